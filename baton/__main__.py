"""The `baton` command, also as `python -m baton`."""

import sys

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> int:
    """Runs one command. Ctrl-C is silent also while modules are still being imported."""
    try:
        from baton.cli import main as cli  # noqa: PLC0415 - below the `try`

        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
