"""The features of each token in the starting weights of `headstart-tiny`: its code and its flags.

A token's code has 64 coordinates. The first 10 distinguish tokens roughly, for heads that compare
preceding tokens. They differ for each digit, and are equal for all openers (tokens before a value
or a name). The first 32 are equal for "number" and "number ". All 64 identify the token in the
output. Tokens that close a value have the code of the end of an answer, so that copying stops at
the end of a cell. A label or "the" counts as an opener of the next token: "age 29" matches "| 29".
"""

from __future__ import annotations

import re

import data
import torch
import words
from circuit import LOUD, Registers
from tokenizers import Tokenizer
from torch import Tensor

MATCH, SHARED, CODE = 10, 32, 64
TYPES = len(data.COLUMNS)  # kinds of cells, in the order of data.COLUMNS
NULL = TYPES  # the label of facts without a column, such as a setting
CELL_ENDS = (" | ", " |\n| ", " |\n")
LINE_ENDS = ("\n", "\n\n", ".\n", ".\n\n", ". ")
STATES = (" is ", "is ")
PLAIN_OPENERS = ("| ", ": ", "ID: ", "of ", " of ", "in ", "at ", "as ", "a ", "from ", "The ",
                 " works ", " comes ", " lives ", "does ", "email ", "call ")  # fmt: skip
OPENERS = {*CELL_ENDS, *LINE_ENDS, *STATES, *PLAIN_OPENERS, data.USER}
NAME_OPENERS = {" |\n| ", *LINE_ENDS, "of ", " of ", "is ", "does ", "email ", "call ", "The ",
                data.USER}  # fmt: skip
FILLERS = {
    "your", "answer", "question", ": ", "? ", "of ", " of ", *STATES, "is ", "the ", "what ",
    "as ", "a ", "from ", "at ", "in ", "tell ", "me ", "give ", "which ", "who ", "whose ",
    "where ", "how ", " do", " from", " live", " on", "does ", "do ", "can ", "person ",
    "lives ", "has ", "s ",
}  # fmt: skip
LEADS = {"the ", "s ", "which ", "Which "}  # may precede the requested label
STARTS = {data.USER, "\n", "\n\n", ": "}  # may precede a question
ENDS = {"?", "? ", ".", data.END}  # may end a question
SINKS = {"The ", "| ", ": ", data.USER, data.SYSTEM}  # a head that finds nothing attends to these
CLOSERS = {*CELL_ENDS, *LINE_ENDS, " years old"}
COLUMN_WORDS = {
    "job": "Occupation", "works": "Occupation", "living": "Occupation", "live": "Address",
    "lives": "Address", "comes": "Country", "from": "Country", "old": "Age", "call": "Phone Number",
    "phone": "Phone Number", "email address": "Email",
}  # fmt: skip
COUNTRY_ENDS = {c.split(" ")[-1] for c in words.COUNTRIES if " " in c}
FLAGS = (
    "OPEN", "NAMEABLE", "OPENSNAME", "MARKSLABEL", "TITLE", "DIGIT", "CELLEND", "ROW", "AT", "JOB",
    "COUNTRY", "COUNTRYEND", "REGION", "COMMA", "COLON", "NEWLINE", "STATE", "SINK", "FILLER",
    "SPACE", "PLAINIS", "LEADS", "REPLIES", "NAMED", "NUMBERED", "CLOSES", "NOT", "SAYS", "WHO",
    "PERSON", "ENDS", "STARTS", "OFS", "TITLEWORD", "SPACED", "KEYED", "BREAKS", "POSSESS",
    "ASKING", "ANSWERS",
)  # fmt: skip


