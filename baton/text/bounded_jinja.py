"""jinja2's sandbox with bounds on time and memory, for templates that come with a checkpoint.

Both are looked at where a template does something: at each turn of a loop, call, filter, operator
and output. One operation cannot be interrupted, so those that make large results of small operands
are charged for the largest possible one before they run. Two values that a template nests into
themselves many times and then compares are not covered here: long chats are rendered in a process
that can be killed (`router.admission.tokenizer_process`). Short ones are rendered on an event loop,
which nothing can end.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ITEM_CHARS = 64  # what an item of a list counts as
MAX_NUMBER_BITS = 1 << 14
_STEP_CHARS, _LOOK_CHARS = 128, 4096  # the clock is looked at for so many characters or steps

# Filters that take a value's items, or look at it, without making text of all of it.
_ITEMWISE = frozenset(
    (
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float"),
        *("groupby", "int", "items", "last", "length", "list", "map", "max", "min", "random"),
        *("reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice", "sort"),
        *("sum", "unique"),
    )
)
# What may make so much of each character, or so much once; of numbers, their value counts.
_MULTIPLYING = frozenset(
    ("expandtabs", "indent", "join", "replace", "tojson", "translate", "wordwrap")
)
_PADDING = frozenset(("batch", "center", "ljust", "rjust", "round", "slice", "to_bytes", "zfill"))
_FORMATTING = frozenset(("format", "format_map"))
_WIDE = re.compile(r"\d{5}|\*|\{[^}]*\{")  # of a field, or one that an argument gives


class TooMuch(Exception):
    """A template has used up its time, or what it may build."""


class Bounds:
    """What is left to one rendering."""

    def __init__(self, seconds: float, chars: int) -> None:
        self._seconds, self._chars = seconds, chars
        self._until = time.thread_time() + seconds
        self._left, self._unseen = chars, 0

    def take(self, chars: int = 0) -> None:
        """Something is done, and so much built. Raises TooMuch when that is more than may be."""
        self._left -= chars
        if self._left < 0:
            raise TooMuch(f"it builds over {self._chars} characters")
        self._unseen += chars + _STEP_CHARS
        if self._unseen > _LOOK_CHARS:
            self._unseen = 0
            if time.thread_time() > self._until:
                raise TooMuch(f"it takes over {self._seconds:g} s")

    def weigh(self, value: Any) -> int:
        """About how many characters the text of a value has. Raises TooMuch."""
        if isinstance(value, str):
            return len(value)
        chars, left = 0, [value]
        while left:
            item = left.pop()
            chars += len(item) if isinstance(item, str | bytes) else ITEM_CHARS
            if isinstance(item, Namespace):
                left.append(item._Namespace__attrs)
            elif isinstance(item, Mapping):
                left.extend(item.values())
            if isinstance(item, Collection) and not isinstance(item, str | bytes):
                left.extend(item)
            self.take()
            if chars > self._left:
                self.take(chars)
        return chars


_bounds: ContextVar[Bounds] = ContextVar("bounds")  # of the rendering under way, if there is one


@contextmanager
def bounded(seconds: float, chars: int) -> Iterator[None]:
    """Within, a template of a `BoundedEnvironment` may be rendered.

    It may take so many CPU seconds of the thread, and all its operators, filters and calls together
    may build so many characters.
    """
    token = _bounds.set(Bounds(seconds, chars))
    try:
        yield
    finally:
        _bounds.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders only in a `bounded` block. Templates raise TooMuch."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, finalize=_output)
        self.code_generator_class = _BoundedCode
        for name, function in {**self.filters, **filters}.items():
            self.filters[name] = _bounded_filter(name, function)
        self.filters[_TURNS] = _turns
        del self.filters["urlize"]  # seconds for a text of some megabytes

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounds = _bounds.get()
        bounds.take(_built_by(bounds, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template. (Named as the overridden method, for what `kwargs` may hold.)"""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        args = _before(name, (owner, *args), kwargs)[1:]
        return _after(super().call(__context, __obj, *args, **kwargs))

    def join(self, parts: Iterable[Any]) -> str:
        """What the operator `~` of a template does."""
        bounds = _bounds.get()
        texts = []
        for part in parts:
            bounds.take(bounds.weigh(part))
            texts.append(str(part))
        return "".join(texts)


