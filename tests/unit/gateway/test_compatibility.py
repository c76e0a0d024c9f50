"""docs/reference/compatibility.md says what each field of a request does: every field is sent."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
ROWS = re.findall(r"^\| `(/\S+)` \|(.*)\|(.*)\|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}
WRONG = [[{}]]  # of no field's type


def names(cell):
    return re.findall(r"`(\w+)`", cell)


def test_every_path_has_a_row():
    assert [path for path, *_ in ROWS] == list(BODIES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
async def test_each_field_does_what_the_table_says(says, row):
    path, taken, refused, ignored, added = row
    gateway, body = await says("{}"), BODIES[path]

    async def sent(name, value):
        answer = await gateway.post(path, {**body, name: value})
        return answer.status_code, answer.json()

    plain = await gateway.post(path, body)
    assert plain.status_code == 200, plain.text
    for name in names(taken) + names(added):  # what is read is checked
        status, answer = await sent(name, WRONG)
        error = answer.get("error", {})
        assert status == 400 and name in (error.get("param") or error["message"]), (name, answer)
    for name in names(refused):
        status, answer = await sent(name, {"given": 1})
        error = answer.get("error", {})
        assert status == 400 and "not supported" in error["message"], (name, answer)
        assert name in (error.get("param") or error["message"])
    for name in names(ignored):
        status, answer = await sent(name, {"given": 1})
        assert status == 200 and answer.keys() == plain.json().keys(), (name, answer)
