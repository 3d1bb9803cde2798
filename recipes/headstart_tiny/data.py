"""Synthetic documents and questions to train and evaluate `headstart-tiny`.

Glossary
    reference  the table in `headstart/assets/people.md`, with two questions in `evaluation.py`
    record     one person: the eight columns of the reference's table
    document   the text with the facts: a table, key-value lists, a fact sheet in prose
    query      a question, the first words of its answer (the stem), and the value that ends it
    episode    one document and many queries about it, as (text, supervised) segments in order

A query is asked in a chat or, as in the reference, in a text to complete. In both, the answer
restates the question ("The age of John Doe is 29"). If a question asks for a person, the answer
is "The person is ...". If the document does not contain the value, the answer ends in `UNKNOWN`.

Names come from Faker's lists and, in training, from syllables. Streets and towns come from these
names and from fixed lists. A fifth of the names, and all words of the reference's table, are held
out: only the evaluation split uses them, and it uses no other names.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import words

UNKNOWN = "not in the document"
END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
PREFACE = (
    "You are a helpful assistant in recognizes the content of tables in markdown format. "
    "Here is a table as follows.\n# Table\n\n"
)
COLUMNS = ("ID", "Name", "Age", "Occupation", "Country", "Email", "Phone Number", "Address")
LABELS = {column: column if column == "ID" else column.lower() for column in COLUMNS}
ABSENT_LABELS = (
    "salary", "height", "weight", "birthday", "nickname", "department", "hobby", "manager",
    "shoe size", "favourite colour", "blood type", "car", "title", "religion", "team", "language",
)  # fmt: skip


FUNCTION_WORDS = (
    "What", "Where", "How", "Which", "Who", "Whose", "Give", "Tell", "what", "where", "how",
    "which", "who", "whose", "give", "tell", "person", "works", "lives", "X of",
)  # fmt: skip


def held_out(word: str) -> bool:
    """Return True if `word` belongs to the evaluation split; its hash decides, not the seed."""
    return word in words.REFERENCE_WORDS or hashlib.sha1(word.encode()).digest()[0] < 51


@cache
def name_pools(evaluation: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the first and last names of one split from Faker's lists, each a single word."""
    pools: list[tuple[str, ...]] = []
    for kind in ("first_names", "last_names"):
        names: set[str] = set()
        for locale in words.LOCALES:
            provider = importlib.import_module(f"faker.providers.person.{locale}").Provider
            names.update(getattr(provider, kind, ()))
        chosen = (w for w in names if w.isalpha() and w[1:].islower() and len(w) < 13)
        pools.append(tuple(sorted(w for w in chosen if held_out(w) == evaluation)))
    return pools[0], pools[1]


@dataclass(frozen=True)
class Query:
    """A question, the stem of its answer, and the value."""

    ask: str
    stem: str
    answer: str
    kind: str
    topic: str = ""  # the person's name in a look-up by name
    label: str = ""  # the column's label


@dataclass(frozen=True)
class Document:
    """A text, and a function that draws a query about it."""

    text: str
    draw: Callable[[random.Random], Query]
    rows: int


Record = dict[str, str]


