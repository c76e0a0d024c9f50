"""Chats with tools and reasoning: the chat template's input, the output's format and its grammar.

A model's formats follow from its chat template; there are none if the template has no tools.
Required tool calls are enforced by a grammar of the model's format, which applies after reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import ConfigError, InvalidRequest, quoted
from baton.generation.json_schema import JSON_OPTIONS, prepare_schema
from baton.generation.sampling_params import (
    Reasoning,
    SamplingParams,
    StructuredOutput,
)
from baton.text import Tokenizer
from baton.text.detokenizer import TokenPieces
from baton.text.json_repair import repaired
from baton.text.reasoning import ReasoningFormat, reasoning_format
from baton.text.scoring import is_pair
from baton.text.tool_parsers import ToolFormat, ToolSchemas, tool_format
from baton.text.tool_parsers.format import AllowedCalls, GrammarTerms, check_size
from baton.text.tool_parsers.harmony import HarmonyFormat
from baton.v1 import inference_pb2
from router.request import OutputFormat

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOL_CHARS = 256 << 10  # all tools of a request
MAX_TEMPLATE_KWARGS_CHARS = 16 << 10
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_SPACE = 4  # white-space tokens after the one with which a prompt opens or closes reasoning
_MAX_OPENING = 64  # tokens with which a prompt opens reasoning by a text
_STRUCTURED_OUTPUT = "sampling.structured_output"
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on
_SCHEMA_OPTIONS = {"x-guidance": JSON_OPTIONS}


@dataclass(frozen=True)
class ChatFormats:
    """The served model's formats of tool calls and reasoning."""

    tokenizer: Tokenizer
    pieces: TokenPieces  # with the markers of tool calls as text
    tools: ToolFormat | None = None
    markers: Mapping[str, int] | None = None  # token ids of the markers that are tokens
    reasoning: Reasoning | None = None
    always_reasons: bool = False
    text_reasoning: ReasoningFormat | None = None  # between texts instead of tokens
    text_pieces: TokenPieces | None = None  # with its markers as text, and none of tool calls
    shows_calls: bool = True  # whether the template shows earlier calls
    text_arguments: bool = False  # whether it takes their arguments as JSON in a text

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> ChatFormats:
        """The formats by parser name. Raises ConfigError for reasoning without its tokens."""
        templates = (tokenizer.template, tokenizer.tool_template)
        plain, template = (one.source if one else "" for one in templates)
        tools = tool_format(tool_parser, template)
        texts = tools.markers if tools else ()
        markers = {text: tokenizer.added_token(text) for text in texts}
        shown = tokenizer.tool_template.shown_arguments if tokenizer.tool_template else {dict}
        reasoning, form = None, reasoning_format(reasoning_parser, plain + template)
        if form and not form.is_text:
            begin, end = map(tokenizer.added_token, (form.begin, form.end))
            if begin is not None and end is not None:
                reasoning = Reasoning(begin, end)
            elif reasoning_parser == "auto":
                form = replace(form, is_text=True)
            else:
                raise ConfigError(
                    f"--reasoning-parser {reasoning_parser} needs a model whose tokenizer has the "
                    f"tokens {form.begin} and {form.end}"
                )
        if tools and tools.channels:
            reasoning = form = None  # it has a channel
        text_form = form if form and form.is_text else None
        text_markers = [text for text in text_form.markers if text] if text_form else []
        return cls(
            tokenizer,
            tokenizer.showing([*texts, *text_markers]),
            tools,
            {text: token for text, token in markers.items() if token is not None},
            reasoning,
            always_reasons=bool(form and form.always),
            text_reasoning=text_form,
            text_pieces=tokenizer.showing(text_markers) if text_form else None,
            shows_calls=not shown.isdisjoint((dict, str)),
            text_arguments=shown == {str},
        )

    def __str__(self) -> str:
        tools = f"tool calls as {self.tools.name}" if self.tools else "no tool calls"
        reasons = self.reasoning or self.text_reasoning or self.has_channels
        return f"{tools}, {'reasoning' if reasons else 'no reasoning'}"

    @property
    def has_channels(self) -> bool:
        """Whether the model's outputs consist of channels, also without tools."""
        return self.tools is not None and self.tools.channels

    def encode(
        self,
        chat: inference_pb2.Chat,
        max_tokens: int,
        add_special_tokens: bool = False,
        at_once: bool = False,
        salt: str = "",
    ) -> list[int]:
        """Token ids of a conversation's prompt; see `Tokenizer.encode_chat`.

        Raises InvalidRequest; with `at_once`, TimeoutError if it would block an event loop for too
        long.
        """
        messages = [_message(message, i) for i, message in enumerate(chat.messages)]
        if is_pair([message["role"] for message in messages]):
            return self.tokenizer.encode_pair(messages, max_tokens)
        if self.text_arguments:
            _write_arguments(messages)
        return self.tokenizer.encode_chat(
            self.tools.history(messages, shown=self.shows_calls) if self.tools else messages,
            max_tokens,
            self._variables(chat),
            chat.continue_final_message,
            add_special_tokens,
            at_once=at_once,
            salt=salt,
        )

    def output_format(self, chat: inference_pb2.Chat, prompt: Sequence[int]) -> OutputFormat | None:
        """The output format of a chat with this prompt; None if all output is content."""
        tools = self.tools if _with_tools(chat) or self.has_channels else None
        reasoning = self.reasoning
        if reasoning is not None:
            last = self._last_marker(prompt)
            always = self.always_reasons and last != reasoning.end_token_id
            reasoning = replace(
                reasoning,
                begun=always or last == reasoning.begin_token_id,
                max_tokens=(
                    chat.max_thinking_tokens if chat.HasField("max_thinking_tokens") else None
                ),
            )
        elif chat.HasField("max_thinking_tokens"):
            reason = (
                "the end of this model's reasoning, which is no token, cannot be forced: leave it "
                "out, and set reasoning_effort"
                if self.has_channels or self.text_reasoning
                else "no reasoning of this model is known: leave it out"
            )
            raise InvalidRequest(reason, "chat.max_thinking_tokens")
        text_reasoning = self.text_reasoning
        if text_reasoning and self._opens_text(prompt, text_reasoning.begin):
            text_reasoning = replace(text_reasoning, always=True)
        if tools is None and reasoning is None and text_reasoning is None:
            return None
        pieces = self.pieces if tools else self.text_pieces or self.tokenizer.pieces
        schemas = _schemas(chat, parsed=tools.typed) if tools and _with_tools(chat) else {}
        implied_end = (self.markers or {}).get(tools.ends_reasoning) if tools else None
        single = chat.single_tool_call
        return OutputFormat(pieces, reasoning, text_reasoning, tools, single, schemas, implied_end)

    def restrict(
        self,
        params: SamplingParams,
        chat: inference_pb2.Chat,
        output: OutputFormat,
        prompt: Sequence[int],
    ) -> SamplingParams:
        """`params` with the restrictions that the chat's tools and reasoning add.

        Required tool calls replace another restriction; with optional ones an answer without calls
        must match it. Where a prompt ends with the end of reasoning, either begins at once. Raises
        InvalidRequest.
        """
        structured, must_call = params.structured_output, _must_call(chat)
        if output.tools is not None and has_grammar(params, chat):
            answer = None if must_call else structured
            optional = not must_call and answer is None
            if not optional or output.tools.marks_calls(self.markers or {}):
                structured = self._tool_grammar(output.tools, chat, answer, optional=optional)
        elif structured and isinstance(output.tools, HarmonyFormat):
            structured = self._channel_grammar(output.tools, structured)
        if isinstance(output.tools, HarmonyFormat) and not params.ignore_eos:
            markers = self.markers or {}
            stops = frozenset(markers[text] for text in output.tools.stops if text in markers)
            stops -= self.tokenizer.eos_token_ids
            params = replace(params, stop_token_ids=params.stop_token_ids | stops)
        reasoning = output.reasoning
        if reasoning and structured and self._last_marker(prompt) == reasoning.end_token_id:
            reasoning = None
        if reasoning and (structured or reasoning.max_tokens is not None):
            params = replace(params, reasoning=reasoning)
        params = replace(params, structured_output=structured)
        params.validate(self.tokenizer.vocab_size)
        return params

    def _tool_grammar(
        self,
        tools: ToolFormat,
        chat: inference_pb2.Chat,
        answer: StructuredOutput | None,
        *,
        optional: bool,
    ) -> StructuredOutput:
        if answer is not None and not answer.json_schema:
            raise InvalidRequest(
                "with tools that may be called only a JSON schema can restrict the answer",
                _STRUCTURED_OUTPUT,
            )
        parameters, inputs = dict[str, Any](), dict[str, StructuredOutput]()
        for at, tool in enumerate(chat.tools):
            if chat.tool_name in ("", tool.name):
                field = f"chat.tools[{at}].parameters"
                schema = _arguments(tool.parameters, field) if tool.parameters else None
                prepare_schema(schema or {}, "the schema", field)
                parameters[tool.name] = schema
                if tool.HasField("input"):
                    inputs[tool.name] = _input(tool, at)
        schema = _object(answer.json_schema, _STRUCTURED_OUTPUT) if answer else None
        if schema is not None:
            prepare_schema(schema, field=_STRUCTURED_OUTPUT)
        allowed = AllowedCalls(
            tools=parameters,
            inputs=inputs,
            single=bool(chat.tool_name) or chat.single_tool_call,
            answer=schema,
            optional=optional,
        )
        grammar = tools.grammar(allowed, GrammarTerms(self.markers or {}, _SCHEMA_OPTIONS))
        check_size(len(grammar))
        return StructuredOutput(grammar=grammar)

    def _channel_grammar(self, form: HarmonyFormat, output: StructuredOutput) -> StructuredOutput:
        """A grammar of reasoning and an answer that matches `output`."""
        output.validate()
        schema = ""
        if output.json_schema:
            prepared = _object(output.json_schema, _STRUCTURED_OUTPUT)
            prepare_schema(prepared, field=_STRUCTURED_OUTPUT)
            schema = json.dumps({**prepared, **_SCHEMA_OPTIONS})
        terms = GrammarTerms(self.markers or {}, {})
        return StructuredOutput(grammar=form.answer_grammar(output, terms, schema))

    def _variables(self, chat: inference_pb2.Chat) -> dict[str, Any]:
        """The template's variables other than messages."""
        variables: dict[str, Any] = {}
        if chat.template_kwargs:
            variables = _object(chat.template_kwargs, "chat.template_kwargs")
            if len(chat.template_kwargs) > (most := MAX_TEMPLATE_KWARGS_CHARS):
                raise InvalidRequest(
                    f"the template's variables may have {most} characters at most",
                    "chat.template_kwargs",
                )
            for name in ("messages", "tools"):
                if name in variables:
                    raise InvalidRequest(f"{name} is a separate field", "chat.template_kwargs")
        variables = self._with_effort(variables, with_tools=_with_tools(chat))
        if chat.documents:
            variables = {**variables, "documents": self._documents(chat)}
        names = _checked_tools(chat)
        if (_must_call(chat) and not names) or chat.tool_name not in ("", *names):
            raise InvalidRequest(
                f"there is no tool {quoted(chat.tool_name)}"
                if chat.tool_name
                else "required calls need tools",
                "chat.tool_name" if chat.tool_name else "chat.tool_choice",
            )
        if not _with_tools(chat):
            return variables
        template = self.tokenizer.tool_template
        if template is None or not template.has_tools:
            raise InvalidRequest("this model's chat template has no tools", "chat.tools")
        if self.tools is None:
            raise InvalidRequest(
                "the format of this model's tool calls is not known: the router's --tool-parser "
                "names one",
                "chat.tools",
            )
        return {**variables, "tools": [_tool(tool) for tool in chat.tools]}

    def _documents(self, chat: inference_pb2.Chat) -> list[dict[str, Any]]:
        template = self.tokenizer.tool_template if _with_tools(chat) else self.tokenizer.template
        if template is None or "documents" not in template.source:
            raise InvalidRequest("this model's chat template has no documents", "chat.documents")
        try:
            documents = json.loads(chat.documents)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"documents are not JSON: {error}", "chat.documents") from error
        if not isinstance(documents, list) or not all(isinstance(one, dict) for one in documents):
            raise InvalidRequest("documents must be a list of objects", "chat.documents")
        return documents

    def _with_effort(self, variables: dict[str, Any], *, with_tools: bool) -> dict[str, Any]:
        """Adds the switch of reasoning of a template that has one, and no degrees of effort."""
        template = self.tokenizer.tool_template if with_tools else self.tokenizer.template
        effort, source = variables.get("reasoning_effort"), template.source if template else ""
        if effort is None or "reasoning_effort" in source:
            return variables
        switch = next((name for name in _SWITCHES if re.search(rf"\b{name}\b", source)), None)
        return {switch: effort != "none", **variables} if switch else variables

    def _opens_text(self, prompt: Sequence[int], begin: str) -> bool:
        """Whether a prompt ends with the text that opens reasoning."""
        assert self.text_pieces is not None
        tail = b"".join(self.text_pieces.shown(token)[1] for token in prompt[-_MAX_OPENING:])
        return tail.decode("utf-8", "replace").rstrip().endswith(begin)

    def _last_marker(self, prompt: Sequence[int]) -> int | None:
        """The token of reasoning's beginning or end with which a prompt ends, but for space."""
        assert self.reasoning is not None
        markers = (self.reasoning.begin_token_id, self.reasoning.end_token_id)
        tail = prompt[-1 - _MAX_SPACE :]
        at = next((i for i in reversed(range(len(tail))) if tail[i] in markers), None)
        return None if at is None or self.tokenizer.decode(tail[at + 1 :]).strip() else tail[at]


