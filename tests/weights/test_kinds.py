"""Models with quantized weights compared with the same models with those weights in float."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headstart.errors import ConfigError, DamagedModelError, UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.dense.decoder import DenseDecoder
from headstart.models.loader import load_model
from headstart.models.transformers_backend import loader as zoo_loader
from headstart.models.transformers_backend.decoder import forward_rows
from headstart.models.transformers_backend.loader import load_transformers
from headstart.native import library
from headstart.weights import reader
from headstart.weights.format import Embedding, Linear, WeightFormat, WeightKind
from headstart.weights.grouped import quantize_groups
from headstart.weights.int8 import Int8Weight
from headstart.weights.quantize import kind_of_layer
from tests.models.paged import Paged
from tests.rounded_rows import apart_in_most_rows, round_inputs
from tests.tiny_models import VOCABULARY, save_tiny, tiny_config, tiny_model
from tests.weights.stored import quantized_matrices

KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
# Ties, biases, fused projections, experts, capped logits, learned positions.
ARCHITECTURES = ("llama", "qwen2", "qwen3_moe", "gemma2", "phi3", "opt", "gpt_neox", "deepseek_v3")
TOKENS = torch.arange(3, 23) % VOCABULARY


def quantized(model: DecoderModel) -> dict[str, WeightFormat]:
    return quantized_matrices(model.module)


def logits(model: DecoderModel) -> Tensor:
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    model.detach()
    return torch.stack(sequence.logits)


def in_float(folder: Path, model: DecoderModel, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' model with the layers' own weights, and rows rounded as they do."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for name, layer in quantized(model).items():
        # A separate parameter, which embeddings do not share.
        module = plain.get_submodule(name)
        module.weight = nn.Parameter(layer.unpack().to(dtype))
    round_inputs(plain, model.module)
    table = next(
        (m for m in model.module.modules() if isinstance(m, Embedding) and m.matrix.kind), None
    )
    if table is not None:
        rows = table(torch.arange(table.num_embeddings))
        plain.get_input_embeddings().weight = nn.Parameter(rows)
    return plain


def load_zoo(folder: Path, dtype: str = "float32", *, weights: WeightKind | None) -> DecoderModel:
    """Load the model with the modules of transformers."""
    return load_transformers(folder, getattr(torch, dtype), torch.device("cpu"), weights=weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [load_model, load_zoo])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_unpacked_weights(
    architecture: str, load: Any, kind: WeightKind, tmp_path: Path
) -> None:
    folder = save_tiny(architecture, tmp_path)
    model = load(folder, "float32", weights=kind)
    places = torch.arange(len(TOKENS))
    expected = forward_rows(in_float(folder, model), TOKENS, places, places)
    assert apart_in_most_rows(logits(model), expected) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "granite"])
def test_float16_loses_as_much_as_in_transformers(
    architecture: str, kind: WeightKind, tmp_path: Path
) -> None:
    """Rounding in float16 sometimes moves an 8-bit number of a row to the next one.

    Granite's multipliers make that more frequent in some models.
    """
    folder = save_tiny(architecture, tmp_path)
    model = load_model(folder, "float16", weights=kind)
    places = torch.arange(len(TOKENS))
    exact, theirs = (
        forward_rows(in_float(folder, model, dtype), TOKENS, places, places).float()
        for dtype in (torch.float32, torch.float16)
    )
    own, allowed = (
        ((actual - exact).norm(dim=-1) / exact.norm(dim=-1)).median()
        for actual in (logits(model), theirs)
    )
    assert own < 1.5 * allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.usefixtures("amx_products")
def test_layers_under_bfloat16_run_as_one_call_with_amx(
    architecture: str, kind: WeightKind, tmp_path: Path
) -> None:
    if library() is None:
        pytest.skip("no products of bfloat16 here")  # without AMX the same weight is multiplied
    folder = save_tiny(architecture, tmp_path)
    model = load_model(folder, "bfloat16", weights=kind)
    assert isinstance(model, DenseDecoder) and model._compiled is not None
    places = torch.arange(len(TOKENS))
    expected = forward_rows(in_float(folder, model), TOKENS, places, places)

    def error() -> float:
        apart = (logits(model) - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(apart.median())

    eps = torch.finfo(torch.bfloat16).eps
    assert error() < 10 * eps
    model.calls_each_layer = True  # as a step with adapters runs
    assert error() < 10 * eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [load_model, load_zoo])
def test_every_layer_of_the_text_is_replaced(kind: WeightKind, load: Any, tmp_path: Path) -> None:
    model = load(save_tiny("qwen2", tmp_path), weights=kind)
    left = [name for name, m in model.module.named_modules() if isinstance(m, nn.Linear)]
    layers = quantized(model)
    assert not left and len(layers) == 3 * 7 + 1
    assert layers["lm_head"].kind == "int8"
    plain = load_model(tmp_path)
    assert model.linear_widths() == plain.linear_widths()
    for name in layers:
        weight, original = model.weight(name), plain.weight(name)
        assert weight is not None and original is not None
        assert 0 < float((weight - original).norm() / original.norm()) < 0.2
    assert model.weight("model.norm") is not None and model.weight("model") is None


def tied_llama(folder: Path) -> Path:
    """A model whose LM head is its embedding."""
    config = AutoModelForCausalLM.from_pretrained(save_tiny("llama", folder / "own")).config
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "tied")
    return folder / "tied"


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load", [load_model, load_zoo])
@pytest.mark.usefixtures("amx_products")
def test_embeddings_that_share_the_heads_weight_share_its_values(
    tmp_path: Path, load: Any, dtype: str, kernels: str, use_kernels: Callable[..., None]
) -> None:
    """The rows are stored in addition to FBGEMM's layout, from which no row can be read."""
    use_kernels(kernels)
    model = load(tied_llama(tmp_path), dtype, weights="int8")
    table, head = model.layer("model.embed_tokens"), model.layer("lm_head")
    assert isinstance(table, Embedding) and isinstance(head, Linear)
    assert table.matrix is head.matrix and isinstance(head.matrix, Int8Weight)
    unpacked = head.matrix.unpack()
    assert (table.num_embeddings, table.embedding_dim) == unpacked.shape
    for name in ("model.embed_tokens", "lm_head"):
        weight = model.weight(name)
        assert weight is not None and torch.equal(weight, unpacked)
    numbers = torch.arange(VOCABULARY).flip(0)[1:].view(2, -1)
    assert torch.equal(table(numbers), unpacked[numbers].to(model.dtype))
    assert table(numbers[:, :0]).shape[:2] == (2, 0)
    with pytest.raises(IndexError):
        table(torch.tensor([VOCABULARY]))
    assert model.vocab_size == VOCABULARY and model.dtype == getattr(torch, dtype)