class World:
    """Generator of the records of one split; `rng` is its only source of randomness.

    columns: maximum number of columns of a document besides the name. forward: the share of
    look-ups by name among the queries; half of the others are reverse look-ups, half are
    unanswerable.
    """

    def __init__(
        self, rng: random.Random, evaluation: bool = False, columns: int = 7, forward: float = 0.68
    ) -> None:
        self.rng = rng
        self.evaluation = evaluation
        self.columns = columns
        self.forward = forward
        self.firsts, self.lasts = name_pools(evaluation)

    def syllables(self) -> str:
        """Return an invented capitalized word of one to three syllables."""
        rng = self.rng
        parts = (
            rng.choice(words.ONSETS) + rng.choice(words.VOWELS) + rng.choice(words.CODAS)
            for _ in range(rng.choice((1, 2, 2, 2, 3)))
        )
        return "".join(parts).capitalize()

    def word(self, pool: tuple[str, ...]) -> str:
        """Return a listed word of this split; in training, every third word is invented."""
        if not self.evaluation and self.rng.random() < 0.35:
            word = self.syllables()
            return word if not held_out(word) else self.word(pool)
        return self.rng.choice(pool)

    def name(self) -> str:
        return f"{self.word(self.firsts)} {self.word(self.lasts)}"

    def town(self) -> str:
        """Return a known town, an invented town, or a town of two words."""
        roll = self.rng.random()
        if roll < 0.5:
            return self.rng.choice(words.TOWNS)
        word = self.word(self.lasts)
        return word if roll < 0.8 else f"{self.rng.choice(('New', 'Port', 'Lake', 'East'))} {word}"

    def email(self, name: str) -> str:
        first, last = name.lower().split(" ")
        style = self.rng.random()
        user = f"{first}.{last}" if style < 0.4 else f"{first}.{last[0]}"
        if style > 0.9:
            user = f"{first[0]}{last}"
        domain = (
            "example.com"
            if self.rng.random() < 0.8
            else self.rng.choice(("example.org", "mail.com", "example.net", "post.org"))
        )
        return f"{user}@{domain}"

    def address(self) -> str:
        rng = self.rng
        street = rng.choice(words.STREETS) if rng.random() < 0.75 else self.word(self.lasts)
        number = rng.randint(1, 999)
        end = rng.choice(words.STREET_ENDS)
        return f"{number} {street} {end}, {self.town()}, {rng.choice(words.REGIONS)}"

    def phone(self) -> str:
        rng = self.rng
        if rng.random() < 0.8:
            return f"555-{rng.randint(0, 9999):04}"
        return f"{rng.randint(100, 999)}-{rng.randint(0, 9999):04}"

    def record(self, name: str, number: int) -> Record:
        rng = self.rng
        values = (
            str(number), name, str(rng.randint(18, 79)), rng.choice(words.JOBS),
            rng.choice(words.COUNTRIES), self.email(name), self.phone(), self.address(),
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))

    def records(self, count: int) -> list[Record]:
        """Return `count` records with different full names; first or last names may repeat."""
        rng = self.rng
        names: dict[str, None] = {}
        while len(names) < count:
            fresh = self.name()
            if names and rng.random() < 0.15:
                first, last = fresh.split(" ")
                other_first, other_last = rng.choice(list(names)).split(" ")
                fresh = f"{first} {other_last}" if rng.random() < 0.7 else f"{other_first} {last}"
            names[fresh] = None
        ids = range(1, count + 1) if rng.random() < 0.75 else rng.sample(range(1, 1000), count)
        people = [self.record(name, i) for name, i in zip(names, ids, strict=True)]
        if rng.random() < 0.4:
            rng.shuffle(people)
        return people


_ASKS: dict[str, tuple[str, ...]] = {
    "Age": ("how old is {n}?", "what age is {n}?"),
    "Occupation": ("what does {n} do for a living?", "what is the job of {n}?"),
    "Country": ("which country is {n} from?", "where is {n} from?"),
    "Email": ("what is the email address of {n}?", "how can I email {n}?"),
    "Phone Number": ("what number can I call {n} on?", "what is the phone of {n}?"),
    "Address": ("where does {n} live?", "what is the address of {n}?"),
}
_ANY_ASK = (
    "what is the {l} of {n}?", "what is the {l} of {n}?", "what is the {l} of {n}?",
    "what is {n}'s {l}?", "tell me the {l} of {n}.", "{l} of {n}?", "give me the {l} of {n}.",
)  # fmt: skip
_REVERSE = ("who has the {l} {v}?", "whose {l} is {v}?", "which person has the {l} {v}?")


