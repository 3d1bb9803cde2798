"""Models of known shapes with random weights, made when needed and stored in `build/bench`.

A model with random weights is as fast as a real model of its shape, and needs no download. The
folders have no tokenizer: prompts are token ids. `make_tokenizer` makes one for benchmarks that
need the texts of tokens.
"""

import re
import shutil
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

_WORD = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+")

FOLDER = Path(__file__).resolve().parents[1] / "build" / "bench"


def _lfm2(hidden: int, intermediate: int, heads: int, kv_heads: int) -> Lfm2Config:
    return Lfm2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=16,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        tie_word_embeddings=True,
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "demo": LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "lfm2-350m": _lfm2(1024, 6656, 16, 8),
    "lfm2-1.2b": _lfm2(2048, 12_288, 32, 8),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=32_768,
        eos_token_id=248_044,
        tie_word_embeddings=True,
    ),
    "gemma-3-1b": Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        tie_word_embeddings=True,
    ),
    "small-llama": LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    ),
}


def make_tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the vocabulary's size: bytes, and common words of Python's library.

    It has no merges. It provides the texts of tokens, which grammars need.
    """
    symbols = bytes_to_unicode()
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(symbols.values())}
    size = SHAPES[shape].vocab_size
    words: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
        words.update(_WORD.findall(path.read_text(encoding="utf-8", errors="ignore")))
        if len(words) > 2 * size:
            break
    for word, _ in words.most_common(size):
        if len(vocabulary) < size - 1:
            spelled = "".join(symbols[byte] for byte in word.encode())
            vocabulary.setdefault(spelled, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def model_folder(shape: str) -> Path:
    """Return a bfloat16 checkpoint of a shape. The first call writes it, all or nothing."""
    folder = FOLDER / shape
    if not folder.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{shape}-", dir=FOLDER))
        try:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
            model.save_pretrained(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def gguf_file(shape: str, kind: str) -> Path:
    """Return the model as a GGUF file, its matrices in `kind` (BF16, Q8_0, Q4_0).

    The first call writes it, completely or not at all. It has no tokenizer.
    """
    path = FOLDER / "gguf" / f"{shape}-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        model = AutoModelForCausalLM.from_pretrained(model_folder(shape), dtype=torch.float32)
        _write_gguf(model, unfinished, gguf.GGMLQuantizationType[kind])
        unfinished.rename(path)
    return path


_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def _write_gguf(model: PreTrainedModel, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_metadata(writer, model)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = _convert(name, tensor, config).numpy()
        target = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        assert target is not None, name
        if data.ndim == 1 or tensor.ndim == 3:
            writer.add_tensor(target, data)
        elif data.shape[-1] % 32 == 0:
            writer.add_tensor(target, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:  # as in llama.cpp, if a row is not a multiple of the group size
            writer.add_tensor(target, data.astype("float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    kind = config.model_type
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    angles = config.rope_parameters
    kv_heads = config.num_key_value_heads
    if kind == "lfm2":  # by layer
        kv_heads = [kv_heads * (layer == "full_attention") for layer in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    if kind == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        angles = angles["full_attention"]
    if kind == "qwen3_5_text":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * angles.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(angles["rope_theta"])
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _convert(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Return a tensor as llama.cpp's converter changes it."""
    kind = config.model_type
    if tensor.ndim == 3:  # of a convolution
        return tensor.squeeze(1).contiguous()
    if kind == "llama" and ("q_proj" in name or "k_proj" in name):  # GGUF interleaves pairs of rows
        half = config.hidden_size // config.num_attention_heads // 2
        return tensor.view(-1, 2, half, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    if name.endswith("A_log"):
        return -tensor.exp()
    has_one_less = kind in ("gemma3_text", "qwen3_5_text") and "linear_attn.norm" not in name
    return tensor + 1 if has_one_less and "norm" in name else tensor
