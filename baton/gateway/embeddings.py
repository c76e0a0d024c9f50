"""/v1/embeddings: each input is a prompt of which nothing is generated."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.errors import InvalidRequest
from baton.gateway import api
from baton.gateway.generation import run_choices
from baton.gateway.headers import correlated, id_headers
from baton.gateway.parsed_request import ParsedRequest, priority_of
from baton.net.http_server import HttpExchange
from baton.v1 import common_pb2, inference_pb2
from router.generation_service import Caller, GenerationService
from router.output.sink import Piece


@dataclass(frozen=True)
class ParsedEmbeddings:
    """What to compute, and how to write it."""

    run: ParsedRequest
    base64: bool
    dimensions: int | None
    request_id: str | None


def parse_embeddings(text: bytes) -> ParsedEmbeddings:
    """A body of /v1/embeddings. Raises InvalidRequest naming the field."""
    body = api.decode(api.EmbeddingRequest, text)
    base = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=common_pb2.SamplingParams(max_tokens=0, embedding=True),
        truncate_prompt_tokens=body.truncate_prompt_tokens or 0,
        cache_salt=body.cache_salt or "",
        priority=priority_of(body.priority),
    )
    if body.add_special_tokens is not None:
        base.add_special_tokens = body.add_special_tokens
    run = ParsedRequest(
        base,
        api.prompts_of(body.input, "input"),
        api.GenerateOptions(model=body.model),
        n=1,
        kept=1,
        logprobs=None,
        max_tokens_given=True,
        fields=dict.fromkeys(("input", "text", "token_ids"), "input"),
    )
    in_base64 = body.encoding_format == "base64"
    return ParsedEmbeddings(run, in_base64, body.dimensions, body.request_id)


class _Sink:
    """Keeps what a request ends with; there is no output."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self.end = inference_pb2.Finish()

    def start(self, started: inference_pb2.Started) -> None:
        ids = id_headers(self._exchange, started.request_id, started.trace_id)
        # Of the first input to start, whose names stay.
        self._exchange.answer_headers = {**ids, **self._exchange.answer_headers}

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        pass

    def put(self, piece: Piece) -> None:
        pass

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish


async def embed(
    service: GenerationService, parsed: ParsedEmbeddings, caller: Caller, exchange: HttpExchange
) -> None:
    """Answers with the embedding of each input."""
    caller = correlated(exchange, caller, parsed.request_id)
    sinks = [_Sink(exchange) for _ in range(parsed.run.num_prompts)]
    try:
        await run_choices(service, parsed.run, caller, sinks)
        data = [
            api.Embedding(_written(_cut(sink.end.embedding, parsed.dimensions), parsed), index)
            for index, sink in enumerate(sinks)
        ]
    except InvalidRequest as error:
        raise error.renamed(parsed.run.fields.get(error.field, error.field)) from error
    tokens = sum(sink.end.usage.prompt_tokens for sink in sinks)
    model = parsed.run.options.model or service.admission.model
    answer = api.Embeddings(data, model, api.EmbeddingUsage(tokens, tokens))
    exchange.answer(200, msgspec.json.encode(answer))


def _cut(embedding: Sequence[float], dimensions: int | None) -> array.array[float]:
    """Its first dimensions, at length 1 again, as models are trained for it (Kusupati et al.,
    "Matryoshka Representation Learning", 2022)."""
    if dimensions is None:
        return array.array("f", embedding)
    if dimensions > len(embedding):
        what = f"dimensions is {dimensions} and the model's embeddings have {len(embedding)}"
        raise InvalidRequest(what, "dimensions")
    kept = embedding[:dimensions]
    length = math.hypot(*kept) or 1.0
    return array.array("f", [value / length for value in kept])


def _written(embedding: array.array[float], parsed: ParsedEmbeddings) -> list[float] | str:
    if not parsed.base64:
        return embedding.tolist()
    if sys.byteorder == "big":
        embedding.byteswap()
    return base64.b64encode(embedding).decode()
