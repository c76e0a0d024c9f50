"""Generates the gRPC stubs in baton/v1 from protos/.

They are not committed: hatchling generates them when the package is built or installed as editable
(`StubsHook`), `make` when a proto file has changed. The generator's version is pinned in
pyproject.toml, because stubs demand a runtime at least as new as the generator that made them.
"""

import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent.parent


def generate(root: Path) -> None:
    """Writes the stubs of `root`/protos to `root`/baton/v1; leaves those alone that are current."""
    stubs = root / "baton/v1"
    with tempfile.TemporaryDirectory() as scratch:
        includes = [root / "protos", resources.files("grpc_tools") / "_proto"]
        outs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        sources = sorted(str(path) for path in (root / "protos/baton/v1").glob("*.proto"))
        if protoc.main(["protoc", *(f"-I{path}" for path in includes), *outs, *sources]) != 0:
            sys.exit("protoc failed: see above")
        fresh = {path.name: path.read_text() for path in Path(scratch, "baton/v1").iterdir()}
    for name, text in list(fresh.items()):
        if name.endswith("_grpc.py") and "Servicer" not in text:
            del fresh[name]  # a file of messages only has no services
    for stub in stubs.glob("*_pb2*"):
        if stub.name not in fresh:
            stub.unlink()
    for name, text in fresh.items():
        stub = stubs / name
        if not stub.exists() or stub.read_text() != text:
            temporary = stub.with_suffix(".new")
            temporary.write_text(text)
            temporary.replace(stub)  # processes may be importing it


class StubsHook(BuildHookInterface[Any]):
    """Generates the stubs in the source tree, and packs them although git ignores them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before each build, editable or not."""
        generate(Path(self.root))
        build_data["artifacts"].append("/baton/v1/*_pb2*")


if __name__ == "__main__":
    generate(ROOT)
