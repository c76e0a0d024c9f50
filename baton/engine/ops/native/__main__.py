"""Builds the native kernels for every kind of CPU into the installation, as an image does."""

from __future__ import annotations

import logging
import sys

from baton.engine.ops.native import library


def main() -> int:
    """Exit status 1 when the compiler fails or is not there."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library.build_all()
    except library.BuildFailed as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
