"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import msgspec

from baton.errors import InvalidRequest
from baton.gateway import api
from baton.gateway.chat import chat_message
from baton.gateway.output import token_text
from baton.gateway.parsed_request import ParsedRequest
from baton.net.http_server import HttpExchange
from baton.v1 import inference_pb2
from router.generation_service import Caller, GenerationService


def parse_tokenize(text: bytes) -> tuple[inference_pb2.TokenizeRequest, bool]:
    """Parses a body of /tokenize; True if it asks for the tokens' texts."""
    body = api.decode(api.TokenizeRequest, text)
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    request = inference_pb2.TokenizeRequest(model=body.model or "")
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    if body.messages is None:
        request.text = body.prompt or ""
    else:
        request.chat.CopyFrom(chat_message(body, body.messages))
    return request, bool(body.return_token_strs)


async def tokenize(
    service: GenerationService,
    parsed: tuple[inference_pb2.TokenizeRequest, bool],
    caller: Caller,
    exchange: HttpExchange,
) -> None:
    """Answers with the token ids of a prompt or a chat."""
    request, with_strings = parsed
    try:
        target = service.resolve(request.model, "", caller)
        found = await service.tokenize(request, caller, target)
    except InvalidRequest as error:
        field = "prompt" if request.HasField("text") else "messages"
        raise error.renamed(field) from error
    tokens = list(found.token_ids)
    tokenizer = target.version.admission.tokenizer
    strings = [token_text(tokenizer, token)[0] for token in tokens] if with_strings else None
    answer = api.Tokens(len(tokens), found.max_context, tokens, strings)
    exchange.answer(200, msgspec.json.encode(answer))


async def count_chat(service: GenerationService, parsed: ParsedRequest, caller: Caller) -> int:
    """The number of tokens of a chat's prompt. Raises InvalidRequest naming the body's field."""
    base = parsed.base
    request = inference_pb2.TokenizeRequest(model=base.model, chat=base.chat)
    try:
        target = service.resolve(base.model, base.session, caller)
        return len((await service.tokenize(request, caller, target)).token_ids)
    except InvalidRequest as error:
        raise parsed.renamed(error) from error


def parse_detokenize(text: bytes) -> api.DetokenizeRequest:
    """Parses a body of /detokenize."""
    return api.decode(api.DetokenizeRequest, text)


async def detokenize(
    service: GenerationService,
    body: api.DetokenizeRequest,
    caller: Caller,
    exchange: HttpExchange,
) -> None:
    """Answers with the text of token ids."""
    text = await service.detokenize(body.model or "", body.tokens, caller)
    exchange.answer(200, msgspec.json.encode(api.Detokenized(text)))
