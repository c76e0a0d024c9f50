"""Line charts as inline SVG: no script, no network, colours from the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 46
_NUMBER_OF_TICKS = 6
_LOG_FROM = 5.0  # smaller spans are easier to read on an even scale


@dataclass(frozen=True)
class Line:
    """One series; a y of None is a gap. `color` is an index into the page's palette."""

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int = 0
    is_dashed: bool = False
    has_marks: bool = False
    labels: Sequence[str] = ()  # of marks


@dataclass(frozen=True)
class Axis:
    """What is drawn along a side; a logarithmic one shows no values of 0 or less."""

    title: str
    is_log: bool = False
    from_zero: bool = False


def chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """A figure element; says so where there is nothing to draw."""
    scales = _scales(x, y, lines)
    drawn = [line for line in lines if line.points]
    if scales is None:
        return f'<figure><p class="empty">{escape(title)}: nothing was measured</p></figure>'
    across, up = scales
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
        *_grid(across, up),
        *_titles(x, y),
        *(part for line in drawn for part in _line(line, across, up)),
        "</svg>",
    ]
    names = [
        f'<span class="{_class(line)}">{escape(line.name)}</span>' for line in drawn if line.name
    ]
    return f"<figure>{''.join(parts)}<figcaption>{''.join(names)}</figcaption></figure>"


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    begin: float  # pixel of `low`
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share: float = (value - low) / (high - low)
        return self.begin + share * (self.end - self.begin)

    def shows(self, value: float | None) -> bool:
        return value is not None and (value > 0 or not self.is_log)

    @property
    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def _scales(x: Axis, y: Axis, lines: Sequence[Line]) -> tuple[_Scale, _Scale] | None:
    points = [
        (at, value)
        for line in lines
        for at, value in line.points
        if value is not None and (at > 0 or not x.is_log) and (value > 0 or not y.is_log)
    ]
    if not points:
        return None
    xs, ys = zip(*points, strict=True)
    across = _scale(x, xs, _LEFT, _WIDTH - _RIGHT)
    return across, _scale(y, ys, _HEIGHT - _BOTTOM, _TOP)


def _scale(axis: Axis, values: Sequence[float], begin: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    if axis.from_zero and not axis.is_log:
        low = min(0.0, low)
    is_log = axis.is_log and high / low > _LOG_FROM
    if high <= low:
        low, high = min(low, 0.0), low + (abs(low) or 1.0)
    if is_log:
        low, high = _round_down(low), 1 / _round_down(1 / high)
    else:
        step = _step(high - low)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return _Scale(low, high, begin, end, is_log)


def _round_down(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return max(factor * power for factor in (1, 2, 5) if factor * power <= value * (1 + 1e-9))


def _step(span: float) -> float:
    """A round distance between ticks: 1, 2 or 5 times a power of ten."""
    rough = span / _NUMBER_OF_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if rough <= factor * power * (1 + 1e-9))


def _ticks(low: float, high: float) -> list[float]:
    step = _step(high - low)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    return [
        f * 10.0**p
        for p in powers
        for f in factors
        if low <= f * 10.0**p * (1 + 1e-9) and f * 10.0**p <= high * (1 + 1e-9)
    ]


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    for tick in across.ticks:
        at = across.at(tick)
        yield f'<path class="grid" d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
        yield _text("tick", at, _HEIGHT - _BOTTOM + 16, "middle", _number(tick))
    for tick in up.ticks:
        at = up.at(tick)
        yield f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>'
        yield _text("tick", _LEFT - 7, at + 4, "end", _number(tick))


def _titles(x: Axis, y: Axis) -> Iterator[str]:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield _text("axis", middle, _HEIGHT - 10, "middle", x.title)
    height = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f' transform="rotate(-90 14 {height})"'
    yield _text("axis", 14, height, "middle", y.title, turned)


def _line(line: Line, across: _Scale, up: _Scale) -> Iterator[str]:
    path, is_open = [], False
    for at, value in line.points:
        if value is None or not (across.shows(at) and up.shows(value)):
            is_open = False
            continue
        path.append(f"{'L' if is_open else 'M'}{across.at(at):.1f} {up.at(value):.1f}")
        # A point between two gaps is a line of no length, which a round cap makes visible.
        path += [] if is_open else ["h0"]
        is_open = True
    yield f'<path class="line {_class(line)}" d="{"".join(path)}"/>'
    if line.has_marks:
        yield from _marks(line, across, up)


def _marks(line: Line, across: _Scale, up: _Scale) -> Iterator[str]:
    labels = line.labels or [""] * len(line.points)
    for (at, value), label in zip(line.points, labels, strict=True):
        if value is None or not (across.shows(at) and up.shows(value)):
            continue
        x, y = across.at(at), up.at(value)
        yield f'<circle class="mark c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
        if label:
            anchor = "end" if x > _WIDTH - _RIGHT - 90 else "start"
            shift = -8 if anchor == "end" else 8
            yield _text("tick", x + shift, y - 6, anchor, label)


def _class(line: Line) -> str:
    return f"c{line.color} dashed" if line.is_dashed else f"c{line.color}"


def _text(kind: str, x: float, y: float, anchor: str, text: str, more: str = "") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>'
        f"{escape(text)}</text>"
    )


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.6g}k"
    return f"{value:.6g}"
