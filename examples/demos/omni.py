"""Ask a speech model two questions about one recording.

    python -m examples.demos.omni [--wav FOLDER]

Both prompts begin with the same description and recording, so the second question hits the caches
of the thinker and the talker. The speech is generated each time.
"""

import argparse
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.small_models.omni import DEMO_OMNI, OmniSizes, demo_omni_path
from headstart import Omni, OmniOutput, OmniParams, SamplingParams
from headstart.cli.demo import demo_console
from headstart.cli.pool_picture import color_of
from headstart.cli.terminal import duration

NOTE = (
    "A generated Qwen2.5-Omni with random weights. Its words are noise and its speech is one note "
    "per code, but every stage does the work of the real model."
)
SAMPLING_RATE = 16_000
CONTEXT = "This was said at the meeting: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
MINUTES = "The minutes of this meeting are as long as the minutes of all other meetings. "
QUESTIONS = ("Who was against it, and why?", "What was decided in the end?")


@dataclass(frozen=True)
class Answer:
    """One answer and the seconds until it was complete."""

    output: OmniOutput
    seconds: float


def ask(omni: Omni, text: str, recording: NDArray[np.float32], codes: int, seed: int) -> Answer:
    """Ask a question about a recording; the answer has up to `codes` codes of speech."""
    params = OmniParams(
        text=SamplingParams(temperature=0.5, seed=seed, max_tokens=24, ignore_eos=True),
        speech=SamplingParams(seed=seed, max_tokens=codes, ignore_eos=True),
        voice="Ada",
    )
    start = time.perf_counter()
    [output] = omni.generate({"prompt": text, "audio": [recording]}, params)
    return Answer(output, time.perf_counter() - start)


def make_recording(seed: int, seconds: int) -> NDArray[np.float32]:
    """Make a sound like speech: syllables of a voice that rises and falls."""
    random = np.random.default_rng(seed)
    time_axis = np.arange(seconds * SAMPLING_RATE) / SAMPLING_RATE
    pitch = 120 + 40 * np.interp(time_axis, np.arange(seconds), random.uniform(-1, 1, seconds))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLING_RATE
    voiced = sum(np.sin(phase * harmonic) / harmonic for harmonic in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * 3.5 * time_axis), 0, 1)
    return (0.2 * voiced * syllables).astype(np.float32)


def draw_panel(number: int, question: str, answer: Answer, where: str) -> Panel:
    """Draw the metrics of an answer's stages, its text, and the file of its speech."""
    output = answer.output
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("stage", "computed", "cached", "rows from the store", "working", "done after"):
        side: Any = "left" if heading == "stage" else "right"
        table.add_column(heading, justify=side, no_wrap=" " not in heading)
    for name, metrics in output.metrics.items():
        rows = max(metrics.hit_rows.values(), default=0)
        table.add_row(
            name,
            f"{metrics.tokens - metrics.cached_tokens:,}",
            f"{metrics.cached_tokens:,}",
            f"{rows:,}" if rows else "–",
            duration(metrics.seconds),
            duration(metrics.total),
            style="bold",
        )
    speech = f"{output.seconds:.1f} s, {len(output.codes)} codes  ({where})"
    text = Text("text  ", style="dim").append(output.text, style="italic not dim")
    text.append("\nspeech  ", style="dim").append(speech, style="not dim")
    return Panel(
        Group(table, Padding(text, (1, 0, 0, 0))),
        title=f"[bold]{number}[/] {question}",
        title_align="left",
        border_style=color_of(number),
    )


def draw_totals(cold: Answer, warm: Answer) -> Group:
    """Draw the latencies of both answers, and the seconds that the vocoder took."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in ("question 1", "question 2", "speedup"):
        table.add_column(heading, justify="right")
    waits = {
        f"{name}'s first token": [
            answer.output.metrics[name].first_output or 0.0 for answer in (cold, warm)
        ]
        for name in ("thinker", "talker")
    }
    waits["whole answer"] = [cold.seconds, warm.seconds]
    for name, (first, second) in waits.items():
        table.add_row(name, duration(first), duration(second), f"{first / second:.1f}×")
    vocoder = duration(warm.output.metrics["token2wav"].seconds)
    note = (
        f"The vocoder took {vocoder} of the second answer's {duration(warm.seconds)}. It caches "
        "whole answers, so it hits only if all codes of an answer are equal."
    )
    return Group(table, Padding(Text(note), (1, 0, 0, 0)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wav", type=Path, help="write each answer into this folder")
    parser.add_argument("--tiny", action="store_true", help="a smaller model, a shorter recording")
    arguments = parser.parse_args()
    tiny: bool = arguments.tiny
    if arguments.wav is not None:
        arguments.wav.mkdir(parents=True, exist_ok=True)
    seconds, minutes, codes = (3, 5, 16) if tiny else (24, 20, 64)
    console = demo_console()
    with console.status("generating the model, and loading it"):
        model = demo_omni_path(OmniSizes(64, 2, 48, 2, 4) if tiny else DEMO_OMNI)
        omni = Omni(model, options={"num_blocks": 512, "block_size": 16})
    console.print(f"[dim]{NOTE}")
    answers = []
    with closing(omni):
        with console.status("warming up"):
            ask(omni, CONTEXT, make_recording(9, 2), codes, 0)
            omni.reset_cache()
        for number, question in enumerate(QUESTIONS, start=1):
            with console.status(f"question {number}: {question}"):
                text = CONTEXT + minutes * MINUTES + question
                answers.append(ask(omni, text, make_recording(1, seconds), codes, number))
            where = "not written: --wav FOLDER writes it"
            if arguments.wav is not None:
                path = arguments.wav / f"answer-{number}.wav"
                answers[-1].output.save_wav(path)
                where = str(path)
            console.print(draw_panel(number, question, answers[-1], where))
    console.print(draw_totals(*answers))


if __name__ == "__main__":
    main()
