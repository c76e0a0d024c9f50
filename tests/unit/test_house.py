"""What holds for every file, and for the protos; docstrings are for ruff to check."""

import re
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PACKAGES = ("router", "prefill_worker", "decode_worker", "kvtransfer", "baton")
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
KINDS = ("message_type", "nested_type", "field", "enum_type", "value", "service", "method")

# In pieces, so that this file does not match.
PRIVATE = (
    "/" + "work/", "/" + "root/", "/" + "home/", "/" + "opt/pypi", "/" + "tmp/tmp.", "/" + "Users/",
    "pypi" + ".org", "files.pythonhosted" + ".org", "pytorch" + ".org/whl", "index" + "-url",
    "artifact" + "ory", "proxy" + ".golang",
)  # fmt: skip
PATTERN = re.compile("|".join(map(re.escape, PRIVATE)).encode())
UNSAFE = re.compile(
    r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
    r"|_object_list\(|(send|recv)_object\(|\btorch\.load\(",
    re.MULTILINE,
)


def test_no_file_names_a_machine_or_a_registry():
    """A checkout builds anywhere: no absolute path of some disk, no package index."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    if not files:  # without git, what is installed
        files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else (), 1):
            if match := PATTERN.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {match[0].decode()}")
    assert not found


def test_nothing_that_runs_code_is_read_from_the_network_or_a_checkpoint():
    """No pickle: protobuf, JSON and safetensors only."""
    packages = ("router", "prefill_worker", "decode_worker", "kvtransfer", "baton")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 100
    assert not [path for path in modules if UNSAFE.search(path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """Every proto with its comments."""
    out = tmp_path_factory.mktemp("protos") / "all.pb"
    names = [str(path.relative_to(ROOT / "protos")) for path in PROTOS]
    argv = ["protoc", f"-I{ROOT / 'protos'}", "--include_source_info", f"-o{out}", *names]
    assert protoc.main(argv) == 0
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file


def commentable(item, path=()):
    """(path in the file, name) of each message, field, enum, value, service and rpc below."""
    for field, children in item.ListFields():
        for number, child in enumerate(children if field.is_repeated else ()):
            is_entry = field.name == "nested_type" and child.options.map_entry
            if field.name in KINDS and not is_entry:
                below = (*path, field.number, number)
                yield below, f"{item.name}.{child.name}"
                yield from commentable(child, below)


def test_everything_in_the_protos_is_explained(described):
    silent, count = [], 0
    for file in described:
        explained = {
            tuple(where.path)
            for where in file.source_code_info.location
            if where.leading_comments.strip() or where.trailing_comments.strip()
        }
        names = list(commentable(file))
        count += len(names)
        silent += [name for path, name in names if path not in explained]
    assert count > 300 and not silent


def test_the_protos_keep_to_one_style(described):
    """One service a file, a request and a response of its own per RPC, `_UNSPECIFIED` for zero."""
    others = ("etcd.proto", "externalscaler.proto")
    ours = [file for file in described if not file.name.endswith(others)]
    pairs = []
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
