"""Screens and forms in Pillow's default font, in pairs that differ in one small detail.

The limits of `headstart.frontend.images.similar` were chosen with these pictures.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["CHANGES", "Pair", "draw_screens"]

SIZES = ((200, 150), (320, 240), (400, 300), (448, 448), (640, 480), (800, 600), (1280, 800))
LARGE = (3840, 2160)
LARGE_SHARE = 0.01
FONT_SIZES = (9, 10, 11, 12, 12, 13, 14, 16, 20, 28)
CONTRASTS = (0.12, 0.25, 0.5, 1, 1, 1)  # between text and background
MAX_LINES = 300
WORDS = (
    "the", "dose", "patient", "total", "amount", "invoice", "left", "right", "open", "closed",
    "yes", "no", "north", "south", "monday", "friday", "error", "warning", "before", "after",
    "increase", "decrease",
)  # fmt: skip
CHANGES = ("digit", "word", "glyph", "point", "minus", "swap", "colour", "icon", "line")

Random = np.random.Generator
Colour = tuple[int, int, int]


class Pair(NamedTuple):
    """Two pictures that differ in one detail, and the kind of detail."""

    change: str
    picture: Image.Image
    other: Image.Image


class _Line(NamedTuple):
    """A line of text and its position."""

    x: int
    y: int
    text: str


def draw_screens(seed: int, size: tuple[int, int] | None = None) -> Pair:
    """Draw the pair of a seed; its size is random unless `size` is given."""
    random = np.random.default_rng(seed)
    if size is None:
        size = LARGE if random.random() < LARGE_SHARE else SIZES[random.integers(len(SIZES))]
    picture, ink = _paper(random, size)
    font_size = FONT_SIZES[random.integers(len(FONT_SIZES))]
    lines = _lines(random, size, font_size)
    change = CHANGES[seed % len(CHANGES)]
    place, edited = _edited(random, lines, change)
    font = ImageFont.load_default(font_size)
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        if number != place:
            draw.text(line[:2], line.text, fill=ink, font=font)
    other = picture.copy()
    for drawn, text in ((picture, lines[place].text), (other, edited)):
        ImageDraw.Draw(drawn).text(lines[place][:2], text, fill=ink, font=font)
    if edited == lines[place].text:
        _mark(random, picture, other, change, ink)
    return Pair(change, picture, other)


def _paper(random: Random, size: tuple[int, int]) -> tuple[Image.Image, Colour]:
    """Return an empty window and the color of its text."""
    dark = random.random() < 0.25
    paper = random.integers(0, 50, 3) if dark else random.integers(225, 256, 3)
    ink = random.integers(180, 256, 3) if dark else random.integers(0, 80, 3)
    if random.random() < 0.3:
        ink[random.integers(3)] = 255 - ink[0] // 2
    ink = paper + (ink - paper) * CONTRASTS[random.integers(len(CONTRASTS))]
    picture = Image.new("RGB", size, _colour(paper))
    if random.random() < 0.3:
        picture = _uneven(random, picture)
    draw = ImageDraw.Draw(picture)
    for _ in range(random.integers(0, 8)):
        x, y, side = (int(random.integers(low, high)) for low, high in _boxes(size))
        draw.rectangle((x, y, x + side, y + side // 2), fill=_colour(random.integers(0, 256, 3)))
    return picture, _colour(ink)


def _boxes(size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    width, height = size
    return (0, width), (0, height), (6, max(8, width // 6))


def _colour(levels: np.ndarray) -> Colour:
    red, green, blue = (int(level) for level in levels)
    return red, green, blue


def _uneven(random: Random, picture: Image.Image) -> Image.Image:
    """Return the picture with waves of light and, in half of the cases, noise."""
    width, height = picture.size
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = 30 * np.sin(x / random.uniform(50, 300) + y / random.uniform(50, 300))
    pixels = np.asarray(picture) + waves[..., None]
    if random.random() < 0.5:
        noise = random.standard_normal(pixels.shape, np.float32)
        pixels = pixels + noise * np.float32(random.uniform(1, 12))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _lines(random: Random, size: tuple[int, int], font_size: int) -> list[_Line]:
    width, height = size
    places = [
        (x, y)
        for y in range(4, height - font_size - 2, int(font_size * 1.5))
        for x in range(4, max(5, width - font_size * 9), font_size * 15)
        if random.random() < 0.7
    ] or [(4, 4)]
    if len(places) > MAX_LINES:
        places = [places[place] for place in random.permutation(len(places))[:MAX_LINES]]
    return [_Line(*place, _text(random)) for place in places]


def _text(random: Random) -> str:
    first, second, third = (WORDS[place] for place in random.integers(0, len(WORDS), 3))
    number = int(random.integers(10, 9999))
    return (
        f"{first}: {number} mg",
        f"{number % 100}.{number // 100:02d} {first}",
        f"{first} {second} {third}",
        f"-{number % 1000} {first} {number % 10}",
    )[random.integers(4)]


def _edited(random: Random, lines: list[_Line], change: str) -> tuple[int, str]:
    """Return a line's number and its new text, or its old text if the change is not in text."""
    for place in random.permutation(len(lines)):
        text = _edit(random, lines[place].text, change)
        if text != lines[place].text:
            return int(place), text
    return 0, lines[0].text


def _edit(random: Random, text: str, change: str) -> str:
    if change == "point":
        return text.replace(".", " ", 1)
    if change == "minus":
        return text.replace("-", " ", 1)
    if change == "word":
        word = next(word for word in text.replace(":", "").split() if word.isalpha())
        return text.replace(word, WORDS[random.integers(len(WORDS))], 1)
    kinds = {"digit": str.isdigit, "glyph": str.isalpha, "swap": str.isalpha}
    if change not in kinds:
        return text
    places = [place for place, letter in enumerate(text) if kinds[change](letter)]
    if not places:
        return text
    place = places[random.integers(len(places))]
    if change == "swap":
        return text[:place] + text[place : place + 2][::-1] + text[place + 2 :]
    letters = "0123456789" if change == "digit" else "abcdefghijklmnopqrstuvwxyz"
    return text[:place] + letters[random.integers(len(letters))] + text[place + 1 :]


def _mark(
    random: Random, picture: Image.Image, other: Image.Image, change: str, ink: Colour
) -> None:
    """Draw a small mark on both pictures, and a different one on the second."""
    side = int(random.integers(6, 20))
    x = int(random.integers(0, picture.width - 2 * side))
    y = int(random.integers(0, picture.height - side))
    box = (x, y, x + side, y + side)
    left, right = ImageDraw.Draw(picture), ImageDraw.Draw(other)
    if change == "colour":
        colours = random.integers(0, 256, 3), random.integers(3)
        left.ellipse(box, fill=_colour(colours[0]))
        colours[0][colours[1]] = (colours[0][colours[1]] + 128) % 256
        right.ellipse(box, fill=_colour(colours[0]))
    elif change == "icon":
        left.ellipse(box, outline=ink)
        right.rectangle(box, outline=ink)
    else:  # also used if no line of text allows the requested change
        colour = _colour((np.asarray(picture.getpixel((x, y))) + 128) % 256)
        right.line((x, y, x + 2 * side, y), fill=colour)
