"""Layers 0 to 2 of the starting weights of `headstart-tiny`, which read a document.

`wiring.py` explains each layer. This file has the registers, and the parts that compute for every
token the kind of its cell, the name of its column and the owner of its row.
"""

from __future__ import annotations

from typing import Any

import torch
from circuit import NEXT, Match, Registers, Wirer
from features import CODE, FLAGS, MATCH, SHARED, TYPES
from tokenizers import Tokenizer
from torch import Tensor

ID, NAME, AGE, JOB, COUNTRY, EMAIL, PHONE, ADDRESS = range(TYPES)
PREVIOUS = {  # flags of the tokens 1 to 4 positions before
    1: ("OPEN", "DIGIT", "ROW", "CELLEND", "AT", "JOB", "COUNTRY", "COUNTRYEND", "REGION", "NAMED",
        "NAMEABLE", "STATE", "NOT", "LEADS", "WHO", "ENDS", "SAYS", "STARTS",
        "KEYED", "BREAKS", "POSSESS"),
    2: ("OPEN", "DIGIT", "ROW", "NUMBERED", "TITLE", "COMMA", "STATE", "NOT", "WHO", "BREAKS"),
    3: ("OPEN", "DIGIT", "ROW", "NUMBERED", "STATE", "NOT", "WHO", "BREAKS"),
    4: ("OPEN", "DIGIT", "ROW", "NUMBERED"),
}  # fmt: skip
NUMBER = 3 * MATCH + 2  # an ID: three digits as codes, and whether the 2nd and 3rd are missing
SIGNATURE = 10  # coordinates of a signature, which is a hash of four tokens
SIZES = {
    "ONE": 1, "CODE": CODE, "BEFORE": MATCH, **dict.fromkeys(FLAGS, 1), "LABEL": TYPES + 1,
    "ASKS": TYPES,
    **{f"B{k}": MATCH for k in PREVIOUS}, "BLANK2": 1, "BLANK3": 1, "BLANK4": 1,
    **{f"{flag}{k}": 1 for k, flags in PREVIOUS.items() for flag in flags}, "HEAD2": TYPES,
    "KIND": TYPES, "HEADER": TYPES, "IDEND": 1, "ID": NUMBER, "LABELWORD": 1,
    "BACK": 1, "HASH": SIGNATURE, "KINDBEFORE": TYPES, "INNAME": 1, "INSTATE": 1, "INCELL": 1,
    "INTHE": 1, "INIS": 1, "COLUMN": TYPES + 1, "BACKWARDS": 1, "SAYING": 1,
    "SPAN": SIGNATURE, "SPANSQUARE": 1,
    "PART": 1, "INSIDE": 1, "COPIED": 1, "NOVALUE": 1, "Q2": MATCH, "Q3": MATCH, "QBLANK3": 1,
    "BAG": SHARED, "SQUARE": 1, "ROWID": NUMBER, "ROWSPAN": SIGNATURE, "ROWSPANSQUARE": 1,
    "ROWBAG": SHARED, "ROWSQUARE": 1, "CLOSED": TYPES + 1, "HITSQUARE": 1, "MISS": 1,
    "ASKEDBACK": 1, "ASKEDHIS": 1,
    "NOBODY": 1, "NOTHING": 1, "NOID": 1, "NONAME": 1, "NAMEEND": 1,
}  # fmt: skip
LATER = {
    "FOUND": "ID", "WHOM": "SPAN", "WHOMSQUARE": "SPANSQUARE", "HIT": "HASH", "ASKED": "HEAD2",
}  # fmt: skip


def part(name: str, first: int, count: int, at: Registers) -> Tensor:
    """Return rows `[count, width]` that read some coordinates of a register."""
    return at.rows(name)[first : first + count]