def test_a_table_too_large_to_be_quantized_is_refused(tmp_path: Path) -> None:
    """Its logits would be infinite."""
    file = tied_llama(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][3, 5:7] = 3e38
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight .* too large for int8;"):
        load_model(file.parent, "float32", weights="int8")


@pytest.mark.usefixtures("amx_products")
def test_a_table_is_not_packed_if_rows_cannot_be_read() -> None:
    """With AMX, each row would cost a copy of the whole weight."""
    values = quantize_groups(torch.randn(16, 64), 4)
    assert values.store(None, torch.bfloat16, table=True).struct(torch.bfloat16) is None
    if library() is not None:
        assert values.store(None, torch.bfloat16).struct(torch.bfloat16) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("load", [load_model, load_zoo])
@pytest.mark.usefixtures("amx_products")
def test_a_model_recognizes_the_embedding_of_its_file(
    tmp_path: Path, load: Any, weights: str, dtype: str
) -> None:
    """Regression: an adapter with a copy of the embedding was refused in some layouts."""
    kind = None if load is load_zoo and weights == "auto" else weights
    model = load(tied_llama(tmp_path), dtype, weights=kind)
    table = load_file(tmp_path / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    for name in ("model.embed_tokens", "lm_head"):
        assert model.holds(name, table)
        for other in (table.roll(1, 0), table[1:], table.flatten()):
            assert not model.holds(name, other)


@pytest.mark.parametrize("kind", KINDS)
def test_freed_memory_is_returned_after_the_embedding_each_layer_and_the_head(
    kind: WeightKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise memory for reading would accumulate, and stay until the process ends."""
    returned: list[None] = []
    monkeypatch.setattr(reader, "return_freed_memory", lambda: returned.append(None))
    folder = save_tiny("llama", tmp_path)
    model = load_model(folder, "float32", weights=kind)
    assert isinstance(model, DenseDecoder)
    assert len(returned) == 1 + len(model.layouts) + 1


def test_weights_that_are_not_quantized_outlive_their_file(tmp_path: Path) -> None:
    """Regression: transformers leaves embeddings and norms in their mapped file.

    They changed with it.
    """
    model = load_zoo(save_tiny("gpt_neox", tmp_path), weights="int4")
    expected, file = logits(model), tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(logits(model), expected)


def test_files_that_are_written_to_while_transformers_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the model had weights of both files, and answered."""
    file = save_tiny("gpt_neox", tmp_path) / "model.safetensors"
    monkeypatch.setattr(zoo_loader, "quantize_linears", lambda *_: file.touch())
    with pytest.raises(DamagedModelError, match="changed while they were read"):
        load_zoo(tmp_path, weights="int4")


def test_routers_and_experts_are_not_quantized(tmp_path: Path) -> None:
    model = load_model(save_tiny("qwen3_moe", tmp_path), weights="int4")
    assert quantized(model).keys() == {
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkvo"
    } | {"lm_head"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(kind: WeightKind, tmp_path: Path) -> None:
    model = load_model(save_tiny("llama", tmp_path), "float32", weights=kind)
    paged = Paged(model, num_blocks=256)
    prompt = (torch.arange(200) * 7 % VOCABULARY).tolist()
    whole, cut = paged.add(prompt), paged.add(prompt)
    paged.step([(whole, 200)])
    while cut.done < 200:
        paged.step([(cut, min(7, 200 - cut.done))])
    actual, expected = torch.stack(cut.logits), torch.stack(whole.logits)
    apart = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(apart.max()) < 0.03  # near ties of whole numbers go either way
    assert apart_in_most_rows(actual, expected) < 1e-3


@pytest.mark.parametrize("load", [load_model, load_zoo])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_int4_uses_more_bits_where_it_loses_most(kv_heads: int, load: Any, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.num_key_value_heads = kv_heads
    tiny_model(config).save_pretrained(tmp_path)
    kinds = {name: layer.kind for name, layer in quantized(load(tmp_path, weights="int4")).items()}
    assert kinds.pop("lm_head") == "int8"
    wanted = dict.fromkeys(("q", "gate", "down"), "int4") | dict.fromkeys(("o", "up"), "int5")
    # As many keys as queries are too much of a model.
    wanted |= dict.fromkeys("kv", "int8" if kv_heads == 2 else "int5")
    kinds_by_projection = {
        (name.split(".")[-1].removesuffix("_proj"), kind) for name, kind in kinds.items()
    }
    assert kinds_by_projection == set(wanted.items()) and len(kinds) == 7 * config.num_hidden_layers
    others = quantized(load(tmp_path, weights="int5")).values()
    assert {layer.kind for layer in others} == {"int5", "int8"}


@pytest.mark.parametrize(
    ("name", "outputs", "wanted"),
    [
        ("model.layers.3.self_attn.k_proj", 32, "int8"),
        ("v_proj", 32, "int8"),
        ("k_proj", 64, "int5"),
        ("v_proj", 96, "int5"),
        ("model.layers.3.self_attn.qkv_proj", 32, "int5"),  # fused, and narrow
        ("gate_up_proj", 128, "int5"),
        ("o_proj", 32, "int5"),
        ("up_proj", 128, "int5"),
        ("q_proj", 32, "int4"),
        ("gate_proj", 128, "int4"),
        ("down_proj", 32, "int4"),
        ("k_proj.extra", 32, "int4"),
        ("fc1", 32, "int4"),
    ],
)
def test_bits_depend_on_the_name_and_the_shape_of_a_layer(
    name: str, outputs: int, wanted: WeightKind
) -> None:
    assert kind_of_layer(name, "int4", 64, outputs) == wanted
    for kind in ("int5", "int8"):
        assert kind_of_layer(name, kind, 64, outputs) == kind


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights is 'int3'; allowed: auto, int8, int5, int4"):
        load_model(tmp_path, weights="int3")