def _before(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Counts what a call may make of its arguments, the first of which is the value it is for.

    Returns the arguments, of which an iterator that had to be looked at has become a list.
    """
    bounds = _bounds.get()
    bounds.take()
    if name == "join":
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
    value, others = args[0], (*args[1:], *kwargs.values())
    if name in _FORMATTING:
        bounds.take(_formatted(bounds, value, others))
    elif name in _MULTIPLYING or name in _PADDING:
        counts = [abs(x) if isinstance(x, int) else bounds.weigh(x) for x in others]
        most = max(counts, default=1)
        if name == "round" and most > MAX_NUMBER_BITS:
            raise TooMuch(f"it rounds to {most} digits")
        weight = bounds.weigh(value)
        bounds.take(weight * most if name in _MULTIPLYING else weight + most)
    return args


def _after(result: Any) -> Any:
    if isinstance(result, str | bytes):
        _bounds.get().take(len(result))
    elif isinstance(result, list | tuple | dict):
        _bounds.get().take(len(result) * ITEM_CHARS)
    return result


def _built_by(bounds: Bounds, operator: str, left: Any, right: Any) -> int:
    """How much an operator makes of its operands. Raises TooMuch."""
    if operator == "%":
        return 0 if isinstance(left, int | float) else _formatted(bounds, left, (right,))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if max(bits, 0) + right.bit_length() > MAX_NUMBER_BITS:
            raise TooMuch(f"its numbers have over {MAX_NUMBER_BITS} bits")
        return 0
    if operator == "*":
        times = left if isinstance(left, int) else right
        value = right if isinstance(left, int) else left
        return max(0, times) * _length(value) if isinstance(times, int) else 0
    return _length(left) + _length(right) if operator == "+" else 0


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return len(value) * ITEM_CHARS if isinstance(value, list | tuple) else 0


def _formatted(bounds: Bounds, form: Any, values: Iterable[Any]) -> int:
    """At most how much formatting makes: each field as long as the longest value."""
    text = str(form) if isinstance(form, str | bytes) else ""
    if _WIDE.search(text):
        raise TooMuch("it formats fields of 10,000 characters, or as many as it computes")
    most = max((bounds.weigh(value) for value in values), default=0)
    return len(text) + (text.count("%") + text.count("{")) * most


@pass_context  # so that constants are not made into text while compiling
def _output(context: Context, value: Any) -> Any:
    """What `{{ }}` shows."""
    bounds = _bounds.get()
    bounds.take(len(value) if isinstance(value, str) else bounds.weigh(value))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 gives some filters a context or the like before the value.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # with the mark that says so
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _before(name, args[at:], kwargs)
        if name not in _ITEMWISE:
            _bounds.get().weigh(given[0])
        return _after(function(*args[:at], *given, **kwargs))

    return call


_TURNS = "turns of a loop"  # no name that a template could write


def _turns(items: Iterable[Any], chars: int) -> Iterator[Any]:
    """The items, with each of which so many characters may be written."""
    bounds = _bounds.get()
    for item in items:
        bounds.take(chars)
        yield item


class _BoundedCode(CodeGenerator):
    """Compiles loops and `~` to what looks at the bounds."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in node.find_all(nodes.For):
            chars = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            args: list[nodes.Expr] = [nodes.Const(chars)]
            loop.iter = nodes.Filter(
                loop.iter,
                _TURNS,
                args,
                [],
                None,
                None,
                lineno=loop.lineno,
                environment=loop.environment,
            )
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")
