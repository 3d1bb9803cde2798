"""Make `headstart-tiny` from scratch: data, tokenizer, wired weights, and optional training.

    python recipes/headstart_tiny/train.py --out build/tiny [--minutes 20]

The first weights are a circuit for look-ups (`wiring.py`), so no training is needed. Training
starts with short sequences (tables of a few rows, many questions each). The loss counts only
answers and their stems. Wired weights take much smaller steps than random weights. The tables grow
when enough whole answers are right. An interrupted run resumes from its last checkpoint. Progress
goes to standard output and to `progress.jsonl` in the output folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokens import IGNORE, Batch, BatchMaker, Level, load_tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from wiring import Wiring

LEVELS = (
    Level(4, 512, forward=0.6, plain=0.6, mark=0.9),
    Level(14, 2048, forward=0.65, plain=0.65, mark=0.92),
    Level(62, 4096, forward=0.7, plain=0.8),
)


@dataclass(frozen=True)
class Settings:
    """The settings of a run; every field is a flag of the command line."""

    out: str = "build/tiny"
    seed: int = 0
    workers: int = 2
    minutes: float = 0.0  # no training; the model card describes its effect on wired weights
    vocab: int = 2048
    width: int = 480
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    feed_forward: int = 176
    rope_base: float = 1e12
    batch_tokens: int = 2048
    rate: float = 1e-3
    care: float = 0.002
    stem_weight: float = 1.0
    first_level: int = 0
    compile: int = 1
    save_every: float = 120.0


def build_model(
    s: Settings, tokenizer: PreTrainedTokenizerFast
) -> tuple[LlamaForCausalLM, dict[str, Tensor]]:
    """Return a Llama that is wired for look-ups, and masks of its wired weights.

    Its norms are not trained, because wired registers are scaled by them.
    """
    config = LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.width, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim,
        intermediate_size=s.feed_forward, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope_base},
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(s.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.requires_grad_(False)
        wired = Wiring(model, tokenizer.backend_tokenizer).install()
    return model, wired


class Adam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) with steps that are `care` times as long for wired weights.

    With normal steps, training would destroy the wired weights before it learns a replacement.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], wired: dict[str, Tensor], rate: float, care: float
    ) -> None:
        super().__init__(list(parameters.values()), {"lr": rate, "step": 0})
        for name, parameter in parameters.items():
            mark = wired.get(name, torch.full_like(parameter, float("embed" in name)))
            if "layers" in name and "layers.5." not in name:
                mark = torch.ones_like(parameter)  # changes here disturb all later layers
            self.state[parameter]["scale"] = 1 - (1 - care) * mark
            for moment in ("mean", "square"):
                self.state[parameter][moment] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step along `grad`, with the current rate of the parameter group."""
        [group] = self.param_groups
        group["step"] += 1
        for parameter in group["params"]:
            state, grad = self.state[parameter], parameter.grad
            state["mean"].lerp_(grad, 0.1)
            state["square"].lerp_(grad * grad, 0.02)
            mean = state["mean"] / (1 - 0.9 ** group["step"])
            square = state["square"] / (1 - 0.98 ** group["step"])
            change = mean / (square.sqrt() + 1e-8)
            parameter.sub_(group["lr"] * state["scale"] * change)


@dataclass
class Score:
    """Losses of value and stem tokens, and the shares of right tokens and of right values."""

    loss: float
    stem: float
    token: float
    exact: float


def batch_loss(
    model: LlamaForCausalLM, body: Callable[..., Tensor], batch: Batch, stem_weight: float
) -> tuple[Tensor, Score]:
    """Return the loss of a batch and its score; values have weight 1, stems `stem_weight`."""
    tokens, targets, answer = (
        torch.from_numpy(a) for a in (batch.tokens, batch.targets, batch.answer)
    )
    chosen = targets != IGNORE
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(tokens)[chosen]
        logits = model.lm_head(hidden).float()
    goal, number = targets[chosen], answer[chosen]
    each = F.cross_entropy(logits, goal, reduction="none")
    weight = torch.where(number > 0, 1.0, stem_weight)
    loss = (each * weight).sum() / weight.sum()
    with torch.no_grad():
        hit = (logits.argmax(-1) == goal).float()
        values = number > 0
        whole = torch.ones(int(number.max()) + 1).scatter_reduce(0, number, hit, "amin")
        exact = whole[1:].mean().item()
        parts = each[values], each[~values], hit[values]
        means = [part.mean().item() for part in parts]
        score = Score(means[0], means[1], means[2], exact)
    return loss, score


KEYS = ("loss", "stem", "token", "exact")


class Feeder:
    """A thread that makes batches in advance, at the last requested level."""

    def __init__(self, maker: BatchMaker, tokens: int, step: int, level: Level) -> None:
        self.maker, self.tokens, self.level, self.step = maker, tokens, level, step
        self.ready: queue.Queue[tuple[Level, Batch]] = queue.Queue(4)
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self) -> None:
        while True:
            level = self.level
            tokens = self.tokens * (1 if level.length <= 512 else 2)
            self.ready.put((level, self.maker.make(self.step, level, tokens)))
            self.step += 1

    def next(self, level: Level) -> Batch:
        """Return the next batch at `level`; batches of other levels are discarded."""
        self.level = level
        while True:
            made_for, batch = self.ready.get()
            if made_for == level:
                return batch


