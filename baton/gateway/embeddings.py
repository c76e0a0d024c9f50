"""/v1/embeddings: each input is a prompt without output."""

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
from baton.gateway.headers import id_headers, with_request_id
from baton.gateway.parsed_request import ParsedRequest, priority_of
from baton.net.http_server import HttpExchange
from baton.v1 import common_pb2, inference_pb2
from router.generation_service import Caller, GenerationService
from router.output.sink import Piece


@dataclass(frozen=True)
class ParsedEmbeddings:
    """The requests of a body, and the format of the answer."""

    requests: ParsedRequest
    base64: bool
    dimensions: int | None
    request_id: str | None


def parse_embeddings(text: bytes) -> ParsedEmbeddings:
    """Parses a body of /v1/embeddings. Raises InvalidRequest naming the field."""
    body = api.decode(api.EmbeddingRequest, text)
    base = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=common_pb2.SamplingParams(max_tokens=0, embedding=True),
        truncate_prompt_tokens=body.truncate_prompt_tokens or 0,
        cache_salt=body.cache_salt or "",
        priority=priority_of(body.priority),
        session=body.user or "",
    )
    if body.add_special_tokens is not None:
        base.add_special_tokens = body.add_special_tokens
    requests = ParsedRequest(
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
    return ParsedEmbeddings(requests, in_base64, body.dimensions, body.request_id)


class _EmbeddingSink:
    """Stores the `Finish` of a request, which has no output."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self.end = inference_pb2.Finish()

    def start(self, started: inference_pb2.Started) -> None:
        ids = id_headers(self._exchange, started.request_id, started.trace_id)
        # The ids of the first input that starts are kept.
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
    caller = with_request_id(exchange, caller, parsed.request_id)
    base = parsed.requests.base
    target = service.resolve(base.model, base.session, caller)
    sinks = [_EmbeddingSink(exchange) for _ in range(parsed.requests.num_prompts)]
    try:
        await run_choices(service, parsed.requests, caller, sinks, target)
        data = [
            api.Embedding(
                _encoded(_shortened(sink.end.embedding, parsed.dimensions), parsed), index
            )
            for index, sink in enumerate(sinks)
        ]
    except InvalidRequest as error:
        raise error.renamed(parsed.requests.fields.get(error.field, error.field)) from error
    tokens = sum(sink.end.usage.prompt_tokens for sink in sinks)
    model = base.model or target.version.name
    answer = api.Embeddings(data, model, api.EmbeddingUsage(tokens, tokens))
    exchange.answer(200, msgspec.json.encode(answer))


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


def _encoded(embedding: array.array[float], parsed: ParsedEmbeddings) -> list[float] | str:
    if not parsed.base64:
        return embedding.tolist()
    if sys.byteorder == "big":
        embedding.byteswap()
    return base64.b64encode(embedding).decode()
