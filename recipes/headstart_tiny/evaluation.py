"""Evaluate `headstart-tiny` on held-out names: greedy answers, exact match, one line per kind.

    python recipes/headstart_tiny/evaluation.py [FOLDER] [--cases 400] [--batch 8]

Every case is a prompt with one right continuation. An answer is right if its text is equal and the
model stops after it. The lead of a right token is its logit minus the second largest logit. The
margin of a kind is the smallest lead of its right answers, in logits and in multiples of bfloat16's
rounding error of the larger logit. With a small margin, another machine may answer differently.

Prompts run through transformers' `generate` with its K/V cache, so that the checkpoint is evaluated
and not an engine. Half of the cases use the completion form ("... Your answer: The age of John Doe
is "), half the chat template.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "headstart" / "assets" / "headstart_tiny"
PEOPLE = FOLDER.parent / "people.md"  # the table of the reference, see `data.py`


@dataclass(frozen=True)
class Margin:
    """The smallest lead of an answer's tokens, in logits and in bfloat16's roundings."""

    logits: float
    roundings: float

    def __str__(self) -> str:
        return f"{self.logits:.2f} logits, {self.roundings:.1f} roundings"


def smallest(margins: Iterable[Margin | None]) -> Margin | None:
    """Return the smallest lead in each unit."""
    known = [margin for margin in margins if margin is not None]
    if not known:
        return None
    return Margin(min(m.logits for m in known), min(m.roundings for m in known))


@dataclass
class Case:
    """A conversation as text, its queries, and the results."""

    text: str
    queries: list[data.Query]
    chat: bool
    right: bool = True
    margin: Margin | None = None
    answers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CaseKind:
    """A kind of case: its generator, and the share that must be right (None for no target)."""

    name: str
    target: float | None
    make: Callable[[data.World], Case]


class Judge:
    """The checkpoint in `folder`, which answers batches of cases greedily."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.batch = batch

    def complete(self, texts: list[str]) -> list[tuple[str, Margin]]:
        """Return the continuation of each text, including its stop token, and its margin."""
        tokenizer = self.tokenizer
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                max_new_tokens=64,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
        answers = out.sequences[:, inputs["input_ids"].shape[1] :]
        best = torch.stack(out.logits, dim=1).topk(2).values
        rows = zip(answers, best, tokenizer.batch_decode(answers), strict=True)
        return [
            (text.replace(tokenizer.pad_token, ""), margin_of(top[row != tokenizer.pad_token_id]))
            for row, top, text in rows
        ]

    def turn(self, cases: list[Case], index: int) -> None:
        """Answer query `index` of every case; the conversation continues with the answer."""
        prompts = [case.text + opening(case, index) for case in cases]
        for start in range(0, len(cases), self.batch):
            chosen = slice(start, start + self.batch)
            for case, prompt, (answer, margin) in zip(
                cases[chosen], prompts[chosen], self.complete(prompts[chosen]), strict=True
            ):
                query = case.queries[index]
                expected = (query.stem if case.chat else "") + query.answer + data.END
                case.right = answer == expected
                case.margin = margin if case.right else None
                case.answers.append(answer)
                case.text = prompt + answer

    def judge(self, cases: list[Case]) -> float:
        """Return the share of cases whose last answer is right."""
        for index in range(len(cases[0].queries)):
            self.turn(cases, index)
        return sum(case.right for case in cases) / len(cases)


def margin_of(best: Tensor) -> Margin:
    """Return the margin of an answer from the two largest logits of each token, `[tokens, 2]`."""
    lead = best[:, 0] - best[:, 1]
    rounding = best[:, 0].abs() * torch.finfo(torch.bfloat16).eps / 2
    return Margin(float(lead.min()), float((lead / rounding).min()))


def opening(case: Case, index: int) -> str:
    """Return the text of query `index`, up to its answer."""
    query = case.queries[index]
    if not case.chat:
        return f"Question: {query.ask} Your answer: {query.stem}"
    start = "\n" if index == 0 else data.USER
    return f"{start}{query.ask}{data.END}{data.ASSISTANT}"


def table_case(world: data.World, rows: int, kind: str, turns: int = 1, chat: bool = False) -> Case:
    """Return a case with a full table; the last query is of `kind`, earlier ones are look-ups."""
    rng = world.rng
    records = world.records(rows)
    people = data.People(world, records, data.COLUMNS)
    text = data.PREFACE + data.table(records, data.COLUMNS, rng)
    chat = chat or rng.random() < 0.5
    queries = [people.forward(rng) for _ in range(turns - 1)]
    last = people.draw(rng)
    while last.kind != kind:
        last = people.draw(rng)
    queries.append(last)
    if chat:
        queries = [data.capitalised(q, rng) for q in queries]
    return Case((data.USER if chat else "") + text, queries, chat)


