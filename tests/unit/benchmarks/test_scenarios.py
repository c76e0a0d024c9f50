"""The scenarios' own parts: a wrong figure would go unnoticed."""

import pytest

from benchmarks.__main__ import COMMANDS, parser


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        parser(name).parse_args([name, "--help"])
    assert end.value.code == 0 and f"benchmarks {name}" in capsys.readouterr().out
