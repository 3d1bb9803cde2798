"""`headstart demo`: what prefix caching saves, shown on a real run.

The prompt and its two questions are the usage example of vLLM's "Automatic Prefix Caching"
page, asked as chats; a further question in the second chat then hits what its first reply
generated, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from headstart.cli.options import DEFAULT_MODEL, note_on, open_model
from headstart.cli.pool_picture import PoolPicture, colour_of
from headstart.cli.reply_metrics import cached_share, duration
from headstart.cli.show import PANEL, Figures, demo_console, show
from headstart.engine.params import SamplingParams

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.llm import LLM

INSTRUCTION = (
    "You are a helpful assistant in recognizes the content of tables in markdown format. "
    "Here is a table as follows.\n# Table\n\n"
)
QUESTION = "What is the age of {0}?"
NEXT_QUESTION = "And what is the occupation of {0}?"
JOHN, ZACK = "John Doe", "Zack Blue"
ANSWER_TOKENS = 64
WARM_UP_TOKENS = 512
# Blocks of 16 fill five rows of the picture.
POOL_TOKENS = 5120
MAX_MODEL_LEN = 4800


@dataclass(frozen=True)
class Ask:
    """One request of the demo: its card's title, the question, and the right answer.

    `sentence` is the whole answer of headstart-tiny, which ends in `right`. A request that
    `continues` is asked in the chat before it.
    """

    title: str
    question: str
    sentence: str
    right: str
    continues: bool = False

    def is_answered_by(self, text: str, model: str) -> bool:
        """Whether `text` is right: whole where we know the words, else `right` is a word of it."""
        if model == DEFAULT_MODEL:
            return text == f"{self.sentence} {self.right}"
        return re.search(rf"\b{re.escape(self.right)}\b", text) is not None


def show_demo(model: str, options: Mapping[str, Any], svg: Path | None) -> None:
    """Run the demo on a model and print it, into an SVG file as well if one is named.

    Raises what loading and running raise.
    """
    console = demo_console()
    with console.status("loading the model"):
        llm = open_model(model, {**_defaults(options), **options})
    with closing(llm):
        heading = Text(note_on(model, options) or f"model {model}", style="dim")
        show(chain([heading], _run(llm, model, console)), console, svg)


def _run(llm: LLM, model: str, console: Console) -> Iterator[RenderableType]:
    """A card for each request as soon as it is answered, then what it comes to."""
    with console.status("warming up, so that the first request is not slow for other reasons"):
        _warm_up(llm)
    picture = PoolPicture(llm.engine.manager)
    outputs: list[RequestOutput] = []
    right = 0
    messages: list[dict[str, str]] = []
    for number, ask in enumerate(demo_asks(), start=1):
        asked = {"role": "user", "content": ask.question}
        messages = [*messages, asked] if ask.continues else [asked]
        with console.status(f"request {number}: {ask.title}"):
            output = _answer(llm, messages, picture, number)
        outputs.append(output)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        is_right = ask.is_answered_by(output.outputs[0].text, model)
        right += is_right
        note = "" if is_right else f"  (the table says {ask.right})"
        pool = picture.draw(console.width - PANEL)
        yield _card(number, ask.title, outputs, pool, note)
    yield _verdict(outputs, right)


def _defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """A pool that the picture can show, whatever the size of its blocks."""
    block_size = max(1, options.get("block_size", 16))
    return {"num_blocks": POOL_TOKENS // block_size, "max_model_len": MAX_MODEL_LEN}


def demo_asks() -> list[Ask]:
    """The three requests of the demo."""
    table = INSTRUCTION + people_table()
    return [
        Ask(
            "a table of 30 people: how old is John Doe?",
            table + QUESTION.format(JOHN),
            f"The age of {JOHN} is",
            "29",
        ),
        Ask(
            "the same table: how old is Zack Blue?",
            table + QUESTION.format(ZACK),
            f"The age of {ZACK} is",
            "30",
        ),
        Ask(
            "the same chat, next turn: what does he do?",
            NEXT_QUESTION.format(ZACK),
            f"The occupation of {ZACK} is",
            "Lawyer",
            continues=True,
        ),
    ]


def people_table() -> str:
    """The 30 rows of the usage example, in Markdown."""
    return files("headstart").joinpath("assets/people.md").read_text(encoding="utf-8")


def _warm_up(llm: LLM) -> None:
    """Have the libraries allocate and plan what they do once, on a prompt of no use later.

    Asked again with another end, so that a hit has been there too.
    """
    prompt = [index % 200 for index in range(WARM_UP_TOKENS)]
    for end in (1, 2):
        for _ in llm.stream([*prompt, end], SamplingParams(temperature=0, max_tokens=4)):
            pass
    llm.engine.manager.reset_prefix_cache()


def _answer(
    llm: LLM, messages: list[dict[str, str]], picture: PoolPicture, number: int
) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    *_, output = picture.watch(llm.stream_chat(messages, params), number)
    return output


def _card(number: int, title: str, outputs: list[RequestOutput], pool: Text, note: str) -> Panel:
    """The last request's numbers, its answer with a note on it, and the pool."""
    output, colour = outputs[-1], colour_of(number)
    figures = Figures(
        {
            "prompt tokens": f"{len(output.prompt_token_ids):,}",
            "cached tokens": cached_share(output),
            "time to first token": duration(output.metrics.time_to_first_token) + _sooner(outputs),
            "time per token": duration(output.metrics.time_per_token),
        }
    )
    answer = Text("answer  ", style="dim").append(output.outputs[0].text, style="italic not dim")
    answer.append(note, style="not dim")
    return Panel(
        Group(figures, Padding(answer, (1, 0)), pool),
        title=f"[bold]{number}[/] {title}",
        title_align="left",
        border_style=colour,
    )


def _sooner(outputs: list[RequestOutput]) -> str:
    return ", cold" if len(outputs) == 1 else f", {_ratio(outputs):.0f}× sooner"


def _ratio(outputs: list[RequestOutput]) -> float:
    cold, warm = (output.metrics.time_to_first_token for output in (outputs[0], outputs[-1]))
    assert cold is not None and warm is not None
    return cold / warm


def _verdict(outputs: list[RequestOutput], right: int) -> Text:
    cold, warm = (duration(output.metrics.time_to_first_token) for output in outputs[:2])
    verdict = Text("cold / warm  ", style="bold")
    verdict.append(f"{cold} / {warm} = {_ratio(outputs[:2]):.1f}", style="green")
    verdict.append(
        f"\nThe second question computed {_computed(outputs[1]):,} of its "
        f"{len(outputs[1].prompt_token_ids):,} prompt tokens, the next turn "
        f"{_computed(outputs[2]):,} of its {len(outputs[2].prompt_token_ids):,}.",
        style="not bold",
    )
    verdict.append(f" Right answers: {right} of {len(outputs)}.", style="not bold")
    return verdict


def _computed(output: RequestOutput) -> int:
    return len(output.prompt_token_ids) - output.num_cached_tokens
