"""What `similar_images` takes for the same image and what not, on generated pictures.

    python bench/similar_images.py

Limits: nothing here is a photograph. `same` are copies as they come about on the way: saved as
JPEG, scaled, a little brighter, a frame of one pixel cut off. `look-alikes` are pairs that a
reader tells apart at once and that must not be taken for one another: another number on the same
form, another bar in the same chart, another text in the same window, a thing moved, other colours.
"""

import io
import json
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

from headstart.engine.looks import HASH_SIZE, MAX_BITS, MAX_STEP, look_of

SIZE = 448
SEEDS = range(100, 124)  # the limits were chosen on 0 to 23


def landscape(seed: int, change: int = 0) -> Image.Image:
    """Sky, hills, a sun; a change moves the sun or gives the hills other colours."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    top, bottom = random.integers(60, 200, 3), random.integers(120, 255, 3)
    pixels = top + (bottom - top) * y[..., None]
    sun = random.uniform(0.2, 0.8) + (0.25 if change == 1 else 0)
    pixels[(x - sun % 1) ** 2 + (y - 0.25) ** 2 < 0.012] = (255, 220, 120)
    for level in (0.55, 0.7, 0.85):
        hill = y > level + 0.06 * np.sin(random.uniform(3, 9) * x + random.uniform(0, 6))
        colour = random.integers(20, 150, 3)
        pixels[hill] = np.roll(colour, 1) if change == 2 else colour
    pixels += random.normal(0, 6, pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def chart(seed: int, change: int = 0) -> Image.Image:
    """Seven bars; a change makes one higher or lower, or the bars another colour."""
    random = np.random.default_rng(seed)
    heights = random.integers(40, 360, 7)
    colour = tuple(random.integers(20, 200, 3).tolist())
    if change == 1:
        heights[3] = 400 - heights[3]
    if change == 2:
        colour = colour[1:] + colour[:1]
    image = Image.new("RGB", (SIZE, SIZE), "white")
    draw = ImageDraw.Draw(image)
    for bar, height in enumerate(heights.tolist()):
        draw.rectangle((30 + bar * 58, 420 - height, 70 + bar * 58, 420), fill=colour)
    draw.line((20, 420, 440, 420), fill="black", width=3)
    return image


def form(seed: int, change: int = 0) -> Image.Image:
    """Lines of large digits in boxes; a change is another digit, or another line."""
    random = np.random.default_rng(seed)
    lines = ["".join(map(str, random.integers(0, 10, 8))) for _ in range(6)]
    if change == 1:
        lines[2] = lines[2][:3] + str((int(lines[2][3]) + 5) % 10) + lines[2][4:]
    if change == 2:
        lines[4] = lines[4][::-1]
    image = Image.new("RGB", (SIZE, SIZE), (245, 243, 235))
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        draw.rectangle((20, 15 + 72 * row, 428, 75 + 72 * row), outline="gray", width=2)
        draw.text((40, 22 + 72 * row), line, fill="black", font_size=44)
    return image


def jpeg(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "jpeg", quality=80)
    return Image.open(stream).convert("RGB")


KINDS: dict[str, Callable[..., Image.Image]] = {
    "landscape": landscape,
    "chart": chart,
    "form": form,
}
COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "as JPEG": jpeg,
    "scaled": lambda image: image.resize((400, 400)).resize((SIZE, SIZE)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.04),
    "cut": lambda image: image.crop((1, 1, SIZE - 1, SIZE - 1)),
}


def pairs() -> Iterator[tuple[str, str, bool, Image.Image, Image.Image]]:
    """Kind, what was done, whether it is the same picture, and the two."""
    for kind, draw in KINDS.items():
        for seed in SEEDS:
            image = draw(seed)
            for name, copy in COPIES.items():
                yield kind, name, True, image, copy(image)
            yield kind, "one detail", False, image, draw(seed, 1)
            yield kind, "colour or line", False, image, draw(seed, 2)
            yield kind, "another one", False, image, draw(seed + len(SEEDS))


def measure() -> dict[tuple[str, str, bool], tuple[int, int]]:
    """By kind and change: how many pairs were taken for the same, of how many."""
    counts: dict[tuple[str, str, bool], tuple[int, int]] = {}
    for kind, name, same, left, right in pairs():
        near, total = counts.get((kind, name, same), (0, 0))
        taken = look_of(left).is_near(look_of(right))
        counts[kind, name, same] = (near + taken, total + 1)
    return counts


def main() -> None:
    counts = measure()
    print(
        f"Taken for the same: up to {MAX_BITS} of {HASH_SIZE**2} bits of frequencies differ, and "
        f"no pixel of a thumbnail by more than {MAX_STEP}."
    )
    print(f"{'':12}{'':16}{'pairs':>7}{'matched':>9}")
    for (kind, name, same), (near, total) in counts.items():
        wrong = "" if same or not near else "   false matches"
        print(f"{kind:12}{name:16}{total:7}{near:9}{wrong}")
    rates = {}
    for same in (True, False):
        near, total = (sum(v[i] for k, v in counts.items() if k[2] == same) for i in (0, 1))
        rates[same] = near / total
        print(f"{'copies found' if same else 'look-alikes matched'}: {near} of {total}")
    print(json.dumps({"true_match_rate": rates[True], "false_match_rate": rates[False]}))


if __name__ == "__main__":
    main()