class Trainer:
    """One run: the model, its optimizer, and the position in the curriculum."""

    def __init__(self, s: Settings, rank: int = 0) -> None:
        self.s = s
        self.rank = rank
        self.out = Path(s.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(self.out, s.vocab, s.seed)
        self.model, wired = build_model(s, self.tokenizer)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = Adam(trained, wired, s.rate, s.care)
        self.step, self.seen, self.spent, self.level = 0, 0, 0.0, s.first_level
        self.recent: deque[float] = deque(maxlen=40)
        if (self.out / "checkpoint.pt").exists():
            self.resume()
        inner = self.model.model
        self.body = lambda tokens: inner(tokens, use_cache=False).last_hidden_state
        if s.compile:
            compiled: Callable[..., Any] = torch.compile(inner, dynamic=False)
            self.body = lambda tokens: compiled(tokens, use_cache=False).last_hidden_state

    def resume(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen, self.spent, self.level = state["place"]

    def save(self) -> None:
        """Write the checkpoint to a new file, then replace the old one atomically."""
        part = self.out / "checkpoint.part"
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "place": [self.step, self.seen, self.spent, self.level],
        }
        torch.save(state, part)
        part.replace(self.out / "checkpoint.pt")

    def rate(self) -> float:
        """Return the factor of the learning rate: a short rise, then a linear fall to almost 0."""
        done = self.spent / (60 * self.s.minutes)
        return min((self.step + 1) / 20, max(0.01, 1 - done))

    def draw_level(self) -> int:
        """Return the current level; in two of five steps an earlier level, to retain its skills."""
        if self.level and np.random.default_rng(self.step).random() < 0.4:
            return int(np.random.default_rng(self.step + 1).integers(0, self.level))
        return self.level

    def train_step(self, batch: Batch) -> Score:
        loss, score = batch_loss(self.model, self.body, batch, self.s.stem_weight)
        torch.autograd.backward(loss)
        score = self.share(score)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = self.rate()
        self.optimizer.param_groups[0]["lr"] = self.s.rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return score

    def share(self, score: Score) -> Score:
        """Average gradients, score and time over the workers, so that all remain equal."""
        if self.s.workers == 1:
            return score
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        numbers = torch.tensor([*dataclasses.astuple(score), self.spent])
        flat = torch.cat([g.flatten() for g in gradients] + [numbers])
        dist.all_reduce(flat)
        flat /= self.s.workers
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        *parts, self.spent = flat[start:].tolist()
        return Score(*parts)

    def run(self) -> None:
        """Train for `minutes` in total, including the time of earlier runs."""
        s = self.s
        maker = BatchMaker(self.tokenizer.backend_tokenizer, f"{s.seed}-{self.rank}")
        feeders: dict[int, Feeder] = {}
        window: list[Score] = []
        saved = reported = time.monotonic()
        while self.spent < 60 * s.minutes:
            start = time.monotonic()
            index = self.draw_level()
            if index not in feeders:
                feeders[index] = Feeder(maker, s.batch_tokens, self.step * 7, LEVELS[index])
            batch = feeders[index].next(LEVELS[index])
            score = self.train_step(batch)
            self.step += 1
            self.seen += batch.tokens.size * s.workers
            self.spent += time.monotonic() - start
            if index == self.level:
                self.recent.append(score.exact)
                window.append(score)
            self.promote()
            if self.rank == 0 and time.monotonic() - reported > 20 and window:
                self.report(window)
                window, reported = [], time.monotonic()
            if self.rank == 0 and time.monotonic() - saved > s.save_every:
                self.save()
                saved = time.monotonic()
        if self.rank == 0:
            self.save()

    def promote(self) -> None:
        full = len(self.recent) == self.recent.maxlen
        if full and sum(self.recent) / len(self.recent) > LEVELS[self.level].mark:
            self.level = min(self.level + 1, len(LEVELS) - 1)
            self.recent.clear()

    def report(self, window: list[Score]) -> None:
        mean = [sum(getattr(w, k) for w in window) / len(window) for k in KEYS]
        line = {
            "minutes": round(self.spent / 60, 2), "step": self.step, "tokens": self.seen,
            "level": self.level, "rows": LEVELS[self.level].rows,
            **{k: round(m, 4) for k, m in zip(KEYS, mean, strict=True)},
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        with (self.out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def parse() -> Settings:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for field in dataclasses.fields(Settings):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return Settings(**vars(parser.parse_args()))


def work(rank: int, settings: Settings) -> None:
    """Run one worker: one thread, separate batches, and gradients shared with other workers."""
    torch.set_num_threads(1)
    if settings.workers > 1:
        rendezvous = f"file://{Path(settings.out).resolve()}/rendezvous"
        dist.init_process_group("gloo", rendezvous, rank=rank, world_size=settings.workers)
    Trainer(settings, rank).run()


def main() -> None:
    settings = parse()
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "rendezvous").unlink(missing_ok=True)
    load_tokenizer(out, settings.vocab, settings.seed)
    if settings.workers == 1:
        work(0, settings)
    else:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=work, args=(rank, settings), daemon=True)
            for rank in range(settings.workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
