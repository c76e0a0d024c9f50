"""The scenarios' own parts: a wrong figure would go unnoticed."""

import json

import pytest

from benchmarks.__main__ import COMMANDS, parser


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0 and f"benchmarks {name}" in capsys.readouterr().out


def test_structured_output_tells_what_is_accepted_and_fails_where_that_is_wrong(tmp_path, capsys):
    def run(*tests):
        groups = [
            {"schema": {"type": "integer", "minimum": 3}, "tests": tests},
            {"schema": {"not": {}}, "tests": []},
        ]
        (tmp_path / "suite.json").write_text(json.dumps(groups))
        argv = ["structured_output", "--suite", str(tmp_path), "--samples", "5"]
        args = parser(argv[0]).parse_args(argv)
        return args.main(args), capsys.readouterr().out

    status, out = run({"data": 2, "valid": False}, {"data": 4, "valid": True})
    assert status == 0
    assert " ".join(out.split()) == (
        "schemas: 1 of 2 accepted 1 not 5 random outputs valid "
        "1 instances invalid, refused 1 instances valid, taken"
    )
    status, out = run({"data": 4, "valid": False}, {"data": 3.0, "valid": True})
    assert status == 1
    assert "invalid, taken: 4 by" in out and "valid, refused: 3.0 by" in out
