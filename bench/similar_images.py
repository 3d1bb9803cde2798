"""Rates of true and false matches of `similar_images`.

    python bench/similar_images.py [--pairs 2000] [--only screens|scenes|points]

Look-alikes are pairs of drawn pictures that differ in one small detail. In every second pair, one
of the pictures is also saved or scaled again, as a copy would be. One third comes from each of
`drawn_screens`, with which the limits were chosen, `drawn_scenes`, with which no limit was chosen,
and `drawn_points`. The copies are made of the same pictures, except points.

Limits: no look-alike matches, and at least 90 % of the copies match for each kind of copy in
COPIES. The copies in OTHER_COPIES are measured without a limit.

Pairs whose pixels differ by less than MIN_CHANGE levels of 255 are left out: their detail is not
visible. A codec may erase the detail, so that both pictures of a pair have the same copy. It is
then compared with the second picture and counted as usual. No picture is a photograph, and all
codecs are Pillow's.
"""

import argparse
import io
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from drawn_points import draw_points
from drawn_scenes import draw_scenes
from drawn_screens import Pair, draw_screens
from PIL import Image, ImageChops

from headstart.frontend.images.similar import are_same, distance, thumbnail_of

__all__ = ["COPIES", "GENERATORS", "OTHER_COPIES"]

MIN_FOUND = 0.9
MIN_CHANGE = 8
FIRST_SEED = 100_000
Resampling = Image.Resampling
Copy = Callable[[Image.Image], Image.Image]

GENERATORS: dict[str, Callable[[int], Pair]] = {
    "screens": draw_screens,
    "scenes": draw_scenes,
    "points": draw_points,
}


def jpeg(quality: int, subsampling: int = 2) -> Copy:
    """Return a function that saves a picture as JPEG."""
    return lambda image: _saved(image, "jpeg", quality=quality, subsampling=subsampling)


def webp(**options: Any) -> Copy:
    """Return a function that saves a picture as WebP, by default with loss."""
    return lambda image: _saved(image, "webp", **options)


def scaled(percent: int, how: Resampling) -> Copy:
    """Return a function that scales a picture by one of Pillow's filters."""
    return lambda image: image.resize(_percent(image, percent), how)


def interpolated(percent: int) -> Copy:
    """Return a function that scales by plain cubic interpolation, unlike Pillow."""

    def copy(image: Image.Image) -> Image.Image:
        width, height = _percent(image, percent)
        step = (image.width / width, 0, 0, 0, image.height / height, 0)
        return image.transform((width, height), Image.Transform.AFFINE, step, Resampling.BICUBIC)

    return copy


def both(first: Copy, second: Copy) -> Copy:
    """Return a function that makes one copy after the other."""
    return lambda image: second(first(image))


def _saved(image: Image.Image, name: str, **options: Any) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, name, **options)
    return Image.open(stream).convert("RGB")


def _percent(image: Image.Image, percent: int) -> tuple[int, int]:
    return round(image.width * percent / 100), round(image.height * percent / 100)


COPIES: dict[str, Copy] = {
    "JPEG 75": jpeg(75),
    "JPEG 83": jpeg(83),
    "JPEG 90, full colours": jpeg(90, subsampling=0),
    "JPEG 95": jpeg(95),
    "WebP": webp(),
    "WebP, lossless": webp(lossless=True),
    "98 %, bicubic": scaled(98, Resampling.BICUBIC),
    "99 %, Lanczos": scaled(99, Resampling.LANCZOS),
    "101 %, bilinear": scaled(101, Resampling.BILINEAR),
    "102 %, bicubic": scaled(102, Resampling.BICUBIC),
    "98 %, then JPEG 80": both(scaled(98, Resampling.BICUBIC), jpeg(80)),
}
OTHER_COPIES: dict[str, Copy] = {
    "JPEG 90, then JPEG 78": both(jpeg(90), jpeg(78)),
    "JPEG 83, then WebP": both(jpeg(83), webp()),
    "JPEG 83, then 99 %": both(jpeg(83), scaled(99, Resampling.LANCZOS)),
    "98 %, another cubic": interpolated(98),
}