def _input(tool: inference_pb2.Tool, at: int) -> StructuredOutput:
    """What the text that a tool takes must match. Raises InvalidRequest."""
    found, field = StructuredOutput.from_proto(tool.input), f"chat.tools[{at}].input"
    if bool(found.regex) + bool(found.grammar) != 1 or found.json_schema or found.choice:
        raise InvalidRequest("give a regular expression or a grammar, which is not empty", field)
    return found


def _arguments(parameters: str, field: str) -> dict[str, Any]:
    """The schema of a tool's arguments, of objects only. Raises InvalidRequest if none match."""
    schema: dict[str, Any] = json.loads(parameters)
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise InvalidRequest('arguments are an object: /type must be "object"', field)
    return {**schema, "type": "object"}


def check_messages(messages: Sequence[inference_pb2.ChatMessage]) -> None:
    """Raises InvalidRequest for no messages or too many."""
    if not messages:
        raise InvalidRequest("chat has no messages", "chat")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"chat may have {MAX_MESSAGES} messages at most, not {len(messages)}", "chat"
        )


def _with_tools(chat: inference_pb2.Chat) -> bool:
    return bool(chat.tools) and chat.tool_choice != inference_pb2.TOOL_CHOICE_NONE


def has_grammar(params: SamplingParams, chat: inference_pb2.Chat) -> bool:
    """Whether the chat's tools are made into a grammar, which takes some time."""
    if not _with_tools(chat):
        return False
    has_inputs = any(tool.HasField("input") for tool in chat.tools)
    restricted = has_inputs or params.structured_output is not None
    return restricted or _must_call(chat)


