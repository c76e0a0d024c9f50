"""/classify, /score and /rerank, in the forms of vLLM, Jina and Cohere.

A pair of a query and a document is a chat with messages of these roles, which the router renders
for the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, Struct, UnsetType

from baton.errors import InvalidRequest
from baton.gateway import answers, openai
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.gateway.pooling import Answered, InputRequests, parse_inputs, run_inputs
from baton.text.scoring import DOCUMENT, QUERY
from baton.v1 import inference_pb2


class ClassifyRequest(openai.InputRequest, kw_only=True):
    """Texts or token ids to classify; `activation` is an older name."""

    unsupported: ClassVar[openai.Unsupported] = {
        **openai.PoolingOptions.unsupported,
        "softmax": (True,),
    }

    use_activation: bool | None = None
    activation: bool | None = None


class TextDocument(Struct):
    """A document as an object."""

    text: str


Document = str | TextDocument
Documents = Annotated[list[Document], Meta(min_length=1, max_length=openai.MAX_INPUTS)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=openai.MAX_INPUTS)]


class PairOptions(openai.PoolingOptions, kw_only=True):
    """Fields of requests with pairs."""

    use_activation: bool | None = None
    activation: bool | None = None
    instruction: str | None = None  # what makes a document relevant


class ScoreRequest(PairOptions, kw_only=True):
    """Pairs to score: one text and many, or as many of both; `queries` and `documents`, and
    `data_1` and `data_2`, are other names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(PairOptions, kw_only=True):
    """Documents to order by their relevance for a query."""

    unsupported: ClassVar[openai.Unsupported] = {
        **openai.PoolingOptions.unsupported,
        "max_tokens_per_doc": (),
        "max_chunks_per_doc": (),
        "rank_fields": ([], ["text"]),
    }

    query: str
    documents: Documents
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0, as in vLLM: all
    return_documents: bool | None = None


class Classification(Struct):
    """The likeliest label of an input, and the score of each label."""

    index: openai.Count
    label: str
    probs: list[float]
    num_classes: openai.Count


class Classifications(Struct):
    """The answer of /classify."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: answers.InputUsage
    object: Literal["list"] = "list"


class Score(Struct):
    """The score of a pair."""

    index: openai.Count
    score: float
    object: Literal["score"] = "score"


class Scores(Struct):
    """The answer of /score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: answers.InputUsage
    object: Literal["list"] = "list"


class RankedDocument(Struct):
    """A document, by its index in the request."""

    index: openai.Count
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class Ranking(Struct):
    """The answer of /rerank, the most relevant document first."""

    id: str
    model: str
    usage: answers.InputUsage
    results: list[RankedDocument]


@dataclass(frozen=True)
class ParsedRanking:
    """The requests of a body, and what its answer shows."""

    inputs: InputRequests
    documents: Sequence[str] = field(default=())  # empty: not shown
    top_n: int = 0  # 0: all


def parse_classify(text: bytes) -> InputRequests:
    """Parses a body of /classify. Raises InvalidRequest naming the field."""
    body = openai.decode(ClassifyRequest, text)
    return _classified(body, openai.inputs_of(body.input, "input"), "input")


def parse_score(text: bytes) -> InputRequests:
    """Parses a body of /score. Raises InvalidRequest naming the field."""
    body = openai.decode(ScoreRequest, text)
    names = ("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")
    given = [pair for pair in names if any(getattr(body, name) is not None for name in pair)]
    if len(given) != 1:
        raise InvalidRequest("give text_1 and text_2, or queries and documents", "text_1")
    for name in given[0]:
        if getattr(body, name) is None:
            raise InvalidRequest(f"{name} is missing", name)
    first, second = (_listed(getattr(body, name)) for name in given[0])
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{given[0][0]} must have one text, or as many as {given[0][1]} ({len(second)}), not "
            f"{len(first)}",
            given[0][0],
        )
    queries = repeat(first[0]) if len(first) == 1 else first
    pairs = [
        _pair(query, one, body.instruction) for query, one in zip(queries, second, strict=False)
    ]
    return _classified(body, pairs, given[0][1])


def parse_rerank(text: bytes) -> ParsedRanking:
    """Parses a body of /rerank. Raises InvalidRequest naming the field."""
    body = openai.decode(RerankRequest, text)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    pairs = [_pair(body.query, one, body.instruction) for one in documents]
    shown = [] if body.return_documents is False else documents
    return ParsedRanking(_classified(body, pairs, "documents"), shown, body.top_n or 0)


