"""Pairs of screens and scenes; the second picture has one more small point on a plain background.

Codecs erase many of these points, so they test how a comparison handles lost details.
"""

import numpy as np
from drawn_scenes import draw_scenes
from drawn_screens import Pair, draw_screens
from PIL import Image

__all__ = ["SIDES", "draw_points"]

SIDES = (1, 2, 3, 4)  # pixels
STEPS = (8, 10, 12, 16, 20, 30, 45, 55, 70)  # of 255, in one colour or in all three
AROUND = 3  # even pixels on every side of a point
EVEN = 2  # of 255
TRIES = 1000


def draw_points(seed: int, size: tuple[int, int] | None = None) -> Pair:
    """Draw the pair of a seed, with a random position and color of the point."""
    picture = (draw_screens, draw_scenes)[seed % 2](seed, size).picture
    random = np.random.default_rng(seed)
    side = SIDES[seed // 2 % len(SIDES)]
    pixels = np.asarray(picture).astype(np.int16)
    y, x = _even_place(random, pixels, side)
    step = np.zeros(3, np.int16)
    channel = int(random.integers(4))
    step[slice(None) if channel == 3 else channel] = STEPS[random.integers(len(STEPS))]
    bright = pixels[y, x].mean() > 128
    pixels[y : y + side, x : x + side] += -step if bright else step
    other = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return Pair(f"{side} x {side}", picture, other)


def _even_place(random: np.random.Generator, pixels: np.ndarray, side: int) -> tuple[int, int]:
    """Return the first tried position with even pixels around it, or else the last one."""
    for _ in range(TRIES):
        y, x = (int(random.integers(AROUND, end - side - AROUND)) for end in pixels.shape[:2])
        around = pixels[y - AROUND : y + side + AROUND, x - AROUND : x + side + AROUND]
        if np.ptp(around, axis=(0, 1)).max() <= EVEN:
            break
    return y, x
