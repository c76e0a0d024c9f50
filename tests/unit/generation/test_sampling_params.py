"""Sampling settings: what is refused and how it is named, and their message and back."""

import math
import re
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.generation.sampling_params import (
    DEFAULT_MAX_TOKENS,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from baton.v1 import common_pb2

VOCAB = 1000
NAN, INFINITY = float("nan"), float("inf")
# By field: what is out of range, and what is just inside.
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([-0.1, 100.5, NAN, INFINITY], [0.0, 100.0]),
    "top_p": ([0.0, 1.01, NAN], [1.0, 1e-6]),
    "min_p": ([-0.01, 1.01, NAN], [1.0]),
    "repetition_penalty": ([0.0, 101.0, NAN], [100.0]),
    "presence_penalty": ([-2.1, NAN], [-2.0]),
    "frequency_penalty": ([2.1, NAN], [2.0]),
    "prompt_logprobs": ([MAX_TOP_LOGPROBS + 1], [None, 0, MAX_TOP_LOGPROBS]),
    "min_tokens": ([DEFAULT_MAX_TOKENS + 1, -1], [DEFAULT_MAX_TOKENS]),
    "seed": ([-1, MAX_SEED + 1], [MAX_SEED]),
    "logprobs": ([MAX_TOP_LOGPROBS + 1], [None, 0, MAX_TOP_LOGPROBS]),
    "logit_bias": ([{1: 100.5}, {1: NAN}, {VOCAB: 1.0}], [{0: -100.0, VOCAB - 1: 100.0}]),
    "allowed_token_ids": ([frozenset({VOCAB})], [frozenset({0, VOCAB - 1})]),
    "bad_words": ([((),), ((1, VOCAB),)], [((0, VOCAB - 1), (3,))]),
    "stop_token_ids": ([frozenset({VOCAB})], [frozenset({0, VOCAB - 1})]),
}


@pytest.mark.parametrize("name", RANGES)
def test_what_is_out_of_range_is_named(name):
    outside, inside = RANGES[name]
    for value in outside:
        with pytest.raises(InvalidRequest, match=f"^{name} must be ") as refused:
            SamplingParams(**{name: value}).validate(VOCAB)
        assert refused.value.field == f"sampling.{name}"
    for value in inside:
        SamplingParams(**{name: value}).validate(VOCAB)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logit_bias", MappingProxyType({3: 1.0, 99: 2.0}), "of known tokens, not [99]"),
        ("logit_bias", MappingProxyType({3: 101.0}), "±100 at most, not {3: 101.0}"),
        ("stop_token_ids", frozenset({99, 1, 98}), "known tokens, not [98, 99]"),
        ("allowed_token_ids", frozenset({99}), "known tokens, not [99]"),
        ("bad_words", ((1, 99),), "known tokens, not [99]"),
    ],
)
def test_messages_show_what_is_wrong_in_plain_ids(name, value, message):
    with pytest.raises(InvalidRequest, match=f"^{name} must be {re.escape(message)}$"):
        SamplingParams(**{name: value}).validate(50)


def singles(low, high):
    """Numbers that a float field carries unchanged."""
    return st.floats(low, high, width=32)


UNSIGNED = st.integers(0, 2**32 - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=singles(0, 100),
    top_k=UNSIGNED,
    top_p=singles(0, 1),
    min_p=singles(0, 1),
    repetition_penalty=singles(0, 100),
    presence_penalty=singles(-2, 2),
    frequency_penalty=singles(-2, 2),
    logit_bias=st.dictionaries(UNSIGNED, singles(-100, 100), max_size=5),
    seed=st.integers(0, MAX_SEED),
    stop_token_ids=st.frozensets(UNSIGNED, max_size=5),
    allowed_token_ids=st.frozensets(UNSIGNED, max_size=5),
    bad_words=st.lists(st.tuples(UNSIGNED, UNSIGNED), max_size=3).map(tuple),
    min_tokens=UNSIGNED,
    max_tokens=UNSIGNED,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, MAX_TOP_LOGPROBS),
    prompt_logprobs=st.none() | st.integers(0, MAX_TOP_LOGPROBS),
)


@given(PARAMS)
def test_settings_survive_their_message(params):
    """Also zeros, which a message could mistake for "not set"."""
    wire = params.to_proto().SerializeToString()
    assert SamplingParams.from_proto(common_pb2.SamplingParams.FromString(wire)) == params


def test_defaults_and_not_a_number_survive_a_message():
    assert SamplingParams.from_proto(common_pb2.SamplingParams()) == SamplingParams()
    params = SamplingParams.from_proto(SamplingParams(temperature=NAN).to_proto())
    assert math.isnan(params.temperature), "to be refused"


def test_whether_logits_depend_on_earlier_tokens():
    assert not SamplingParams(temperature=1.0, top_k=4, seed=3).has_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 1.1}).has_penalties
    assert SamplingParams(logit_bias={3: 1.0}).has_penalties