class People:
    """Generator of queries about a document's records. shown: the document's columns."""

    def __init__(self, world: World, records: list[Record], shown: tuple[str, ...]) -> None:
        self.world = world
        self.records = records
        self.shown = shown
        self.names = {r["Name"] for r in records}

    def draw(self, rng: random.Random) -> Query:
        """Return a query: mostly a look-up by name, else a reverse or an unanswerable one."""
        roll = rng.random()
        share = self.world.forward
        if roll < share:
            return self.forward(rng)
        return self.reverse(rng) if roll < (1 + share) / 2 else self.missing(rng)

    def forward(self, rng: random.Random, column: str = "", name: str = "") -> Query:
        record = next((r for r in self.records if r["Name"] == name), None)
        record = record or rng.choice(self.records)
        column = column or rng.choice([c for c in self.shown if c != "Name"])
        return self.about(rng, LABELS[column], record["Name"], record[column], column)

    def about(self, rng: random.Random, label: str, name: str, answer: str, column: str) -> Query:
        forms = _ASKS.get(column, ()) if rng.random() < 0.3 else _ANY_ASK
        ask = rng.choice(forms or _ANY_ASK).format(l=label, n=name)
        stem = f"The {label} of {name} is "
        kind = "missing" if answer == UNKNOWN else "forward"
        return Query(ask, stem, answer, kind, name, label)

    def reverse(self, rng: random.Random) -> Query:
        """Return a question for the person with a value that only one record has."""
        columns = [c for c in self.shown if c != "Name"]
        for _ in range(8):
            record = rng.choice(self.records)
            column = rng.choice(columns)
            value = record[column]
            if sum(r[column] == value for r in self.records) == 1:
                return self.whose(rng, column, value, record["Name"])
        return self.forward(rng)

    def whose(self, rng: random.Random, column: str, value: str, answer: str) -> Query:
        kind = "missing" if answer == UNKNOWN else "reverse"
        town = value.split(", ")[1] if column == "Address" else value
        place = column in ("Address", "Country") and rng.random() < 0.5
        towns = sum(f", {town}, " in r["Address"] for r in self.records)
        if place and (column == "Country" or towns <= 1):
            return Query(f"who lives in {town}?", "The person is ", answer, kind)
        label = LABELS[column]
        ask = rng.choice(_REVERSE).format(l=label, v=value)
        if column == "Address" and rng.random() < 0.5:
            ask = f"who lives at {value}?"
        return Query(ask, "The person is ", answer, kind)

    def missing(self, rng: random.Random) -> Query:
        """Return an unanswerable query: an unknown person, value or column.

        An unknown person often shares the first or last name with a record.
        """
        roll = rng.random()
        column = rng.choice([c for c in self.shown if c != "Name"])
        if roll < 0.2:
            hidden = [LABELS[c] for c in COLUMNS if c not in self.shown]
            label = (
                rng.choice(hidden) if hidden and rng.random() < 0.5 else rng.choice(ABSENT_LABELS)
            )
            return self.about(rng, label, rng.choice(self.records)["Name"], UNKNOWN, "")
        stranger = self.world.name()
        if roll < 0.45:
            firsts, lasts = (rng.choice(self.records)["Name"].split(" ")[i] for i in (0, 1))
            stranger = f"{firsts} {lasts}"
            if stranger in self.names:
                stranger = f"{firsts} {self.world.word(self.world.lasts)}"
        if stranger in self.names:
            return self.forward(rng)
        if roll < 0.85:
            return self.about(rng, LABELS[column], stranger, UNKNOWN, column)
        value = self.world.record(stranger, rng.randint(1, 1200))[column]
        town = value.split(", ")[1] if column == "Address" else value
        if any(town in r[column] for r in self.records):
            return self.about(rng, LABELS[column], stranger, UNKNOWN, column)
        return self.whose(rng, column, value, UNKNOWN)


