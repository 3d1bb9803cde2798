"""Show which cached blocks LoRA adapters share.

    python -m examples.demos.adapters [--model headstart-tiny]

The adapters are generated: where the model would end its answer, "cheerful" writes "!" and
"doubtful" writes "?". Each swaps two rows of the output layer. It also changes attention a little,
so that its K/V differ from those of other adapters.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from examples.small_models.adapter import write_adapter
from headstart import LLM, RequestOutput, SamplingParams
from headstart.cli.demo import INSTRUCTION, demo_console, people_table
from headstart.cli.pool_picture import color_of
from headstart.cli.terminal import cached_share, duration

PARAMS = SamplingParams(
    temperature=0, max_tokens=32, stop=["!", "?"], include_stop_str_in_output=True
)
COLORS = {"cheerful": color_of(3), "doubtful": color_of(1), "jolly": color_of(3)}


@dataclass(frozen=True)
class Step:
    """A step of the demo.

    questions: the adapter's name and the text of each question. adapters: adapters that are loaded
    before the questions, as folders by name.
    """

    title: str
    questions: tuple[tuple[str | None, str], ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    in_one_batch: bool = False


JOHN = "What is the age of John Doe?"
ZACK = "What is the age of Zack Blue?"
WORK = "What is the occupation of Zack Blue?"
NAMES = (None, "cheerful", "doubtful")
# By folder: the mark that the adapter writes, and the seed of its other weights.
FOLDERS = {"a": ("!", 1), "b": ("?", 2), "copy of a": ("!", 1), "a, trained again": ("!", 3)}
STEPS = (
    Step(
        "Each adapter computes its own K/V of the table",
        tuple((name, JOHN) for name in NAMES),
        adapters={"cheerful": "a", "doubtful": "b"},
    ),
    Step("Then each adapter hits its own blocks", tuple((name, ZACK) for name in NAMES)),
    Step(
        "jolly is a copy of cheerful: the same weights, so the same blocks",
        (("jolly", WORK),),
        adapters={"jolly": "copy of a"},
    ),
    Step(
        "cheerful is loaded again with other weights: it hits none of its old blocks",
        (("cheerful", WORK),),
        adapters={"cheerful": "a, trained again"},
    ),
    Step(
        "All in one batch, each row with its own adapter",
        tuple((name, JOHN) for name in (*NAMES, "jolly")),
        in_one_batch=True,
    ),
)


def ask(llm: LLM, step: Step) -> list[RequestOutput]:
    """Ask the questions of a step about the table, one after another or in one batch."""
    names = [name for name, _ in step.questions]
    table = INSTRUCTION + people_table()
    chats = [[{"role": "user", "content": table + question}] for _, question in step.questions]
    if step.in_one_batch:
        return llm.chat(chats, PARAMS, use_tqdm=False, adapter=names)
    return [
        llm.chat(chat, PARAMS, adapter=name)[0] for chat, name in zip(chats, names, strict=True)
    ]


def draw_table(step: Step, outputs: Sequence[RequestOutput]) -> Table:
    """Draw the requests of a step, a row for each."""
    table = Table(
        title=step.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        expand=True,
    )
    for heading, width in (("adapter", 8), ("cached tokens", 13), ("first token", 11)):
        table.add_column(heading, width=width, header_style="dim")
    table.add_column("answer, and why not more was cached", ratio=1, header_style="dim")
    for (name, _), output in zip(step.questions, outputs, strict=True):
        shown = Text(name or "none", style=f"bold {COLORS.get(name or '', '')}")
        answer = Text().append(output.outputs[0].text, style="italic")
        if output.num_cached_tokens * 2 < len(output.prompt_token_ids):
            answer.append(f"\n{output.why_missed}", style="dim")
        wait = duration(output.metrics.time_to_first_token)
        table.add_row(shown, cached_share(output), wait, answer)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="headstart-tiny")
    arguments = parser.parse_args()
    console = demo_console()
    llm = LLM(arguments.model, num_blocks=1024, max_model_len=4096)
    with closing(llm), tempfile.TemporaryDirectory() as folder:
        end = min(llm.engine.model.eos_token_ids)
        for name, (mark, seed) in FOLDERS.items():
            [token] = llm.get_tokenizer().encode(mark, add_special_tokens=False)
            write_adapter(llm.engine.model, Path(folder) / name, (token, end), seed)
        console.print(
            "Two generated LoRA adapters: where the model ends its answer, "
            f"[bold {COLORS['cheerful']}]cheerful[/] writes ! and "
            f"[bold {COLORS['doubtful']}]doubtful[/] writes ?.\n"
        )
        outputs = []
        for step in STEPS:
            for name, source in step.adapters.items():
                llm.load_adapter(name, Path(folder) / source)
            answers = ask(llm, step)
            outputs += answers
            console.print(draw_table(step, answers))
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    console.print(
        f"{cached:,} of {prompts:,} prompt tokens were not computed again. Blocks are identified "
        "by the weights of an adapter, not by its name: equal adapters share blocks, different "
        "adapters never do."
    )


if __name__ == "__main__":
    main()
