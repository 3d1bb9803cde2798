"""The starting weights of `headstart-tiny`: a circuit for look-ups, without training.

A small model needs tens of millions of tokens to learn that a cell belongs to the name in its row,
and never learns to find a value that precedes the name. So the first weights are set by hand, and
training can refine them. The architecture is an unchanged Llama.

    layer 0   the codes and flags of the four tokens before, and a hash of them; the kind of the
              cell that ends here; the ID that ends here; the label that a question requests ("the
              *shoe* size"), and whether it requests a person ("whose *age*")
    layer 1   from the latest opener (the token before a value or a name): the kind of the cell
              before it, whether a name begins after it, and the opener's hash (the signature of
              this name); the latest label ("age"), and whether its question requests a person
    layer 2   the bag of a name: the mean of the codes of its tokens so far, found by their common
              signature; the signature of the latest name, which identifies a row; the ID of the
              row; a cell's column: in the header, the label after the label of the previous cell
    layer 3   the bag of the latest name, for every cell of its row; the cell's column at the token
              that closes the cell; at the end of "who has ...?": the signature of the row with
              this value in this column
    layer 4   look-up by name: find the last three tokens in the row with this bag and the column
              with this label, and output the next token; the ID of the row with this bag
    layer 5   look-up of a person: find the last three tokens in the name with this signature, and
              output the next token; in a chat, the words of the question that begin the answer

Bags are compared by their squared distance |q - k|^2 = |q|^2 - 2qk + |k|^2, which distinguishes
names that differ in one token. Signatures are compared in the same way. Attention is causal, so the
tokens of a name cannot depend on the values after it. So a name's signature is a hash of the tokens
before it. A head that finds nothing attends to a sink such as "The " or ": ", which has only the
flag for the answer "not in the document".

A key of a list ("door code: 4711") is a name whose values have no column. In an answer ("The door
code is"), a value follows "is"; in a question ("what is"), a name follows it. The latest "The "
distinguishes the two.
"""

from __future__ import annotations

import data
import torch
from circuit import NEXT, SOUGHT, Match
from features import CODE, MATCH, SHARED, TYPES, embedding
from reading import ADDRESS, COUNTRY, ID, NUMBER, SIGNATURE, Reading, part
from torch import Tensor

SURE = 36.0  # score of an equal column
SLACK = 13.0  # the sink wins over matches that score this much less than a full match
OFF = 150.0  # changes a sink's score so much that the sink always or never wins
OUTPUT_GAIN = 6.0  # strength of an answer, relative to the code of the token at which it is output
APART = 400.0  # score per squared distance of bags
STEPS = (30.0, 26.0, 22.0)  # scores of equal previous tokens, the last one first


