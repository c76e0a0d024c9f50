"""Temporary folders: gone with their owner, or with the next one if the owner was killed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.local.etcd import ScratchFolder

OWNER = """
import signal, sys
from baton.local.etcd import ScratchFolder
folder = ScratchFolder("baton-test-")
(folder.path / "data").mkdir()
(folder.path / "data" / "wal").write_text("x" * 1000)
print(folder.path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = ScratchFolder("baton-test-")
    assert folder.path.parent == tmp_path and folder.path.stat().st_mode & 0o77 == 0
    (folder.path / "data").mkdir()
    files = len(list(Path("/proc/self/fd").iterdir()))
    folder.remove()
    assert not list(tmp_path.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == files - 1


def test_a_killed_owners_folder_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        text=True,
    )
    assert owner.stdout is not None
    with owner:
        left = Path(owner.stdout.readline().strip())
        strangers = [tmp_path / "baton-test-other", tmp_path / "other"]
        for stranger in strangers:
            stranger.mkdir()  # one that never was ours, one of another kind
        second = ScratchFolder("baton-test-")
        assert (left / "data" / "wal").exists(), "its owner lives"
        owner.kill()
    assert left.exists()
    third = ScratchFolder("baton-test-")
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {second.path, third.path, *strangers}
    second.remove()
    third.remove()
