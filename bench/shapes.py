"""Models of known shapes with random weights, made on the spot and kept in `build/bench`.

A model with random weights costs what a real one of its shape costs, and needs no download.
The folder has no tokenizer: prompts are token ids.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

FOLDER = Path(__file__).resolve().parents[1] / "build" / "bench"

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


def model_folder(shape: str) -> Path:
    """A saved bfloat16 checkpoint of this shape; written on the first call, whole or not at all."""
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
