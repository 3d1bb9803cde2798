"""The starting weights of `headstart-tiny`: a circuit that looks things up, from step 0.

Left to itself a small model takes tens of millions of tokens to find out that a cell belongs to
the name in its row, and never finds what stands before the name. So the first weights say how,
and training refines them. The architecture stays stock; only where training begins is chosen.

    layer 0   the four tokens before, as codes and flags; what kind of cell ends here; the ID that
              ends here, its digits in order; what stands before an opener is blanked
    layer 1   the latest opener (kind of the cell before, does a name begin, is it "is"); the
              latest label ("age"), and whether it is asked the other way ("whose age")
    layer 2   the bag of the last name's tokens; the ID of the row; a cell's column, by the
              header's label that follows the kind of the cell before
    layer 3   the bag of the name that ended last, so every cell has its row's; asked the other
              way: the ID of the row where this value stands in this column
    layer 4   asked forwards: the token of the row with this bag and the column with this label
              that follows the same tokens; the ID of the row with this bag
    layer 5   asked the other way: the token of the name in the row with this ID

A bag is matched by its squared distance |q - k|^2 = |q|^2 - 2qk + |k|^2, so a name that shares
all but one token is told apart. A head that finds nothing looks at "The ", which carries nothing
but the flag that makes the answer "not in the document".
"""

from __future__ import annotations

import tiny_data as data
import torch
from tiny_circuit import Match
from tiny_features import CODE, MATCH, TYPES, embedding
from tiny_reading import ADDRESS, COUNTRY, ID, NAME, NUMBER, Reading, part
from torch import Tensor

SURE, SLACK, OFF = 36.0, 13.0, 150.0  # scores: of a full match of the column; below a match; never
LOUDLY = 6.0  # how much louder an answer is than the code of the token it is said at
APART = 400.0  # score per squared distance of bags
STEPS = (24.0, 14.0, 10.0)  # scores of the tokens before that agree, the last one first


