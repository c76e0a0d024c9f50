"""Generates the gRPC stubs in baton/v1 from protos/, or checks that they are up to date.

`make protos` writes them; `make lint` runs `--check`, which generates into a scratch folder and
compares. The generator's version is pinned in constraints.txt, because stubs demand a runtime at
least as new as the generator that made them.
"""

import argparse
import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "baton" / "v1"


def generate(out: Path) -> None:
    """Runs protoc over every proto file; stubs land in `out`/baton/v1."""
    includes = [ROOT / "protos", resources.files("grpc_tools") / "_proto"]
    flags = [f"-I{path}" for path in includes]
    outs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    sources = sorted(str(path) for path in (ROOT / "protos/baton/v1").glob("*.proto"))
    if protoc.main(["protoc", *flags, *outs, *sources]) != 0:
        sys.exit("protoc failed: see above")
    for stub in (out / "baton/v1").glob("*_pb2_grpc.py"):
        if "Servicer" not in stub.read_text():
            stub.unlink()  # a file of messages only has no services to stub


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    if not parser.parse_args().check:
        for old in STUBS.glob("*_pb2*"):
            old.unlink()
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "baton/v1"
        names = {path.name for folder in (fresh, STUBS) for path in folder.glob("*_pb2*")}
        _, changed, lost = filecmp.cmpfiles(fresh, STUBS, names, shallow=False)
        if stale := sorted(changed + lost):
            sys.exit(f"stubs are stale, run 'make protos': {', '.join(stale)}")
    print("stubs are up to date")


if __name__ == "__main__":
    main()