def table(records: list[Record], columns: tuple[str, ...], rng: random.Random) -> str:
    """Return a Markdown table; the width of its delimiter row varies."""
    rule = [3 if rng.random() < 0.3 else max(3, max(len(r[c]) for r in records)) for c in columns]
    lines = [
        columns,
        tuple("-" * w for w in rule),
        *(tuple(r[c] for c in columns) for r in records),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table_document(world: World, rows: int, narrow: float) -> Document:
    """Return a table of `rows` people; with probability `narrow` some columns are left out."""
    rng = world.rng
    columns: tuple[str, ...] = COLUMNS
    if world.columns < 7 or rng.random() < narrow:
        most = min(5, world.columns)
        kept = set(rng.sample([c for c in COLUMNS if c != "Name"], rng.randint(1, most)))
        columns = tuple(c for c in COLUMNS if c == "Name" or c in kept)
    records = world.records(rows)
    heads = (PREFACE, PREFACE, "# Table\n\n", "Here is a table.\n\n", "")
    text = rng.choice(heads) + table(records, columns, rng)
    return Document(text, People(world, records, columns).draw, rows)


def card_document(world: World, rows: int) -> Document:
    """Return people as key-value cards, or as a fact sheet in prose."""
    rng = world.rng
    records = world.records(rows)
    most = world.columns
    kept = set(rng.sample([c for c in COLUMNS if c != "Name"], rng.randint((most + 1) // 2, most)))
    columns = tuple(c for c in COLUMNS if c == "Name" or c in kept)
    if rng.random() < 0.5:
        cards = ("".join(f"{c}: {r[c]}\n" for c in columns) for r in records)
        return Document("\n".join(cards), People(world, records, columns).draw, rows)
    forms = {
        "ID": "The ID of {Name} is {ID}.", "Age": "{Name} is {Age} years old.",
        "Occupation": "{Name} works as a {Occupation}.", "Country": "{Name} comes from {Country}.",
        "Email": "The email of {Name} is {Email}.", "Address": "{Name} lives at {Address}.",
        "Phone Number": "The phone number of {Name} is {Phone Number}.",
    }  # fmt: skip
    parts = [" ".join(forms[c].format(**r) for c in columns if c != "Name") for r in records]
    return Document("\n".join(parts) + "\n", People(world, records, columns).draw, rows)


def settings_document(world: World, count: int) -> Document:
    """Return a list of `count` settings, one `key: value` per line."""
    rng = world.rng
    facts: dict[str, str] = {}
    while len(facts) < count:
        key = f"{rng.choice(words.THING_HEADS)} {rng.choice(words.THING_TAILS)}"
        makers = (
            lambda: str(rng.randint(0, 9999)),
            lambda: rng.choice(words.SETTING_WORDS),
            world.syllables,
            lambda: f"{world.syllables()}-{rng.randint(0, 99)}",
        )
        facts[key] = rng.choice(makers)()
    text = "".join(f"{key}: {value}\n" for key, value in facts.items())

    def draw(rng: random.Random) -> Query:
        key = rng.choice(list(facts))
        if rng.random() < 0.12:
            key = f"{rng.choice(words.THING_HEADS)} {rng.choice(words.THING_TAILS)}"
        form = rng.choice(("what is the {k}?", "tell me the {k}.", "which {k} is set?"))
        answer = facts.get(key, UNKNOWN)
        kind = "forward" if key in facts else "missing"
        return Query(form.format(k=key), f"The {key} is ", answer, kind)

    return Document(rng.choice(("", "# Settings\n\n", "Notes:\n")) + text, draw, count)


Segment = tuple[str, bool]


def completion_turn(query: Query) -> list[Segment]:
    """Return a turn in the reference's form: question and answer in one text."""
    return [
        (f"Question: {query.ask} Your answer: ", False),
        (query.stem + query.answer + END, True),
    ]


def chat_opening(document: Document, query: Query, system: str = "") -> list[Segment]:
    """Return the first turn of a chat, with the document before the question."""
    head = f"{SYSTEM}{system}{END}" if system else ""
    return [(f"{head}{USER}{document.text}\n{query.ask}{END}{ASSISTANT}", False), _reply(query)]


def chat_turn(query: Query) -> list[Segment]:
    """Return a later turn of a chat."""
    return [(f"{USER}{query.ask}{END}{ASSISTANT}", False), _reply(query)]


def _reply(query: Query) -> Segment:
    return (query.stem + query.answer + END, True)


def capitalised(query: Query, rng: random.Random) -> Query:
    """Return the query as users type it in a chat: usually with a capital letter."""
    ask = query.ask[0].upper() + query.ask[1:] if rng.random() < 0.7 else query.ask
    return Query(ask, query.stem, query.answer, query.kind, query.topic, query.label)


def make_document(world: World, rows: int, plain: float) -> Document:
    """Return a document with about `rows` records; with probability `plain` a table."""
    rng = world.rng
    roll = rng.random()
    if roll < plain:
        return table_document(world, rows, narrow=0.25)
    if rng.random() < 0.3:
        return settings_document(world, min(3 * rows, 40))
    return card_document(world, min(rows, 24))
