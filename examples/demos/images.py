"""Show which K/V are computed and which pictures are encoded in five requests with pictures.

    python -m examples.demos.images [--model FOLDER]

Without a model, a small LLaVA with random weights is generated. Its answers are noise, but its
latencies are real.
"""

import argparse
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.small_models.vision import demo_vision_path
from headstart import LLM, RequestOutput, SamplingParams
from headstart.cli.demo import PANEL, demo_console, figures_table
from headstart.cli.pool_picture import PoolPicture, color_of
from headstart.cli.terminal import cached_share, duration

PARAMS = SamplingParams(temperature=0, max_tokens=24)
SIZE = 480


@dataclass(frozen=True)
class Question:
    """A request: its title, the parts of its message, and the result that it shows.

    continues: the message continues the previous chat.
    """

    title: str
    parts: tuple[str | Image.Image, ...]
    result: str
    continues: bool = False


def make_picture(seed: int) -> Image.Image:
    """Draw hills under a sky with a sun, which depend only on the seed."""
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


def make_questions() -> list[Question]:
    """Return the five requests of the demo."""
    one, two = make_picture(1), make_picture(2)
    changed = one.copy()
    changed.putpixel((240, 240), (255, 0, 255))
    return [
        Question("a picture and a question", (one, "What is this?"), "Everything is computed."),
        Question(
            "the same picture, another question",
            (one, "Is the sun up?"),
            "The picture's K/V are cached; the vision tower does nothing.",
        ),
        Question(
            "the same chat continues with another picture",
            (two, "And on this one?"),
            "The first picture and the turn are cached; the new picture is encoded.",
            continues=True,
        ),
        Question(
            "both pictures in the other order",
            (two, one, "Which is warmer?"),
            "No K/V match, but the embeddings of both pictures are cached.",
        ),
        Question(
            "the first picture with one pixel changed",
            (changed, "What is this?"),
            "Another picture: neither its K/V nor its embeddings are cached.",
        ),
    ]


def make_message(parts: tuple[str | Image.Image, ...]) -> dict[str, Any]:
    """Return a user's message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def draw_panel(
    number: int, question: Question, output: RequestOutput, encoded: int, pictures: RenderableType
) -> Panel:
    """Draw the metrics of a request, its result, its pictures and the pool."""
    figures = figures_table(
        {
            "prompt tokens": f"{len(output.prompt_token_ids):,}",
            "of images": f"{sum(image.num_tokens for image in output.images):,}",
            "cached tokens": cached_share(output),
            "images encoded": f"{encoded} of {len(output.images)}",
            "first token": duration(output.metrics.time_to_first_token),
        }
    )
    return Panel(
        Group(figures, Padding(Text(question.result, style="italic"), (1, 0)), pictures),
        title=f"[bold]{number}[/] {question.title}",
        title_align="left",
        border_style=color_of(number),
    )


def draw_thumbnails(question: Question, width: int = 16) -> Padding:
    """Draw the pictures of a request in half blocks, two pixels in each character."""
    shown = Table.grid(padding=(0, 2))
    thumbnails = []
    for picture in (part for part in question.parts if not isinstance(part, str)):
        small = np.asarray(picture.resize((width, width))).tolist()
        text = Text()
        for upper, lower in zip(small[::2], small[1::2], strict=True):
            for above, below in zip(upper, lower, strict=True):
                colors = [f"rgb({','.join(map(str, pixel))})" for pixel in (above, below)]
                text.append("▀", style=" on ".join(colors))
            text.append("\n")
        text.rstrip()
        thumbnails.append(text)
    shown.add_row(*thumbnails)
    return Padding(shown, (0, 0, 1, 0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    arguments = parser.parse_args()
    console = demo_console()
    with console.status("generating the model, and loading it"):
        llm = LLM(arguments.model or str(demo_vision_path()), num_blocks=128)
    images = llm.frontend.images
    assert images is not None, "the model takes only text; allowed: a vision model"
    with closing(llm):
        llm.chat([make_message((make_picture(3), "?"))], PARAMS, use_tqdm=False)  # warm up
        llm.manager.reset_prefix_cache()
        images.cache.clear()
        picture = PoolPicture(llm.manager)
        outputs: list[RequestOutput] = []
        messages: list[dict[str, Any]] = []
        start = images.cache.num_encoded
        for number, question in enumerate(make_questions(), start=1):
            message = make_message(question.parts)
            messages = [*messages, message] if question.continues else [message]
            before = images.cache.num_encoded
            with console.status(f"request {number}: {question.title}"):
                *_, output = picture.watch(llm.stream_chat(messages, PARAMS), number)
            outputs.append(output)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            pool: RenderableType = picture.draw(console.width - PANEL)
            if console.color_system is not None:
                pool = Group(draw_thumbnails(question), pool)
            encoded = images.cache.num_encoded - before
            console.print(draw_panel(number, question, output, encoded, pool))
        encoded = images.cache.num_encoded - start
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    computed = prompts - sum(output.num_cached_tokens for output in outputs)
    shown = sum(len(output.images) for output in outputs)
    console.print(
        f"[bold]Of {prompts:,} prompt tokens {computed:,} were computed; "
        f"of {shown} pictures {encoded} were encoded."
    )


if __name__ == "__main__":
    main()