def flags_of(text: str) -> set[str]:
    """Return the flags of a token with this text."""
    word = text.strip()
    title = word in data.COLUMNS
    job, country = word in words.JOBS, word in words.COUNTRIES
    label = label_of(text)
    letters = word.replace(" ", "").isalpha() or "\ufffd" in word
    nameable = letters and not (title or label or text.lower() in FILLERS)
    spaced = text.endswith(" ") and text[:1].isalpha()
    tests = {
        "OPEN": text in OPENERS,
        "NAMEABLE": nameable,
        "OPENSNAME": text in NAME_OPENERS,
        "MARKSLABEL": bool(label) or text in {*CELL_ENDS, "ID: "},
        "TITLE": title,
        "DIGIT": text.isdigit(),
        "CELLEND": text in CELL_ENDS,
        "ROW": text in (" |\n| ", "| "),
        "AT": text.startswith("@"),
        "JOB": job,
        "COUNTRY": country,
        "COUNTRYEND": text in COUNTRY_ENDS,
        "REGION": bool(re.fullmatch("[A-Z]{2,3}", text)) and text != "ID",
        "COMMA": text == ", ",
        "COLON": text == ": ",
        "NEWLINE": text in ("\n", "\n\n"),
        "STATE": text in STATES,
        "SINK": text in SINKS,
        "FILLER": text not in SINKS and (text.lower() in FILLERS or (letters and bool(label))),
        "SPACE": text in (" ", "-"),  # within a name
        "PLAINIS": text == "is ",
        "LEADS": text in LEADS,
        "REPLIES": text == data.ASSISTANT,
        "NAMED": text == "Name",
        "NUMBERED": text == "ID: ",
        "CLOSES": text in CLOSERS or text == ", ",
        "NOT": text == "not ",
        "SAYS": text == "The ",
        "ANSWERS": text == "The ",
        "WHO": text.lower() in ("who ", "whose ", "person "),
        "PERSON": text == "person ",
        "ENDS": text in ENDS,
        "STARTS": text in STARTS,
        "OFS": text in ("of ", " of "),
        "TITLEWORD": spaced and word in data.LABELS.values(),
        "SPACED": spaced,
        "KEYED": spaced and nameable,
        "BREAKS": text in {*OPENERS, *LEADS} or (spaced and bool(label)),
        "ASKING": bool(asks_for(text)) and (text != word or len(word) > 5 or word in data.COLUMNS),
        "POSSESS": text == "s ",
    }  # fmt: skip
    return {name for name, holds in tests.items() if holds}


def label_of(text: str) -> dict[int, float]:
    """Return the columns that a token names, with factors; NULL if no column applies after it."""
    word = text.strip()
    if text in ("\n", "\n\n", "The ", data.USER):
        return {NULL: 1.0}
    if text in (". ", ".\n", ".\n\n"):
        return {data.COLUMNS.index("Age"): 1.0}  # "{Name} is 30 years old." names no column
    if text == "ID: " or (not text.endswith(" ") and not word[:1].isupper()):
        return {}  # it may be a part of a longer word
    titles = {label: column for column, label in data.LABELS.items()}
    if word == "id":
        word = "ID"
    column = word if word in data.COLUMNS else titles.get(word, COLUMN_WORDS.get(word, ""))
    if not column:
        return {}
    factors = {data.COLUMNS.index(column): 1.0}
    if text == "lives ":  # who lives in Rome, or in Italy?
        factors[data.COLUMNS.index("Country")] = 1.0
    return factors


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def asks_for(text: str) -> dict[int, float]:
    """Return the column that a token of a question names, anywhere in the question."""
    word = text.strip().lower()
    return label_of(word + " ") if word in {*COLUMN_WORDS, *map(str.lower, data.COLUMNS)} else {}


def codes(texts: list[str]) -> Tensor:
    """Return the codes of all tokens, `[vocab, 64]`; see the top of this file."""
    code = torch.zeros(len(texts), CODE)
    by_word: dict[str, Tensor] = {}
    opener = unit(torch.randn(MATCH))
    for token, text in enumerate(texts):
        word = text.strip() or text
        if word not in by_word:
            by_word[word] = torch.cat([unit(torch.randn(MATCH)), unit(torch.randn(SHARED - MATCH))])
        code[token, :SHARED] = by_word[word]
        code[token, SHARED:] = 1.2 * unit(torch.randn(CODE - SHARED))
        if text.isdigit():
            code[token, :MATCH] = torch.eye(MATCH)[int(text)]
        if text in OPENERS or text == ", ":  # a town may follow a comma
            code[token, :MATCH] = opener
    end = texts.index(data.END)
    code[end, :MATCH] = opener
    for token, text in enumerate(texts):
        if text in CLOSERS:
            code[token] = code[end]
    return code


def embedding(tokenizer: Tokenizer, at: Registers) -> tuple[Tensor, Tensor]:
    """Return the embedding and the output rows, both `[vocab, width]`."""
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    rows = torch.zeros(size, at.width)
    rows[:, at.slices["ONE"]] = LOUD
    code = codes(texts)
    sinks = torch.tensor([text in SINKS for text in texts])
    rows[:, at.slices["CODE"]] = torch.where(sinks[:, None], 0.0, code)
    opener = code[texts.index(" | "), :MATCH]
    breaks = torch.tensor(["BREAKS" in flags_of(text) for text in texts])
    rows[:, at.slices["BEFORE"]] = torch.where(breaks[:, None], opener, code[:, :MATCH])
    for token, text in enumerate(texts):
        for flag in flags_of(text):
            rows[token, at.slices[flag]] = 1.0
        for name, labels in (("LABEL", label_of(text)), ("ASKS", asks_for(text))):
            for label, factor in labels.items():
                rows[token, at.slices[name].start + label] = factor
    out = torch.zeros(size, at.width)
    closing = torch.tensor([text in CLOSERS for text in texts])
    out[:, at.slices["CODE"]] = torch.where(closing[:, None], 0.0, code)
    return rows, out
