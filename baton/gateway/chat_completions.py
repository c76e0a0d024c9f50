"""/v1/chat/completions: parses bodies and formats outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from baton.errors import InvalidRequest, quoted
from baton.gateway import answers, openai
from baton.gateway.answers import ChatDelta, ChatLogprobs, ChatToken
from baton.gateway.custom_tools import ChatCalls, arguments_of, tool_message, whole_calls
from baton.gateway.output import MIN_LOGPROB, ChoiceOutput
from baton.gateway.parsed_request import (
    ParsedRequest,
    base_request,
    check_choices,
    check_prompt_alone,
    structured_output_of,
)
from baton.generation.sampling_params import FILL_CONTEXT
from baton.v1 import common_pb2, inference_pb2
from router.output.output_parser import ParsedOutput


def parse_chat(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/chat/completions. Raises InvalidRequest naming the field."""
    return parsed_chat(openai.decode(openai.ChatRequest, text))


def parsed_chat(body: openai.ChatRequest) -> ParsedRequest:
    """Translates a chat; without a limit its output may fill the context."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens or body.max_tokens
    if most == 0:
        check_prompt_alone(body, "max_tokens")
    output, restriction = structured_output_of(body)
    request = base_request(body, FILL_CONTEXT if most is None else most, logprobs, output)
    request.chat.CopyFrom(chat_message(body, body.messages))
    _set_tool_choice(request.chat, body)
    n, size = body.n or 1, sum(len(message.content) for message in request.chat.messages)
    check_choices(body, n, 1, size)
    older_name = body.max_tokens is not None and not body.max_completion_tokens
    return ParsedRequest(
        request,
        (),
        body,
        n=n,
        kept=n,
        logprobs=logprobs,
        max_tokens_given=most is not None,
        fields={
            **dict.fromkeys(("input", "chat", "token_ids"), "messages"),
            "max_tokens": "max_tokens" if older_name else "max_completion_tokens",
            "include_stop": "include_stop_str_in_output",
            "structured_output": restriction,
            "tool_name": "tool_choice",
            "max_thinking_tokens": (
                "max_thinking_tokens"
                if body.thinking_token_budget is None
                else "thinking_token_budget"
            ),
            "template_kwargs": "chat_template_kwargs",
            **_tool_fields(body),
        },
    )


def chat_message(
    body: openai.ChatRequest | openai.TokenizeRequest, messages: Sequence[openai.Message]
) -> inference_pb2.Chat:
    """Builds the protocol's chat from a body and its messages."""
    chat = inference_pb2.Chat(continue_final_message=bool(body.continue_final_message))
    for at, message in enumerate(messages):
        content = message.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        turn = chat.messages.add(role=message.role, content=content)
        turn.name, turn.tool_call_id = message.name or "", message.tool_call_id or ""
        turn.reasoning = message.reasoning or message.reasoning_content or ""
        for number, call in enumerate(message.tool_calls or ()):
            name, arguments = _called(call, f"messages[{at}].tool_calls[{number}]")
            turn.tool_calls.add(id=call.id, name=name, arguments=arguments)
    choice = getattr(body, "tool_choice", None)
    tools = body.tools or ()
    chat.tools.extend(tool_message(tools[at]) for at in _allowed(tools, choice))
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if isinstance(body, openai.ChatRequest) and body.reasoning_effort:
        variables["reasoning_effort"] = body.reasoning_effort
    if variables:
        chat.template_kwargs = json.dumps(variables)
    if body.documents:
        chat.documents = json.dumps(body.documents)
    return chat


def _set_tool_choice(chat: inference_pb2.Chat, body: openai.ChatRequest) -> None:
    choice = body.tool_choice
    if isinstance(choice, openai.NamedTool | openai.NamedCustomTool):
        chat.tool_name = choice.name
    elif choice == "required" or _mode(choice) == "required":
        chat.tool_choice = inference_pb2.TOOL_CHOICE_REQUIRED
    elif choice == "none":
        chat.tool_choice = inference_pb2.TOOL_CHOICE_NONE
    chat.single_tool_call = body.parallel_tool_calls is False
    most, budget = body.max_thinking_tokens, body.thinking_token_budget
    if most is not None and budget is not None:
        name = "thinking_token_budget"
        raise InvalidRequest(f"{name} and max_thinking_tokens are the same setting: give one", name)
    if most is None and budget != -1:
        most = budget
    if most is not None:
        chat.max_thinking_tokens = most


