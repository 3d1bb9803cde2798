"""`headstart demo`: the time that prefix caching saves, measured on a real run.

The prompt and its two questions are the usage example of vLLM's "Automatic Prefix Caching" page, as
chats. A third question continues the second chat and also hits its generated reply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import headstart
from headstart.cli.opening import quality_note, resolve_model
from headstart.cli.options import GroupedCommand, GroupedOption, flags, model_option, sort_options
from headstart.cli.pool_picture import PoolPicture, color_of
from headstart.cli.terminal import MAX_WIDTH, OutputConsole, cached_share, draw_svg, duration
from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.llm import LLM

INSTRUCTION = (
    "You are a helpful assistant in recognizes the content of tables in markdown format. "
    "Here is a table as follows.\n# Table\n\n"
)
ANSWER_TOKENS = 64
WARM_UP_TOKENS = 512
POOL_TOKENS = 5120  # blocks of 16 fill five rows of the picture
MAX_MODEL_LEN = 4800
PANEL = 4  # columns of a panel's frame


@click.command(cls=GroupedCommand, short_help="Show what prefix caching saves.")
@click.option(
    "--svg",
    cls=GroupedOption,
    type=click.Path(path_type=Path),
    help="Save the output as a picture in this file.",
)
@model_option
@flags(EngineConfig)
def demo(svg: Path | None, model: str, **options: Any) -> None:
    """Answer three questions about one table, whose tokens are computed once."""
    if svg is not None and (svg.is_dir() or not os.access(svg.parent, os.W_OK | os.X_OK)):
        reason = (
            "it is a folder" if svg.is_dir() else f"there is no folder {svg.parent} to write to"
        )
        raise ConfigError(f"cannot write {svg}: {reason}")
    for name in ("cache_dir", "cache_dir_bytes", "cache_words", "remote_cache"):
        options.pop(name)  # the environment may set it; the demo needs an empty cache
    engine = sort_options(options).engine
    pool = {"num_blocks": POOL_TOKENS // max(1, engine.get("block_size", 16))}
    console = demo_console()
    with console.status("loading the model"):
        options = {**pool, "max_model_len": MAX_MODEL_LEN, **engine}
        llm = headstart.LLM(resolve_model(model), **options)
    renderables: list[RenderableType] = []
    with closing(llm):
        renderables.append(Text(quality_note(model, engine) or f"model {model}", style="dim"))
        console.print(renderables[0])
        for part in _run(llm, console):
            console.print(part)
            renderables.append(part)
    if svg is not None:
        try:
            svg.write_text(draw_svg(renderables, "headstart demo"), "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {svg}: {error.strerror}") from error


def demo_console() -> Console:
    """Return a console for stdout, at most 80 columns wide."""
    console = OutputConsole(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    return console


class DemoRequest(NamedTuple):
    """A request: the title of its panel, the question, and a word of the right answer.

    with_table: True if the question begins a chat and follows the table; False if it continues the
    previous chat.
    """

    title: str
    question: str
    right: str
    with_table: bool = True

    def is_answered_by(self, text: str) -> bool:
        """Return True if the right answer is a word of `text`."""
        return re.search(rf"\b{re.escape(self.right)}\b", text) is not None


REQUESTS = (
    DemoRequest("a table of 30 people: how old is John Doe?", "What is the age of John Doe?", "29"),
    DemoRequest("the same table: how old is Zack Blue?", "What is the age of Zack Blue?", "30"),
    DemoRequest(
        "the same chat, next turn: what does he do?",
        "And what is the occupation of Zack Blue?",
        "Lawyer",
        with_table=False,
    ),
)


def people_table() -> str:
    """Return the table of the usage example, 30 rows in Markdown."""
    return files("headstart").joinpath("assets/people.md").read_text(encoding="utf-8")


def _run(llm: LLM, console: Console) -> Iterator[RenderableType]:
    """Yield a panel for each request as soon as it is answered, then the totals."""
    # First compute an unrelated prompt twice, since the first requests have one-time costs.
    warm = [index % 200 for index in range(WARM_UP_TOKENS)]
    with console.status("warming up"):
        for end in (1, 2):
            for _ in llm.stream([*warm, end], SamplingParams(temperature=0, max_tokens=4)):
                pass
        llm.manager.reset_prefix_cache()
    picture = PoolPicture(llm.manager)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    outputs: list[RequestOutput] = []
    num_right = 0
    messages: list[dict[str, str]] = []
    for number, request in enumerate(REQUESTS, start=1):
        question = request.question
        if request.with_table:
            messages, question = [], INSTRUCTION + people_table() + question
        messages.append({"role": "user", "content": question})
        with console.status(f"request {number}: {request.title}"):
            *_, output = picture.watch(llm.stream_chat(messages, params), number)
        outputs.append(output)
        text = output.outputs[0].text
        messages.append({"role": "assistant", "content": text})
        is_right = request.is_answered_by(text)
        num_right += is_right
        answer = Text("answer  ", style="dim").append(text, style="italic not dim")
        if not is_right:
            answer.append(f"  (the table says {request.right})", style="not dim")
        pool = picture.draw(console.width - PANEL)
        yield Panel(
            Group(_figures(outputs), Padding(answer, (1, 0)), pool),
            title=f"[bold]{number}[/] {request.title}",
            title_align="left",
            border_style=color_of(number),
        )
    first, second = (duration(output.metrics.time_to_first_token) for output in outputs[:2])
    prompts = [len(output.prompt_token_ids) for output in outputs]
    computed = [len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs]
    totals = Text("cold / warm  ", style="bold")
    totals.append(f"{first} / {second} = {_ratio(outputs[:2]):.1f}", style="green")
    totals.append(
        f"\nThe second question computed {computed[1]:,} of its {prompts[1]:,} prompt tokens, "
        f"the next turn {computed[2]:,} of its {prompts[2]:,}. "
        f"Right answers: {num_right} of {len(outputs)}.",
        style="not bold",
    )
    yield totals


def _figures(outputs: list[RequestOutput]) -> Table:
    output = outputs[-1]
    note = "cold" if len(outputs) == 1 else f"{_ratio(outputs):.0f}× sooner"
    return figures_table(
        {
            "prompt tokens": f"{len(output.prompt_token_ids):,}",
            "cached tokens": cached_share(output),
            "time to first token": f"{duration(output.metrics.time_to_first_token)}, {note}",
            "time per token": duration(output.metrics.time_per_token),
        }
    )


def _ratio(outputs: list[RequestOutput]) -> float:
    cold, warm = (output.metrics.time_to_first_token for output in (outputs[0], outputs[-1]))
    assert cold is not None and warm is not None
    return cold / warm


def figures_table(figures: Mapping[str, str]) -> Table:
    """Return a table of one row, whose header has the names of the figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0), header_style="dim")
    for name in figures:
        table.add_column(name, style="bold")
    table.add_row(*figures.values())
    return table
