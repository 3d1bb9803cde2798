"""`headstart demo --adapters`: who shares blocks when one model serves several adapters.

The adapters are made on the spot, so that their manner can be seen and needs no training: where
the model would end its answer, "cheerful" has it say "!" and "doubtful" "?". They do that by
swapping two rows of the output layer, and change the attention a little besides, so that their
K/V are their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headstart.cli.demo.table import INSTRUCTION, people_table
from headstart.cli.options import note_on, open_model
from headstart.cli.pool_picture import colour_of
from headstart.cli.reply_metrics import cached_share, duration
from headstart.cli.show import demo_console, show
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.llm import LLM

PARAMS = SamplingParams(
    temperature=0, max_tokens=32, stop=["!", "?"], include_stop_str_in_output=True
)
# Room for the table in every adapter's own blocks.
DEFAULTS = {"num_blocks": 1024, "max_model_len": 4096}
COLOURS = {"cheerful": colour_of(3), "doubtful": colour_of(1), "jolly": colour_of(3)}
NARROW = 76
"""Below so many columns the answers stand under the numbers."""


@dataclass(frozen=True)
class Act:
    """What is loaded (folder by name), and then asked: an adapter and a question for each request.

    They are asked one after another, or all in one batch.
    """

    title: str
    asks: tuple[tuple[str | None, str], ...]
    loads: Mapping[str, str] = field(default_factory=dict)
    in_one_batch: bool = False


JOHN = "What is the age of John Doe?"
ZACK = "What is the age of Zack Blue?"
WORK = "What is the occupation of Zack Blue?"
EVERYBODY = (None, "cheerful", "doubtful")
# Folders of adapters: the sign that each says, and the seed of its other weights.
FOLDERS = {"a": ("!", 1), "b": ("?", 2), "copy of a": ("!", 1), "a, trained again": ("!", 3)}
ACTS = (
    Act(
        "Each computes the table for itself",
        tuple((name, JOHN) for name in EVERYBODY),
        loads={"cheerful": "a", "doubtful": "b"},
    ),
    Act("From then on each hits its own blocks", tuple((name, ZACK) for name in EVERYBODY)),
    Act(
        "jolly is a copy of cheerful: the same weights, so the same blocks",
        (("jolly", WORK),),
        loads={"jolly": "copy of a"},
    ),
    Act(
        "cheerful is loaded again with other weights: none of its old blocks",
        (("cheerful", WORK),),
        loads={"cheerful": "a, trained again"},
    ),
    Act(
        "All in one batch, each row with its own adapter",
        tuple((name, JOHN) for name in (*EVERYBODY, "jolly")),
        in_one_batch=True,
    ),
)


def show_adapters(model: str, options: Mapping[str, Any], svg: Path | None) -> None:
    """Run the demo on a model and print it, into an SVG file as well if one is named.

    Raises what loading and running raise.
    """
    console = demo_console()
    with console.status("loading the model"):
        llm = open_model(model, {**DEFAULTS, **options})
    with closing(llm), tempfile.TemporaryDirectory() as folder:
        heading = Text(note_on(model, options) or f"model {model}", style="dim")
        show(chain([heading], _run(llm, Path(folder), console)), console, svg)


def _run(llm: LLM, folder: Path, console: Console) -> Iterator[RenderableType]:
    """A table for each act as soon as it is over, then what it comes to."""
    with console.status("making adapters"):
        for name, (sign, seed) in FOLDERS.items():
            _write_adapter(llm, folder / name, sign, seed)
    yield _introduction(folder / "a")
    outputs: list[RequestOutput] = []
    for act in ACTS:
        with console.status(act.title):
            for name, content in act.loads.items():
                llm.load_adapter(name, folder / content)
            found = _ask(llm, act)
        outputs += found
        yield ActTable(act, found)
    yield _verdict(outputs)


def _ask(llm: LLM, act: Act) -> list[RequestOutput]:
    names = [name for name, _ in act.asks]
    table = INSTRUCTION + people_table()
    chats = [[{"role": "user", "content": table + question}] for _, question in act.asks]
    if act.in_one_batch:
        return llm.chat(chats, PARAMS, use_tqdm=False, adapter=names)
    return [
        llm.chat(chat, PARAMS, adapter=name)[0] for chat, name in zip(chats, names, strict=True)
    ]


def _write_adapter(llm: LLM, folder: Path, sign: str, seed: int) -> None:
    """An adapter that says `sign` where the model would end its answer. Raises RequestError."""
    model, tokenizer = llm.engine.model, llm.get_tokenizer()
    spelled = [] if tokenizer is None else tokenizer.encode(sign, add_special_tokens=False)
    if len(spelled) != 1 or not model.eos_token_ids:
        raise RequestError(f"these adapters need a model that ends its texts, and a token {sign!r}")
    write = import_module("headstart.models.demo.adapter").write_adapter
    write(model, folder, (spelled[0], min(model.eos_token_ids)), seed)


def _introduction(folder: Path) -> Text:
    size = sum(path.stat().st_size for path in folder.iterdir())
    text = Text("\nTwo LoRA adapters, made on the spot, of ")
    text.append(f"{size / 1024:,.0f} KB: where the model ends its answer, ")
    text.append("cheerful", style=f"bold {COLOURS['cheerful']}").append(" says ! and ")
    return text.append("doubtful", style=f"bold {COLOURS['doubtful']}").append(" says ?.\n")


class ActTable:
    """The requests of an act: a row for each, or several lines where the row does not fit."""

    def __init__(self, act: Act, outputs: Sequence[RequestOutput]) -> None:
        self._act = act
        self._outputs = outputs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_narrow = options.max_width < NARROW
        table = Table(
            title=self._act.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 2, 0, 0),
            expand=True,
        )
        numbers = [] if is_narrow else [("cached tokens", 13), ("first token", 11)]
        for heading, width in [("adapter", 8), *numbers]:
            table.add_column(heading, width=width, header_style="dim")
        table.add_column("answer, and why not more was cached", ratio=1, header_style="dim")
        for (name, _), output in zip(self._act.asks, self._outputs, strict=True):
            shown = Text(name or "none", style=f"bold {COLOURS.get(name or '', '')}")
            share = cached_share(output)
            wait = duration(output.metrics.time_to_first_token)
            answer = _answer(output)
            if is_narrow:
                table.add_row(shown, Text(f"{share} cached, first token {wait}\n").append(answer))
            else:
                table.add_row(shown, share, wait, answer)
        yield table


def _answer(output: RequestOutput) -> Text:
    answer = Text().append(output.outputs[0].text, style="italic")
    if output.num_cached_tokens * 2 < len(output.prompt_token_ids):
        answer.append(f"\n{output.why_missed}", style="dim")
    return answer


def _verdict(outputs: list[RequestOutput]) -> Text:
    asked = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return Text(
        f"{cached:,} of {asked:,} prompt tokens were not computed again. Blocks go by what an "
        "adapter does, not by its name: an equal one shares them, another one never does."
    )
