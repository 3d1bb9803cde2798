"""Charts, meters, slanted labels, textures and icons, in pairs that differ in one small detail.

No limit of `similar_images` was chosen with these pictures, but 30 of them helped to fix a bug of
its search. Digits are strokes, bitmap letters or slanted letters. Backgrounds are gradients, grain
and weave.
"""

from collections.abc import Callable

import numpy as np
from drawn_screens import Pair
from PIL import Image, ImageChops, ImageDraw, ImageFont

__all__ = ["SCENES", "draw_scenes"]

SIDES = (200, 232, 288, 320, 360, 420, 500, 640, 768, 1024)
RATIOS = (0.5, 0.625, 0.75, 1.0, 1.4)
LARGE_SHARE = 0.01
SEGMENTS = {  # of a seven-segment digit: clockwise from the top (a), the middle last (g)
    0: "abcdef", 1: "bc", 2: "abged", 3: "abgcd", 4: "fgbc",
    5: "afgcd", 6: "afgedc", 7: "abc", 8: "abcdefg", 9: "abcdfg",
}  # fmt: skip
STROKES = {
    "a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2), "f": (0, 0, 0, 1), "g": (0, 1, 1, 1),
}  # fmt: skip
LABELS = (
    "Rx", "Qty", "Lot", "Exp", "pH", "kPa", "Ohm", "net",
    "due", "tax", "row", "bin", "gate", "seat", "lane", "dock",
)  # fmt: skip

Random = np.random.Generator
Scene = Callable[[Random, Image.Image], Image.Image]


def draw_scenes(seed: int, size: tuple[int, int] | None = None) -> Pair:
    """Draw the pair of a seed; its size is random unless `size` is given."""
    random = np.random.default_rng([seed, 7])
    width = 3840 if random.random() < LARGE_SHARE else int(SIDES[random.integers(len(SIDES))])
    height = max(200, int(width * RATIOS[random.integers(len(RATIOS))]))
    ground = _ground(random, *(size or (width, min(height, 2160))))
    name = tuple(SCENES)[seed % len(SCENES)]
    for _ in range(int(random.integers(2, 9))):  # objects that both pictures show
        _things(random, ground)
    picture = ground.copy()
    other = SCENES[name](random, picture)
    if random.random() < 0.1 and ground.width < 1024:  # saved with a palette
        palette = picture.quantize(255)
        picture = palette.convert("RGB")
        changed = np.asarray(ImageChops.difference(ground, other)).any(2)
        changed |= np.asarray(ImageChops.difference(ground, picture)).max(2) > 64
        mask = Image.fromarray(changed.astype(np.uint8) * 255)
        other = Image.composite(other, picture, mask)
    return Pair(name, picture, other)


