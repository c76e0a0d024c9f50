"""What the documentation names exists: commands, options, targets, files, links, variables."""

import ast
import re
import shlex
import tomllib
from functools import cache

import pytest

from baton import errors
from baton.cli import main as cli
from baton.net import tls
from baton.net.http_errors import failure_of
from baton.net.rpc import code_of
from baton.telemetry.metrics.instruments import INSTRUMENTS
from benchmarks.__main__ import COMMANDS
from tests.documents import DOCS, PAGES, ROOT, code, commands

SOURCES = (
    *("baton", "router", "prefill_worker", "decode_worker", "kvtransfer"),
    *("benchmarks", "scripts", "tests/chaos", "tests/compose"),
)
# Options of etcd, Docker, Helm, kubectl, openssl, pip, curl, guidellm, cmake, git and pytest.
FOREIGN_OPTIONS = """
--advertise-client-urls --any-config --backend --build --build-arg --cacert --cert-file
--client-cert-auth
--constraint --create-namespace --data --detach --enable-feature --file --from-file --gpus
--interactive --key-file
--listen-client-urls --local-dir --migration-limit --namespace --no-binary --no-deps
--no-recreate --output --prefix --profile --reuse-values --scale --set --strict --tag --target
--tasks --time --tokenizer --trusted-ca-file --values
"""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def sources():
    files = [ROOT / "Makefile", *(ROOT / "compose").glob("*")]
    files += [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@cache
def options():
    found = set()
    parsers = [cli.parser()]
    for parser in parsers:
        for action in parser._actions:
            found.update(action.option_strings)
            if isinstance(action.choices, dict):
                parsers += action.choices.values()
    return found


def foreign(line):
    """The options in a line `baton COMMAND …` that this command does not have."""
    parser, words = cli.parser(), re.split(r"[#|>]", line)[0].split()[1:]
    while several := [one.choices for one in parser._actions if isinstance(one.choices, dict)]:
        parser = several[0][words.pop(0)]
    given = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
    return given - parser._option_string_actions.keys()


@pages
def test_what_a_page_names_exists(page, capsys):
    """Commands, options, variables, make's targets, benchmarks, files, metrics and links."""
    for command in commands(page, "baton"):
        words = shlex.split(re.split(r"[|>]", command)[0])[1:]
        try:
            cli.parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{command}\n{capsys.readouterr().err}")
    pieces, text = code(page), page.read_text(encoding="utf-8")
    shown = "\n".join(pieces)
    for name in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", shown)):
        known = name in options() or name in FOREIGN_OPTIONS.split() or f'"{name}' in sources()
        assert known, f"there is no option {name}"
    for line in filter(
        re.compile("baton [a-z].* --[a-z].*").fullmatch, pieces
    ):  # parts of commands
        assert not foreign(line), line
    for name in set(re.findall(r"\bBATON_[A-Z_]+[A-Z]\b", shown)):
        option = name.removeprefix("BATON_OPT_").lower().replace("_", "-")
        assert f"--{option}" in options() or name in sources(), f"nothing reads {name}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for piece in pieces:
        for target in re.findall(r"(?:^|\n)\s*make ([a-z][a-z-]*)", piece):
            assert target in targets, f"make {target}"
        for name in re.findall(r"python -m benchmarks ([\w-]+)", piece):
            assert name in COMMANDS, f"python -m benchmarks {name}"
        for path in re.findall(r"(?<![\w/.])(?:scripts|benchmarks|tests)/[\w/.-]+\.\w+", piece):
            assert (ROOT / path).exists(), path
        if re.fullmatch(r"(baton|router|kvtransfer|\w+_worker)/[\w/-]+(\.\w+)?", piece):
            assert (ROOT / piece).exists(), piece
    metrics = {name for one in INSTRUMENTS for name in (one.series, *one.samples)}
    named = set(re.findall(r"\b(?:baton|gen_ai)_[a-z_]+\b", shown))
    assert named - {"baton_version"} <= metrics  # a field of a report
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_every_message_in_troubleshooting_is_one_of_ours():
    """Its longest part without placeholders (capitals, dots) is in a string of the sources."""
    strings = re.sub(r'"\s*\n\s*f?"', "", sources())
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`.*?) \|", text, re.M):
        for message in re.findall(r"`([^`]+)`", row):
            longest = max(re.split(r"\b[A-Z]+\b|[…()]", message), key=len).strip(" :;,")
            assert longest in strings, f"{message}: nothing says {longest!r}"


def test_the_security_page_has_the_roles_that_certificates_name():
    text = (DOCS / "security.md").read_text(encoding="utf-8")
    section = text.partition("\n## TLS\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"\b(\w+)\.baton\b", section)) == set(tls.ROLES)
    (heads,) = re.findall(r"^\| may call \| (.*) \|$", section, re.M)
    assert heads.split(" | ") == list(tls.ROLES)


def test_every_row_of_the_failures_page_names_tests_that_exist():
    lines = (DOCS / "failures.md").read_text(encoding="utf-8").splitlines()
    heads = [line for line in lines if line.startswith(("| what happens", "| seen"))]
    rows = [line for line in lines if line.startswith("| ") and line not in heads]
    assert len(heads) == 4 and len(rows) > 50
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rstrip("| ").rpartition("|")[2])
        assert named, row
        for file, name in named:
            module = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
            assert name in {getattr(node, "name", "") for node in ast.walk(module)}, (file, name)


def test_the_table_of_errors_is_what_callers_get():
    text = (DOCS / "reference/sdk.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (\w+)[^|]*\| (\d+) \| (\w+)", text, re.M)
    listed = {name: (grpc, int(http), retry == "yes") for name, grpc, http, retry in rows}
    for name, row in listed.items():
        error = getattr(errors, name)("why")
        assert row == (code_of(error).name, failure_of(error).status, error.retryable), name
    assert len(listed) == 12


def test_the_layers_in_the_architecture_are_those_that_are_enforced():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    shown = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert "\n".join(re.sub("[()]", "", layer) for layer in layers) in re.sub(
        r" {3,}\(.*", "", shown
    )


def test_the_architecture_is_short_and_its_reading_set_can_be_read_in_a_morning():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `([\w/]+\.py)` \|", text[text.index("## Reading set") :], re.M)
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(files) > 20 and sum(lines.values()) <= 6500, lines
    assert len(text.splitlines()) <= 150


def test_every_page_is_in_the_navigation_and_the_readme_is_short():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in navigation
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
