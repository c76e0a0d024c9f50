"""How a checkpoint scores a prompt: by a classification head, or by the logits of tokens.

A reranker scores a pair of a query and a document. It has a head of one label, or compares the
logits of two tokens, "yes" and "no", after a prompt that asks whether the document answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.checkpoint_files import (
    MAX_JSON_BYTES,
    label_names,
    parse_json,
    parse_json_value,
    read_bytes,
)
from baton.errors import CheckpointError, InvalidRequest, quoted

Activation = Literal["sigmoid", "softmax", "identity"]
ROLES = QUERY, DOCUMENT = "query", "document"  # of the two messages of a pair; "system" instructs
RELEVANCE = "relevance"  # the label of a reranker without a head
# The prompt of Qwen3-Reranker, whose checkpoints may have a template for chats only.
PAIR_TEMPLATE = """\
{%- set given = namespace(system='Given a web search query, retrieve relevant passages that answer \
the query', query='', document='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set given.system = message.content -%}
{%- elif message.role == 'query' -%}{%- set given.query = message.content -%}
{%- elif message.role == 'document' -%}{%- set given.document = message.content -%}
{%- endif -%}
{%- endfor -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ given.system }}
<Query>: {{ given.query }}
<Document>: {{ given.document }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ '' }}"""


@dataclass(frozen=True)
class LabelScore:
    """A label, its logit, and the score that the activation makes of it."""

    name: str
    logit: float
    score: float


@dataclass(frozen=True)
class Scoring:
    """The labels of a model and their activation.

    token_ids: the tokens whose logits are compared, first the one of a relevant document; empty for
    a classification head.
    """

    labels: tuple[str, ...]
    activation: Activation
    token_ids: tuple[int, ...] = ()

    @classmethod
    def from_tokens(cls, token_ids: Sequence[int]) -> Scoring:
        """Of a reranker that says a token for a relevant document, and maybe another for others."""
        return cls((RELEVANCE,), "sigmoid", tuple(token_ids))

    @classmethod
    def read(
        cls, file: Path, config: Mapping[str, Any], token_id: Callable[[str], int]
    ) -> Scoring | None:
        """Reads config.json, the object in `file`, and the files beside it; None if nothing scores.

        `token_id`: the id of a text that is one token, else InvalidRequest. Raises CheckpointError.
        """
        if not config:
            return None
        if (labels := label_names(file, config)) is not None:
            return cls(labels, _activation(config, len(labels)))
        if ids := _logit_score(file.parent):
            return cls.from_tokens(ids)
        if texts := config.get("classifier_from_token"):  # vLLM's
            is_pair = isinstance(texts, list) and len(texts) == 2
            if not is_pair or not all(isinstance(text, str) for text in texts):
                raise CheckpointError(f"{file}: classifier_from_token must be two texts")
            try:
                return cls.from_tokens([token_id(text) for text in reversed(texts)])
            except InvalidRequest as error:
                raise CheckpointError(f"{file}: classifier_from_token: {error}") from error
        return None

    def scores(self, logits: Sequence[float]) -> list[LabelScore]:
        """The score of each label. logits: of the labels, or of `token_ids`."""
        if self.token_ids:
            logits = [logits[0] - sum(logits[1:])]
        scores = list(logits)
        if self.activation == "sigmoid":
            scores = [_sigmoid(logit) for logit in logits]
        elif self.activation == "softmax":
            powers = [math.exp(logit - max(logits)) for logit in logits]
            scores = [power / sum(powers) for power in powers]
        return list(map(LabelScore, self.labels, logits, scores))


def embeds(directory: Path) -> bool:
    """Whether a checkpoint is an embedding model: sentence-transformers' files have a pooling."""
    return any(str(one.get("type")).endswith(".Pooling") for one in _modules(directory))


def is_pair(roles: Sequence[str]) -> bool:
    """Whether a conversation with these roles is a query and a document, and not a chat."""
    return QUERY in roles and DOCUMENT in roles


def renders_pairs(source: str) -> bool:
    """Whether a chat template has the roles of pairs, as those of rerankers do."""
    return all(f"'{role}'" in source or f'"{role}"' in source for role in ROLES)


def _sigmoid(logit: float) -> float:
    return 0.5 * (1 + math.tanh(logit / 2))


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """By the name that sentence-transformers writes, or transformers' `problem_type`."""
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = str(named or config.get("sbert_ce_default_activation_function") or "")
    problem = config.get("problem_type")
    if named.endswith("Identity") or (not named and problem == "regression"):
        return "identity"
    if named.endswith("Sigmoid") or problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def _logit_score(directory: Path) -> list[int]:
    """Token ids of sentence-transformers' module `LogitScore`; empty if there is none."""
    for module in _modules(directory):
        if not str(module.get("type")).endswith(".LogitScore"):
            continue
        file = directory / str(module.get("path")) / "config.json"
        try:
            found = parse_json(file, read_bytes(file, MAX_JSON_BYTES))
        except FileNotFoundError:
            raise CheckpointError(f"{file}: not found, though modules.json names it") from None
        ids = [found.get(f"{answer}_token_id") for answer in ("true", "false")]
        given = [token for token in ids if token is not None]
        if ids[0] is None or not all(type(token) is int and token >= 0 for token in given):
            raise CheckpointError(f"{file}: true_token_id must be a token id, not {quoted(ids[0])}")
        return given
    return []


def _modules(directory: Path) -> list[dict[str, Any]]:
    """sentence-transformers' modules; empty if there are none."""
    file = directory / "modules.json"
    try:
        found = parse_json_value(file, read_bytes(file, MAX_JSON_BYTES))
    except FileNotFoundError:
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
