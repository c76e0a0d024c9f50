"""jinja2's sandbox with limits on time and memory, for the templates of checkpoints.

Limits are checked at each loop iteration, call, filter, operator and output. An operation cannot be
interrupted, so one whose result may be large is charged for the largest possible result before it
runs. Comparing deeply nested values is not limited here: long chats are rendered in a process that
can be killed (`router.admission.tokenizer_process`). Short ones are rendered on the event loop.
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

ITEM_CHARS = 64  # charge for an item of a list
MAX_NUMBER_BITS = 1 << 14
_STEP_CHARS, _LOOK_CHARS = 128, 4096  # charge for a step; charge between clock checks

# Filters that do not convert their whole value to text.
_ITEMWISE = frozenset(
    (
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float"),
        *("groupby", "int", "items", "last", "length", "list", "map", "max", "min", "random"),
        *("reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice", "sort"),
        *("sum", "unique"),
    )
)
# Largest result for each character, or in all; numbers count by their value.
_MULTIPLYING = frozenset(
    ("expandtabs", "indent", "join", "replace", "tojson", "translate", "wordwrap")
)
_PADDING = frozenset(("batch", "center", "ljust", "rjust", "round", "slice", "to_bytes", "zfill"))
_FORMATTING = frozenset(("format", "format_map"))
_WIDE = re.compile(r"\d{5}|\*|\{[^}]*\{")  # widths of format fields, literal or from an argument


class LimitExceeded(Exception):
    """A template has exceeded its time or output limit."""


class Bounds:
    """The remaining limits of one rendering."""

    def __init__(self, seconds: float, chars: int) -> None:
        self._seconds, self._chars = seconds, chars
        self._until = time.thread_time() + seconds
        self._left, self._unseen = chars, 0

    def charge(self, chars: int = 0) -> None:
        """Charges a step with `chars` of output. Raises LimitExceeded."""
        self._left -= chars
        if self._left < 0:
            raise LimitExceeded(f"it builds over {self._chars} characters")
        self._unseen += chars + _STEP_CHARS
        if self._unseen > _LOOK_CHARS:
            self._unseen = 0
            if time.thread_time() > self._until:
                raise LimitExceeded(f"it takes over {self._seconds:g} s")

    def estimate_chars(self, value: Any) -> int:
        """Estimates the characters of a value as text. Raises LimitExceeded."""
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
            self.charge()
            if chars > self._left:
                self.charge(chars)
        return chars


_bounds: ContextVar[Bounds] = ContextVar("bounds")  # of the current rendering


@contextmanager
def bounded(seconds: float, chars: int) -> Iterator[None]:
    """Sets the limits of a rendering: the thread's CPU seconds, and characters of all results."""
    token = _bounds.set(Bounds(seconds, chars))
    try:
        yield
    finally:
        _bounds.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders within a `bounded` block only; templates raise LimitExceeded."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, finalize=_output)
        self.code_generator_class = _BoundedCode
        for name, function in {**self.filters, **filters}.items():
            self.filters[name] = _bounded_filter(name, function)
        self.filters[_ITERATIONS] = _iterations
        del self.filters["urlize"]  # takes seconds for megabytes of text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounds = _bounds.get()
        bounds.charge(_built_by(bounds, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls from a template; parameter names are those of the overridden method."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        args = _before(name, (owner, *args), kwargs)[1:]
        return _after(super().call(__context, __obj, *args, **kwargs))

    def join(self, parts: Iterable[Any]) -> str:
        """The operator `~` of templates."""
        bounds = _bounds.get()
        texts = []
        for part in parts:
            bounds.charge(bounds.estimate_chars(part))
            texts.append(str(part))
        return "".join(texts)


def _before(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charges for the largest result of a call, whose first argument is the filtered value.

    Returns the arguments, with iterators that were measured replaced by lists.
    """
    bounds = _bounds.get()
    bounds.charge()
    if name == "join":
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
    value, others = args[0], (*args[1:], *kwargs.values())
    if name in _FORMATTING:
        bounds.charge(_formatted(bounds, value, others))
    elif name in _MULTIPLYING or name in _PADDING:
        counts = [abs(x) if isinstance(x, int) else bounds.estimate_chars(x) for x in others]
        most = max(counts, default=1)
        if name == "round" and most > MAX_NUMBER_BITS:
            raise LimitExceeded(f"it rounds to {most} digits")
        weight = bounds.estimate_chars(value)
        bounds.charge(weight * most if name in _MULTIPLYING else weight + most)
    return args


def _after(result: Any) -> Any:
    if isinstance(result, str | bytes):
        _bounds.get().charge(len(result))
    elif isinstance(result, list | tuple | dict):
        _bounds.get().charge(len(result) * ITEM_CHARS)
    return result


def _built_by(bounds: Bounds, operator: str, left: Any, right: Any) -> int:
    """The largest result of an operator, characters. Raises LimitExceeded."""
    if operator == "%":
        return 0 if isinstance(left, int | float) else _formatted(bounds, left, (right,))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if max(bits, 0) + right.bit_length() > MAX_NUMBER_BITS:
            raise LimitExceeded(f"its numbers have over {MAX_NUMBER_BITS} bits")
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
    """The largest result of formatting: each field as long as the longest value."""
    text = str(form) if isinstance(form, str | bytes) else ""
    if _WIDE.search(text):
        raise LimitExceeded("it formats fields of 10,000 characters, or as many as it computes")
    most = max((bounds.estimate_chars(value) for value in values), default=0)
    return len(text) + (text.count("%") + text.count("{")) * most


@pass_context  # keeps constants from being formatted at compile time
def _output(context: Context, value: Any) -> Any:
    """Formats the value of `{{ }}`."""
    bounds = _bounds.get()
    bounds.charge(len(value) if isinstance(value, str) else bounds.estimate_chars(value))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 passes some filters a context or the like before the value.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # copies the mark of such filters
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _before(name, args[at:], kwargs)
        if name not in _ITEMWISE:
            _bounds.get().estimate_chars(given[0])
        return _after(function(*args[:at], *given, **kwargs))

    return call


_ITERATIONS = "iterations of a loop"  # not a name that templates can use


def _iterations(items: Iterable[Any], chars: int) -> Iterator[Any]:
    """Charges for each iteration, which writes `chars`."""
    bounds = _bounds.get()
    for item in items:
        bounds.charge(chars)
        yield item


class _BoundedCode(CodeGenerator):
    """Compiles loops and `~` so that they check the limits."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in node.find_all(nodes.For):
            chars = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            args: list[nodes.Expr] = [nodes.Const(chars)]
            loop.iter = nodes.Filter(
                loop.iter,
                _ITERATIONS,
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
