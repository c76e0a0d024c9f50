"""The native library is built once, by the first process, and its absence has a reason."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.engine.kernels.native import library
from baton.errors import ConfigError

AVX512, AVX2, NEON = (library.TARGETS[at] for at in (0, 2, 3))
TARGET, DTYPE = AVX2, torch.float32


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What was loaded before, and what a test could not load."""
    caches = (library.load_target, library.load)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


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


def test_it_is_compiled_once_by_those_who_start_together_and_says_so(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a warning: a local cluster's processes show no other lines."""
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(lambda _: library._built(TARGET, DTYPE), range(3))
    assert set(others) == {first} and first.is_relative_to(tmp_path / "cache")
    assert library._built(TARGET, DTYPE) == first
    calls = (tmp_path / "calls").read_text().splitlines()
    files = len(list(library.SOURCES.glob("*.cpp")))
    assert sum(" -c " in call for call in calls) == files
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(f"{files - 1} of {files} files after" in line for line in lines)
    assert lines[-1].startswith("compiled native CPU kernels in ")


@pytest.mark.skipif(shutil.which(library.COMPILER) is None, reason="no compiler")
def test_it_is_little_code() -> None:
    """What the first start waits for goes with the code that templates are unrolled to.

    Formats of 4, 5, 6 and 8 bits with minimums, for GGUF files, are more than half of it.
    """
    assert library._built(TARGET, torch.bfloat16).stat().st_size < 750_000


def test_a_builder_that_was_stopped_is_not_waited_for_for_ever(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LOCK_TIMEOUT_S", 0.05)
    with (library._cache_folder() / "lock").open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert library._built(TARGET, DTYPE).exists()


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
    here = [one for one in library.TARGETS if one.machine == platform.machine()]
    assert len(set(paths)) == len(here) * len(library.DEFINES)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library._built(TARGET, DTYPE) in paths


@pytest.mark.parametrize(
    ("cpu", "lacks", "name"),
    [
        (AVX512, "", "avx512_bf16"), (AVX512, "avx512_vnni", "avx512"),
        (AVX512, "avx512f", "avx2"), (AVX512, "fma", None),
        (NEON, "", "neon_bf16"), (NEON, "i8mm", "neon"), (NEON, "asimd", None),
    ],
)  # fmt: skip
def test_the_best_target_is_chosen(
    cpu: library.Target, lacks: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_cpu_flags", lambda: cpu.cpu - {lacks})
    if name is not None:
        assert library.best_target().name == name
        return
    with pytest.raises(library.BuildFailed, match="AVX2"):
        library.best_target()


@pytest.mark.parametrize("asked", ["avx2", "avx512_bf16", "neon"])
def test_baton_cpu_names_another_target_and_is_refused_where_the_cpu_is_not_one(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_cpu_flags", lambda: library.TARGETS[1].cpu)
    monkeypatch.setenv("BATON_CPU", asked)
    if asked == "avx2":
        assert library.best_target().name == asked
        return
    with pytest.raises(ConfigError, match=f"BATON_CPU={asked}: this machine can use avx512, avx2"):
        library.load()


def test_without_proc_cpuinfo_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_file(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_file)
    assert library.load() is None
    assert "computing with torch" in caplog.text and "/proc/cpuinfo" in caplog.text


def test_a_library_that_cannot_be_built_or_loaded_is_no_failure_and_has_a_reason(
    compiler: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load() is None  # "made" is no shared object
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2; exit 1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiler.parent))
    library.load.cache_clear()
    assert library.load() is None and library.load() is None
    warnings = [r for r in caplog.records if "no such header" in r.getMessage()]
    assert len(warnings) == 1, "it is said once"
    with pytest.raises(ConfigError, match="no such header"):
        library.require()
    compiler.unlink()
    monkeypatch.setenv("PATH", str(compiler.parent))
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        library.require()


@pytest.mark.parametrize("folder", ["", "/proc"])
def test_a_cache_that_cannot_be_written_has_a_substitute(
    folder: str, compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder or "/dev/null/nowhere")
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", "/dev/null")
    assert library._built(TARGET, DTYPE).is_relative_to(tmp_path)
