"""The curves of docs/performance.md, from the output of bench/curves.py."""

import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from svg import HOLDERS, LINE, Canvas, Color

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 164, 104, 56  # margins around the axes
APART = 18  # least pixels between two names


class Curve(NamedTuple):
    """One line: its name, one value for each position on the x axis, and its color."""

    name: str
    values: list[float]
    color: Color


class Frame(NamedTuple):
    """The frame of a chart: its texts, the positions on the x axis, the ticks of y."""

    title: str
    note: str
    machine: str
    below: str
    places: list[int]
    ticks: list[float]
    even: bool

    def x(self, at: int) -> float:
        """Return the pixels of a position: proportional, or, if `even`, at equal distances."""
        part = at / (len(self.places) - 1) if self.even else self.places[at] / self.places[-1]
        start = LEFT + (24 if self.even else 0)
        return start + part * (WIDTH - RIGHT - start)

    def y(self, value: float) -> float:
        """Return the pixels of a value."""
        return HEIGHT - BOTTOM - value / self.ticks[-1] * (HEIGHT - TOP - BOTTOM)


def draw_curves(frame: Frame, curves: list[Curve]) -> Canvas:
    """Draw lines over a common x axis, each with its last value and its name at its end."""
    canvas = Canvas(WIDTH, HEIGHT, frame.title)
    canvas.text(28, 38, frame.title, size=19, style="bold")
    canvas.text(28, 62, frame.note, size=13.5, style="muted")
    for tick in frame.ticks:
        y = frame.y(tick)
        canvas.line((LEFT, y), (WIDTH - RIGHT, y), LINE)
        canvas.text(LEFT - 10, y + 4, f"{tick:g}", size=12, style="end muted")
    for at, place in enumerate(frame.places):
        words = f"{place:,}"
        canvas.text(frame.x(at), HEIGHT - BOTTOM + 20, words, size=12, style="middle muted")
    middle = (LEFT + WIDTH - RIGHT) / 2
    canvas.text(28, 78, frame.machine, size=12, style="muted")
    canvas.text(middle, HEIGHT - 14, frame.below, size=12.5, style="middle muted")
    for curve in curves:
        points = [(frame.x(at), frame.y(value)) for at, value in enumerate(curve.values)]
        for start, end in pairwise(points):
            canvas.line(start, end, curve.color.line, style="thick")
        for x, y in points:
            canvas.box((x - 4, y - 4, 8, 8), curve.color, style="thick")
    lowest: float = -APART
    for curve in sorted(curves, key=lambda curve: frame.y(curve.values[-1])):
        lowest = max(frame.y(curve.values[-1]), lowest + APART)
        words = f"{curve.values[-1]:.3g} {curve.name}"
        at = WIDTH - RIGHT + 14
        canvas.text(at, lowest + 4, words, size=13, style=f"bold {curve.color.line}")
    return canvas


def nice_ticks(highest: float) -> list[float]:
    """Return ticks from 0 to at least `highest` in four to six round steps.

    >>> nice_ticks(7.3)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    >>> nice_ticks(0.5)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    """
    step = 1.0
    while step * 5 < highest:
        step *= 10
    while step * 3 > highest:
        step /= 10
    step = next(step * by for by in (1, 2, 5, 10) if step * by * 6 > highest)
    count = 1
    while step * count < highest * 0.999:
        count += 1
    return [round(step * at, 10) for at in range(count + 1)]


def draw_performance(data: Path) -> dict[str, Canvas]:
    """Return both figures, by name."""
    found = json.loads(data.read_text(encoding="utf-8"))
    machine = (
        f"{found['shape']}, {found['threads']} thread, {found['gemm_gflops']} GFLOP/s, "
        f"{found['memory_gbs']} GB/s, {found['date']}"
    )
    first = Frame(
        "Seconds to the first token",
        "a question of 40 tokens about a document, when that is computed and when it is cached",
        machine,
        "tokens of the document",
        found["lengths"],
        nice_ticks(max(found["cold_s"])),
        even=False,
    )
    rate = Frame(
        "Output tokens a second",
        "requests that share 2,000 cached tokens, whose K and V are read once or by each",
        machine,
        "requests that decode together",
        found["sharers"],
        nice_ticks(max(found["shared_rate"])),
        even=True,
    )
    blue, orange, green = HOLDERS
    return {
        "first-token": draw_curves(
            first, [Curve("cold", found["cold_s"], orange), Curve("warm", found["warm_s"], blue)]
        ),
        "shared-decoding": draw_curves(
            rate,
            [
                Curve("read once", found["shared_rate"], green),
                Curve("read by each", found["alone_rate"], orange),
            ],
        ),
    }
