"""`headstart demo --omni`: a model that hears and speaks, asked two questions about one recording.

The recording and what is written about it are the same in both questions, so the thinker's K/V,
its rows, and the talker's K/V for them are made once. The speech itself is made each time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import headstart
from headstart.cli.pool_picture import colour_of
from headstart.cli.reply_metrics import duration
from headstart.cli.show import demo_console, show
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headstart.omni.omni import Omni
    from headstart.omni.params import OmniOutput
    from headstart.omni.stage import StageMetrics

NOTE = (
    "A Qwen2.5-Omni with random weights, made on the spot: its words are noise and its speech is "
    "notes, one for each code, but every stage does what the real one does."
)
SECONDS, SAMPLING_RATE = 24, 16_000
CONTEXT = "This was said at the meeting: <|audio_bos|><|AUDIO|><|audio_eos|>\n" + (
    "Its minutes, as far as they were taken down, are those of the other meetings. " * 20
)
QUESTIONS = ("Who was against it, and why?", "What was decided in the end?")
VOICE = "Ada"
TEXT_TOKENS, SPEECH_TOKENS = 24, 64
POOL = {"num_blocks": 512, "block_size": 16}


@dataclass(frozen=True)
class Answer:
    """One answer and the seconds that its user waited for all of it."""

    output: OmniOutput
    seconds: float


def show_omni_demo(options: Mapping[str, Any], folder: Path | None) -> None:
    """Run the demo, print it, and write a WAV file for each answer into `folder` if there is one.

    Raises what loading and running raise.
    """
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    console = demo_console()
    with console.status("loading the model"):
        model = import_module("headstart.models.demo.omni").demo_omni_path()
        told = {**POOL, **options}
        of_model = {name: told.pop(name) for name in ("dtype", "device") if name in told}
        omni = headstart.Omni(model, **of_model, options=told)
    with closing(omni):
        show(chain([Text(NOTE, style="dim")], _run(omni, folder, console)), console)


def _run(omni: Omni, folder: Path | None, console: Console) -> Iterator[RenderableType]:
    with console.status("warming up, so that the first question is not slow for other reasons"):
        _ask(omni, "warm up", _recording(seed=9)[: 2 * SAMPLING_RATE])
        omni.reset_cache()
    answers = []
    for number, question in enumerate(QUESTIONS, start=1):
        with console.status(f"question {number}: {question}"):
            answers.append(_ask(omni, CONTEXT + question, _recording(seed=1), seed=number))
        where = "not written: --wav FOLDER writes it"
        if folder is not None:
            path = folder / f"answer-{number}.wav"
            answers[-1].output.save_wav(path)
            where = str(path)
        yield _card(number, question, answers[-1], where)
    yield _verdict(answers)


def _ask(omni: Omni, text: str, recording: NDArray[np.float32], seed: int = 0) -> Answer:
    params = headstart.OmniParams(
        text=SamplingParams(temperature=0.5, seed=seed, max_tokens=TEXT_TOKENS, ignore_eos=True),
        speech=SamplingParams(seed=seed, max_tokens=SPEECH_TOKENS, ignore_eos=True),
        voice=VOICE,
    )
    prompt: Any = {"prompt": text, "audio": [recording]} if "<|AUDIO|>" in text else text
    start = time.perf_counter()
    [output] = omni.generate(prompt, params)
    return Answer(output, time.perf_counter() - start)


def _recording(seed: int) -> NDArray[np.float32]:
    """Something like speech: syllables of a voice that rises and falls."""
    draw = np.random.default_rng(seed)
    at = np.arange(SECONDS * SAMPLING_RATE) / SAMPLING_RATE
    pitch = 120 + 40 * np.interp(at, np.arange(SECONDS), draw.uniform(-1, 1, SECONDS))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLING_RATE
    voiced = sum(np.sin(phase * harmonic) / harmonic for harmonic in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * 3.5 * at), 0, 1)
    sound: NDArray[np.float32] = (0.2 * voiced * syllables).astype(np.float32)
    return sound


def _card(number: int, question: str, answer: Answer, where: str) -> Panel:
    output = answer.output
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    rows = [(name, *_columns(metrics)) for name, metrics in output.metrics.items()]
    headings = ("stage", "computed", "cached", "rows from the store", "working", "done after")
    for heading in headings:
        side: JustifyMethod = "left" if heading == "stage" else "right"
        # Where the table does not fit, headings of several words are broken.
        table.add_column(heading, justify=side, no_wrap=" " not in heading)
    for row in rows:
        table.add_row(*row, style="bold")
    said = Text("text  ", style="dim").append(output.text, style="italic not dim")
    spoken = f"{output.seconds:.1f} s, {len(output.codes)} codes  ({where})"
    said.append("\nspeech  ", style="dim").append(spoken, style="not dim")
    return Panel(
        Group(table, Padding(said, (1, 0, 0, 0))),
        title=f"[bold]{number}[/] {question}",
        title_align="left",
        border_style=colour_of(number),
    )


def _columns(metrics: StageMetrics) -> tuple[str, ...]:
    rows = max(metrics.hit_rows.values(), default=0)
    return (
        f"{metrics.tokens - metrics.cached_tokens:,}",
        f"{metrics.cached_tokens:,}",
        f"{rows:,}" if rows else "–",
        duration(metrics.seconds),
        duration(metrics.total),
    )


def _verdict(answers: list[Answer]) -> Group:
    """What was saved, and what was not."""
    cold, warm = answers
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in ("question 1", "question 2", "sooner"):
        table.add_column(heading, justify="right")
    waits = {
        f"{name}'s first token": [
            answer.output.metrics[name].first_output or 0.0 for answer in answers
        ]
        for name in ("thinker", "talker")
    }
    waits["whole answer"] = [cold.seconds, warm.seconds]
    for name, (first, second) in waits.items():
        table.add_row(name, duration(first), duration(second), f"{first / second:.1f}×")
    vocoder = warm.output.metrics["token2wav"]
    share = f"Of the second answer's {duration(warm.seconds)} the vocoder took "
    share += f"{duration(vocoder.seconds)}; it works on whole answers, and knows again only those "
    share += "that are the same code for code."
    return Group(table, Padding(Text(share), (1, 0, 0, 0)))
