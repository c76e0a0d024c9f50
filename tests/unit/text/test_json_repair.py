"""Whatever a model writes as JSON becomes JSON; what is JSON already passes unchanged."""

import json
import random

import pytest

from baton.text.json_repair import JsonRepair, repaired


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "b\nc\td"}', '{"a": "b\\nc\\td"}'),
        ('{"a": "\\ud83d", "b": "\\ude00"}', '{"a": "\\ufffd", "b": "\\ufffd"}'),
        ('{"a": "\\ud83d\\ude00 \\ud83d!"}', '{"a": "\\ud83d\\ude00 \\ufffd!"}'),
        ('{"a": "\ud83d"}', '{"a": "\\ufffd"}'),
        ('{"a": "\\d+ \\u12 \\\'"}', '{"a": "\\\\d+ \\\\u12 \'"}'),
        ("{'a': 'it\\'s \"b\"', c: True,}", '{"a": "it\'s \\"b\\"", "c": true}'),
        ('{"a": NaN, "b": -Infinity, "c": 01}', '{"a": null, "b": null, "c": "01"}'),
        ('{"a" 1 "b" [2 3,], "c":}', '{"a" :1 ,"b" :[2 ,3], "c":null}'),
        ('{"a": [{"b": "c', '{"a": [{"b": "c"}]}'),
        ('{"a": 1}} and more', '{"a": 1}'),
        ("", ""),
    ],
)
def test_what_is_no_json_becomes_json(text, expected):
    assert repaired(text) == expected
    if text:
        json.dumps(json.loads(expected), ensure_ascii=False).encode()


def strict(text):
    """The value of JSON text, without Python's extensions; it has no lone surrogates."""
    value = json.loads(text, parse_constant=int)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def test_any_text_becomes_json_however_it_is_cut_and_json_stays_as_it_is():
    rng, sound = random.Random(1), 0
    for _ in range(30_000):
        text = rng.choice(("", "{", '{"a": ')) + "".join(
            rng.choices("{}[]:,\"'\\ua1d83e \n\tTrue-.<é0", k=rng.randint(0, 12))
        )
        found, repair = repaired(text), JsonRepair()
        assert "".join(map(repair.push, text)) + repair.close() == found
        if found.strip():
            strict(found)
        try:
            strict(text)
        except ValueError:
            continue
        sound += 1
        assert found.strip() == text.strip()
    assert sound > 100
