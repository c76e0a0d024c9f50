"""What a worker reports of a prompt without output: its embedding, or the logits of its labels."""

from __future__ import annotations

from baton.engine.build import Loaded
from baton.engine.models.weight_loader import load_classification_head
from baton.engine.pooling import Pooling, Vector
from baton.engine.sequence import Sequence
from baton.errors import CheckpointError, InvalidRequest
from baton.generation.sampling_params import SamplingParams

_EMBEDDING, _CLASSIFICATION = "sampling.embedding", "sampling.classification"


class PromptPooler:
    """Pools prompts as the checkpoint says, and applies its classification head if it has one."""

    def __init__(self, loaded: Loaded) -> None:
        self._pooling, self._no_pooling = Pooling(), ""
        try:
            self._pooling = Pooling.read(loaded.path)
        except CheckpointError as error:  # it can still generate
            self._no_pooling = f"this model's embeddings cannot be computed: {error}"
        self._head = load_classification_head(loaded.path, loaded.model_config)

    def prepare(self, sequence: Sequence) -> None:
        """Sets which hidden states of a sequence are pooled. Raises InvalidRequest."""
        params = sequence.params
        if params.embedding:
            if self._no_pooling:
                raise InvalidRequest(self._no_pooling, _EMBEDDING)
            sequence.num_scored = 0 if self._pooling.mean else None
        elif params.classification and self._head is None and not params.label_token_ids:
            raise InvalidRequest(
                "this model has no classification head: serve a checkpoint that has one",
                _CLASSIFICATION,
            )

    def finish(self, params: SamplingParams, pooled: Vector | None, num_tokens: int) -> list[float]:
        """The prompt's embedding, or the logit of each label; empty if neither was asked for.

        pooled: the sum over the prompt's steps. Raises InvalidRequest if there is none.
        """
        if not params.is_pooled:
            return []
        if pooled is None:
            name = _EMBEDDING if params.embedding else _CLASSIFICATION
            raise InvalidRequest(f"a simulated engine has no {name.partition('.')[2]}", name)
        if params.embedding:
            pooled = self._pooling.finish(pooled, num_tokens)
        elif self._head is not None and not params.label_token_ids:
            pooled = self._head.numpy() @ pooled
        values: list[float] = pooled.tolist()
        return values