async def classify(inputs: InputRequests, call: Call) -> None:
    """Answers with the labels of each input."""
    found = await run_inputs(inputs, call)
    data = []
    for index, end in enumerate(found.finishes):
        best = max(end.labels, key=lambda label: label.logit)
        data.append(Classification(index, best.name, inputs.scores(end), len(end.labels)))
    now = int(time.time())
    answer = Classifications(f"classify-{found.request_id}", now, found.model, data, found.usage)
    call.answer(answer)


async def score(inputs: InputRequests, call: Call) -> None:
    """Answers with the score of each pair."""
    found, scores = await _scored(inputs, call)
    data = [Score(index, value) for index, value in enumerate(scores)]
    now = int(time.time())
    answer = Scores(f"score-{found.request_id}", now, found.model, data, found.usage)
    call.answer(answer)


async def rerank(parsed: ParsedRanking, call: Call) -> None:
    """Answers with the documents by relevance; those of equal scores keep their order."""
    found, scores = await _scored(parsed.inputs, call)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        RankedDocument(
            index,
            scores[index],
            TextDocument(parsed.documents[index]) if parsed.documents else UNSET,
        )
        for index in order[: parsed.top_n or None]
    ]
    answer = Ranking(f"rerank-{found.request_id}", found.model, found.usage, results)
    call.answer(answer)


async def _scored(inputs: InputRequests, call: Call) -> tuple[Answered, list[float]]:
    """The score of each pair: of a model with one label, or the cosine of an embedding model's two
    vectors. Raises InvalidRequest for other models."""
    base = inputs.requests.base
    admission = call.service.resolve(base.model, base.session, call.caller).version.admission
    scoring = admission.scoring
    if scoring is None and admission.tokenizer.embeds:
        return await _cosines(inputs, call)
    if scoring and (count := len(scoring.labels)) > 1:
        raise InvalidRequest(
            f"this model has {count} labels, and a score is of one: use /classify", "model"
        )
    found = await run_inputs(inputs, call)
    return found, [inputs.scores(end)[0] for end in found.finishes]


async def _cosines(inputs: InputRequests, call: Call) -> tuple[Answered, list[float]]:
    """The cosine of the embeddings of each pair, of which each text is computed once."""
    pairs = []
    for chat in inputs.requests.prompts:
        assert isinstance(chat, inference_pb2.Chat)
        texts = {message.role: message.content for message in chat.messages}
        if "system" in texts:
            text = "an embedding model takes no instruction: put it into the texts"
            raise InvalidRequest(text, "instruction")
        pairs.append((texts[QUERY], texts[DOCUMENT]))
    prompts = list(dict.fromkeys(chain.from_iterable(pairs)))
    requests = replace(inputs.requests, prompts=prompts)
    sampling = requests.base.sampling
    sampling.classification, sampling.embedding = False, True
    found = await run_inputs(replace(inputs, requests=requests), call)
    vectors = {
        text: np.asarray(end.embedding, np.float64)
        for text, end in zip(prompts, found.finishes, strict=True)
    }
    return found, [_cosine(vectors[query], vectors[document]) for query, document in pairs]


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    return float(a @ b / ((np.linalg.norm(a) * np.linalg.norm(b)) or 1.0))


def _classified(
    body: ClassifyRequest | PairOptions,
    prompts: Sequence[str | Sequence[int] | inference_pb2.Chat],
    field: str,
) -> InputRequests:
    use_activation = False not in (body.use_activation, body.activation)
    inputs = parse_inputs(body, prompts, field, use_activation=use_activation)
    inputs.requests.base.sampling.classification = True
    return inputs


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _pair(query: str, document: str, instruction: str | None) -> inference_pb2.Chat:
    turns = {"system": instruction, QUERY: query, DOCUMENT: document}
    return inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(role=role, content=text)
            for role, text in turns.items()
            if text is not None
        ]
    )


_score = {"POST": Operation(
    Endpoint(parse_score, score),
    "Score pairs of texts.", Scores, ERRORS, ScoreRequest, runs=True,
)}  # fmt: skip
_rerank = {"POST": Operation(
    Endpoint(parse_rerank, rerank),
    "Order documents by their relevance for a query.", Ranking, ERRORS, RerankRequest,
    runs=True,
)}  # fmt: skip
ROUTES: Routes = {
    "/classify": {"POST": Operation(
        Endpoint(parse_classify, classify),
        "Classify texts.", Classifications, ERRORS, ClassifyRequest, runs=True,
    )},
    **dict.fromkeys(("/score", "/v1/score"), _score),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _rerank),
}  # fmt: skip
