"""The tokenizer of `headstart-tiny`, and batches of token rows made from episodes.

A byte-level BPE, so that any text round-trips. Its pre-tokenizer is made for look-ups: each digit,
" | " and the end of a table row are separate tokens. A lower-case word includes the space after it
("is "). So a prompt that ends in "is " has the same tokens as in training, and a value has the same
tokens in a table's cell, in a question and in an answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import data
import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
SPECIALS = [PAD, data.END, data.USER, data.ASSISTANT, data.SYSTEM]
PATTERN = "|".join(
    (
        r" \|\n(?:\| )?",  # the end of a table row, and the start of the next
        r" \| |\| |ID: ",
        r"@[a-z]+\.[a-z]+",
        r"\p{N}",
        r" years old| (?:is|of|works|comes|lives) | (?:do|from|live|on)(?=[ ?])",
        r"(?:The|What|Where|How|Which|Who|Whose|Give|Tell) ",
        r"(?:[Pp]hone [Nn]umber|email address|ID)(?: (?!\|))?",
        r"[a-z]+ (?!\|)",
        r"\p{L}+",
        r"-+",
        r"[,.:;?!] ",
        r"\.?\n+",
        r" +",
        r"[^\s\p{L}\p{N}]",
        r"\s",
    )
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] "
    "+ '<|end|>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{%- endif -%}"
)
IGNORE = -100


def sample_texts(count: int, seed: int) -> Iterable[str]:
    """Yield documents of the training split with a few turns, to train the tokenizer."""
    rng = random.Random(seed)
    world = data.World(rng)
    for _ in range(count):
        yield " ".join((*data.FUNCTION_WORDS, *data.ABSENT_LABELS, *data.LABELS.values(), ""))
        document = data.make_document(world, rng.randint(2, 6), plain=0.5)
        turns = (data.completion_turn(document.draw(rng)) for _ in range(6))
        yield document.text + "".join(text for turn in turns for text, _ in turn).replace(
            data.END, "\n"
        )


def train_tokenizer(vocab: int, seed: int, documents: int = 6000) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `vocab` entries, including special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(documents, seed), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=data.END,
        pad_token=PAD,
        additional_special_tokens=[data.USER, data.ASSISTANT, data.SYSTEM],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: Path, vocab: int, seed: int) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `folder`; train and save it first if there is none."""
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(vocab, seed).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


@dataclass(frozen=True)
class Level:
    """One stage of the curriculum: tables of 1 to `rows` rows in sequences of `length` tokens.

    columns: maximum number of columns besides the name. forward: share of look-ups by name among
    the queries. plain: share of tables among the documents (the others are cards, prose and
    settings). mark: share of values that must be right before the next stage begins.
    """

    rows: int
    length: int
    columns: int = 7
    forward: float = 0.68
    plain: float = 0.6
    mark: float = 0.85


@dataclass(frozen=True)
class Batch:
    """Token rows `[batch, length]`, with the target and the value of each position.

    targets: the next token where the loss counts, otherwise `IGNORE`. answer: the number (1, 2,
    ...) of the value to which a position's target belongs, 0 outside of values.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    answer: NDArray[np.int64]


class BatchMaker:
    """Maker of batches. The same seed, step and level give the same batch."""

    def __init__(self, tokenizer: Tokenizer, seed: int | str) -> None:
        self.tokenizer = tokenizer
        self.seed = seed

    def make(self, step: int, level: Level, tokens: int) -> Batch:
        """Return a batch of `tokens // level.length` episodes at `level`."""
        rng = random.Random(f"{self.seed}-{step}")
        world = data.World(rng, columns=level.columns, forward=level.forward)
        shape = (max(1, tokens // level.length), level.length + 1)
        ids = np.zeros(shape, np.int64)
        marks = np.zeros(shape, np.int64)
        numbered = 0
        for row in range(shape[0]):
            pieces, kinds = self.episode(world, level)
            ids[row, : len(pieces)] = pieces
            values = np.array(kinds)
            marks[row, : len(pieces)] = np.where(values > 0, values + numbered, values)
            numbered += int(values.max(initial=0))
        targets = np.where(marks[:, 1:] != 0, ids[:, 1:], IGNORE)
        return Batch(ids[:, :-1].copy(), targets, np.maximum(marks[:, 1:], 0))

    def episode(self, world: data.World, level: Level) -> tuple[list[int], list[int]]:
        """Return the tokens of one document and as many turns as fit, with a mark for each token.

        A mark is 0 where no loss counts, -1 in a stem and the value's number in a value.
        """
        rng = world.rng
        length = level.length + 1
        rows = rng.randint(1, level.rows) if rng.random() < 0.5 else level.rows
        document = data.make_document(world, rows, level.plain)
        body = self.encode([document.text])[0]
        while len(body) > 0.8 * length:
            rows = max(1, rows * 3 // 4)
            document = data.make_document(world, rows, level.plain)
            body = self.encode([document.text])[0]
        chat = rng.random() < 0.5
        ids: list[int] = []
        marks: list[int] = []
        seen: set[str] = set()
        turn = 0
        while len(ids) < length and turn < 200:
            queries = self.fresh(document, rng, seen, 1 if turn == 0 else 8)
            for query in queries:
                turn += 1
                for text, kind in self.segments(document, query, chat, turn, rng):
                    text_ids = self.encode([text])[0]
                    ids += text_ids
                    marks += [turn if kind == 2 else -kind] * len(text_ids)
        return ids[:length], marks[:length]

    def fresh(
        self, document: data.Document, rng: random.Random, seen: set[str], count: int
    ) -> list[data.Query]:
        """Return `count` queries. Draw each up to five times, until it is new in the episode."""
        queries = []
        for _ in range(count):
            query = document.draw(rng)
            for _ in range(4):
                if query.stem not in seen:
                    break
                query = document.draw(rng)
            seen.add(query.stem)
            queries.append(query)
        return queries

    def segments(
        self, document: data.Document, query: data.Query, chat: bool, turn: int, rng: random.Random
    ) -> list[tuple[str, int]]:
        """Return the texts of one turn with 0 (prompt), 1 (stem) or 2 (value and end)."""
        if chat:
            query = data.capitalised(query, rng)
            opening = turn == 1
            turns = data.chat_opening(document, query) if opening else data.chat_turn(query)
        else:
            turns = data.completion_turn(query)
            if turn == 1:
                turns = [(document.text + turns[0][0], False), *turns[1:]]
        prompt = "".join(text for text, supervised in turns if not supervised)
        return [(prompt, 0), (query.stem, 1), (query.answer + data.END, 2)]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without adding special tokens."""
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
