"""How the starting weights of `headstart-tiny` read a document: layers 0 to 2.

`tiny_wiring` says what each layer does; here are the registers, and the parts that tell every
token what kind of cell it is in, what its column is called and whose row it is in.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_circuit import Match, Registers, Wirer
from tiny_features import CODE, FLAGS, MATCH, SHARED, TYPES
from tokenizers import Tokenizer
from torch import Tensor

ID, NAME, AGE, JOB, COUNTRY, EMAIL, PHONE, ADDRESS = range(TYPES)
PREVIOUS = {  # flags seen of the tokens 1 to 4 places before
    1: ("OPEN", "DIGIT", "ROW", "CELLEND", "AT", "JOB", "COUNTRY", "COUNTRYEND", "REGION", "NAMED",
        "NUMBERED", "NAMEABLE", "STATE", "WHOSE", "NOT", "SINK", "LEADS"),
    2: ("OPEN", "DIGIT", "ROW", "TITLE", "COMMA", "STATE", "NOT"),
    3: ("OPEN", "DIGIT", "ROW", "NUMBERED", "STATE", "NOT", "SINK"),
    4: ("OPEN", "DIGIT", "ROW", "NUMBERED"),
}  # fmt: skip
NUMBER = 3 * MATCH + 2  # an ID: three digits as codes, and whether the 2nd and 3rd are missing
SIZES = {
    "ONE": 1, "CODE": CODE, **dict.fromkeys(FLAGS, 1), "LABEL": TYPES + 1, "ASKS": TYPES,
    **{f"B{k}": MATCH for k in PREVIOUS}, "BLANK2": 1, "BLANK3": 1, "BLANK4": 1,
    **{f"{flag}{k}": 1 for k, flags in PREVIOUS.items() for flag in flags}, "HEAD2": TYPES,
    "KIND": TYPES, "HEADER": TYPES, "IDEND": 1, "ID": NUMBER, "LABELWORD": 1,
    "KINDBEFORE": TYPES, "INNAME": 1, "INSTATE": 1, "INCELL": 1, "INTHE": 1,
    "COLUMN": TYPES + 1, "BACKWARDS": 1,
    "PART": 1, "INSIDE": 1, "OTHER": 1, "Q2": MATCH, "Q3": MATCH, "QBLANK3": 1,
    "BAG": SHARED, "SQUARE": 1, "PART1": 1, "NAMEEND": 1, "ROWID": NUMBER,
    "ROWBAG": SHARED, "ROWSQUARE": 1, "FOUND": NUMBER, "NOBODY": 1,
    "ASKED": TYPES, "NOTHING": 1, "NOID": 1, "NONAME": 1,
}  # fmt: skip


def part(name: str, first: int, count: int, at: Registers) -> Tensor:
    """`[count, width]`: reads some coordinates of a register."""
    return at.rows(name)[first : first + count]


class Reading:
    """Wires the layers that read, of a Llama of 6 layers and 4 heads in 2 groups."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.at = Registers(SIZES, model.config.hidden_size)
        self.model = model
        self.wire = Wirer(model, self.at)
        self.tokenizer = tokenizer

    def one(self, **form: float) -> Tensor:
        """`[1, width]`: reads a sum of one-coordinate registers."""
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
        """Attend to the token `distance` places back, whatever it is."""
        pairs = [i for i, a in enumerate(self.wire.angles.tolist()) if a >= low]
        turn = distance * self.wire.angles[pairs]
        self.wire.key_marker(layer, group, pairs, self.at.form({"ONE": 1.0}))
        self.wire.point(layer, head, pairs, 45.0 * torch.cat([turn.cos(), -turn.sin()]))

    def tokens_before(self) -> None:
        """Layer 0: codes and flags of the four tokens before, then blanks behind openers."""
        at, wire = self.at, self.wire
        flags = sorted({flag for seen in PREVIOUS.values() for flag in seen})
        read = torch.cat([part("CODE", 0, MATCH, at), at.forms(*({f: 1.0} for f in flags)),
                          part("LABEL", 0, TYPES, at)])  # fmt: skip
        self.empty(0, 0, 1)
        for k, seen in PREVIOUS.items():
            head, group = k - 1, (k - 1) // 2
            wire.values(0, group, read)
            self.back(0, head, group, k, 0.02)
            wire.write(0, head, 0, at.rows(f"B{k}"))
            for flag in seen:
                wire.write(0, head, MATCH + flags.index(flag), self.one(**{f"{flag}{k}": 1.0}))
            if k == 2:
                wire.write(0, head, MATCH + len(flags), at.rows("HEAD2"))
        for k in (2, 3, 4):
            self.blank(0, [f"OPEN{j}" for j in range(1, k)], f"B{k}", f"BLANK{k}")

    def blank(self, layer: int, flags: list[str], name: str, blank: str) -> None:
        """Clear a code of a token before, and say so, where any of the flags is up."""
        read = torch.cat([self.at.rows(name), self.at.forms({"ONE": 1.0})])
        write = torch.cat([-self.at.rows(name), self.at.rows(blank)])
        count = dict.fromkeys(flags, 1.0)
        self.wire.neurons(layer, count | {"ONE": -0.5}, read, write)
        if len(flags) > 1:  # 2 (c - 1/2) less 2 (c - 1) is 1 for any count c of 1 or more
            self.wire.neurons(layer, count | {"ONE": -1.0}, read, -write)

    def kinds_of_cells(self) -> None:
        """Layer 0: what ends at an opener, and what a header's label follows."""
        flag, row = self.wire.flag, {"ROW2": 1.0, "ROW3": 1.0, "ROW4": 1.0}
        flag(0, {"DIGIT1": 4, **row, "ONE": -4.5}, f"KIND.{ID}")
        flag(0, {"DIGIT1": 1, "DIGIT2": 1, "OPEN3": 1, "ROW3": -1, "NUMBERED4": -1, "ONE": -2.5},
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
        flag(0, {"NEWLINE": 1, "DIGIT1": 1, "NUMBERED3": 1, "NUMBERED4": 1, "ONE": -2.5}, "IDEND")
        flag(0, {"PLAINIS": 1, "SINK3": 1, "ONE": -1.5}, "STATE")  # of a setting: two words
        known = {f"ASKS.{kind}": 1.0 for kind in range(TYPES)}
        flag(0, known | {"LEADS1": 1, "ONE": -0.5}, "LABELWORD")
        flag(0, {"COLON": 1, "NAMED1": 1, "ONE": -1.5}, "OPENSNAME")
        flag(0, {"COLON": 1, "NUMBERED1": 1, "ONE": -1.5}, "MARKSLABEL")

    def numbers(self) -> None:
        """Layer 0: the one to three digits that end here, first digit first."""
        at, one = self.at, self.at.forms({"ONE": 1.0})
        for length in (1, 2, 3):
            digits = {f"DIGIT{k}": 1.0 for k in range(1, length + 1)}
            where = digits | {f"OPEN{length + 1}": 1.0, "ONE": -0.5 - length}
            read = [at.rows(f"B{length - place}") for place in range(length)]
            write = [part("ID", MATCH * place, MATCH, at) for place in range(length)]
            missing = [part("ID", 3 * MATCH + k, 1, at) for k in range(2) if length < k + 2]
            reads = torch.cat(read + [one] * len(missing))
            self.wire.neurons(0, where, reads, torch.cat(write + missing))

    def openers_and_labels(self) -> None:
        """Layer 1."""
        at, wire = self.at, self.wire
        self.empty(1, 0, 1)
        wire.latest(1, 0, 0, {"OPEN": 1.0})
        into = ("KINDBEFORE", "INNAME", "INSTATE", "INCELL", "INTHE")
        flags = at.forms({"OPENSNAME": 1}, {"STATE": 1}, {"CELLEND": 1}, {"SINK": 1})
        wire.values(1, 0, torch.cat([at.rows("KIND"), flags]))
        wire.write(1, 0, 0, torch.cat([at.rows(name) for name in into]))
        wire.latest(1, 2, 1, {"MARKSLABEL": 1.0})
        wire.values(1, 1, torch.cat([at.rows("LABEL"), at.forms({"TURNED": 1, "WHOSE1": 1})]))
        wire.write(1, 2, 0, torch.cat([at.rows("COLUMN"), at.rows("BACKWARDS")]))

    def parts_of_names(self) -> None:
        """Layer 1: which tokens are parts of names; the tokens up to here, as a query has them."""
        at, wire = self.at, self.wire
        wire.flag(1, {"INNAME": 1, "NAMEABLE": 1, "ONE": -1.5}, "PART")
        wire.flag(1, {"INTHE": 1, "NAMEABLE": 1, "ONE": -1.5}, "OTHER")  # no column's label
        wire.flag(1, {"INNAME": 1, "NAMEABLE": 1, "SPACE": 1, "ONE": -1.5}, "INSIDE")
        read = torch.cat([at.rows("B1"), at.rows("B2"), at.forms({"ONE": 1, "BLANK2": -1})])
        write = torch.cat([-at.rows("Q2"), -at.rows("Q3"), at.rows("QBLANK3")])
        wire.neurons(1, {"OPEN": 1, "ONE": -0.5}, read, write)
        wire.neurons(1, {"ONE": 0.5, "CELLEND": 1, "INCELL": -1}, at.rows("KINDBEFORE"),
                     -at.rows("KINDBEFORE"))  # fmt: skip
        closed = part("COLUMN", 1, TYPES - 1, at).sum(0)[None]  # what closes a cell ends any column
        ends = {"CLOSES": 1.0, "COMMA": -1.0, "IDEND": -1.0, f"KIND.{NAME}": -1.0, "ONE": -0.5}
        wire.neurons(1, ends, at.forms({"ONE": 1.0}), closed)
        ends = {"CLOSES": 1.0, "COMMA": -1.0, f"KIND.{NAME}": 1.0, "ONE": -1.5}
        wire.flag(1, ends, f"COLUMN.{NAME}")
        self.forget(1, "B1", "B2", "B3", "B4", "BLANK2", "BLANK3", "BLANK4")

    def forget(self, layer: int, *names: str) -> None:
        """Clear registers at "The ", so that only what makes it a sink scores there."""
        read = torch.cat([self.at.rows(name) for name in names])
        self.wire.neurons(layer, {"SINK": 1, "ONE": -0.5}, read, -read)

    def bags_and_columns(self) -> None:
        """Layer 2."""
        at, wire = self.at, self.wire
        self.empty(2, 0, 1)
        distance = [*range(100), *range(100, 4200, 10)]
        fall = [-1.2 * min(max(d - 8, 0), 25) for d in distance]  # a name is some ten tokens
        pairs, amplitude = wire.near(distance, fall, 2e-4, 0.22)
        steady = [int(wire.slow[-2])]
        wire.key_marker(2, 0, pairs + steady, at.form({"PART": 1.0}))
        wire.point(2, 0, pairs, amplitude[:-1])
        wire.point(2, 0, steady, torch.tensor([16.0 + float(amplitude[-1]), 0.0]))
        wire.values(2, 0, torch.cat([part("CODE", 0, SHARED, at), at.rows("PART")]))
        wire.write(2, 0, 0, at.rows("BAG"))
        self.back(2, 1, 0, 1, 0.22)
        wire.write(2, 1, SHARED, at.rows("PART1"))
        wire.latest(2, 3, 1, {"IDEND": 1.0}, {"ONE": 1.0, "SINK": -1.0})
        wire.match(2, 2, 1, [
            Match(at.rows("KINDBEFORE"), at.rows("HEADER"), 40.0),
            Match(self.one(ONE=1.0), self.one(SINK=1.0), 20.0),
        ])  # fmt: skip
        wire.values(2, 1, torch.cat([part("LABEL", 0, TYPES, at), at.rows("ID")]))
        wire.write(2, 2, 0, part("COLUMN", 0, TYPES, at))
        wire.write(2, 3, TYPES, at.rows("ROWID"))
        wire.flag(2, {"OPEN": 1, "PART1": 1, "ONE": -1.5}, "NAMEEND")
        wire.squares(2, "BAG", "SQUARE")

    def sink(self, score: float, **form: float) -> Match:
        """What "The " scores, for a head that may find nothing."""
        return Match(self.at.forms({"ONE": score} | form), self.one(SINK=1.0))
