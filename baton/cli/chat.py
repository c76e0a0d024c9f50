"""`baton chat`: a conversation with a chat model, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.cli import options
from baton.cli.generate import SAMPLING, add_sampling_options, add_where_options, asked_of
from baton.errors import BatonError, InvalidRequest

if TYPE_CHECKING:
    from baton import Client
    from baton.client import Completion

_TEXT = """\
Each line is a message; a message of several lines begins and ends with \"\"\". ctrl-C stops an
answer, ctrl-D quits. Without a terminal the first error ends it, with exit status 1."""
_EXAMPLES = """\
  baton chat
  baton chat --system 'Answer in one sentence.' --temperature 0.7
  printf 'Name a colour.\\nAnother one.\\n' | baton chat"""
_COMMANDS = """\
/system TEXT      set the system prompt; without TEXT remove it
/set NAME VALUE   set a sampling option, as temperature 0.2; without VALUE reset it
/retry            answer the last message again
/clear            start over with the same system prompt and options
/quit             quit, as ctrl-D
\"\"\" begins and ends a message of several lines; with a space before it, / begins one, too."""
_QUOTES = '"""'
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Output of a model must not contain control sequences of the terminal.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

Message = dict[str, str]


def add_commands(commands: options.Commands) -> None:
    """Adds `chat`."""
    parser = options.add_command(commands, "chat", "talk to a chat model", _TEXT, _EXAMPLES)
    text = "system prompt (default: none)"
    parser.add_argument("--system", default="", metavar="TEXT", help=text)
    add_sampling_options(parser, "longest answer (default: the rest of the context)")
    add_where_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from baton import Client
    from baton.generation.sampling_params import FILL_CONTEXT

    with Client(args.target, api_key=options.api_key(args)) as client:
        with options.calling(args.target, args.timeout):
            model = client.models()[0]
        if not model.chat:
            raise InvalidRequest(
                f"{model.name} has no chat template: serve a chat model, or use `baton generate`"
            )
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        asked = {"max_tokens": FILL_CONTEXT, **asked_of(args)}
        chat = Chat(client, args.target, asked, args.system, interactive)
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives `input` line editing and history
            print(f"{model.name}, {model.max_context} tokens of context; /help lists commands")
        return _converse(chat, interactive)


def _converse(chat: Chat, interactive: bool) -> int:
    """Reads and answers messages until the end of input; returns the exit status."""
    interrupted = False  # at the previous prompt
    while True:
        try:
            text = _read(interactive)
            interrupted = False
            if text is None or not chat.take(text):
                return 0
        except KeyboardInterrupt:
            if interrupted or not interactive:
                raise
            interrupted = True
            print("\npress ctrl-C again, or ctrl-D, to quit", file=sys.stderr)
        except BatonError as error:
            if not interactive:
                raise
            print(f"baton: error: {error or type(error).__name__}", file=sys.stderr)


def _read(interactive: bool) -> str | None:
    """The next message or command; None at the end of input."""
    text = _line(">>> " if interactive else "")
    if text is None or not text.startswith(_QUOTES):
        return text
    text = text.removeprefix(_QUOTES)
    while not text.endswith(_QUOTES):
        line = _line("... " if interactive else "")
        if line is None:
            raise InvalidRequest(f"the message has no end: close it with {_QUOTES}")
        text += "\n" + line
    return " " + text.removesuffix(_QUOTES).strip("\n")  # the space: not a command


def _line(prompt: str) -> str | None:
    try:
        if prompt:
            return input(prompt)
        return line.removesuffix("\n") if (line := sys.stdin.readline()) else None
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not text: {error}") from error


class Chat:
    """A conversation and its sampling options."""

    def __init__(
        self, client: Client, target: str, asked: dict[str, Any], system: str, interactive: bool
    ) -> None:
        """`asked`: options of the SDK; `interactive`: ctrl-C ends an answer, not the program."""
        self._client = client
        self._target = target
        self._asked = asked
        self._defaults = dict(asked)
        self._system = system
        self._interactive = interactive
        self._messages: list[Message] = []  # without the system prompt
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: print(_COMMANDS),
            "system": self._set_system,
            "set": self._set,
            "retry": self._retry,
            "clear": lambda rest: self._messages.clear(),
        }

    def take(self, text: str) -> bool:
        """Answers a message or runs a command; False for /quit. Raises BatonError."""
        if not text.startswith("/"):
            if text.strip():
                self._drop_last("user")  # unanswered
                self._messages.append({"role": "user", "content": text.removeprefix(" ")})
                self._answer()
            return True
        name, _, rest = text[1:].strip().partition(" ")
        if name in ("quit", "exit"):
            return False
        if name not in self._commands:
            raise InvalidRequest(f"there is no /{name}: /help lists commands")
        self._commands[name](rest.strip())
        return True

    def _answer(self) -> None:
        """Streams the answer to the last message; ctrl-C stops it."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        parts: list[str] = []
        timeout_s = self._asked.get("timeout")
        try:
            with (
                options.calling(self._target, timeout_s),
                self._client.stream([*system, *self._messages], **self._asked) as stream,
            ):
                for delta in stream:
                    parts.append(delta.text)
                    print(delta.text.translate(_CONTROLS), end="", flush=True)
            end = _told(stream.completion)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            end = "stopped"
        finally:
            if text := "".join(parts):
                print()
                self._messages.append({"role": "assistant", "content": text})
        if sys.stdout.isatty():
            print(f"{_DIM}{end}{_PLAIN}")

    def _drop_last(self, role: str) -> None:
        if self._messages and self._messages[-1]["role"] == role:
            self._messages.pop()

    def _retry(self, rest: str) -> None:
        self._drop_last("assistant")
        if not self._messages:
            raise InvalidRequest("there is no message to answer again")
        self._answer()

    def _set_system(self, text: str) -> None:
        self._system = text

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if name not in SAMPLING:
            raise InvalidRequest(f"set one of {', '.join(SAMPLING)}")
        if not value.strip():
            self._asked[name] = self._defaults.get(name)
            return
        try:
            self._asked[name] = SAMPLING[name](value)
        except ValueError as error:
            kind = "a whole number" if SAMPLING[name] is int else "a number"
            raise InvalidRequest(f"{name} must be {kind}, not {value!r}") from error


def _told(answer: Completion) -> str:
    """Tokens, times and route of an answer in one line."""
    usage, timing, route = answer.usage, answer.timing, answer.route
    parts = [
        f"{usage.completion_tokens} tokens" + " (cut)" * (answer.finish_reason == "length"),
        f"TTFT {timing.ttft_ms:.0f} ms",
        f"TPOT {timing.tpot_ms:.1f} ms",
        f"{usage.prompt_tokens} of prompt, {usage.cached_tokens} cached",
        " → ".join(filter(None, (route.prefill, route.decode)))
        + (f" by {route.transport}" if route.transport else ""),
    ]
    return " · ".join(filter(None, parts))