def _ground(random: Random, width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    first, last = (random.integers(0, 256, 3).astype(np.float32) for _ in range(2))
    kind = random.integers(4)
    part = (x / width + y / height) / 2
    if kind == 0:  # one colour
        part = np.zeros_like(part)
    elif kind == 1:  # weave
        part = (np.sin(x / random.uniform(1, 9)) * np.sin(y / random.uniform(1, 9)) + 1) / 4
    pixels = first + (last - first) * part[..., None]
    if kind == 2:  # a photograph's grain over soft shapes
        soft = Image.fromarray(random.integers(0, 256, (9, 9, 3), np.uint8))
        pixels = np.asarray(soft.resize((width, height), Image.Resampling.BICUBIC))
        grain = random.standard_normal((height, width, 1), np.float32)
        pixels = pixels + grain * np.float32(random.uniform(2, 25))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _things(random: Random, image: Image.Image) -> None:
    """Draw a label, a polygon or a curve at a random position."""
    x, y = _place(random, image, 60)
    kind = random.integers(3)
    if kind == 0:
        _write(random, image, (x, y), LABELS[random.integers(len(LABELS))])
    elif kind == 1:
        corners = [(x + int(a), y + int(b)) for a, b in random.integers(0, 60, (4, 2))]
        ImageDraw.Draw(image).polygon(corners, fill=_ink(random, image, (x, y)))
    else:
        points = [(x + 4 * step, y + int(random.integers(0, 30))) for step in range(15)]
        ImageDraw.Draw(image).line(points, fill=_ink(random, image, (x, y)), width=2)


def _place(random: Random, image: Image.Image, room: int) -> tuple[int, int]:
    return tuple(int(random.integers(0, max(1, side - room))) for side in image.size)  # type: ignore[return-value]


def _ink(random: Random, image: Image.Image, place: tuple[int, int]) -> tuple[int, int, int]:
    """Return a color that differs, faintly or strongly, from the color at this position."""
    ground = np.asarray(image.getpixel(place), dtype=float)
    sign = np.where(ground < 128, 1, -1)
    red, green, blue = (ground + sign * random.uniform(40, 128, 3)).astype(int).tolist()
    return red, green, blue


def _write(random: Random, image: Image.Image, place: tuple[int, int], text: str) -> None:
    """Write text in bitmap letters, or in larger, slanted and outlined letters."""
    ink = _ink(random, image, place)
    if random.random() < 0.5:
        ImageDraw.Draw(image).text(place, text, fill=ink, font=ImageFont.load_default_imagefont())
        return
    font = ImageFont.load_default(int(random.integers(36, 80)))
    box = font.getbbox(text, stroke_width=1)
    mask = Image.new("L", (int(box[2]) + 20, int(box[3]) + 8))
    ImageDraw.Draw(mask).text((10, 2), text, fill=255, font=font, stroke_width=1)
    slanted = mask.transform(
        mask.size, Image.Transform.AFFINE, (1, 0.2, -4, 0, 1, 0), Image.Resampling.BILINEAR
    )
    image.paste(ink, place, slanted.reduce(int(random.integers(2, 5))))


def _meter(random: Random, image: Image.Image) -> Image.Image:
    """Change one digit of a seven-segment meter."""
    side, count = int(random.integers(4, 14)), int(random.integers(1, 6))
    start = _place(random, image, 3 * side * count)
    ink = _ink(random, image, start)
    digits = random.integers(0, 10, count).tolist()
    place = int(random.integers(count))
    other = image.copy()
    for drawn in (image, other):
        draw = ImageDraw.Draw(drawn)
        for number, digit in enumerate(digits):
            x, y = start[0] + number * 2 * side, start[1]
            for segment in SEGMENTS[digit]:
                a, b, c, d = (side * end for end in STROKES[segment])
                draw.line((x + a, y + b, x + c, y + d), fill=ink, width=1 + side // 6)
        digits[place] = (digits[place] + int(random.integers(1, 10))) % 10
    return other


def _chart(random: Random, image: Image.Image) -> Image.Image:
    """Make one bar of a chart longer by a few pixels."""
    start, width = _place(random, image, 120), int(random.integers(4, 14))
    heights = random.integers(10, 80, 7).tolist()
    ink = _ink(random, image, start)
    place, more = int(random.integers(7)), int(random.integers(3, 30))
    other = image.copy()
    for drawn in (image, other):
        for bar, height in enumerate(heights):
            x = start[0] + bar * (width + 3)
            box = (x, start[1] + 110 - height, x + width, start[1] + 110)
            ImageDraw.Draw(drawn).rectangle(box, fill=ink)
        heights[place] += more
    return other


def _label(random: Random, image: Image.Image) -> Image.Image:
    """Change one letter or digit of a label."""
    text = f"{LABELS[random.integers(len(LABELS))]} {random.integers(100, 999)}"
    place = int(random.integers(len(text)))
    while text[place] == " ":
        place = int(random.integers(len(text)))
    letter = "0123456789ABCDEFGHKMNPRTUXYZ"[random.integers(28)]
    letter = "@" if letter == text[place] else letter
    start, state = _place(random, image, 100), random.bit_generator.state
    other = image.copy()
    _write(random, image, start, text)
    random.bit_generator.state = state
    _write(random, other, start, text[:place] + letter + text[place + 1 :])
    return other


def _dot(random: Random, image: Image.Image) -> Image.Image:
    """Add a decimal point or a minus sign."""
    other, (x, y) = image.copy(), _place(random, image, 12)
    ink = _ink(random, other, (x, y))
    width, height = ((2, 2), (3, 3), (5, 1), (6, 2))[random.integers(4)]
    ImageDraw.Draw(other).rectangle((x, y, x + width - 1, y + height - 1), fill=ink)
    return other


def _line(random: Random, image: Image.Image) -> Image.Image:
    """Add a line of one pixel: anywhere, or at the border of the picture or of a JPEG block."""
    other = image.copy()
    ends = [_place(random, image, 1), _place(random, image, 1)]
    kind = random.integers(3)
    if kind == 0:
        x, y = ends[0]
        ends = [(x // 8 * 8, y), (x // 8 * 8, y + 12)]
    elif kind == 1:
        ends = [(0, ends[0][1]), (0, ends[0][1] + 12)]
    ImageDraw.Draw(other).line(ends, fill=_ink(random, image, ends[0]))
    return other


def _lamp(random: Random, image: Image.Image) -> Image.Image:
    """Change the color of a lamp, with the same brightness."""
    other, (x, y) = image.copy(), _place(random, image, 14)
    size = int(random.integers(3, 14))
    first = random.integers(40, 200, 3)
    second = np.clip(np.roll(first, 1) + int(random.integers(-30, 30)), 0, 255)
    second[0] = (first[0] + 100) % 256
    weights = np.array([0.299, 0.587, 0.114])
    second = np.clip(second + (weights @ first - weights @ second), 0, 255)
    for drawn, colour in ((image, first), (other, second)):
        red, green, blue = (int(level) for level in colour)
        ImageDraw.Draw(drawn).ellipse((x, y, x + size, y + size), fill=(red, green, blue))
    return other


def _icon(random: Random, image: Image.Image) -> Image.Image:
    """Reverse an arrow, or replace a cross by a tick."""
    other, (x, y), size = image.copy(), _place(random, image, 26), int(random.integers(8, 24))
    ink = _ink(random, image, (x, y))
    half = size // 2
    shapes = [
        ([(x, y + half), (x + size, y), (x + size, y + size)],) * 1,
        ([(x + size, y + half), (x, y), (x, y + size)],) * 1,
    ]
    if random.random() < 0.5:
        shapes = [
            ([(x, y), (x + size, y + size)], [(x, y + size), (x + size, y)]),  # type: ignore[list-item]
            ([(x, y + half), (x + half, y + size), (x + size, y)],),
        ]
    for drawn, lines in zip((image, other), shapes, strict=True):
        for line in lines:
            ImageDraw.Draw(drawn).line(line, fill=ink, width=1 + size // 10)
    return other


SCENES: dict[str, Scene] = {
    "meter digit": _meter,
    "chart bar": _chart,
    "label glyph": _label,
    "point or minus": _dot,
    "thin line": _line,
    "lamp colour": _lamp,
    "icon shape": _icon,
}
