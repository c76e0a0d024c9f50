"""How often each token occurs in a sequence, for its penalties."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """How often each token occurs in one sequence, for its penalties; updated from step to step.

    Tokens are only ever appended, and counts depend on them alone: on every worker and after every
    preemption they are equal, up to their order. Engine thread only.
    """

    def __init__(self) -> None:
        self._counted = 0  # tokens
        self._places: dict[int, int] = {}  # token -> its index in the two arrays below
        self._ids = np.empty(0, np.int64)
        self._times = np.empty(0, np.int64)  # counts in the output; 0: in the prompt only

    def count(self, token_ids: Tokens[int], prompt_tokens: int, proposed: int) -> tuple[Ints, Ints]:
        """(distinct tokens, count of each in the output), valid until the next call.

        proposed: how many of the last `token_ids` are proposals, which may be rejected.
        """
        known = len(token_ids) - proposed
        assert self._counted <= known and prompt_tokens <= known, "tokens only grow"
        if not self._counted:
            self._count_all(np.asarray(token_ids[:known], np.int64), prompt_tokens)
        for at in range(self._counted, known):
            self._add(token_ids[at])
        self._counted = known
        ids, times = self._ids[: len(self._places)], self._times[: len(self._places)]
        return (
            self._with_proposed(ids, times, token_ids[known:][:proposed])
            if proposed
            else (ids, times)
        )

    def _count_all(self, token_ids: Ints, prompt_tokens: int) -> None:
        ids = np.unique(token_ids)
        output, times = np.unique(token_ids[prompt_tokens:], return_counts=True)
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids, self._times = ids, np.zeros(len(ids), np.int64)
        self._times[ids.searchsorted(output)] = times
        self._counted = len(token_ids)

    def _add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):  # room for more, so that growing is rare
            room = np.zeros(len(self._ids) + 64, np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._times = np.concatenate([self._times, room])
        self._ids[place] = token_id
        self._times[place] += 1

    def _with_proposed(self, ids: Ints, times: Ints, proposed: Tokens[int]) -> tuple[Ints, Ints]:
        times, new = times.copy(), dict[int, int]()
        for token_id in proposed:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                times[place] += 1
        new_ids, new_times = (np.array(list(part), np.int64) for part in (new, new.values()))
        return np.concatenate([ids, new_ids]), np.concatenate([times, new_times])