class Reading:
    """The reading layers of a Llama with 6 layers and 4 heads in 2 groups."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.at = Registers(SIZES, LATER, model.config.hidden_size)
        self.model = model
        self.wire = Wirer(model, self.at)
        self.tokenizer = tokenizer

    def one(self, **form: float) -> Tensor:
        """Return a row `[1, width]` that reads a weighted sum of coordinates."""
        return self.at.forms(dict(form))

    def empty(self, layer: int, *groups: int) -> None:
        """Zero the queries, keys and values of whole groups before they are wired."""
        attention, wire = self.wire.layers[layer].self_attn, self.wire
        for group in groups:
            attention.k_proj.weight[wire.span(group)] = 0.0
            attention.v_proj.weight[wire.span(group)] = 0.0
            for head in (2 * group, 2 * group + 1):
                attention.q_proj.weight[wire.span(head)] = 0.0

    def back(self, layer: int, head: int, group: int, distance: int, low: float) -> None:
        """Attend to the token `distance` positions before."""
        pairs = [i for i, a in enumerate(self.wire.angles.tolist()) if a >= low]
        turn = distance * self.wire.angles[pairs]
        self.wire.key_marker(layer, group, pairs, self.at.form({"ONE": 1.0}))
        self.wire.point(layer, head, pairs, 45.0 * torch.cat([turn.cos(), -turn.sin()]))

    def tokens_before(self) -> None:
        """Copy the codes and flags of the four preceding tokens (layer 0).

        Clear the code of a preceding token if an opener is between this token and the current one.
        """
        at, wire = self.at, self.wire
        flags = sorted({flag for seen in PREVIOUS.values() for flag in seen})
        read = torch.cat([at.rows("BEFORE"), at.forms(*({f: 1.0} for f in flags)),
                          part("LABEL", 0, TYPES, at)])  # fmt: skip
        self.empty(0, 0, 1)
        for k, seen in PREVIOUS.items():
            head, group = k - 1, (k - 1) // 2
            wire.values(0, group, read)
            self.back(0, head, group, k, 0.02)
            wire.write(0, head, 0, at.rows(f"B{k}"))
            mixed, _ = torch.linalg.qr(torch.randn(SIGNATURE, MATCH))
            wire.write(0, head, 0, mixed @ at.rows("HASH"))
            for flag in seen:
                wire.write(0, head, MATCH + flags.index(flag), self.one(**{f"{flag}{k}": 1.0}))
            if k == 2:
                wire.write(0, head, MATCH + len(flags), at.rows("HEAD2"))
        for k in (2, 3, 4):
            self.blank(0, [f"BREAKS{j}" for j in range(1, k)], f"B{k}", f"BLANK{k}")

    def blank(self, layer: int, flags: list[str], name: str, blank: str) -> None:
        """Clear a previous token's code and set `blank` where any of the flags is set."""
        read = torch.cat([self.at.rows(name), self.at.forms({"ONE": 1.0})])
        write = torch.cat([-self.at.rows(name), self.at.rows(blank)])
        count = dict.fromkeys(flags, 1.0)
        self.wire.neurons(layer, count | {"ONE": -0.5}, read, write)
        if len(flags) > 1:  # 2 (c - 1/2) - 2 (c - 1) = 1 for any count c of 1 or more
            self.wire.neurons(layer, count | {"ONE": -1.0}, read, -write)

    def kinds_of_cells(self) -> None:
        """Compute the kind of cell that ends at an opener, and the headers' kinds (layer 0)."""
        flag, row = self.wire.flag, {"ROW2": 1.0, "ROW3": 1.0, "ROW4": 1.0}
        card = {"NUMBERED2": 1.0, "NUMBERED3": 1.0, "NUMBERED4": 1.0}
        flag(0, {"DIGIT1": 4, **row, **card, "ONE": -4.5}, f"KIND.{ID}")
        flag(0, {"DIGIT1": 1, "DIGIT2": 1, "OPEN3": 1, "ROW3": -1, "NUMBERED3": -1, "ONE": -2.5},
             f"KIND.{AGE}")  # fmt: skip
        flag(0, {**{f"DIGIT{k}": 1.0 for k in PREVIOUS}, "ONE": -3.5}, f"KIND.{PHONE}")
        flag(0, {"AT1": 1, "ONE": -0.5}, f"KIND.{EMAIL}")
        flag(0, {"JOB1": 1, "OPEN2": 1, "ONE": -1.5}, f"KIND.{JOB}", f"-KIND.{NAME}")
        flag(0, {"COUNTRY1": 1, "OPEN2": 1, "ONE": -1.5}, f"KIND.{COUNTRY}", f"-KIND.{NAME}")
        flag(0, {"COUNTRYEND1": 1, "ONE": -0.5}, f"KIND.{COUNTRY}", f"-KIND.{NAME}")
        flag(0, {"REGION1": 1, "COMMA2": 1, "ONE": -1.5}, f"KIND.{ADDRESS}", f"-KIND.{NAME}")
        flag(0, {"NAMEABLE1": 1, "ONE": -0.5}, f"KIND.{NAME}")
        for kind in range(TYPES):
            flag(0, {"TITLE": 1, "CELLEND1": 1, "TITLE2": 1, f"HEAD2.{kind}": 1, "ONE": -3.5},
                 f"HEADER.{kind}")  # fmt: skip
        flag(0, {"CELLEND": 4, "DIGIT1": 4, **row, "ONE": -8.5}, "IDEND", "OPENSNAME")
        flag(0, {"NEWLINE": 4, "DIGIT1": 4, **card, "ONE": -8.5}, "IDEND")
        flag(0, {"COLON": 1, "NAMED1": 1, "ONE": -1.5}, "OPENSNAME")
        flag(0, {"COLON": 1, "NAMED1": 1, "DIGIT3": 1, "ONE": -2.5}, "-OPEN")

    def words_of_questions(self) -> None:
        """Compute the requested column, and whether a person is requested (layer 0)."""
        flag = self.wire.flag
        known = {f"ASKS.{kind}": 1.0 for kind in range(TYPES)}
        first = {"STARTS1": 1.0, "NAMEABLE": 1.0, "KEYED1": -2.0}
        flag(0, first | {"ASKING": 2, "LEADS1": 2, "ONE": -1.5}, "LABELWORD")
        in_key = {"TITLEWORD": 1.0, "KEYED1": 1.0, "ONE": -1.5}  # "printer name" has no column
        flag(0, in_key, "-MARKSLABEL", "NAMEABLE")
        who = {"WHO1": 1.0, "WHO2": 1.0, "WHO3": 1.0}
        flag(0, dict.fromkeys(known, 3.0) | who | {"ONE": -3.5}, "BACK")
        flag(0, {"PERSON": 1, "SAYS1": 1, "ONE": -1.5}, "BACK", "ANSWERS", "MARKSLABEL")
        flag(0, {"ENDS": 1, "ENDS1": 1, "ONE": -1.5}, "-ENDS")

    def numbers(self) -> None:
        """Collect the one to three digits that end here, first digit first (layer 0)."""
        at, one = self.at, self.at.forms({"ONE": 1.0})
        for length in (1, 2, 3):
            digits = {f"DIGIT{k}": 1.0 for k in range(1, length + 1)}
            where = digits | {f"OPEN{length + 1}": 1.0, "ONE": -0.5 - length}
            read = [at.rows(f"B{length - index}") for index in range(length)]
            write = [part("ID", MATCH * index, MATCH, at) for index in range(length)]
            missing = [part("ID", 3 * MATCH + k, 1, at) for k in range(2) if length < k + 2]
            reads = torch.cat(read + [one] * len(missing))
            self.wire.neurons(0, where, reads, torch.cat(write + missing))

    def openers_and_labels(self) -> None:
        """Wire the latest opener and the latest label (layer 1)."""
        at, wire = self.at, self.wire
        self.empty(1, 0, 1)
        wire.latest(1, 0, 0, {"OPEN": 1.0})
        into = ("KINDBEFORE", "SPAN", "INNAME", "INSTATE", "INCELL", "INTHE", "INIS")
        flags = ("OPENSNAME", "STATE", "CELLEND", "SAYS", "PLAINIS")
        wire.values(1, 0, torch.cat([at.rows(name) for name in ("KIND", "HASH", *flags)]))
        wire.write(1, 0, 0, torch.cat([at.rows(name) for name in into]))
        wire.latest(1, 2, 1, {"MARKSLABEL": 1.0})
        wire.values(1, 1, torch.cat([at.rows("LABEL"), at.forms({"BACK": 1}, {"ANSWERS": 1})]))
        wire.write(1, 2, 0, torch.cat([at.rows(n) for n in ("COLUMN", "BACKWARDS", "SAYING")]))

    def parts_of_names(self) -> None:
        """Mark the parts of names (layer 1).

        After "is ", a question has a name. An answer, which begins with "The ", has a value.
        """
        at, wire = self.at, self.wire
        name = {"INNAME": 2.0, "INIS": -1.0, "SAYING": -1.0, "ONE": -2.5}
        wire.flag(1, name | {"NAMEABLE": 2.0}, "PART")
        name |= {"SPACE": 2.0, "INTHE": -2.0}
        wire.flag(1, name | {"NAMEABLE": 2.0}, "INSIDE")
        wire.flag(1, name | {"NAMEABLE": 2.0, "LEADS1": -2.0}, "COPIED")
        wire.flag(1, {"OFS": 1, "BREAKS1": -1, "ONE": -0.5}, "COPIED")
        wire.flag(1, {"INNAME": 1, "CLOSES": -1, "SINK": -1, "ONE": -0.5}, "NOVALUE")
        wire.flag(1, {"INIS": 1, "SAYING": 1, "ONE": -1.5}, "-INNAME")
        wire.flag(1, {"INIS": 1, "SAYING": -1, "ONE": -0.5}, "-INSTATE")
        read = torch.cat([at.rows("B1"), at.rows("B2"), at.forms({"ONE": 1, "BLANK2": -1})])
        write = torch.cat([-at.rows("Q2"), -at.rows("Q3"), at.rows("QBLANK3")])
        wire.neurons(1, {"OPEN": 1, "ONE": -0.5}, read, write)
        wire.neurons(1, {"ONE": 0.5, "CELLEND": 1, "INCELL": -1}, at.rows("KINDBEFORE"),
                     -at.rows("KINDBEFORE"))  # fmt: skip
        wire.squares(1, "SPAN", "SPANSQUARE")
        self.forget(1, "B1", "B2", "B3", "B4", "BLANK2", "BLANK3", "BLANK4", "SPAN", "SPANSQUARE")

    def forget(self, layer: int, *names: str) -> None:
        """Clear registers at sinks such as "The ", so that these tokens score only as sinks."""
        read = torch.cat([self.at.rows(name) for name in names])
        self.wire.neurons(layer, {"SINK": 1, "ONE": -0.5}, read, -read)

    def names_and_columns(self) -> None:
        """Wire names, rows and columns (layer 2)."""
        at, wire = self.at, self.wire
        self.empty(2, 0, 1)
        distance = [*range(100), *range(100, 4200, 10)]
        fall = [-1.2 * min(max(d - 12, 0), 25) for d in distance]
        pairs, amplitude = wire.near(distance, fall, 2e-4, NEXT)
        wire.latest(2, 1, 0, {"PART": 1.0})
        wire.point(2, 0, pairs, amplitude[:-1])
        steady = [int(wire.slow[-2])]
        wire.point(2, 0, steady, torch.tensor([16.0 + float(amplitude[-1]), 0.0]))
        wire.match(2, 0, 0, self.same("SPAN", "SPAN", "SPANSQUARE", 20.0))
        wire.values(2, 0, torch.cat([part("CODE", 0, SHARED, at), at.rows("SPAN"),
                                     at.rows("SPANSQUARE")]))  # fmt: skip
        wire.write(2, 0, 0, at.rows("BAG"))
        wire.write(2, 1, SHARED, torch.cat([at.rows("ROWSPAN"), at.rows("ROWSPANSQUARE")]))
        wire.latest(2, 3, 1, {"IDEND": 1.0}, {"ONE": 1.0, "SINK": -1.0})
        wire.match(2, 2, 1, [
            Match(at.rows("KINDBEFORE"), at.rows("HEADER"), 40.0),
            Match(self.one(ONE=1.0), self.one(SINK=1.0), 20.0),
        ])  # fmt: skip
        wire.values(2, 1, torch.cat([part("LABEL", 0, TYPES, at), at.rows("ID")]))
        wire.write(2, 2, 0, part("COLUMN", 0, TYPES, at))
        wire.write(2, 3, TYPES, at.rows("ROWID"))
        wire.squares(2, "BAG", "SQUARE")
        mine, rows = (torch.cat([at.rows(n), at.rows(f"{n}SQUARE")]) for n in ("SPAN", "ROWSPAN"))
        # At the end of an ID, the name of the row is still to come.
        wire.neurons(2, {"IDEND": 1, "ONE": -0.5}, mine - rows, rows)
        wire.clear(2, *LATER.values())
        self.forget(2, "ROWSPAN", "ROWSPANSQUARE")

    def sink(self, score: float, **form: float) -> Match:
        """Return the score of sinks such as "The ", for a head that may find nothing."""
        return Match(self.at.forms({"ONE": score} | form), self.one(SINK=1.0))

    def same(self, query: str, key: str, square: str, gain: float) -> list[Match]:
        """Return `-gain` times the squared distance, without the query's own square."""
        return [
            Match(self.at.rows(query), self.at.rows(key), 2 * gain),
            Match(self.one(ONE=1.0), self.at.rows(square), -gain),
        ]
