"""`headstart demo --images`: what of a prompt with images is computed, and what is found again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headstart.cli.options import DEFAULT_MODEL, open_model
from headstart.cli.pool_picture import PoolPicture, colour_of
from headstart.cli.reply_metrics import cached_share, duration
from headstart.cli.show import PANEL, Figures, demo_console, show
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.imports import install

if TYPE_CHECKING:
    from PIL.Image import Image

    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.llm import LLM

NOTE = (
    "A LLaVA of 17 million parameters with random weights, made on the spot: "
    "its answers are noise, its times are real. A picture is 196 tokens."
)
ANSWER_TOKENS = 24
POOL_TOKENS = 2048
SIZE = 480


@dataclass(frozen=True)
class Ask:
    """One request: what its card says, the parts of its message, and what to look at.

    One that `continues` is asked in the chat before it.
    """

    title: str
    parts: tuple[str | Image, ...]
    moral: str
    continues: bool = False


def show_images(model: str, options: Mapping[str, Any], svg: Path | None) -> None:
    """Run the demo and print it, into an SVG file as well if one is named.

    Without a model of the user's own, one is made on the spot. Raises what making, loading and
    running it raise, and `ConfigError` where Pillow is missing.
    """
    console = demo_console()
    block_size = max(1, options.get("block_size", 16))
    made, asks = model == DEFAULT_MODEL, _asks()
    with console.status("making the model, if it is not there yet, and loading it"):
        if made:
            model = str(import_module("headstart.models.demo.vision").demo_vision_path())
        llm = open_model(model, {"num_blocks": POOL_TOKENS // block_size, **options})
    with closing(llm):
        if llm.engine.images is None:
            raise RequestError(f"{model} takes text alone: --images needs a model that sees")
        note = NOTE if made else f"model {model}"
        show(chain([Text(note, style="dim")], _run(llm, asks, console)), console, svg)


def make_picture(seed: int) -> Image:
    """Hills under a sky with a sun, the same ones each time for a seed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"images need Pillow: {install('vision')} ({error})") from error
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    top, bottom = random.integers(60, 200, 3), random.integers(150, 255, 3)
    pixels = top + (bottom - top) * y[..., None]
    sun_x, sun_y = random.uniform(0.2, 0.8), random.uniform(0.15, 0.4)
    pixels[(x - sun_x) ** 2 + (y - sun_y) ** 2 < 0.012] = (255, 220, 120)
    for level in (0.55, 0.7, 0.85):
        frequency, phase = random.uniform(3, 9), random.uniform(0, 6)
        hill = y > level + 0.06 * np.sin(frequency * x + phase)
        pixels[hill] = random.integers(20, 150, 3)
    return Image.fromarray(pixels.astype(np.uint8))


def _asks() -> list[Ask]:
    one, two = make_picture(1), make_picture(2)
    changed = one.copy()
    changed.putpixel((240, 240), (255, 0, 255))
    return [
        Ask("a picture and a question", (one, "What is this?"), "Everything is computed."),
        Ask(
            "the same picture, another question",
            (one, "Is the sun up?"),
            "K/V of the picture are found; the vision tower does nothing.",
        ),
        Ask(
            "the same chat goes on, with another picture",
            (two, "And on this one?"),
            "The first picture and what was said are found; the new one is encoded.",
            continues=True,
        ),
        Ask(
            "both pictures, the other way round",
            (two, one, "Which is warmer?"),
            "No K/V fit, but both pictures' embeddings are there already.",
        ),
        Ask(
            "the first picture with one pixel changed",
            (changed, "What is this?"),
            "Another picture: nothing of it is taken from the one it looks like.",
        ),
    ]


def _run(llm: LLM, asks: list[Ask], console: Console) -> Iterator[RenderableType]:
    """A card for each request as soon as it is answered."""
    images = llm.engine.images
    assert images is not None
    with console.status("warming up"):
        _answer(llm, [_message((make_picture(3), "?"))], None, 0)
        llm.engine.manager.reset_prefix_cache()
        images.cache.clear()
    picture = PoolPicture(llm.engine.manager)
    outputs: list[RequestOutput] = []
    messages: list[dict[str, Any]] = []
    start = images.cache.num_encoded
    for number, ask in enumerate(asks, start=1):
        messages = [*messages, _message(ask.parts)] if ask.continues else [_message(ask.parts)]
        before = images.cache.num_encoded
        with console.status(f"request {number}: {ask.title}"):
            output = _answer(llm, messages, picture, number)
        outputs.append(output)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        encoded = images.cache.num_encoded - before
        thumbnails = [] if console.color_system is None else _thumbnails(ask)
        yield _card(
            number, ask, output, encoded, Group(*thumbnails, picture.draw(console.width - PANEL))
        )
    yield _verdict(outputs, images.cache.num_encoded - start)


def _message(parts: tuple[str | Image, ...]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def _answer(
    llm: LLM, messages: list[dict[str, Any]], picture: PoolPicture | None, number: int
) -> RequestOutput:
    replies = llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS))
    *_, output = replies if picture is None else picture.watch(replies, number)
    return output


def _card(
    number: int, ask: Ask, output: RequestOutput, encoded: int, pictures: RenderableType
) -> Panel:
    figures = Figures(
        {
            "prompt tokens": f"{len(output.prompt_token_ids):,}",
            "of images": f"{sum(image.num_tokens for image in output.images):,}",
            "cached tokens": cached_share(output),
            "images encoded": f"{encoded} of {len(output.images)}",
            "first token": duration(output.metrics.time_to_first_token),
        }
    )
    return Panel(
        Group(figures, Padding(Text(ask.moral, style="italic"), (1, 0)), pictures),
        title=f"[bold]{number}[/] {ask.title}",
        title_align="left",
        border_style=colour_of(number),
    )


def _verdict(outputs: list[RequestOutput], encoded: int) -> Text:
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    computed = prompts - sum(output.num_cached_tokens for output in outputs)
    shown = sum(len(output.images) for output in outputs)
    return Text(
        f"Of {prompts:,} prompt tokens {computed:,} were computed; "
        f"of {shown} pictures shown {encoded} were encoded.",
        style="bold",
    )


def _thumbnails(ask: Ask) -> list[RenderableType]:
    shown = Table.grid(padding=(0, 2))
    shown.add_row(*(_thumbnail(part) for part in ask.parts if not isinstance(part, str)))
    return [Padding(shown, (0, 0, 1, 0))]


def _thumbnail(image: Image, width: int = 16) -> Text:
    """The picture in half blocks, two pixels to a sign."""
    small = np.asarray(image.resize((width, width)))
    text = Text()
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            text.append("▀", style=f"rgb({_rgb(above)}) on rgb({_rgb(below)})")
        text.append("\n")
    text.rstrip()
    return text


def _rgb(pixel: list[int]) -> str:
    return ",".join(map(str, pixel))
