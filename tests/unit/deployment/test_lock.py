"""The image installs what the project is tested with, and nothing that is not locked."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.deployment.files import BASE, COMPOSE, OVERLAYS

ROOT = COMPOSE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# torch comes from an index of its own, where hashes differ between CPU and CUDA.
NOT_LOCKED = {"baton-serving", "torch"}


def pinned(file):
    """{package: version}; of a lock every one has a hash."""
    pins = {}
    for block in re.split(r"\n(?! )", file.read_text()):
        if match := re.match(r"([\w.-]+)==([^\s;]+)", block):
            pins[canonicalize_name(match[1])] = match[2]
            assert file.name == "constraints.txt" or "--hash=sha256:" in block, block
    return pins


def required(*extras):
    """The packages that these extras need, and those they build on."""
    project = PROJECT["project"]
    found = [*project["dependencies"]]
    for extra in extras:
        found += project["optional-dependencies"][extra]
    for requirement in map(Requirement, found):
        yield canonicalize_name(requirement.name)
        if requirement.name == project["name"]:
            yield from required(*requirement.extras)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("requirements.txt", {*required("worker", "gateway")} - NOT_LOCKED),
        (
            "build-requirements.txt",
            {Requirement(r).name for r in PROJECT["build-system"]["requires"]},
        ),
    ],
)
def test_the_lock_has_all_that_the_image_needs_in_the_versions_of_the_constraints(name, needed):
    locked, constraints = pinned(COMPOSE / name), pinned(ROOT / "constraints.txt")
    assert not needed - locked.keys(), "run `make lock`"
    shared = locked.keys() & constraints.keys()
    assert needed <= shared
    assert {n: locked[n] for n in shared} == {n: constraints[n] for n in shared}, "run `make lock`"


def test_all_files_build_on_the_same_base_by_digest():
    texts = [file.read_text() for file in (COMPOSE / "Dockerfile", BASE, *OVERLAYS)]
    bases = [base for text in texts for base in re.findall(r"BASE\b.*?(python:3\.11[^\s}]*)", text)]
    assert len(bases) == 3 and len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.11[\w.-]*@sha256:[0-9a-f]{64}", bases[0])
