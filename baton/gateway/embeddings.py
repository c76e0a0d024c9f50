"""/v1/embeddings and /pooling: each input is a prompt without output."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from msgspec import Struct

from baton.errors import InvalidRequest
from baton.gateway import answers, openai
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.gateway.pooling import InputRequests, parse_inputs, run_inputs
from baton.v1 import inference_pb2


class PoolingRequest(openai.EmbeddingRequest, kw_only=True):
    """Inputs to embed or to classify, by default what the model is for."""

    unsupported: ClassVar[openai.Unsupported] = {
        **openai.EmbeddingRequest.unsupported,
        "normalize": (True,),
        "softmax": (True,),
        "data": (),
    }

    task: Literal["embed", "classify"] | None = None
    use_activation: bool | None = None
    activation: bool | None = None


class Pooled(Struct):
    """An input's embedding, or the scores of its labels: numbers, or base64 as embeddings."""

    data: list[float] | str
    index: openai.Count
    object: Literal["pooling"] = "pooling"


class PoolingAnswer(Struct):
    """The answer of /pooling."""

    id: str
    data: list[Pooled]
    model: str
    usage: answers.InputUsage
    object: Literal["list"] = "list"


@dataclass(frozen=True)
class ParsedEmbeddings:
    """The requests of a body, and the format of the answer."""

    inputs: InputRequests
    base64: bool
    dimensions: int | None
    task: str | None = "embed"  # None: what the model is for


def parse_embeddings(text: bytes) -> ParsedEmbeddings:
    """Parses a body of /v1/embeddings. Raises InvalidRequest naming the field."""
    body = openai.decode(openai.EmbeddingRequest, text)
    inputs = parse_inputs(body, openai.inputs_of(body.input, "input"), "input")
    return ParsedEmbeddings(inputs, body.encoding_format == "base64", body.dimensions)


def parse_pooling(text: bytes) -> ParsedEmbeddings:
    """Parses a body of /pooling. Raises InvalidRequest naming the field."""
    body = openai.decode(PoolingRequest, text)
    if body.task == "classify" and body.dimensions is not None:
        raise InvalidRequest("dimensions are those of an embedding: leave them out", "dimensions")
    activated = (body.activation, body.use_activation)
    inputs = parse_inputs(
        body, openai.inputs_of(body.input, "input"), "input", use_activation=False not in activated
    )
    return ParsedEmbeddings(inputs, body.encoding_format == "base64", body.dimensions, body.task)


async def embed(parsed: ParsedEmbeddings, call: Call) -> None:
    """Answers with the embedding of each input."""
    parsed.inputs.requests.base.sampling.embedding = True
    found = await run_inputs(parsed.inputs, call)
    data = [
        answers.Embedding(_embedding(end, parsed), index)
        for index, end in enumerate(found.finishes)
    ]
    call.answer(answers.Embeddings(data, found.model, found.usage))


async def pool(parsed: ParsedEmbeddings, call: Call) -> None:
    """Answers with each input's embedding, or the scores of its labels."""
    inputs, task = parsed.inputs, parsed.task
    if task is None:
        base = inputs.requests.base
        scoring = call.service.resolve(
            base.model, base.session, call.caller
        ).version.admission.scoring
        task = "classify" if scoring and not scoring.token_ids else "embed"
    sampling = inputs.requests.base.sampling
    sampling.embedding, sampling.classification = task == "embed", task == "classify"
    found = await run_inputs(inputs, call)
    data = [
        Pooled(
            _embedding(end, parsed)
            if task == "embed"
            else _encoded(array.array("f", inputs.scores(end)), parsed),
            index,
        )
        for index, end in enumerate(found.finishes)
    ]
    answer = PoolingAnswer(f"pool-{found.request_id}", data, found.model, found.usage)
    call.answer(answer)


def _embedding(end: inference_pb2.Finish, parsed: ParsedEmbeddings) -> list[float] | str:
    return _encoded(_shortened(end.embedding, parsed.dimensions), parsed)


def _shortened(embedding: Sequence[float], dimensions: int | None) -> array.array[float]:
    """Keeps the first dimensions and normalizes them (Kusupati et al., "Matryoshka Representation
    Learning", 2022)."""
    if dimensions is None:
        return array.array("f", embedding)
    if dimensions > len(embedding):
        raise InvalidRequest(
            f"dimensions may be at most {len(embedding)}, the size of the model's embeddings, not "
            f"{dimensions}",
            "dimensions",
        )
    kept = embedding[:dimensions]
    length = math.hypot(*kept) or 1.0
    return array.array("f", [value / length for value in kept])


def _encoded(values: array.array[float], parsed: ParsedEmbeddings) -> list[float] | str:
    if not parsed.base64:
        return values.tolist()
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values).decode()


ROUTES: Routes = {
    "/v1/embeddings": {"POST": Operation(
        Endpoint(parse_embeddings, embed),
        "Embed texts.", answers.Embeddings, ERRORS, openai.EmbeddingRequest, runs=True,
    )},
    "/pooling": {"POST": Operation(
        Endpoint(parse_pooling, pool),
        "Embed or classify texts.", PoolingAnswer, ERRORS, PoolingRequest, runs=True,
    )},
}  # fmt: skip
