"""Draw the figures of the docs: the state of a real block pool, and measured curves.

    python docs/figures_src/figures.py [--out docs/figures]

The same code and docs/performance.json, which bench/curves.py wrote, give the same files, so a
test can tell when the figures are out of date.
"""

import argparse
from pathlib import Path

from items import draw_items
from performance import draw_performance
from pool import draw_free, draw_identity, draw_moment, draw_overview
from scenes import at_time_6, at_time_7, before_and_after_a_free

DOCS = Path(__file__).resolve().parents[1]
OUT = DOCS / "figures"
PROMPT = "the first reader paid for every line and all who came later read it"


def draw_all() -> dict[str, str]:
    """Return every figure, by file name."""
    _, scenes = at_time_6()
    before, after = before_and_after_a_free("lru")
    _, after_empty_first = before_and_after_a_free("empty-first-lru")
    figures = {
        "overview": draw_overview(scenes[2]),
        "identity": draw_identity(PROMPT.split(), 4),
        "items": draw_items(),
        "free": draw_free(before, after, after_empty_first),
        "time-7": draw_moment(at_time_7(12, 29)),
        "time-7-of-33": draw_moment(at_time_7(16, 33)),
        **draw_performance(DOCS / "performance.json"),
    }
    for time, scene in zip((1, 3, 4, 5, 6), scenes, strict=True):
        figures[f"time-{time}"] = draw_moment(scene)
    return {f"{name}.svg": canvas.render() for name, canvas in sorted(figures.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in draw_all().items():
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)


if __name__ == "__main__":
    main()
