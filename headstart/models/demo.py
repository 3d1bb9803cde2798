"""The demo model: a generated Llama of 24 million parameters that needs no download.

Its weights are random, from a fixed seed. It is as fast as a real model of its size, but its
answers are noise. Its tokens are bytes, plus three for chats and padding. It is written once to
the user's cache folder, in Hugging Face's layout. The ordinary loader reads it.
"""

import hashlib
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headstart.machine import multiplies_bfloat16
from headstart.models.files import cache_folder, make_folder
from headstart.version import __version__

_VARIABLE = "HEADSTART_DEMO_DIR"
_SEED = 20
_SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_PAD, _, _END_OF_TURN = range(256, 256 + len(_SPECIAL_TOKENS))
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def demo_model_path() -> Path:
    """Return the folder of the demo model; writes the model if it does not exist yet.

    The folder is below `$HEADSTART_DEMO_DIR`, or the user's cache folder. Two processes may create
    it at the same time. Raises `ModelError` if the folder cannot be written.
    """
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32

    def write(folder: Path) -> None:
        _write_model(folder, dtype)
        write_byte_tokenizer(folder, _SPECIAL_TOKENS, _CHAT_TEMPLATE)

    return make_cached_folder(f"demo-{str(dtype).removeprefix('torch.')}", [Path(__file__)], write)


def make_cached_folder(name: str, sources: Sequence[Path], write: Callable[[Path], None]) -> Path:
    """Return a cache folder that `write` fills if it does not exist; see `make_folder`.

    The folder's name contains a digest of `sources`, the files that define its content.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    folder = cache_folder(_VARIABLE) / f"{name}-{__version__}-{digest}"
    return make_folder(folder, _VARIABLE, write)


def _write_model(folder: Path, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=256 + len(_SPECIAL_TOKENS),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        initializer_range=0.04,
        pad_token_id=_PAD,
        bos_token_id=None,
        eos_token_id=_END_OF_TURN,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(_SEED)
    weights = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weights[name] = torch.ones(weight.shape, dtype=dtype)
        else:
            values = torch.randn(weight.shape, generator=generator) * config.initializer_range
            weights[name] = values.to(dtype)
    # Large embeddings make a token depend mostly on the previous token. So the text varies, and
    # rounding does not decide which logit is the largest.
    weights["model.embed_tokens.weight"] *= 25
    favor_printable_bytes(weights["lm_head.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=_END_OF_TURN, pad_token_id=_PAD).save_pretrained(folder)


def favor_printable_bytes(head: Tensor) -> None:
    """Change the weight of an LM head `[vocab, any]` so that only printable bytes are likely."""
    allowed = torch.zeros(head.shape[0], 1, dtype=head.dtype)
    allowed[[ord(character) for character in string.ascii_letters + string.digits + " .,"]] = 8
    head *= allowed


def write_byte_tokenizer(folder: Path, special_tokens: Sequence[str], chat_template: str) -> None:
    """Write a tokenizer of bytes and special tokens.

    The first special token is the padding token, and the third ends a turn.
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special_tokens])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special_tokens[0],
        eos_token=special_tokens[2],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    ).save_pretrained(folder)