class Wiring(Reading):
    """The wiring of all six layers; `install` applies it."""

    def install(self) -> dict[str, Tensor]:
        """Wire every layer; return the result of `wired`."""
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
        self.words_of_questions()
        self.numbers()
        self.openers_and_labels()
        self.parts_of_names()
        self.names_and_columns()
        self.rows_and_values()
        self.look_up()
        self.name_of_row()
        return self.wired(spare)

    def wired(self, spare: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of the wired weights; restore random weights in unused key and value rows.

        Spare heads can use these rows.
        """
        marks: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name not in spare:
                continue
            layer = int(name.split(".")[2])
            mark = (parameter != spare[name]).float()
            if "k_proj" in name or "v_proj" in name:
                empty = (parameter == 0).all(dim=1)
                if "k_proj" in name:  # a rotary pair is spare only if both rows are
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
        """Wire rows and values (layer 3)."""
        at, wire = self.at, self.wire
        self.empty(3, 0, 1)
        wire.latest(3, 0, 0, {"PART": 1.0})
        self.back(3, 1, 0, 1, NEXT)
        wire.values(3, 0, torch.cat([at.rows(r) for r in ("BAG", "SQUARE", "COLUMN")]))
        wire.write(3, 0, 0, torch.cat([at.rows("ROWBAG"), at.rows("ROWSQUARE")]))
        wire.write(3, 1, SHARED + 1, at.rows("CLOSED"))
        kind = at.rows("KIND")
        gains = {1: 54.0, 2: 44.0, 3: 40.0, 4: 40.0}
        # "lives in" requests a country or, after a comma, a part of an address
        kind[ADDRESS] += at.form({"COMMA": 1.0})
        kind[COUNTRY] += at.form({"COMMA": (gains[3] + gains[4]) / SURE})
        same = [Match(self.token(k), self.token(k), gain) for k, gain in gains.items()]
        full = SURE + 20.0 + sum(gains.values())
        wire.match(3, 2, 1, [
            *same, Match(part("COLUMN", 0, TYPES, at), kind, SURE),
            Match(self.one(ONE=1.0), self.one(CLOSES=1.0), 20.0),
            self.sink(full - 20.0 + 2 * OFF, ENDS=-OFF, BACKWARDS=-OFF),
        ])  # fmt: skip
        wire.latest(3, 3, 1, {"LABELWORD": 1.0})
        found, asked = ("HIT", "HITSQUARE", "MISS"), ("ASKED", "ASKEDBACK", "ASKEDHIS")
        carried = [at.rows(r) for r in ("ROWSPAN", "ROWSPANSQUARE", "SINK", "ASKS")]
        wire.values(3, 1, torch.cat([*carried, at.forms({"BACK": 1}, {"POSSESS1": 1})]))
        wire.write(3, 2, 0, torch.cat([at.rows(name) for name in found]))
        wire.write(3, 3, SIGNATURE + 2, torch.cat([at.rows(name) for name in asked]))
        ends = {"CLOSES": 1.0, "COMMA": -1.0, "ONE": -0.5}  # a closing token has the value's column
        wire.neurons(3, ends, at.rows("CLOSED") - at.rows("COLUMN"), at.rows("COLUMN"))
        self.forget(3, "ROWBAG", "ROWSQUARE", "COLUMN")

    def token(self, k: int) -> Tensor:
        """Return the code of the token `k` positions before, with its blank flag if k > 1."""
        rows = self.at.rows(f"B{k}")
        return rows if k == 1 else torch.cat([rows, self.at.rows(f"BLANK{k}")])

    def same_tokens(self) -> list[Match]:
        """Match keys whose three preceding tokens equal the last three tokens of the query."""
        at = self.at
        blanks = at.forms({"OPEN": 1}, {"BLANK2": 1, "QBLANK3": 1})
        return [
            Match(part("CODE", 0, MATCH, at), at.rows("B1"), STEPS[0]),
            Match(torch.cat([at.rows("B1") + at.rows("Q2"), blanks[:1]]), self.token(2), STEPS[1]),
            Match(torch.cat([at.rows("B2") + at.rows("Q3"), blanks[1:]]), self.token(3), STEPS[2]),
        ]

    def look_up(self) -> None:
        """Wire look-ups by name (layer 4)."""
        at, wire = self.at, self.wire
        self.empty(4, 0, 1)
        bags = self.same("ROWBAG", "ROWBAG", "ROWSQUARE", APART)
        wire.match(4, 0, 0, [
            *bags, *self.same_tokens(),
            Match(at.rows("COLUMN"), at.rows("COLUMN"), SURE),
            Match(self.one(ONE=1.0), self.one(NOVALUE=1.0, FILLER=1.0), -SURE),
            self.sink(SURE + sum(STEPS) - SLACK + OFF, INSTATE=-OFF, BACKWARDS=OFF,
                      ROWSQUARE=APART),
        ])  # fmt: skip
        wire.values(4, 0, torch.cat([at.rows("CODE"), at.rows("SINK")]))
        wire.write(4, 0, 0, OUTPUT_GAIN * at.rows("CODE"))
        wire.write(4, 0, CODE, at.rows("NOTHING"))
        wire.latest(4, 3, 1, {"ENDS": 1.0})
        wire.match(4, 2, 1, [
            *bags, Match(self.one(ONE=1.0), self.one(CELLEND=1.0, NEWLINE=1.0, IDEND=-2.0), 60.0),
            self.sink(60 - SLACK + 2 * OFF, INSTATE=-OFF, BACKWARDS=OFF, ROWSQUARE=APART,
                      **{f"COLUMN.{ID}": -OFF}),
        ])  # fmt: skip
        carried = ("ROWID", "SINK", "HIT", "HITSQUARE", "MISS")
        wire.values(4, 1, torch.cat([at.rows(name) for name in carried]))
        wire.write(4, 2, 0, torch.cat([at.rows("FOUND"), at.rows("NOID")]))
        into = ("WHOM", "WHOMSQUARE", "NOBODY")
        wire.write(4, 3, NUMBER + 1, torch.cat([at.rows(name) for name in into]))
        self.output_ids()

    def output_rows(self, *texts: str) -> Tensor:
        """Return the rows `[len(texts), width]` that output these tokens."""
        tokens = [self.tokenizer.encode(t, add_special_tokens=False).ids[0] for t in texts]
        rows = torch.zeros(len(texts), self.at.width)
        rows[:, self.at.slices["CODE"]] = OUTPUT_GAIN * self.out[tokens][:, self.at.slices["CODE"]]
        return rows

    def output_ids(self) -> None:
        """Output the digits of an ID one by one, and "not in the document" (layer 4)."""
        at, wire = self.at, self.wire
        digits, one = self.output_rows(*map(str, range(MATCH))), self.at.forms({"ONE": 1.0})
        end = self.output_rows(data.END)
        asked = {f"COLUMN.{ID}": 1.0, "BACKWARDS": -1.0, "INNAME": -1.0, "ONE": -1.5}
        for index, state in enumerate(("STATE", "STATE1", "STATE2")):
            read = [part("FOUND", MATCH * index, MATCH, at)]
            read += [part("FOUND", 3 * MATCH + index - 1, 1, at)] if index else []
            write = [digits, end][: len(read)]
            wire.neurons(4, asked | {state: 1.0}, torch.cat(read), torch.cat(write))
        found = asked | {"STATE3": 1.0, "NOT2": -1.0}
        wire.neurons(4, found, one, end)
        nothing = {"STATE": 1.0, "NOTHING": 1.0, "NOID": 1.0, "BACKWARDS": -1.0, "ONE": -2.5}
        nobody = {"STATE": 1.0, "BACKWARDS": 1.0, "NOBODY": 1.0, "ONE": -2.5}
        for where in (nothing, nobody):
            wire.neurons(4, where, one, self.output_rows("not "))
        for flag, text in (
            ("NOT", "in "),
            ("NOT1", "the "),
            ("NOT2", "document"),
            ("NOT3", data.END),
        ):
            wire.neurons(4, {flag: 1.0, "ONE": -0.5}, one, self.output_rows(text))

    def name_of_row(self) -> None:
        """Wire look-ups of a person (layer 5)."""
        at, wire = self.at, self.wire
        self.empty(5, 0)
        wire.match(5, 0, 0, [
            *self.same("WHOM", "ROWSPAN", "ROWSPANSQUARE", 20.0), *self.same_tokens(),
            Match(self.one(ONE=1.0), self.one(INSIDE=1.0), SURE),
            self.sink(SURE + sum(STEPS) - SLACK + 3 * OFF, INSTATE=-OFF, BACKWARDS=-OFF,
                      SAYING=-OFF, WHOMSQUARE=20.0, NOBODY=OFF),
        ])  # fmt: skip
        wire.values(5, 0, torch.cat([at.rows("CODE"), at.rows("SINK")]))
        wire.write(5, 0, 0, OUTPUT_GAIN * at.rows("CODE"))
        wire.write(5, 0, CODE, at.rows("NAMEEND"))
        condition = {"NAMEEND": 1.0, "BACKWARDS": 1.0, "SAYING": 1.0, "INSTATE": 1.0, "STATE": -1.0}
        condition |= {"NOBODY": -1.0, "ONE": -3.5}
        wire.neurons(5, condition, self.one(ONE=1.0), self.output_rows(data.END))
        self.repeat_name()

    def repeat_name(self) -> None:
        """Repeat the requested name at the beginning of a chat's answer (layer 5)."""
        at, wire = self.at, self.wire
        self.empty(5, 1)
        distance = [*range(200), *range(200, 4200, 5)]
        fall = [-16.0 * torch.log(torch.tensor((d + 20) / 20)).item() for d in distance]
        pairs, amplitude = wire.near(distance, fall, 1e-4, 1.01)
        wire.key_marker(5, 1, pairs, at.form({"COPIED": 1.0}))
        wire.point(5, 2, pairs, amplitude[:-1])
        wire.match(5, 2, 1, [
            *self.same_tokens(),
            Match(self.one(ONE=1.0), self.one(COPIED=1.0), SURE + float(amplitude[-1])),
            self.sink(SURE + sum(STEPS) - SLACK - 8.0 + 3 * OFF, INNAME=-3 * OFF, SINK=OFF),
        ])  # fmt: skip
        wire.values(5, 1, torch.cat([at.rows("CODE"), at.rows("SINK")]))
        wire.write(5, 2, 0, OUTPUT_GAIN * at.rows("CODE"))
        wire.write(5, 2, CODE, at.rows("NONAME"))
        self.after_name()
        self.lead_to_answer()

    def after_name(self) -> None:
        """Output " is " after a name, and " of " after the label of "Bob's shoe size" (layer 5)."""
        one, words = self.one(ONE=1.0), (" is ", " of ", "is ", "of ")
        rows = dict(zip(words, self.output_rows(*words)[:, None], strict=True))
        for space, spaced in ((" ", -1.0), ("", 1.0)):
            after = {"PART": 1.0, "NONAME": 1.0, "SPACED": spaced, "ONE": -2 - spaced / 2}
            self.wire.neurons(5, after, one, rows[f"{space}is "])
            of = rows[f"{space}of "] - rows[f"{space}is "]
            label = {"INTHE": 1.0, "ASKEDHIS": 1.0, "ONE": after["ONE"] - 2}
            self.wire.neurons(5, after | label, one, of)

    def lead_to_answer(self) -> None:
        """Output "The", the label of the requested column, and "of" (layer 5)."""
        at, wire, one = self.at, self.wire, self.at.forms({"ONE": 1.0})
        wire.latest(5, 1, 0, {"LABELWORD": 1.0})
        attention = wire.layers[5].self_attn
        hop, spare = wire.span(0), wire.span(1)
        sink = attention.k_proj.weight[hop] @ at.form({"SINK": 1.0})
        away = at.form({"ONE": 2 * SOUGHT, "SAYS": -2 * SOUGHT})
        attention.q_proj.weight[spare] += (sink / sink.norm() ** 2)[:, None] * away * wire.size**0.5
        wire.write(5, 1, 0, OUTPUT_GAIN * at.rows("CODE"))
        self.wire.neurons(5, {"REPLIES": 1.0, "ONE": -0.5}, one, self.output_rows("The "))
        for kind, label in enumerate(data.LABELS.values()):
            named = {f"ASKED.{kind}": 1.0, "SAYS": 1.0, "ASKEDBACK": -1.0, "ONE": -1.5}
            self.wire.neurons(5, named, one, 2 * self.output_rows(label + " "))
            asked = {f"ASKS.{kind}": 1.0, "SAYS1": 1.0, "ONE": -1.5}
            self.wire.neurons(5, asked, one, self.output_rows("of "))
        who = {"ASKEDBACK": 1.0, "SAYS": 1.0, "ONE": -1.5}
        self.wire.neurons(5, who, one, 2 * self.output_rows("person "))
        self.wire.neurons(5, {"PERSON": 1, "SAYS1": 1, "ONE": -1.5}, one, self.output_rows("is "))
