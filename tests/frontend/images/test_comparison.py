"""Copies show the same picture; a picture with one small change does not."""

import io
from functools import cache

import numpy as np
import pytest
from drawn_scenes import SCENES, draw_scenes
from drawn_screens import CHANGES, draw_screens
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from similar_images import COPIES, taken

from headstart.frontend.images.similar import are_same

SIZE = (224, 200)


def saved(image: Image.Image, **options: object) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, **options)  # type: ignore[arg-type]
    return Image.open(stream).convert("RGB")


def screen(text: str, size: tuple[int, int], ink: str = "black") -> Image.Image:
    """Return a picture with lines of text of 12 pixels; one line is `text`."""
    image = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)
    for row in range(8, size[1] - 16, 18):
        line = text if row == 26 else f"Room {row}: closed, see notice {row * 7 % 100}"
        draw.text((10, row), line, fill=ink, font=font)
    return image


@pytest.mark.parametrize("seed", range(2 * len(CHANGES)))
def test_screens_with_one_difference_are_not_copies(seed: int) -> None:
    pair = draw_screens(seed, SIZE)
    assert not taken(pair.picture, pair.other)
    copy = list(COPIES.values())[seed % len(COPIES)]
    assert not taken(pair.picture, copy(pair.other))


@pytest.mark.parametrize("seed", range(2 * len(SCENES)))
def test_scenes_with_one_difference_are_not_copies(seed: int) -> None:
    pair = draw_scenes(seed, SIZE)
    assert not taken(pair.picture, pair.other)
    copy = list(COPIES.values())[seed % len(COPIES)]
    assert not taken(pair.picture, copy(pair.other))


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("draw", [draw_screens, draw_scenes])
def test_copies_are_found(draw: object, name: str) -> None:
    # In other pictures a codec erases a faint point, so copies are refused.
    picture = draw(90 + len(name), SIZE).picture  # type: ignore[operator]
    copy = COPIES[name](picture)
    assert taken(picture, copy)
    assert taken(copy, picture), "the copy may come first"


DIGITS = ["Dose: 90 mg", "Dose: 1.0 mg", "Dose: -10 mg", "Dose: 01 mg"]
INKS = ["black", "#ccc", "#e8e8e8"]
WINDOWS = [(200, 150, text, ink) for text in DIGITS for ink in INKS]
WINDOWS += [(1280, 800, *both) for both in zip(DIGITS, INKS, strict=False)]


@pytest.mark.parametrize(("width", "height", "text", "ink"), WINDOWS)
def test_a_digit_of_12_pixels(width: int, height: int, text: str, ink: str) -> None:
    size = (width, height)
    shown, other = screen("Dose: 10 mg", size, ink), screen(text, size, ink)
    assert not taken(shown, other)
    assert not taken(shown, saved(other, format="jpeg", quality=75))


@given(
    x=st.integers(0, 126),
    y=st.integers(0, 126),
    step=st.sampled_from([-30, 30]),
    grain=st.sampled_from([0, 3, 20]),
    quality=st.sampled_from([None, 75, 90]),
)
@settings(max_examples=10, deadline=None)
def test_a_dot_anywhere_is_seen(x: int, y: int, step: int, grain: int, quality: int | None) -> None:
    """The dot may be at a border, at the corner of a JPEG block, in grain, or in a saved copy."""
    random = np.random.default_rng(1)
    pixels = np.clip(random.normal(128, grain, (128, 128, 3)), 30, 225).astype(np.uint8)
    picture = Image.fromarray(pixels)
    copy = picture if quality is None else saved(picture, format="jpeg", quality=quality)
    if grain == 0 or quality is None:  # a codec may erase some grain, so that copies are refused
        assert are_same(picture, copy)
    edited = np.asarray(copy).astype(int)
    edited[y : y + 2, x : x + 2] += step
    assert not are_same(picture, Image.fromarray(np.clip(edited, 0, 255).astype(np.uint8)))


@cache
def plain_and_copy(codec: str, quality: int) -> tuple[Image.Image, Image.Image]:
    """Return a picture without a point, and its copy, which is recognized."""
    plain = screen("Dose: 10 mg", (320, 200)).point(lambda level: min(level, 200))
    copy = saved(plain, format=codec, quality=quality)
    assert are_same(plain, copy)
    return plain, copy


CODECS = [("jpeg", 75), ("jpeg", 85), ("webp", 80)]
COLOURS = [(0, 0, -1), (0, -1, 0), (-1, 0, 0), (-1, -1, -1), (0, 1, -1)]
POINTS = [(1, 12), (1, 55), (2, 20), (2, 55), (3, 20)]
# Each codec with each colour and with each point.
CASES = [
    (*point, colour, CODECS[(i + j) % 3])
    for i, point in enumerate(POINTS)
    for j, colour in enumerate(COLOURS)
]


@pytest.mark.parametrize(("side", "levels", "colour", "codec"), CASES)
def test_a_point_that_a_codec_weakens_or_erases(
    side: int, levels: int, colour: tuple[int, int, int], codec: tuple[str, int]
) -> None:
    """A copy of one picture is not a copy of the other, unless the copies are equal."""
    plain, copy = plain_and_copy(*codec)
    pixels = np.asarray(plain).astype(np.int16)
    y, x = 61, 271 + side
    pixels[y : y + side, x : x + side] += np.array(colour, np.int16) * levels
    marked = Image.fromarray(pixels.astype(np.uint8))
    copy_of_marked = saved(marked, format=codec[0], quality=codec[1])
    assert not are_same(marked, copy)
    is_erased = copy.tobytes() == copy_of_marked.tobytes()
    assert are_same(plain, copy_of_marked) == is_erased


def test_a_row_that_shrinking_leaves_out_is_missed() -> None:
    plain = draw_screens(3, (300, 200)).picture
    small = plain.resize((294, 196), Image.Resampling.NEAREST)
    marked = plain.copy()
    for row in range(200):
        marked.paste(plain)
        marked.paste("red", (9, row, 290, row + 1))
        if marked.resize(small.size, Image.Resampling.NEAREST).tobytes() == small.tobytes():
            break
    else:
        pytest.fail("no row was left out")
    assert not are_same(marked, small)


@given(first=st.integers(0, 8), second=st.integers(0, 8), width=st.integers(1, 90))
@settings(max_examples=8, deadline=None)
def test_the_order_of_two_small_pictures_does_not_matter(
    first: int, second: int, width: int
) -> None:
    pictures = [
        Image.effect_noise((width, 70), 40).point(lambda level, add=add: level + add).convert("RGB")
        for add in (first, second)
    ]
    assert are_same(*pictures) == are_same(*reversed(pictures))


@pytest.mark.parametrize("levels", [3, -3])
def test_a_brighter_picture_is_not_a_copy(levels: int) -> None:
    picture = draw_scenes(3, SIZE).picture
    assert not are_same(picture, picture.point(lambda level: level + levels))


@pytest.mark.parametrize("colour", ["#3b6ea5", "#3b6fa1"])
def test_similar_plain_colors_are_not_copies(colour: str) -> None:
    first = Image.new("RGB", (300, 200), "#3b6ea5")
    second = Image.new("RGB", (300, 200), colour)
    assert are_same(first, second) == (colour == "#3b6ea5")


def test_sizes_that_differ_by_more_than_a_little_are_not_compared() -> None:
    picture = draw_screens(2, SIZE).picture
    assert not are_same(picture, picture.resize((SIZE[0] * 9 // 10, SIZE[1] * 9 // 10)))
    assert not are_same(picture, picture.crop((1, 1, SIZE[0] - 1, SIZE[1] - 1)))
