"""Multi-token prediction as proposer: a layer of the model's own checkpoint proposes tokens.

It computes each token after the model has computed the token before it, whose hidden state is part
of its input; the logits are those of the token after. For proposed tokens the input is the layer's
own hidden states, until the model's are known and replace them:

    tokens      t5 t6 t7 | p8 p9       t7 is the last known token, p8 and p9 are proposed
    input       h4 h5 h6 | g7 g8       h of the model, g of the layer

Its KV has a pool of its own and follows from hidden states, not from tokens: nothing of it is
handed over or cached, and it begins with the first token that the model samples on this engine:
positions are counted from there, as attention depends on distances only. While proposals are not
worth their cost, hidden states are kept and computed in groups.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Self

import torch

from baton.engine.chunk_budget import ChunkBudget
from baton.engine.draft_model import MIN_CATCH_UP, DraftModel, DraftSequence, ModelProposer
from baton.engine.models.mtp_layer import MtpLayer
from baton.engine.sampling.sampler import SampleRow
from baton.engine.scheduler import ScheduledStep
from baton.engine.sequence import Sequence
from baton.engine.speculative.cost import AcceptanceRate

_MAX_KEPT = 4 * MIN_CATCH_UP  # hidden states of a sequence; with more, its KV begins anew


@dataclass(eq=False)
class PredictedSequence(DraftSequence):
    """The tokens of another sequence from `begin` on, then those proposed for it.

    source: the other sequence · kept: the model's hidden states `[tokens, hidden_size]` that no
    token was computed with yet, from that of token `first` on; after the last known token they may
    be those of rejected ones · own: the layer's hidden state of its last token.
    """

    source: Sequence | None = None
    begin: int = 0
    first: int = 0
    kept: torch.Tensor | None = None
    own: torch.Tensor | None = None

    @classmethod
    def from_sequence(cls, sequence: Sequence, rate: AcceptanceRate) -> Self:
        made = super().from_sequence(sequence, rate)
        made.source = sequence
        made._begin_after(sequence.num_tokens - 1)
        return made

    def keep(self, token: int, hidden: torch.Tensor) -> None:
        """Keeps the model's hidden states of a known token, and of proposed ones after it."""
        count = token - self.first  # of those kept earlier, whose tokens were accepted
        kept = hidden[:0] if self.kept is None else self.kept
        if not 0 <= count <= min(len(kept), _MAX_KEPT):
            self._begin_after(token)
            count = 0
        self.kept = torch.cat((kept[:count], hidden))

    def follow(self, tokens: Tokens[int]) -> None:
        """Takes over the known tokens; what was computed for proposed ones is computed anew."""
        self.num_computed = min(self.num_computed, self.known - self.begin)
        if self.begin + self.num_computed != self.first + 1:  # it has lost its blocks
            self._begin_after(self.first)
        self.tokens[self.known - self.begin :] = tokens[self.known :]
        self.known, self.proposed = len(tokens), ()

    def previous(self, count: int) -> torch.Tensor:
        """The hidden states that its next `count` tokens begin with, which are not kept longer."""
        if self.proposed:
            assert self.own is not None, "a token was proposed by it"
            return self.own
        assert self.kept is not None and count <= len(self.kept), "the model computed its tokens"
        found, self.kept = self.kept[:count], self.kept[count:]
        self.first += count
        return found

    @property
    def row(self) -> SampleRow:
        assert self.source is not None
        tokens = [*self.source.tokens, *self.proposed]
        of_sequence = self.token_counts, self.grammar
        return SampleRow(self.params, tokens, self.prompt_tokens, len(self.proposed), *of_sequence)

    def _begin_after(self, token: int) -> None:
        """Forgets what was computed: its next token follows this one."""
        self.first, self.begin, self.num_computed = token, token + 1, 0
        self.tokens.clear()
        self.known = self.begin


class MtpProposer(ModelProposer[PredictedSequence]):
    """Proposes what the layer samples. `take_hidden` gets the hidden states of each step."""

    sequence_type = PredictedSequence

    def __init__(self, most: int, max_context: int, draft: DraftModel, chunk: ChunkBudget) -> None:
        """draft: whose model is a `MtpLayer`."""
        super().__init__(most, max_context, draft, chunk, prefix_cache=False)
        self._batches.keeps_hidden = True

    def take_hidden(self, step: ScheduledStep, hidden: torch.Tensor) -> None:
        """Keeps hidden states of the sequences that sample. hidden: of the step's logit rows."""
        end = 0
        for item in step.sequences:
            begin = end + len(item.scored)
            end = begin + (1 + len(item.proposed) if item.samples else 0)
            if item.samples and not self._failed and not item.sequence.params.is_pooled:
                draft = self._draft_of(item.sequence)
                if not draft.broken:
                    draft.keep(item.sequence.num_tokens - 1, hidden[begin:end])

    def _known_rows(self, drafts: list[PredictedSequence]) -> list[tuple[PredictedSequence, int]]:
        rows = list[tuple[PredictedSequence, int]]()
        for draft in drafts:
            count = draft.num_pending
            if draft.wanted and count:
                rows.append((draft, count))
            elif count > MIN_CATCH_UP and not draft.broken and self._kv.reserve(draft):
                rows.append((draft, count - 1))  # the last would be sampled after
        return rows

    def _logits(
        self, step: ScheduledStep, rows: list[tuple[PredictedSequence, int]]
    ) -> torch.Tensor:
        model = self._draft.model
        assert isinstance(model, MtpLayer)
        model.previous = torch.cat([draft.previous(count) for draft, count in rows])
        logits = super()._logits(step, rows)
        if model.hidden is not None:
            sampling = (draft for draft, count in rows if count == draft.num_pending)
            for draft, own in zip(sampling, model.hidden.split(1), strict=True):
                draft.own = own
        return logits
