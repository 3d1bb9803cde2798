"""Pre-tokenizers of GGUF files: how text is split into words before byte-level BPE.

A GGUF file has only the name of its pre-tokenizer (`tokenizer.ggml.pre`). The names are those of
llama.cpp's llama-vocab.cpp. The regexes are those of the models' tokenizer.json. Each regex of a
pre-tokenizer splits the pieces that the previous regex returned.
"""

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """The regexes of a pre-tokenizer, and the settings that llama.cpp derives from its name.

    ignore_merges: a word that is a token becomes this token, regardless of merges. add_bos: texts
    begin with BOS if the file does not say otherwise.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_SPACES}"
_QWEN2 = rf"{_ENDS}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}"
_QWEN35 = (
    rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"
)


def _cased(ends: str, numbers: str) -> str:
    """Return a regex like those of GPT-4o and Tekken, which split before upper-case letters."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{lead}{upper}*{lower}+{ends}|{lead}{upper}+{lower}*{ends}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"


_GPT4O = _cased(f"{_ENDS}?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK = (
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    rf"|{_LINES}|{_SPACES}"
)
_SPARK = (
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]"
    rf"|{_SPACES}"
)
_CJK_WIDE = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_NO_STOPS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_SEED = rf"{_ENDS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}"

_SPLITS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK)),
    ),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", _MARKS, r"\s+$", _CJK_WIDE, r"\p{N}+")
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}")),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_NO_STOPS,))),
    ("viking", PreTokenizer((_NO_STOPS, r"\p{N}"))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}",))),
    (
        "minicpm5",
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_ENDS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}|{_SPACES}"),
            ignore_merges=True,
        ),
    ),
)

PRE_TOKENIZERS = {name: split for names, split in _SPLITS for name in names.split()}
"""Pre-tokenizers by name. Names of unsupported architectures are missing, and so is `gemma4`,
which does not split texts into words."""
