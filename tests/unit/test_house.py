"""What holds for every file: nothing of this machine in it, and an explanation at its head."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "prefill_worker", "decode_worker", "kvtransfer", "baton")
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))

# In pieces, so that this file does not match.
PRIVATE = (
    "/" + "work/", "/" + "root/", "/" + "home/", "/" + "opt/pypi", "/" + "tmp/tmp.", "/" + "Users/",
    "pypi" + ".org", "files.pythonhosted" + ".org", "pytorch" + ".org/whl", "index" + "-url",
    "artifact" + "ory", "proxy" + ".golang",
)  # fmt: skip
PATTERN = re.compile("|".join(map(re.escape, PRIVATE)).encode())


def files_of_the_tree() -> list[Path]:
    """What is in a commit, or would be; as it lies here where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = listed.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    """A checkout builds anywhere: no absolute path of somebody's disk, no package index."""
    found = []
    for file in files_of_the_tree():
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            if match := PATTERN.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {match[0].decode()}")
    assert not found


def modules() -> Iterator[Path]:
    """Our own modules; generated ones explain themselves in their protos."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.parent != ROOT / "baton" / "v1":
                yield path


@pytest.mark.parametrize("module", list(modules()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_opens_with_what_it_does_and_documents_what_is_public(module: Path) -> None:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    summary = ast.get_docstring(tree)
    assert summary and summary.splitlines()[0].strip(), "no docstring"
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, kinds) and node.name[0] != "_" and not ast.get_docstring(node)
    ]
    assert not silent


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    """Every proto with its comments."""
    out = tmp_path_factory.mktemp("protos") / "all.pb"
    names = [str(path.relative_to(ROOT / "protos")) for path in PROTOS]
    argv = ["protoc", f"-I{ROOT / 'protos'}", "--include_source_info", f"-o{out}", *names]
    assert protoc.main(argv) == 0
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())


def commentable(
    file: descriptor_pb2.FileDescriptorProto,
) -> Iterator[tuple[tuple[int, ...], str]]:
    """(path in the file, name) of each message, field, enum, value, service and rpc."""

    def message(
        path: tuple[int, ...], item: descriptor_pb2.DescriptorProto
    ) -> Iterator[tuple[tuple[int, ...], str]]:
        if item.options.map_entry:
            return
        yield path, item.name
        for number, field in enumerate(item.field):
            yield (*path, 2, number), f"{item.name}.{field.name}"
        for number, nested in enumerate(item.nested_type):
            yield from message((*path, 3, number), nested)
        for number, values in enumerate(item.enum_type):
            yield from enum((*path, 4, number), values)

    def enum(
        path: tuple[int, ...], item: descriptor_pb2.EnumDescriptorProto
    ) -> Iterator[tuple[tuple[int, ...], str]]:
        yield path, item.name
        for number, value in enumerate(item.value):
            yield (*path, 2, number), f"{item.name}.{value.name}"

    for number, item in enumerate(file.message_type):
        yield from message((4, number), item)
    for number, values in enumerate(file.enum_type):
        yield from enum((5, number), values)
    for number, service in enumerate(file.service):
        yield (6, number), service.name
        for index, method in enumerate(service.method):
            yield (6, number, 2, index), f"{service.name}.{method.name}"


def test_everything_in_the_protos_is_explained(
    described: descriptor_pb2.FileDescriptorSet,
) -> None:
    silent = []
    for file in described.file:
        told = {
            tuple(where.path)
            for where in file.source_code_info.location
            if where.leading_comments.strip() or where.trailing_comments.strip()
        }
        silent += [f"{file.name}: {name}" for path, name in commentable(file) if path not in told]
    assert described.file and not silent


def test_the_protos_keep_to_one_style(described: descriptor_pb2.FileDescriptorSet) -> None:
    """One service a file, a request and a response of its own per RPC, `_UNSPECIFIED` for zero."""
    ours = [file for file in described.file if not file.name.endswith("etcd.proto")]
    pairs: list[str] = []
    for file in ours:
        assert len(file.service) <= 1, file.name
        for service in file.service:
            assert service.name.endswith("Service")
            for method in service.method:
                pairs += [method.input_type, method.output_type]
        for enum in file.enum_type:
            zero = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_UNSPECIFIED"
            assert enum.value[0].name == zero
    assert ours and len(set(pairs)) == len(pairs)
