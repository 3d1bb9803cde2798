"""The split of a text that a GGUF file names, compared with llama.cpp."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headstart.errors import UnsupportedModelError
from headstart.models.gguf_pre_tokenizers import PRE_TOKENIZERS
from headstart.models.tokenizer import load_tokenizer
from tests.models.gguf.files import make_model, write_gguf

TEXTS = [
    "in 2024 there were 12345 things",
    "a  1",
    "a\n\n  22",
    "    return x == 3333+777",
    "10 100 1000 10000 1000000",
    "I'M you're he'll DON'T 'S",
    "\u65e5\u672c\u8a9e 12 \u30c6\u30b9\u30c8\u3001\u3067\u3059\u3002",
    "a\t\t7",
    "HelloWorld fooBar XMLParser getURL2 http://x/y 1/2",
    "|  3 |   44 |\r\n\r\n\tend  ",
    "<<=>>$$$^^~~``||..!! (bar) [baz] {qux}",
    "\uc548\ub155 \uc138\uacc4 123 Stra\u00dfe na\u00efve caf\u00e9 e\u0301x",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0663\u0664\u0665 \U0001f600!",
    "   \n \n  x   ",
]


def split(pre: str, text: str, folder: Path) -> list[str]:
    file = write_gguf(folder / f"{pre}.gguf", "llama", make_model("llama"), "F32", pre=pre)
    loaded: Any = load_tokenizer(file)
    return [
        text[start:end]
        for _, (start, end) in loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", r"a|  |1|2|3|4|.|5|\n|\n|It|'|S"),
        ("refact", r"a|  |1|2|3|4|.|5|\n|\n|It|'|S"),
        ("command-r", r"a|  |1|2|3|4|.|5|\n|\n|It|'|S"),
        ("granite-docling", r"a| | 1234|.|5|\n|\n|It|'|S"),
        ("llama-bpe", r"a| | |123|4|.|5|\n\n|It|'S"),
        ("qwen2", r"a| | |1|2|3|4|.|5|\n\n|It|'S"),
        ("gpt-4o", r"a| | |123|4|.|5|\n\n|It'S"),
        ("deepseek-coder", r"a|  |1|2|3|4|.|5|\n|\n|It|'|S"),
        ("deepseek-v3", r"a|  |123|4|.|5|\n\n|It|'S"),
        ("default", r"a| | |123|4|.|5|\n|\n|It|'|S"),
    ],
)
def test_a_text_is_split_by_the_rule_of_the_file(pre: str, expected: str, tmp_path: Path) -> None:
    """Regression: all but a few names were read as GPT-2's split."""
    assert split(pre, "a  1234.5\n\nIt'S", tmp_path) == expected.replace("\\n", "\n").split("|")


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"pre-tokenizer .* is 'new'; allowed: a\.x-4"):
        split("new", "a", tmp_path)


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm"])
def test_bos_begins_a_text_of_llama_3(pre: str, tmp_path: Path) -> None:
    """Its files do not contain it: llama.cpp derives it from the name of the split."""
    file = write_gguf(tmp_path / "a.gguf", "llama", make_model("llama"), "F32", pre=pre)
    loaded: Any = load_tokenizer(file)
    assert loaded.encode("ab") == ([1] if pre == "llama-bpe" else []) + [159]


@pytest.fixture(scope="module")
def words() -> tuple[list[str], list[str]]:
    """Return a vocabulary whose merges cross words, so that every cut shows in the tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False),
    )
    content = json.loads(trained.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    return tokens, [" ".join(merge) for merge in content["merges"]]


# llama.cpp has no marks in the words of these, and tokenizer.json of their models has.
MARKS = {"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_tokens_are_those_of_llama_cpp(
    pre: str, words: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """Runs where the package xllamacpp is installed."""
    llama_cpp: Any = pytest.importorskip("xllamacpp")
    model = make_model("llama", vocab_size=len(words[0]) + 3, tie_word_embeddings=True)
    file = write_gguf(tmp_path / "a.gguf", "llama", model, "F32", pre=pre, words=words)
    options = llama_cpp.CommonParams()
    options.model.path, options.warmup, options.n_ctx = str(file), False, 128
    options.port, options.verbosity = 0, -1
    server = llama_cpp.Server(options)
    loaded: Any = load_tokenizer(file)
    for text in TEXTS[:-3] if pre in MARKS else TEXTS:
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as answer:
            assert loaded.encode(text) == json.load(answer)["tokens"], text
