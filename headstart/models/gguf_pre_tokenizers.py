"""The splits of a text into words before byte-level BPE, by the name in `tokenizer.ggml.pre`.

A GGUF file has only the name of its split. The names are those of llama.cpp's llama-vocab.cpp, and
the regexes those of the models' own tokenizer.json. Each regex of a split cuts the pieces that the
previous regex left.
"""

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """A split, and the facts that llama.cpp derives from its name.

    ignore_merges: a word that is a token becomes this token, regardless of the merges. add_bos:
    texts begin with BOS, unless the file has another setting.
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
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ends: str, numbers: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return a split like those of GPT-4o and Tekken, which cut before upper-case letters."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{ends}|{lead}{upper}+{lower}*{ends}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"


_GPT4O = _cased(f"{_ENDS}?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"\p{Han}+|" + _cased(
    f"{_ENDS}?", r"\p{N}{1,3}", _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
)
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
_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_NO_STOPS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_HALVED_SPACES = "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))

_YOUTU = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}"
    r"\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+"
)
_JAIS2 = (
    rf"{_ENDS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_HALVED_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_SPACES}"
)
_SEED = rf"{_ENDS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}"
_EXAONE = (
    rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
)

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
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
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
    (
        "youtu",
        PreTokenizer(
            (rf"{_YOUTU}|{_CJK}", _cased(f"{_ENDS}?", r"\p{N}")),
            ignore_merges=True,
        ),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_NO_STOPS,))),
    ("viking", PreTokenizer((_NO_STOPS, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                *(r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
                *(r"([\t\n]|    |  )", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
            ),
            add_bos=True,
        ),
    ),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}",))),
    (
        "afmoe",
        PreTokenizer((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK)),
    ),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    ("exaone-moe", PreTokenizer((_EXAONE,))),
    (
        "minicpm5",
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_ENDS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}|{_SPACES}"),
            ignore_merges=True,
        ),
    ),
)

PRE_TOKENIZERS = {name: split for names, split in _SPLITS for name in names.split()}
"""Pre-tokenizers by name. `sarvam-moe`, `granite-embed-multi-*` and `whitespace` are missing, since
the architectures of their models are not supported. `gemma4` is missing, since it does not split
texts into words."""
