"""Show which cached blocks LoRA adapters share.

    python -m examples.demos.adapters [--model headstart-tiny]

The adapters are generated, so that their effect is visible without training: where the model would
end its answer, "cheerful" says "!" and "doubtful" says "?". They swap two rows of the output layer
and change attention a little, so that each has its own K/V.
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
class Act:
    """Adapters to load (folder by name), and the questions to ask with each adapter.

    The questions are asked one after another, or all in one batch.
    """

    title: str
    asks: tuple[tuple[str | None, str], ...]
    loads: Mapping[str, str] = field(default_factory=dict)
    in_one_batch: bool = False


JOHN = "What is the age of John Doe?"
ZACK = "What is the age of Zack Blue?"
WORK = "What is the occupation of Zack Blue?"
EVERYBODY = (None, "cheerful", "doubtful")
# Folders of adapters: the adapter's sign, and the seed of its other weights.
FOLDERS = {"a": ("!", 1), "b": ("?", 2), "copy of a": ("!", 1), "a, trained again": ("!", 3)}
ACTS = (
    Act(
        "Each adapter computes the table for itself",
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


def ask(llm: LLM, act: Act) -> list[RequestOutput]:
    """Ask an act's questions about the table."""
    names = [name for name, _ in act.asks]
    table = INSTRUCTION + people_table()
    chats = [[{"role": "user", "content": table + question}] for _, question in act.asks]
    if act.in_one_batch:
        return llm.chat(chats, PARAMS, use_tqdm=False, adapter=names)
    return [
        llm.chat(chat, PARAMS, adapter=name)[0] for chat, name in zip(chats, names, strict=True)
    ]


def act_table(act: Act, outputs: Sequence[RequestOutput]) -> Table:
    """Draw the requests of an act, a row for each."""
    table = Table(
        title=act.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        expand=True,
    )
    for heading, width in (("adapter", 8), ("cached tokens", 13), ("first token", 11)):
        table.add_column(heading, width=width, header_style="dim")
    table.add_column("answer, and why not more was cached", ratio=1, header_style="dim")
    for (name, _), output in zip(act.asks, outputs, strict=True):
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
        for name, (sign, seed) in FOLDERS.items():
            [token] = llm.get_tokenizer().encode(sign, add_special_tokens=False)
            write_adapter(llm.engine.model, Path(folder) / name, (token, end), seed)
        console.print(
            "Two generated LoRA adapters: where the model ends its answer, "
            f"[bold {COLORS['cheerful']}]cheerful[/] says ! and "
            f"[bold {COLORS['doubtful']}]doubtful[/] says ?.\n"
        )
        outputs = []
        for act in ACTS:
            for name, content in act.loads.items():
                llm.load_adapter(name, Path(folder) / content)
            answers = ask(llm, act)
            outputs += answers
            console.print(act_table(act, answers))
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    console.print(
        f"{cached:,} of {prompts:,} prompt tokens were not computed again. Blocks are identified "
        "by an adapter's weights, not by its name: an equal adapter shares them, another one "
        "never does."
    )


if __name__ == "__main__":
    main()
