"""Checkpoints of torchao, as transformers saves them, compared with both libraries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from headstart import LLM, SamplingParams
from headstart.engine.parts import identify
from headstart.errors import UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.families import FAMILIES
from headstart.models.loader import load_model
from headstart.weights.format import Embedding, WeightFormat
from headstart.weights.grouped import GroupedWeight
from headstart.weights.int8 import Int8Weight
from tests.engine.internals import kv_memory
from tests.models.paged import Paged
from tests.rounded_rows import apart_in_most_rows, round_inputs
from tests.tiny_models import TINY
from tests.weights.stored import quantized_matrices

quantization: Any = pytest.importorskip("torchao.quantization")
from transformers import TorchAoConfig  # noqa: E402 - needs torchao

PER_ROW, PER_TENSOR = quantization.PerRow(), quantization.PerTensor()
IN_32, BY_OUTPUT = quantization.PerGroup(32), quantization.PerAxis(0)
ASYMMETRIC = quantization.MappingType.ASYMMETRIC

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
TOKENS = torch.arange(3, 23)
LIMIT = 5e-4  # rows have 14 bits where FBGEMM multiplies; elsewhere logits are 4e-7 apart

# The weights of a configuration, value for value.
KINDS: dict[str, tuple[Any, str]] = {
    "int8": (quantization.Int8WeightOnlyConfig(), "int8"),
    "int8, one step": (quantization.Int8WeightOnlyConfig(granularity=PER_TENSOR), "int8"),
    "int8 in groups": (quantization.Int8WeightOnlyConfig(granularity=IN_32), "int8"),
    "w8a8": (quantization.Int8DynamicActivationInt8WeightConfig(), "int8"),
    "w8a8, asymmetric inputs": (
        quantization.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ASYMMETRIC),
        "int8",
    ),
    "w8a8, one step": (
        quantization.Int8DynamicActivationInt8WeightConfig(granularity=[PER_ROW, PER_TENSOR]),
        "int8",
    ),
    "intx of 8 bits": (quantization.IntxWeightOnlyConfig(), "int8"),
    "intx of 8 bits, asymmetric": (
        quantization.IntxWeightOnlyConfig(mapping_type=ASYMMETRIC),
        "int8",
    ),
    "intx of 4 bits": (
        quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=IN_32),
        "int4",
    ),
    "w4a8": (
        quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=IN_32, weight_mapping_type=ASYMMETRIC
        ),
        "int4",
    ),
}


def save(folder: Path, config: Any, quantized: Any, **options: Any) -> Any:
    """Save a model that torchao quantized in `folder`; return it."""
    torch.manual_seed(0)
    return save_model(folder, AutoModelForCausalLM.from_config(config), quantized, **options)


def save_model(folder: Path, model: Any, quantized: Any, **options: Any) -> Any:
    plain = folder.parent / "plain"
    model.bfloat16().save_pretrained(plain)
    loaded = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, quantization_config=quantized
    )
    loaded.save_pretrained(folder, **options)
    return loaded


def in_float(model: Any) -> Any:
    """Return the model with torchao's weights as float32."""
    float_model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    floats = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    float_model.load_state_dict(floats)
    return float_model.eval().requires_grad_(False)


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, quantization.Int8Tensor):
        whole: Tensor = tensor.dequantize(torch.float32)
    elif isinstance(tensor, quantization.IntxUnpackedToInt8Tensor):
        whole = tensor.to(torch.float32).dequantize()
    else:
        whole = tensor.float()
    return whole


def logits(model: DecoderModel) -> Tensor:
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    return torch.stack(sequence.logits).float()


def apart(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def layers_of(model: DecoderModel) -> dict[str, WeightFormat]:
    return quantized_matrices(model.module)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [LlamaConfig, Qwen2Config])
