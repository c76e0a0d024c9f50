"""/tokenize, /detokenize and the render endpoints, as in vLLM."""

from __future__ import annotations

import secrets
from typing import Any

from google.protobuf.json_format import MessageToDict
from msgspec import Struct

from baton.errors import InvalidRequest
from baton.gateway import answers, openai
from baton.gateway.chat_completions import chat_message
from baton.gateway.endpoint import Call
from baton.gateway.headers import session_of
from baton.gateway.output import token_text
from baton.gateway.parsed_request import ParsedRequest
from baton.v1 import inference_pb2
from router.admission.validation import check_prompt, num_kept
from router.models import Target


def parse_tokenize(text: bytes) -> tuple[inference_pb2.TokenizeRequest, bool]:
    """Parses a body of /tokenize; True if it asks for the tokens' texts."""
    body = openai.decode(openai.TokenizeRequest, text)
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


async def tokenize(parsed: tuple[inference_pb2.TokenizeRequest, bool], call: Call) -> None:
    """Answers with the token ids of a prompt or a chat."""
    request, with_strings = parsed
    try:
        target = call.service.resolve(request.model, "", call.caller)
        found = await call.service.tokenize(request, call.caller, target)
    except InvalidRequest as error:
        field = "prompt" if request.HasField("text") else "messages"
        raise error.renamed(field) from error
    tokens = list(found.token_ids)
    tokenizer = target.version.admission.tokenizer
    strings = [token_text(tokenizer, token)[0] for token in tokens] if with_strings else None
    answer = answers.Tokens(len(tokens), found.max_context, tokens, strings)
    call.answer(answer)


class RenderedRequest(Struct):
    """The tokens and sampling parameters that one prompt of a request stands for."""

    request_id: str
    token_ids: list[openai.Count]
    sampling_params: dict[str, Any]  # of gRPC's SamplingParams
    model: str
    features: None = None
    stream: bool = False
    cache_salt: str | None = None


async def render(parsed: ParsedRequest, call: Call) -> None:
    """Answers with what a chat, or each prompt of a completion, is for a worker; runs nothing."""
    base, rendered = parsed.base, list[RenderedRequest]()
    session = base.session or session_of(call.exchange)
    target = call.service.resolve(base.model, session, call.caller)
    params = MessageToDict(base.sampling, preserving_proto_field_name=True)
    key = secrets.token_hex(16)
    try:
        for index in range(parsed.num_prompts):
            request = parsed.request(index)
            if request.suffix:
                raise InvalidRequest("prompts with a suffix are not rendered", "suffix")
            limit, max_tokens = target.version.max_context, request.sampling.max_tokens
            kept = num_kept(request.truncate_prompt_tokens, limit, max_tokens)
            token_ids = (await _tokens_of(request, call, target))[-kept:]
            vocab_size = target.version.admission.tokenizer.vocab_size
            check_prompt(token_ids, (), vocab_size, limit, 0, has_output=max_tokens > 0)
            most = limit - len(token_ids)
            if not parsed.max_tokens_given and most < max_tokens:
                sampling = {**params, "max_tokens": max(0, most)}
            else:
                sampling = dict(params)
            rendered.append(
                RenderedRequest(
                    f"{'' if parsed.prompts else 'chat'}cmpl-{key}-{index}",
                    token_ids,
                    sampling,
                    base.model or target.version.name,
                    stream=bool(parsed.options.stream),
                    cache_salt=base.cache_salt or None,
                )
            )
    except InvalidRequest as error:
        raise parsed.renamed(error) from error
    call.answer(rendered if parsed.prompts else rendered[0])


async def _tokens_of(
    request: inference_pb2.GenerateRequest, call: Call, target: Target
) -> list[int]:
    """The tokens of a request's prompt."""
    form = request.WhichOneof("input")
    if form == "token_ids":
        return list(request.token_ids.ids)
    asked = inference_pb2.TokenizeRequest(model=request.model)
    if form == "chat":
        asked.chat.CopyFrom(request.chat)
    else:
        asked.text = request.text
    if request.HasField("add_special_tokens"):
        asked.add_special_tokens = request.add_special_tokens
    return list((await call.service.tokenize(asked, call.caller, target)).token_ids)


async def count_chat(parsed: ParsedRequest, call: Call) -> int:
    """The number of tokens of a chat's prompt. Raises InvalidRequest naming the body's field."""
    base = parsed.base
    request = inference_pb2.TokenizeRequest(model=base.model, chat=base.chat)
    try:
        target = call.service.resolve(base.model, base.session, call.caller)
        return len((await call.service.tokenize(request, call.caller, target)).token_ids)
    except InvalidRequest as error:
        raise parsed.renamed(error) from error


def parse_detokenize(text: bytes) -> openai.DetokenizeRequest:
    """Parses a body of /detokenize."""
    return openai.decode(openai.DetokenizeRequest, text)


async def detokenize(body: openai.DetokenizeRequest, call: Call) -> None:
    """Answers with the text of token ids."""
    text = await call.service.detokenize(body.model or "", body.tokens, call.caller)
    call.answer(answers.Detokenized(text))
