"""Outcomes with times that a test can reckon with."""

from __future__ import annotations

from array import array
from typing import Any

from baton.bench.request import Outcome


def outcome(*token_times_s: float, sent_s: float = 0.0, **fields: Any) -> Outcome:
    """One that ended OK with a token at each time."""
    told: dict[str, Any] = {
        "at_s": sent_s,
        "sent_s": sent_s,
        "planned_output": len(token_times_s),
        "output_tokens": len(token_times_s),
        "prompt_tokens": 10,
        "ended_s": max(token_times_s, default=0.0) + 0.01,
    }
    return Outcome(
        **{**told, **fields},
        token_times_s=array("d", token_times_s),
        token_counts=array("I", [1] * len(token_times_s)),
    )


def failed(status: str, message: str = "no", **fields: Any) -> Outcome:
    """One that brought nothing."""
    return outcome(status=status, message=message, ended_s=0.1, prompt_tokens=0, **fields)
