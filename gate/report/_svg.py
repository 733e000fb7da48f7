"""Small charts as SVG text: axes, lines, points with whiskers, bars. Colours are classes that the page defines.

Every text is escaped. A mark carries the JSON pointers of the numbers it shows in `data-path`, and says them in its
title, which browsers show on hover and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40
LETTER = 7.2  # width of a letter of a label
SHAPES = ("circle", "square", "diamond", "triangle", "cross")
SHAPE = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M-3.6-3.6h7.2v7.2h-7.2z",
    "diamond": "M0-5.2L5.2 0L0 5.2L-5.2 0z",
    "triangle": "M0-5L4.8 3.8H-4.8z",
    "cross": "M-4.4-2.2L-2.2-4.4L0-2.2L2.2-4.4L4.4-2.2L2.2 0L4.4 2.2L2.2 4.4L0 2.2L-2.2 4.4L-4.4 2.2L-2.2 0z",
}


@dataclass(frozen=True)
class Scale:
    """A range of numbers on a range of pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (self._unit(x) for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1)

    def _unit(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers inside the range."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = len(decades) <= 3
            step = max(1, math.ceil(len(decades) / most))
            every = [m * 10.0**d for d in decades[::step] for m in ((1, 2, 5) if few else (1,))]
            inside = [t for t in every if self.low * 0.999 <= t <= self.high * 1.001]
            if len(inside) >= 3:
                return inside
        rough = (self.high - self.low) / most
        size = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
        step_size = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
        step_size = max(step_size, 1.0) if self.whole else step_size
        first = math.ceil(self.low / step_size - 1e-9)
        return [n * step_size for n in range(first, math.floor(self.high / step_size + 1e-9) + 1)]


def scale(
    values: Iterable[float], start: float, end: float, log: bool = False, zero: bool = False, whole: bool = False
) -> Scale:
    """A scale that holds all of `values` with a little room. zero: it starts there. whole: ticks at whole numbers."""
    found = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(found), max(found)) if found else (1.0, 10.0) if log else (0.0, 1.0)
    if log:
        return Scale(low / 1.15, high * 1.15, start, end, True)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(0.0 if zero else low - room, high + room, start, end, whole=whole)


def number(value: float) -> str:
    """A tick, short: 0.05, 300, 2k, 1e-5."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def frame(title: str, inside: Iterable[Markup], height: float = HEIGHT) -> Markup:
    """The whole chart; `title` is what a screen reader says of it."""
    head = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">').format(WIDTH, height, title)
    return head + Markup("").join(inside) + Markup("</svg>")


def axes(x: Scale, y: Scale, x_name: str, y_name: str, height: float = HEIGHT) -> Markup:
    """Grid lines, ticks and names of two scales."""
    out, bottom = [], height - BOTTOM
    for tick in y.ticks():
        at = y(tick)
        out.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, at, at)
        )
        out.append(text(LEFT - 6, at + 4, number(tick), "tick", "end"))
    for tick in x.ticks():
        at = x(tick)
        out.append(Markup('<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>').format(at, at, TOP, bottom))
        out.append(text(at, bottom + 15, number(tick), "tick", "middle"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, height - 6, x_name, "name", "middle"))
    turned = Markup('<text class="name" text-anchor="middle" transform="translate(12 {:.1f}) rotate(-90)">{}</text>')
    out.append(turned.format((TOP + bottom) / 2, y_name))
    return Markup("").join(out)


def text(x: float, y: float, words: str, kind: str = "label", anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, words)


def line(points: Sequence[tuple[float, float]], series: int, title: str = "") -> Markup:
    """A polyline in the colour and dashes of a series."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return Markup('<path class="line s{}" d="{}"><title>{}</title></path>').format(series, path, title)


def mark(x: float, y: float, series: int, title: str, paths: str = "", small: bool = False) -> Markup:
    """A point; its shape and colour tell the series. title: what it says. paths: JSON pointers of its numbers."""
    size = " scale(.55)" if small else ""
    made = Markup('<path class="mark s{}" transform="translate({:.1f} {:.1f}){}" d="{}" data-path="{}">')
    body = made.format(series, x, y, size, SHAPE[SHAPES[series % len(SHAPES)]], paths)
    return body + Markup("<title>{}</title></path>").format(title)


def whisker(low: float, high: float, at: float, horizontal: bool = True) -> Markup:
    """An interval from low to high (pixels)."""
    ends = (low, high, at, at) if horizontal else (at, at, low, high)
    return Markup('<line class="whisker" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(*ends)


def bar(x0: float, x1: float, y: float, thick: float, series: int, title: str, paths: str) -> Markup:
    made = Markup('<rect class="bar s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" data-path="{}">')
    body = made.format(series, x0, y, max(x1 - x0, 0.5), thick, paths)
    return body + Markup("<title>{}</title></rect>").format(title)


def labels(places: Sequence[tuple[float, float, str]], bottom: float) -> Markup:
    """Words beside points (x, y), moved apart where they would cover each other, with a line to their point."""
    out, taken = [], list[tuple[float, float, float]]()  # left, right, y

    def is_free(left: float, right: float, y: float) -> bool:
        return all(abs(y - other) >= 13 or left >= end or start >= right for start, end, other in taken)

    for x, y, words in sorted(places, key=lambda p: p[1]):
        wide = LETTER * len(words)
        left = x + 9 if x + 9 + wide < WIDTH - 2 else x - 9 - wide
        steps = sorted(range(-20, 21), key=lambda n: (abs(n), -n))
        heights = (y + 4 + 13 * n for n in steps if TOP + 8 < y + 4 + 13 * n < bottom)
        at = next((height for height in heights if is_free(left, left + wide, height)), y + 4)
        taken.append((left, left + wide, at))
        if abs(at - y - 4) > 1:
            near = left - 2 if left > x else left + wide + 2
            leader = Markup('<line class="leader" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>')
            out.append(leader.format(x, y, near, at - 4))
        out.append(text(left, at, words))
    return Markup("").join(out)


def legend(names: Sequence[str], lines: bool = False) -> Markup:
    """Series and their names, as HTML that wraps on a narrow screen."""
    out = []
    for series, name in enumerate(names):
        shape = SHAPE[SHAPES[series % len(SHAPES)]]
        drawn = (
            Markup('<path class="line s{}" d="M1 8H23"/>').format(series)
            if lines
            else Markup('<path class="mark s{}" transform="translate(12 8)" d="{}"/>').format(series, shape)
        )
        out.append(
            Markup('<li><svg viewBox="0 0 24 16" class="key" aria-hidden="true">{}</svg>{}</li>').format(
                drawn, escape(name)
            )
        )
    return Markup('<ul class="legend">') + Markup("").join(out) + Markup("</ul>")