def test_a_checkpoint_has_torchaos_weights_and_answers(
    kind: str, make: Any, tmp_path: Path
) -> None:
    config, wanted = KINDS[kind]
    folder = tmp_path / "model"
    tied = make is Qwen2Config
    theirs = save(folder, make(**SIZES, tie_word_embeddings=tied), TorchAoConfig(config))
    model = load_model(folder, "float32")
    assert model.fallback_reason is None
    layers = layers_of(model)
    assert len(layers) == 14
    assert {(one.kind, one.is_prequantized) for one in layers.values()} == {(wanted, True)}
    original = in_float(theirs)
    for name, layer in layers.items():
        weight = original.get_submodule(name).weight
        if isinstance(layer, Int8Weight):
            torch.testing.assert_close(layer.unpack(), weight, rtol=1e-6, atol=1e-7)
        else:  # a start is a step times a zero point, rounded to 11 bits
            assert isinstance(layer, GroupedWeight)
            largest = theirs.get_submodule(name).weight.scale.float().max()
            limit = 2**layer.form.bits * largest * 2**-12
            assert (layer.unpack() - weight).abs().max() <= limit
    rounded = in_float(theirs)
    for name, layer in layers.items():
        rounded.get_submodule(name).weight.copy_(layer.unpack())
    round_inputs(rounded, model.module)
    with torch.no_grad():
        directly = theirs(TOKENS[None]).logits[0].float()
        expected = rounded(TOKENS[None]).logits[0]
    actual = logits(model)
    assert apart_in_most_rows(actual, expected) <= LIMIT
    # It rounds to bfloat16.
    assert apart_in_most_rows(actual, directly) <= apart(expected, directly) + LIMIT


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & TINY.keys()))
def test_every_family_is_read(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    theirs = save_model(folder, TINY[family](), settings)
    model = load_model(folder, "float32")
    assert model.fallback_reason is None
    assert all(layer.is_prequantized for layer in layers_of(model).values())
    original = in_float(theirs)
    round_inputs(original, model.module)
    with torch.no_grad():
        expected = original(TOKENS[None]).logits[0]
    assert apart_in_most_rows(logits(model), expected) <= LIMIT


def test_parts_of_a_weight_may_be_in_several_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    theirs = save(folder, LlamaConfig(**SIZES), settings, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    original, model = in_float(theirs), load_model(folder, "float32")
    round_inputs(original, model.module)
    with torch.no_grad():
        expected = original(TOKENS[None]).logits[0]
    assert apart_in_most_rows(logits(model), expected) <= LIMIT


def test_each_module_may_have_a_configuration(tmp_path: Path) -> None:
    """Embedding and head in 8 bits, k_proj in float, as in torchao's checkpoints for phones."""
    folder = tmp_path / "model"
    each = {
        "re:.*k_proj": None,
        "re:.*(embed_tokens|lm_head)": quantization.IntxWeightOnlyConfig(granularity=BY_OUTPUT),
        "re:.*_proj": KINDS["w4a8"][0],
    }
    settings = TorchAoConfig(
        quantization.FqnToConfig(each),
        include_input_output_embeddings=True,
        modules_to_not_convert=[],
    )
    theirs = save(folder, LlamaConfig(**SIZES), settings)
    assert "model.embed_tokens._weight_qdata" in load_file(folder / "model.safetensors")
    model = load_model(folder, "float32")
    kinds = {name.rpartition(".")[2]: layer.kind for name, layer in layers_of(model).items()}
    assert kinds == {"lm_head": "int8"} | dict.fromkeys(
        ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "int4"
    )
    original = in_float(theirs)
    head = original.lm_head.weight
    torch.testing.assert_close(layers_of(model)["lm_head"].unpack(), head, rtol=1e-6, atol=1e-7)
    for name, layer in layers_of(model).items():
        original.get_submodule(name).weight.copy_(layer.unpack())
    round_inputs(original, model.module)
    with torch.no_grad():
        expected = original(TOKENS[None]).logits[0]
    assert apart_in_most_rows(logits(model), expected) <= LIMIT


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize(
    ("bits", "granularity"), [(torch.int8, BY_OUTPUT), (torch.int8, IN_32), (torch.int4, IN_32)]
)
def test_an_embedding_may_share_its_bits_with_the_head(
    bits: torch.dtype,
    granularity: Any,
    kernels: str,
    tmp_path: Path,
    use_kernels: Callable[..., None],
) -> None:
    """torchao saves it twice, and transformers does not load it again."""
    use_kernels(kernels)
    folder = tmp_path / "model"
    table = quantization.IntxWeightOnlyConfig(weight_dtype=bits, granularity=granularity)
    each = {
        "re:.*embed_tokens": table,
        "re:.*_proj": quantization.Int8WeightOnlyConfig(),
    }
    settings = TorchAoConfig(
        quantization.FqnToConfig(each),
        include_input_output_embeddings=True,
        modules_to_not_convert=[],
    )
    theirs = save(folder, LlamaConfig(**SIZES, tie_word_embeddings=True), settings)
    model = load_model(folder, "float32")
    assert model.fallback_reason is None
    layers, original = layers_of(model), in_float(theirs)
    assert all(layer.is_prequantized for layer in layers.values()) and "lm_head" in layers
    embedding = model.module.get_submodule("model.embed_tokens")
    assert isinstance(embedding, Embedding) and embedding.matrix is layers["lm_head"]
    assert embedding.matrix.kind == ("int4" if bits == torch.int4 else "int8")
    weight = original.get_submodule("lm_head").weight
    torch.testing.assert_close(embedding.matrix.unpack(), weight, rtol=1e-3, atol=1e-7)
    round_inputs(original, model.module)
    with torch.no_grad():
        expected = original(TOKENS[None]).logits[0]
    assert apart_in_most_rows(logits(model), expected) <= LIMIT
    rounded = load_model(folder, "float32", weights="int8")
    assert not any(layer.is_prequantized for layer in layers_of(rounded).values())


def test_an_llm_answers_and_caches_prefixes(tmp_path: Path) -> None:
    """Weights in their own bits, and the same ones rounded again, are two models to a store."""
    folder, names = tmp_path / "model", set()
    save(folder, Qwen2Config(**SIZES, tie_word_embeddings=True), TorchAoConfig(KINDS["w8a8"][0]))
    for weights in ("auto", "int8"):
        llm = LLM(folder, weights=weights, num_blocks=24, block_size=8, num_threads=1)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        first, second = (
            llm.generate({"prompt_token_ids": TOKENS.tolist()}, params)[0] for _ in range(2)
        )
        assert second.num_cached_tokens == len(TOKENS) - 1
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        memory, config = kv_memory(llm.engine), llm.engine.config
        names.add(identify(llm.engine.model, memory, config, folder).fingerprint)
        llm.close()
    assert len(names) == 2


def test_a_pickle_is_refused_and_may_be_saved_again(tmp_path: Path) -> None:
    """Before transformers 5 only a pickle could be saved; the advice in the error must work."""
    folder, again = tmp_path / "model", tmp_path / "again"
    theirs = save(folder, LlamaConfig(**SIZES), TorchAoConfig(KINDS["int8"][0]))
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin is a pickle of torchao's"):
        load_model(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(again)
    assert load_model(again).fallback_reason is None
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["quant_type"] = "int8_weight_only"  # as transformers 4 wrote it
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        load_model(folder)
