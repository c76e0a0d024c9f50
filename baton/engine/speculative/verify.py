"""Which proposed tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence as Tokens


def verify(proposed: Tokens[int], sampled: Tokens[int]) -> int:
    """The number of accepted tokens: those of `sampled` up to the first that was not proposed.

    That one is included. sampled: one token more than `proposed`: the one after the last known
    token, then those after each proposed token.
    """
    assert len(sampled) == len(proposed) + 1, "a token is sampled after each proposed one"
    for accepted, (guess, token) in enumerate(zip(proposed, sampled, strict=False)):
        if guess != token:
            return accepted + 1
    return len(sampled)