def taken(one: Image.Image, other: Image.Image) -> bool:
    """Return True if `SimilarImages` replaces the second picture by the first."""
    is_near = distance(thumbnail_of(one), thumbnail_of(other)) is not None
    return is_near and are_same(other, one)


class Counts:
    """Numbers of pairs and of matches, by kind."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, ...], int] = defaultdict(int)
        self.taken: dict[tuple[str, ...], int] = defaultdict(int)
        self.seconds: list[float] = []
        self.erased = 0

    def add(self, key: tuple[str, ...], one: Image.Image, other: Image.Image) -> None:
        """Compare a pair and count it."""
        start = time.process_time()
        self.taken[key] += taken(one, other)
        self.seconds.append(time.process_time() - start)
        self.pairs[key] += 1

    def add_look_alike(self, name: str, pair: Pair, copy: Copy | None, of_other: bool) -> None:
        """Compare a pair. copy: makes a copy of one of the two pictures first."""
        one, other = pair.picture, pair.other
        if copy is not None:
            copied = copy(one), copy(other)
            erased = copied[0].tobytes() == copied[1].tobytes()
            self.erased += erased
            one, other = (one, copied[1]) if of_other and not erased else (other, copied[0])
        self.add(("look-alike", name, pair.change), one, other)

    def total(self, *start: str) -> tuple[int, int]:
        """Return the number of matches and of pairs whose keys begin with `start`."""
        keys = [key for key in self.pairs if key[: len(start)] == start]
        return sum(self.taken[key] for key in keys), sum(self.pairs[key] for key in keys)


def measure(counts: Counts, name: str, pairs: int) -> None:
    """Compare `pairs` look-alikes of one generator, and a copy of every second picture."""
    copies = COPIES | OTHER_COPIES
    names = list(copies)
    for number in range(pairs):
        pair = GENERATORS[name](FIRST_SEED + number)
        steps = ImageChops.difference(pair.picture, pair.other).getextrema()
        if max(high for _, high in steps) < MIN_CHANGE:  # type: ignore[misc]
            continue
        how = names[number // 2 % len(names)]
        counts.add_look_alike(name, pair, copies[how] if number % 2 else None, number // 2 % 2 == 0)
        if number % 2 == 0 and name != "points":
            counts.add(("copy", how, name), pair.picture, copies[how](pair.picture))
        if sys.stderr.isatty() or number % 100 == 99:
            print(f"{name}: {number + 1} of {pairs}", file=sys.stderr)


def report(counts: Counts) -> bool:
    """Print tables and one line of JSON. Return True if all limits are met."""
    print(f"{'look-alikes':32}{'pairs':>7}{'taken for the same':>20}")
    for key in sorted(key for key in counts.pairs if key[0] == "look-alike"):
        print(f"{key[1] + ': ' + key[2]:32}{counts.pairs[key]:7}{counts.taken[key]:20}")
    print(f"{'copies':32}{'pairs':>7}{'found':>20}")
    for name in COPIES | OTHER_COPIES:
        found, pairs = counts.total("copy", name)
        print(f"{name:32}{pairs:7}{found:20}")
    false, look_alikes = counts.total("look-alike")
    rates = {}
    for name in COPIES | OTHER_COPIES:
        found, pairs = counts.total("copy", name)
        rates[name] = round(found / pairs, 3) if pairs else None
    has_copies = any(rate is not None for rate in rates.values())  # of points alone there are none
    found_all = all((rates[name] or 0) >= MIN_FOUND for name in COPIES)
    held = not false and (found_all or not has_copies)
    print(
        json.dumps(
            {
                "look_alikes": look_alikes,
                "erased_by_the_codec": counts.erased,
                "taken_for_the_same": false,
                "found": rates,
                "median_ms": round(1000 * statistics.median(counts.seconds)),
                "slowest_ms": round(1000 * max(counts.seconds)),
                "held": held,
            }
        )
    )
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2000, help="look-alikes of all generators")
    parser.add_argument("--only", choices=list(GENERATORS), help="pairs of this generator alone")
    asked = parser.parse_args()
    names = [asked.only] if asked.only else list(GENERATORS)
    counts = Counts()
    for name in names:
        measure(counts, name, asked.pairs // len(names))
    if not report(counts):
        raise SystemExit("a limit is not met")


if __name__ == "__main__":
    main()