class Wiring(Reading):
    """Wires all six layers; `install` does it."""

    def install(self) -> dict[str, Tensor]:
        """Wire every layer; returns which weights are wired, as `wired` does."""
        rows, out = embedding(self.tokenizer, self.at)
        self.out = out
        self.model.model.embed_tokens.weight.copy_(rows)
        self.model.lm_head.weight.copy_(out)
        for layer in self.wire.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        spare = {n: p.clone() for n, p in self.model.named_parameters() if "_proj" in n}
        self.tokens_before()
        self.kinds_of_cells()
        self.numbers()
        self.openers_and_labels()
        self.parts_of_names()
        self.bags_and_columns()
        self.rows_and_values()
        self.look_up()
        self.name_of_row()
        return self.wired(spare)

    def wired(self, spare: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where each matrix is wired, 1 or 0; rows of keys and values left empty get their
        random weights back, for the spare heads to use."""
        marks: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name not in spare:
                continue
            layer = int(name.split(".")[2])
            mark = (parameter != spare[name]).float()
            if "k_proj" in name or "v_proj" in name:
                empty = (parameter == 0).all(dim=1)
                if "k_proj" in name:  # a rotary pair is spare as a whole only
                    pairs = empty.view(self.wire.groups, 2, -1).all(dim=1, keepdim=True)
                    empty = pairs.expand(-1, 2, -1).reshape(-1)
                parameter[empty] = spare[name][empty]
                mark[~empty], mark[empty] = 1.0, 0.0
            elif "q_proj" in name:
                heads = mark.view(self.wire.heads, -1)
                mark = (heads.amax(1, keepdim=True) * torch.ones_like(heads)).view_as(mark)
            elif "o_proj" in name:
                q = marks[name.replace("o_proj", "q_proj")]
                mark = q[:, :1].T.expand_as(mark).clone()
            else:
                mark.zero_()
                neurons = slice(0, self.wire.next_neuron[layer])
                mark[(slice(None), neurons) if "down" in name else neurons] = 1.0
            marks[name] = mark
        return marks

    def rows_and_values(self) -> None:
        """Layer 3."""
        at, wire = self.at, self.wire
        self.empty(3, 0, 1)
        wire.latest(3, 0, 0, {"NAMEEND": 1.0})
        wire.values(3, 0, torch.cat([at.rows("BAG"), at.rows("SQUARE")]))
        wire.write(3, 0, 0, torch.cat([at.rows("ROWBAG"), at.rows("ROWSQUARE")]))
        kind = at.rows("KIND")
        kind[ADDRESS] += at.form({"COMMA": 1.0})  # "who lives in" names a part of an address
        gains = {1: 18.0, 2: 11.0, 3: 7.0, 4: 5.0}
        same = [Match(self.token(k), self.token(k), gain) for k, gain in gains.items()]
        full = SURE + 20.0 + sum(gains.values())
        wire.match(3, 2, 1, [
            *same, Match(part("COLUMN", 0, TYPES, at), kind, SURE),
            Match(self.one(ONE=1.0), self.one(CLOSES=1.0), 20.0),
            self.sink(full - 10.0 + 2 * OFF, STATE=-OFF, BACKWARDS=-OFF,
                      **{f"COLUMN.{COUNTRY}": -7.0, f"COLUMN.{ADDRESS}": -7.0}),
        ])  # fmt: skip
        wire.latest(3, 3, 1, {"LABELWORD": 1.0})
        wire.values(3, 1, torch.cat([at.rows(r) for r in ("ROWID", "SINK", "ASKS")]))
        wire.write(3, 2, 0, torch.cat([at.rows("FOUND"), at.rows("NOBODY")]))
        wire.write(3, 3, NUMBER + 1, at.rows("ASKED"))
        self.forget(3, "ROWBAG", "ROWSQUARE", "COLUMN", "BAG", "SQUARE")

    def token(self, k: int) -> Tensor:
        """The code of the token `k` places before, with its blank from the second on."""
        rows = self.at.rows(f"B{k}")
        return rows if k == 1 else torch.cat([rows, self.at.rows(f"BLANK{k}")])

    def same_tokens(self) -> list[Match]:
        """The last three tokens, this one counted, are the three before the key."""
        at = self.at
        blanks = at.forms({"OPEN": 1}, {"BLANK2": 1, "QBLANK3": 1})
        return [
            Match(part("CODE", 0, MATCH, at), at.rows("B1"), STEPS[0]),
            Match(torch.cat([at.rows("B1") + at.rows("Q2"), blanks[:1]]), self.token(2), STEPS[1]),
            Match(torch.cat([at.rows("B2") + at.rows("Q3"), blanks[1:]]), self.token(3), STEPS[2]),
        ]

    def same_bag(self, bag: str, square: str) -> list[Match]:
        """Minus the squared distance of bags, but for the query's own square."""
        at = self.at
        return [
            Match(at.rows("ROWBAG"), at.rows(bag), 2 * APART),
            Match(self.one(ONE=1.0), at.rows(square), -APART),
        ]

    def look_up(self) -> None:
        """Layer 4."""
        at, wire = self.at, self.wire
        self.empty(4, 0, 1)
        wire.match(4, 0, 0, [
            *self.same_bag("ROWBAG", "ROWSQUARE"), *self.same_tokens(),
            Match(at.rows("COLUMN"), at.rows("COLUMN"), SURE),
            Match(self.one(ONE=1.0), self.one(INSIDE=1.0, FILLER=1.0), -SURE),
            self.sink(SURE + sum(STEPS) - SLACK + OFF, INSTATE=-OFF, BACKWARDS=OFF,
                      ROWSQUARE=APART),
        ])  # fmt: skip
        wire.values(4, 0, torch.cat([at.rows("CODE"), at.rows("SINK")]))
        wire.write(4, 0, 0, LOUDLY * at.rows("CODE"))
        wire.write(4, 0, CODE, at.rows("NOTHING"))
        wire.latest(4, 3, 1, {"STATE": 1.0})
        wire.match(4, 2, 1, [
            *self.same_bag("BAG", "SQUARE"),
            Match(self.one(ONE=1.0), at.forms({"NAMEEND": 1, "CELLEND": 1, "NEWLINE": 1}), 30.0),
            self.sink(60 - SLACK + 2 * OFF, INSTATE=-OFF, BACKWARDS=OFF, ROWSQUARE=APART,
                      **{f"COLUMN.{ID}": -OFF}),
        ])  # fmt: skip
        wire.values(4, 1, torch.cat([at.rows(r) for r in ("ROWID", "SINK", "FOUND")]))
        wire.write(4, 2, 0, torch.cat([at.rows("FOUND"), at.rows("NOID")]))
        wire.write(4, 3, NUMBER + 1, at.rows("FOUND"))
        self.say()

    def spoken(self, *texts: str) -> Tensor:
        """`[len(texts), width]`: what makes these tokens the output."""
        tokens = [self.tokenizer.encode(t, add_special_tokens=False).ids[0] for t in texts]
        rows = torch.zeros(len(texts), self.at.width)
        rows[:, self.at.places["CODE"]] = LOUDLY * self.out[tokens][:, self.at.places["CODE"]]
        return rows

    def say(self) -> None:
        """Layer 4: the digits of an ID one by one, and "not in the document"."""
        at, wire = self.at, self.wire
        digits, one = self.spoken(*map(str, range(MATCH))), self.at.forms({"ONE": 1.0})
        end = self.spoken(data.END)
        asked = {f"COLUMN.{ID}": 1.0, "BACKWARDS": -1.0, "ONE": -1.5}
        for place, state in enumerate(("STATE", "STATE1", "STATE2")):
            read = [part("FOUND", MATCH * place, MATCH, at)]
            read += [part("FOUND", 3 * MATCH + place - 1, 1, at)] if place else []
            write = [digits, end][: len(read)]
            wire.neurons(4, asked | {state: 1.0}, torch.cat(read), torch.cat(write))
        found = asked | {"STATE3": 1.0, "NOT2": -1.0}
        wire.neurons(4, found, one, end)
        for place in (1, 2, 3):  # an ID in prose is an ordinary value, and no column's end
            lost = {f"STATE{place}": 1.0, "NOTHING": 1.0, "NOID": 1.0, "NOT": -2.0, "NOT1": -2.0}
            wire.neurons(4, asked | lost | {"NOT2": -2.0, "ONE": -3.5}, one, end)
        nothing = {"STATE": 1.0, "NOTHING": 1.0, "NOID": 1.0, "BACKWARDS": -1.0, "ONE": -2.5}
        nobody = {"STATE": 1.0, "BACKWARDS": 1.0, "NOBODY": 1.0, "ONE": -2.5}
        for where in (nothing, nobody):
            wire.neurons(4, where, one, self.spoken("not "))
        for flag, text in (
            ("NOT", "in "),
            ("NOT1", "the "),
            ("NOT2", "document"),
            ("NOT3", data.END),
        ):
            wire.neurons(4, {flag: 1.0, "ONE": -0.5}, one, self.spoken(text))

    def name_of_row(self) -> None:
        """Layer 5."""
        at, wire = self.at, self.wire
        self.empty(5, 0)
        where = at.forms({f"COLUMN.{NAME}": 1.0})
        wire.match(5, 0, 0, [
            Match(at.rows("FOUND"), at.rows("ROWID"), 20.0), *self.same_tokens(),
            Match(self.one(ONE=1.0), where, SURE),
            self.sink(60 + SURE + sum(STEPS) - SLACK + 2 * OFF, INSTATE=-OFF, BACKWARDS=-OFF),
        ])  # fmt: skip
        wire.values(5, 0, at.rows("CODE"))
        wire.write(5, 0, 0, LOUDLY * at.rows("CODE"))
        self.repeat_name()

    def repeat_name(self) -> None:
        """Layer 5: the name that was asked for, in the words that lead to the answer of a chat."""
        at, wire = self.at, self.wire
        self.empty(5, 1)
        distance = [*range(200), *range(200, 4200, 5)]
        fall = [-8.0 * torch.log(torch.tensor((d + 20) / 20)).item() for d in distance]
        pairs, amplitude = wire.near(distance, fall, 1e-4, 1.01)
        wire.key_marker(5, 1, pairs, at.form({"INSIDE": 1.0}))
        wire.point(5, 2, pairs, amplitude[:-1])
        wire.match(5, 2, 1, [
            *self.same_tokens(),
            Match(self.one(ONE=1.0), self.one(INSIDE=1.0), SURE + float(amplitude[-1])),
            self.sink(SURE + sum(STEPS) - SLACK + 3 * OFF, INNAME=-3 * OFF, OTHER=-18.0, SINK=OFF),
        ])  # fmt: skip
        wire.values(5, 1, torch.cat([at.rows("CODE"), at.rows("SINK")]))
        wire.write(5, 2, 0, LOUDLY * at.rows("CODE"))
        wire.write(5, 2, CODE, at.rows("NONAME"))
        after = {"PART": 1.0, "NONAME": 1.0, "ONE": -1.5}
        one = at.forms({"ONE": 1.0})
        wire.neurons(5, after | {"INTHE": -1.0}, one, self.spoken(" is "))
        wire.neurons(5, after | {"INTHE": 1.0, "ONE": -2.5}, one, self.spoken("of "))
        self.lead_to_answer()

    def lead_to_answer(self) -> None:
        """Layer 5: "The", the label asked for (in its own word where it is a column), "of"."""
        at, wire, one = self.at, self.wire, self.at.forms({"ONE": 1.0})
        wire.latest(5, 1, 0, {"LABELWORD": 1.0})
        attention = wire.layers[5].self_attn
        hop, spare = wire.span(0), wire.span(1)
        sink = attention.k_proj.weight[hop] @ at.form({"SINK": 1.0})
        away = at.form({"ONE": 2000.0, "SINK": -2000.0})
        attention.q_proj.weight[spare] += (sink / sink.norm() ** 2)[:, None] * away * wire.size**0.5
        wire.write(5, 1, 0, LOUDLY * at.rows("CODE"))
        self.wire.neurons(5, {"REPLIES": 1.0, "ONE": -0.5}, one, self.spoken("The "))
        for kind, label in enumerate(data.LABELS.values()):
            said = 2 * self.spoken(label if label == "ID" else label + " ")
            self.wire.neurons(5, {f"ASKED.{kind}": 1, "SINK": 1, "ONE": -1.5}, one, said)
            asked = {f"ASKS.{kind}": 1.0, "SINK1": 1.0, "ONE": -1.5}
            self.wire.neurons(5, asked, one, self.spoken(" of " if label == "ID" else "of "))
