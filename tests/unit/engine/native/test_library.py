"""The native library is built once, by whoever comes first, and its absence has a reason."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from baton.engine.ops.native import library
from baton.errors import ConfigError

BUILD = (
    "import torch; from baton.engine.ops.native import library as it; "
    "print(it._built(it.best_target(), torch.float32))"
)
TARGET, DTYPE = library.TARGETS[-1], torch.float32


@pytest.fixture(autouse=True)
def _forget() -> None:
    library._loaded.cache_clear()
    library._warn_once.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for g++ that notes each call and writes what it is asked for."""
    script = tmp_path / "bin" / library.COMPILER
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'while [ "$#" -gt 0 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def compilations(tmp_path: Path) -> int:
    calls = (tmp_path / "calls").read_text().splitlines()
    return sum(" -c " in call for call in calls)


def test_is_compiled_once_and_found_again(compiler: Path, tmp_path: Path) -> None:
    first, second = library._built(TARGET, DTYPE), library._built(TARGET, DTYPE)
    assert first == second
    assert first.is_relative_to(tmp_path / "cache")
    assert compilations(tmp_path) == len(library._sources())


def test_progress_is_logged(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a warning: a local cluster's processes show no other lines."""
    compiler.write_text(compiler.read_text().replace("#!/bin/sh\n", "#!/bin/sh\nsleep 0.2\n"))
    monkeypatch.setattr(library, "PROGRESS_S", 0.02)
    library._built(TARGET, DTYPE)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(f" of {len(library._sources())} files after" in line for line in told), told
    assert told[-1].startswith("compiled native CPU kernels in ")


@pytest.mark.skipif(shutil.which(library.COMPILER) is None, reason="no compiler")
def test_attention_is_little_code(tmp_path: Path) -> None:
    """What the first start waits for goes with the code that templates are unrolled to.

    With its softmax inlined for every number of rows it was twice as much, and took thrice as long.
    """
    defines = library.DEFINES[torch.bfloat16]
    made = tmp_path / "attention.o"
    source = library.SOURCES / "attention.cpp"
    options = [*library.FLAGS, *TARGET.flags, *defines, "-c", str(source), "-o", str(made)]
    library._run([library.COMPILER, *options])
    assert made.stat().st_size < 90_000


def test_a_builder_that_was_stopped_is_not_waited_for_for_ever(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LOCK_TIMEOUT_S", 0.05)
    stopped = (library._cache_folder() / "lock").open("w")
    fcntl.flock(stopped, fcntl.LOCK_EX)
    try:
        assert library._built(TARGET, DTYPE).exists()
    finally:
        stopped.close()  # and the thread that waited for it ends
    waiting = [thread for thread in threading.enumerate() if thread.name == "build-lock"]
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()


def test_processes_that_start_together_compile_once(compiler: Path, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE) for _ in range(3)
    ]
    paths = {process.communicate(timeout=120)[0] for process in processes}
    assert len(paths) == 1
    assert compilations(tmp_path) == len(library._sources())


def test_other_options_or_sources_make_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library._built(TARGET, DTYPE)
    assert library._built(library.TARGETS[0], DTYPE) != first
    assert library._built(TARGET, torch.bfloat16) != first
    sources = tmp_path / "src"
    shutil.copytree(library.SOURCES, sources)
    monkeypatch.setattr(library, "SOURCES", sources)
    assert library._built(TARGET, DTYPE) == first
    (sources / "team.h").write_text("// changed\n")
    assert library._built(TARGET, DTYPE) != first


def test_what_an_installation_brings_needs_no_compiler(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "BUILT", tmp_path / "built")
    paths = library.build_all()
    assert len(set(paths)) == len(library.TARGETS) * len(library.DEFINES)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library._built(TARGET, DTYPE) in paths


@pytest.mark.parametrize(
    ("lacks", "name"),
    [("", "avx512_bf16"), ("avx512_vnni", "avx512"), ("avx512f", "avx2"), ("fma", None)],
)
def test_the_best_target_is_chosen(
    lacks: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_cpu_flags", lambda: library.TARGETS[0].cpu - {lacks})
    if name is not None:
        assert library.best_target().name == name
        return
    with pytest.raises(library.BuildFailed, match="AVX2"):
        library.best_target()


def test_what_the_compiler_said_is_the_reason(
    compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'no such header' >&2; exit 1; }\n")
    assert library.load() is None
    assert library.load() is None
    warnings = [r for r in caplog.records if "no such header" in r.getMessage()]
    assert len(warnings) == 1, "it is said once"
    with pytest.raises(ConfigError, match="no such header"):
        library.require()


def test_no_compiler_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.load() is None
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        library.require()


def test_a_broken_library_is_no_failure(compiler: Path) -> None:
    assert library.load() is None  # "made" is no shared object


@pytest.mark.parametrize("folder", ["", "/proc"])
def test_a_cache_that_cannot_be_written_has_a_substitute(
    folder: str, compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder or "/dev/null/nowhere")
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", "/dev/null")
    assert library._built(TARGET, DTYPE).is_relative_to(tmp_path)