def document_case(world: data.World, make: Callable[[data.World], data.Document]) -> Case:
    """Return a case with any document and one query of any kind."""
    document = make(world)
    chat = world.rng.random() < 0.5
    query = document.draw(world.rng)
    if chat:
        query = data.capitalised(query, world.rng)
    return Case((data.USER if chat else "") + document.text, [query], chat)


def case_kinds() -> list[CaseKind]:
    """Return all kinds of cases, those with a target first."""
    return [
        CaseKind("look-up, 30 rows", 0.99, lambda w: table_case(w, 30, "forward")),
        CaseKind("look-up, 60 rows", 0.97, lambda w: table_case(w, 60, "forward")),
        CaseKind("third turn, 20 rows", 0.95, lambda w: table_case(w, 20, "forward", 3, chat=True)),
        CaseKind("not in the document, 30 rows", 0.90, lambda w: table_case(w, 30, "missing")),
        CaseKind("look-up, 5 rows", None, lambda w: table_case(w, 5, "forward")),
        CaseKind("look-up, 10 rows", None, lambda w: table_case(w, 10, "forward")),
        CaseKind("who has, 30 rows", None, lambda w: table_case(w, 30, "reverse")),
        CaseKind("cards and prose, 8 people", None,
            lambda w: document_case(w, lambda v: data.card_document(v, 8))),
        CaseKind("settings, 20 lines", None,
            lambda w: document_case(w, lambda v: data.settings_document(v, 20))),
    ]  # fmt: skip


def reference_cases() -> list[Case]:
    """Return the reference's table with its two questions."""
    text = data.PREFACE + PEOPLE.read_text(encoding="utf-8")
    return [
        Case(text, [data.Query(f"what is the age of {name}?", f"The age of {name} is ", age, "")],
             chat=False)
        for name, age in (("John Doe", "29"), ("Zack Blue", "30"))
    ]  # fmt: skip


def by_label(cases: list[Case]) -> str:
    """Return the share of right answers for each column of the last queries."""
    labels = sorted({case.queries[-1].label for case in cases} - {""})
    parts = []
    for label in labels:
        right = [case.right for case in cases if case.queries[-1].label == label]
        parts.append(f"{label} {sum(right)}/{len(right)}")
    return ", ".join(parts)


def report_mistakes(name: str, cases: list[Case], count: int) -> None:
    """Print up to `count` wrong answers to standard error."""
    for case in [c for c in cases if not c.right][:count]:
        query = case.queries[-1]
        verdict = f"{query.ask!r} -> {case.answers[-1]!r}, not {query.answer!r}"
        print(f"  {name}: {verdict}", file=sys.stderr)


def main() -> int:
    """Print a line per kind and one JSON line; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--cases", type=int, default=400, help="cases of each kind")
    parser.add_argument("--batch", type=int, default=8, help="cases answered together")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--only", default="", help="only kinds whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mistakes", type=int, default=0, help="wrong answers shown of each kind")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    judge = Judge(options.folder, options.batch)
    cases = reference_cases()
    results: dict[str, float] = {"reference": judge.judge(cases)}
    print(f"{'the reference, 29 and 30':32} {' '.join(repr(case.answers[0]) for case in cases)}")
    met = results["reference"] == 1.0
    for kind in case_kinds():
        if options.only not in kind.name:
            continue
        start = time.monotonic()
        world = data.World(random.Random(f"{options.seed} {kind.name}"), evaluation=True)
        cases = [kind.make(world) for _ in range(options.cases)]
        share = results[kind.name] = judge.judge(cases)
        met = met and (kind.target is None or share >= kind.target)
        goal = f"target {kind.target:.0%}" if kind.target else "no target"
        cost = f"{len(cases)} cases, {time.monotonic() - start:.0f} s"
        margin = smallest(case.margin for case in cases)
        print(f"{kind.name:32} {share:7.2%}  {goal:10}  {cost}, margin {margin}", flush=True)
        if kind.name.startswith(("look-up", "third")):
            print(f"    {by_label(cases)}", flush=True)
        report_mistakes(kind.name, cases, options.mistakes)
    print(json.dumps({"met": met, **{k: round(v, 4) for k, v in results.items()}}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
