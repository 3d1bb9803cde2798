"""Small tokenizers of the kinds that models have, trained deterministically.

byte_level      GPT-2, Llama 3, Qwen: byte-level BPE, which is lossless
metaspace       SentencePiece of newer Llamas: a space before the first word only; characters
                outside the vocabulary become bytes
prepended       Llama 2, Mistral: a space after each special token

Other kinds of decoders, only for tests of text:

always          SentencePiece with a space before every part between special tokens
replaced        Gemma: spaces are encoded unchanged, and decoding drops none
word_pieces     BERT: a space before each word except the first, none within a word
"""

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = [
    "CHATML",
    "DECODED_TOKENIZERS",
    "END_OF_TURN",
    "SPECIAL_TOKENS",
    "TINY_TOKENIZERS",
    "byte_tokens",
]

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", END_OF_TURN)
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "the other day they went there together, then rather later than the weather let them",
    "an answer and another answer and the end of that and this",
    "user assistant system hello hello there where were we",
    "für Müller, où êtes-vous, 你好世界, 日本語, 👍🏽 👩‍👩‍👧 🙂🙂",
    "1 2 3 4 10 100 1000, (a), [b], {c}: x = y + z;\n\n\nnew lines\n\nand   spaces  ",
] * 3


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _pieces() -> models.BPE:
    """Return SentencePiece's kind of BPE, over characters, with tokens for single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    letters = [text.encode("ascii", "ignore").decode() for text in _CORPUS]
    tokenizer.train_from_iterator(letters, BpeTrainer(vocab_size=150, show_progress=False))
    trained = json.loads(tokenizer.to_str())["model"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in trained["vocab"]:
        vocabulary[piece] = len(vocabulary)
    merges = [(left, right) for left, right in trained["merges"]]
    return models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(_pieces())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = _piece_decoder()
    return tokenizer


def _prepended() -> Tokenizer:
    tokenizer = Tokenizer(_pieces())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = _piece_decoder()
    return tokenizer


def _always() -> Tokenizer:
    tokenizer = Tokenizer(_pieces())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def _replaced() -> Tokenizer:
    tokenizer = Tokenizer(_pieces())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _piece_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def _wrap(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerBase:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=END_OF_TURN,
        extra_special_tokens=list(SPECIAL_TOKENS[1:2]),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


TINY_TOKENIZERS: dict[str, Callable[..., PreTrainedTokenizerBase]] = {
    "byte_level": lambda chat_template=CHATML: _wrap(_byte_level(), chat_template),
    "metaspace": lambda chat_template=CHATML: _wrap(_metaspace(), chat_template),
    "prepended": lambda chat_template=CHATML: _wrap(_prepended(), chat_template),
}

DECODED_TOKENIZERS = TINY_TOKENIZERS | {
    "always": lambda chat_template=CHATML: _wrap(_always(), chat_template),
    "replaced": lambda chat_template=CHATML: _wrap(_replaced(), chat_template),
    "word_pieces": lambda chat_template=CHATML: _wrap(_word_pieces(), chat_template),
}


def byte_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Text spelled in tokens of one byte each; ASCII letters only if not byte-level."""
    symbols = bytes_to_unicode()
    token_ids = tokenizer.convert_tokens_to_ids([symbols[byte] for byte in text.encode()])
    assert isinstance(token_ids, list)
    return token_ids