def _must_call(chat: inference_pb2.Chat) -> bool:
    return bool(chat.tool_name) or chat.tool_choice == inference_pb2.TOOL_CHOICE_REQUIRED


def _checked_tools(chat: inference_pb2.Chat) -> set[str]:
    """The names of valid tools. Raises InvalidRequest."""
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"there may be {MAX_TOOLS} tools at most, not {len(chat.tools)}", "chat.tools"
        )
    size = sum(
        len(t.name) + len(t.description) + len(t.parameters) + t.input.ByteSize()
        for t in chat.tools
    )
    if size > MAX_TOOL_CHARS:
        raise InvalidRequest(
            f"tools may have {MAX_TOOL_CHARS} characters at most, not {size}", "chat.tools"
        )
    names: set[str] = set()
    for i, tool in enumerate(chat.tools):
        field = f"chat.tools[{i}]"
        if not _NAME.fullmatch(tool.name):
            letters = 'letters, digits, ".", "_" and "-", 128 at most'
            raise InvalidRequest(
                f"a name has {letters}, unlike {quoted(tool.name)}", f"{field}.name"
            )
        if tool.name in names:
            raise InvalidRequest(f"there are two tools {quoted(tool.name)}", f"{field}.name")
        names.add(tool.name)
        if tool.parameters:
            _check_parameters(tool.parameters, f"{field}.parameters")
    return names