def _mode(choice: object) -> str | None:
    return choice.allowed_tools.mode if isinstance(choice, openai.AllowedToolChoice) else None


def _called(call: openai.ToolCall, place: str) -> tuple[str, str]:
    """The name and arguments of an earlier call. Raises InvalidRequest if they are missing."""
    called = call.custom if call.type == "custom" else call.function
    if called is UNSET:
        raise InvalidRequest(f"{place}.{call.type} is missing", f"{place}.{call.type}")
    name = "" if called.name is UNSET else called.name
    if isinstance(called, openai.CalledCustomTool):
        return name, arguments_of(called.input)
    return name, called.arguments


def _tool_fields(body: openai.ChatRequest) -> dict[str, str]:
    """Fields of the body, by the router's names, for the tools that are in the prompt."""
    tools = body.tools or ()
    return {
        f"tools[{number}].function.{name}": f"tools[{at}].{place}"
        for number, at in enumerate(_allowed(tools, body.tool_choice))
        for name, place in tools[at].fields.items()
    }


def _allowed(tools: Sequence[openai.Tool | openai.CustomTool], choice: object) -> Sequence[int]:
    """Places of the tools that a choice allows. Raises InvalidRequest for one that is not there."""
    if not isinstance(choice, openai.AllowedToolChoice):
        return range(len(tools))
    names = {one.name for one in choice.allowed_tools.tools}
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequest(f"there is no tool {quoted(min(unknown))}", "tool_choice")
    return [at for at, tool in enumerate(tools) if tool.name in names]


def chat_tokens(
    positions: Sequence[common_pb2.PositionLogprobs], show: Callable[[int], tuple[str, bytes]]
) -> list[ChatToken]:
    """Formats log-probabilities; `show` returns a token's text and bytes."""

    def entry(token: common_pb2.TokenLogprob) -> tuple[str, float, list[int]]:
        text, piece = show(token.token_id)
        return text, max(token.logprob, MIN_LOGPROB), list(piece)

    return [
        ChatToken(
            *entry(position.chosen), [answers.TopToken(*entry(other)) for other in position.top]
        )
        for position in positions
    ]


class ChatOutput(ChoiceOutput):
    """The output of a chat's choice."""

    id_prefix = "chatcmpl-"
    answer = answers.ChatCompletion
    chunk_object = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._calls = ChatCalls(self.custom_tools)

    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> ChatLogprobs:
        """Formats one entry for each token."""
        return ChatLogprobs(chat_tokens(positions, self.token_text))

    @classmethod
    def answer_members(cls, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        return {"prompt_logprobs": outputs[0].prompt_logprobs()}

    def _whole(self, text: str, parsed: ParsedOutput, **members: Any) -> answers.ChatChoice:
        members_of_parsed = _reasoning(parsed)
        if parsed.tool_calls:
            deltas = self._calls.push(parsed.tool_calls, last=True)
            members_of_parsed["tool_calls"] = whole_calls(deltas)
        content = None if members_of_parsed and not text else text
        return answers.ChatChoice(
            message=answers.AssistantMessage(content, **members_of_parsed), **members
        )

    def _chunk(self, text: str, parsed: ParsedOutput | None, **members: Any) -> answers.ChatChoice:
        members_of_parsed = _reasoning(parsed)
        ended = bool(members["finish_reason"])
        if deltas := self._calls.push(parsed.tool_calls if parsed else (), last=ended):
            members_of_parsed["tool_calls"] = deltas
        delta = ChatDelta(
            UNSET if members_of_parsed and self._begun and not text else text, **members_of_parsed
        )
        if not self._begun:
            delta.role = "assistant"
        return answers.ChatChoice(delta=delta, **members)


def _reasoning(parsed: ParsedOutput | None) -> dict[str, Any]:
    if parsed is None or not parsed.reasoning:
        return {}
    return {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