def _check_parameters(text: str, field: str) -> None:
    """Raises InvalidRequest unless a schema is an object whose keywords have their types."""
    schema = _object(text, field)

    def check(place: str, value: object, kind: str, *, is_kind: bool) -> None:
        if value is not None and not is_kind:
            raise InvalidRequest(f"{field.removeprefix('chat.')}: {place} must be {kind}", field)

    properties, required = schema.get("properties"), schema.get("required")
    check("/properties", properties, "an object", is_kind=isinstance(properties, dict))
    check("/required", required, "a list of names", is_kind=_is_texts(required))
    typed = {"": schema, **{f"/properties/{key}": one for key, one in (properties or {}).items()}}
    for place, part in typed.items():
        types = part.get("type") if isinstance(part, dict) else None
        is_kind = isinstance(types, str) or _is_texts(types)
        check(quoted(f"{place}/type"), types, "a name or a list of names", is_kind=is_kind)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _tool(tool: inference_pb2.Tool) -> dict[str, Any]:
    """A tool for templates, with keys in the order of OpenAI's documentation."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def _message(message: inference_pb2.ChatMessage, index: int) -> dict[str, Any]:
    """A message for templates, most of which expect arguments as objects."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            place = f"messages[{index}].tool_calls[{i}].name"
            raise InvalidRequest(f"{place} is missing", f"chat.{place}")
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call_arguments(
                        call.arguments or "{}",
                        f"chat.messages[{index}].tool_calls[{i}].arguments",
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    return turn


def _schemas(chat: inference_pb2.Chat, *, parsed: bool) -> ToolSchemas:
    """The schemas of the chat's tools, empty ones unless `parsed`."""
    return {
        tool.name: json.loads(tool.parameters) if parsed and tool.parameters else {}
        for tool in chat.tools
    }


def _write_arguments(messages: Sequence[dict[str, Any]]) -> None:
    """Replaces the arguments of calls by JSON."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def call_arguments(text: str, field: str) -> dict[str, Any]:
    """Arguments of an earlier call, repaired if they are not JSON.

    They may have been cut, or written by another model; a conversation must survive one bad call.
    null, as some languages write an empty map, is {}. Raises InvalidRequest if they are another
    value than an object.
    """
    try:
        json.loads(text)
        valid = "\\ud" not in text.lower()  # lone surrogates
    except (ValueError, RecursionError):
        valid = False
    text = text if valid else repaired(text)
    return {} if text.strip() == "null" else _object(text, field)


def _object(text: str, field: str) -> dict[str, Any]:
    name = field.removeprefix("chat.")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object", field)
    return value
