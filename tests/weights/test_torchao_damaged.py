"""Checkpoints of torchao that are damaged or contradict themselves, written by hand.

The layout is that of torchao/prototype/safetensors: three tensors of a weight, and a description of
each weight in the header.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.errors import DamagedModelError, HeadstartError, UnsupportedModelError
from headstart.models.loader import load_model
from headstart.weights.checkpoint import Entry
from headstart.weights.layout import find_torchao_weights
from headstart.weights.scheme import Scheme, UnsupportedLayerError, read_scheme
from tests.weights.written import BASE, Tensors, save

About = dict[str, Any]
UP = "model.layers.1.mlp.up_proj"


def config(kind: str = "Int8WeightOnlyConfig", **data: Any) -> About:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
    }


def config_like(anything: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "FqnToConfig"])
    names = ("granularity", "weight_dtype", "fqn_to_config")
    data = st.fixed_dictionaries({}, optional=dict.fromkeys(names, anything))
    return st.fixed_dictionaries({"_type": kinds, "_data": data})


def shared(kind: str, **data: Any) -> About:
    return {"_type": kind, "_version": 1, "_data": data}


def quantize(weight: Tensor) -> Tensors:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127.5
    return {
        "_weight_qdata": (weight / scale).round().clamp(-128, 127).char(),
        "_weight_scale": scale,
        "_weight_zero_point": torch.zeros_like(scale, dtype=torch.int8),
    }


def describe(inputs: int) -> About:
    return {
        "_type": "Int8Tensor",
        "_data": {"block_size": [1, inputs], "act_quant_kwargs": None},
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    }


def write(
    folder: Path,
    change: Callable[[Tensors, dict[str, str]], None],
    about: About | None = None,
) -> None:
    """Write a checkpoint.

    change: a function that changes its tensors and its header.
    """
    save(folder, LlamaConfig(**BASE), about or config(), quantize)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    described = {
        name.replace("._weight_qdata", ".weight"): json.dumps(describe(tensor.shape[1]))
        for name, tensor in tensors.items()
        if name.endswith("qdata")
    }
    change(tensors, described)
    save_file(tensors, file, {"format": "pt"} | described)


def nothing(tensors: Tensors, header: dict[str, str]) -> None:
    del tensors, header


def part(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    def changed(tensors: Tensors, header: dict[str, str]) -> None:
        full = f"{UP}._weight_{name}"
        tensors[full] = change(tensors[full]).contiguous()

    return changed


def without(name: str) -> Any:
    return lambda tensors, header: tensors.pop(f"{UP}._weight_{name}")


def describing(**about: Any) -> Any:
    def changed(tensors: Tensors, header: dict[str, str]) -> None:
        header[f"{UP}.weight"] = json.dumps(describe(BASE["hidden_size"]) | about)

    return changed


def saying(text: str) -> Any:
    return lambda tensors, header: header.update({f"{UP}.weight": text})


def test_an_undamaged_checkpoint_is_read(tmp_path: Path) -> None:
    """Without zero points, too: some versions of torchao write none where all are 0."""
    write(tmp_path, nothing)
    assert load_model(tmp_path, "float32").fallback_reason is None
    first = load_file(tmp_path / "model.safetensors")

    def no_zeros(tensors: Tensors, header: dict[str, str]) -> None:
        for name in [name for name in tensors if name.endswith("zero_point")]:
            del tensors[name]
        for name, text in header.items():
            header[name] = json.dumps(json.loads(text) | {"_tensor_data_names": ["qdata", "scale"]})

    write(tmp_path, no_zeros)
    model = load_model(tmp_path, "float32")
    assert model.fallback_reason is None
    expected = first[f"{UP}._weight_qdata"] * first[f"{UP}._weight_scale"]
    layer: Any = model.module.get_submodule(UP)
    torch.testing.assert_close(layer.matrix.unpack(), expected, rtol=1e-6, atol=1e-7)


DAMAGE: dict[str, tuple[Any, str]] = {
    "no scale": (without("scale"), "there is no _weight_scale"),
    "no values": (without("qdata"), "there is no _weight_qdata"),
    "no zero points": (without("zero_point"), "there is no _weight_zero_point"),
    "values cut": (part("qdata", lambda t: t[:-1]), "do not fit together"),
    "values in a row": (part("qdata", torch.flatten), "do not fit together"),
    "scales cut": (part("scale", lambda t: t[:-1]), "do not fit together"),
    "scales without a second axis": (part("scale", torch.flatten), "do not fit together"),
    "zero points cut": (part("zero_point", lambda t: t[1:]), "do not fit together"),
    "values in float": (part("qdata", lambda t: t.float()), "type of _weight_qdata"),
    "values in uint8": (part("qdata", lambda t: t.view(torch.uint8)), "type of _weight_qdata"),
    "scales of integers": (part("scale", lambda t: t.int()), "type of _weight_scale"),
    "zero points in float": (part("zero_point", lambda t: t.float()), "type of _weight_zero_point"),
    "scales not finite": (part("scale", lambda t: t * torch.nan), "not finite"),
    "scales too large": (part("scale", lambda t: t + 1e37), "not finite"),
    "an undeclared tensor": (
        lambda tensors, header: tensors.update({f"{UP}._weight_more": torch.zeros(3)}),
        "does not name _weight_more",
    ),
    "an additional float": (
        lambda tensors, header: tensors.update({f"{UP}.weight": torch.zeros(3)}),
        "there is also a float weight",
    ),
    "no description": (
        lambda tensors, header: header.pop(f"{UP}.weight"),
        "no header describes how values",
    ),
    "described as a float": (describing(_type="Tensor"), "no header describes how"),
    "a description that ends too early": (saying('{"_type":'), "allowed: a JSON object"),
    "a description of a list": (saying("[]"), "allowed: a JSON object"),
    "a description that nests": (saying("[" * 10_000), "allowed: a JSON object"),
    "no data": (describing(_data=None), "has no _data"),
    "no names": (describing(_tensor_data_names=None), "there is no _weight_qdata"),
    "names of numbers": (describing(_tensor_data_names=["qdata"]), "there is no _weight_scale"),
    "no blocks": (describing(_data={}), "blocks of None"),
    "blocks of text": (describing(_data={"block_size": ["1", "64"]}), "do not fit together"),
    "blocks of nothing": (describing(_data={"block_size": [1, 0]}), "do not fit together"),
    "blocks of other inputs": (describing(_data={"block_size": [1, 32]}), "do not fit together"),
    "blocks that leave a rest": (describing(_data={"block_size": [1, 48]}), "do not fit together"),
    "all in float": (
        lambda tensors, header: (
            tensors.update({n: torch.ones(3) for n in header}),
            [tensors.pop(name) for name in list(tensors) if "._weight_" in name],
            header.clear(),
        ),
        "no quantized weights, but config.json",
    ),
    "a weight that is nowhere": (
        lambda tensors, header: header.update({"x.weight": json.dumps(describe(3))}),
        "x in .* no tensors: there is no _weight_qdata",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_a_damaged_weight_is_refused(damage: str, weights: str, tmp_path: Path) -> None:
    change, reason = DAMAGE[damage]
    write(tmp_path, change)
    with pytest.raises(DamagedModelError, match=reason):
        load_model(tmp_path, "float32", weights=weights)


def intx(bits: str) -> Any:
    """Describe every weight as of another class, which has values of this many bits."""

    def changed(tensors: Tensors, header: dict[str, str]) -> None:
        for name, text in header.items():
            about = json.loads(text) | {"_type": "IntxUnpackedToInt8Tensor"}
            about["_data"]["target_dtype"] = {"_type": "torch.dtype", "_data": bits}
            header[name] = json.dumps(about)

    return changed


def zeros_beyond(tensors: Tensors, header: dict[str, str]) -> None:
    """Write values of 4 bits, and zero points of more bits, which torchao never does."""
    intx("int4")(tensors, header)
    for name in [name for name in tensors if name.endswith("qdata")]:
        tensors[name] = tensors[name].clamp(-8, 7)
    tensors[f"{UP}._weight_zero_point"][3] = -9


FOUR = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}
CONTRADICTIONS: dict[str, tuple[About, Any, str]] = {
    "values of more than 4 bits": (
        config("IntxWeightOnlyConfig", **FOUR),
        intx("int4"),
        "the value .*; allowed: up to 7 in 4 bits",
    ),
    "zero points of more than 4 bits": (
        config("IntxWeightOnlyConfig", **FOUR),
        zeros_beyond,
        r"up_proj\.weight .* zero points from -9 to 0; allowed: -8 to 7 in 4 bits",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_values_must_fit_the_bits_of_their_header(kind: str, tmp_path: Path) -> None:
    about, change, reason = CONTRADICTIONS[kind]
    write(tmp_path, change, about)
    with pytest.raises(DamagedModelError, match=reason):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize(
    "change",
    [
        describing(_type="Float8Tensor"),
        describing(_type=["x"]),
        describing(_tensor_data_names=["qdata", "scale", "act_pre_scale"]),
    ],
)
def test_other_weights_are_left_to_transformers(change: Any, tmp_path: Path) -> None:
    """It requires torchao, or detects the error; no weight is read as another kind."""
    write(tmp_path, change)
    with pytest.raises(HeadstartError):
        load_model(tmp_path, "float32")


def test_an_error_of_a_missing_package_names_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise ImportError("No module named 'torchao'")

    write(tmp_path, describing(_type="Float8Tensor"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", missing)
    message = r"named 'torchao'; .*up_proj is stored as torchao's Float8Tensor; allowed: Int8T"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path)


KEYS = ("_type", "_data", "_tensor_data_names", "block_size", "target_dtype", "fqn_to_config")
KINDS = (
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
    "IntxWeightOnlyConfig",
    "FqnToConfig",
    "PerGroup",
)
WORDS = st.sampled_from((*KEYS, *KINDS, "qdata", "scale", "int8", "granularity", "group_size"))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 64) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
)


@given(
    about=st.fixed_dictionaries(
        {},
        optional={
            "_type": st.just("Int8Tensor") | ANYTHING,
            "_data": st.fixed_dictionaries({"block_size": ANYTHING, "target_dtype": ANYTHING}),
            "_tensor_data_names": st.just(["qdata", "scale"]) | ANYTHING,
        },
    )
    | ANYTHING
)
def test_any_description_is_read_or_refused(about: Any) -> None:
    entries = {
        "a._weight_qdata": Entry(Path("x"), "", (4, 64), "I8"),
        "a._weight_scale": Entry(Path("x"), "", (4, 1), "F32"),
    }
    try:
        weights = find_torchao_weights(Path("x"), entries, {"a.weight": json.dumps(about)})
    except (DamagedModelError, UnsupportedLayerError):
        return
    assert weights["a.weight"].shape == (4, 64) and weights["a.weight"].group == 64


@given(ANYTHING | st.fixed_dictionaries({"default": config_like(ANYTHING)}))
def test_any_configuration_is_read_or_refused(kind: Any) -> None:
    content = {"quantization_config": {"quant_method": "torchao", "quant_type": kind}}
    try:
        scheme = read_scheme(content)
    except UnsupportedLayerError:
        return
    assert scheme is not None and scheme.bits <= {4, 8}


def test_pickles_are_refused_before_any_work(tmp_path: Path) -> None:
    write(tmp_path, nothing)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin .* save_pretrained"):
        load_model(tmp_path)


IN_32 = shared("PerGroup", group_size=32)
READ: dict[str, About] = {
    "by output": config(granularity=shared("PerRow", dim=-1)),
    "groups": config(granularity=IN_32),
    "w8a8": config("Int8DynamicActivationInt8WeightConfig", granularity=[shared("PerRow"), IN_32]),
    "w4a8": config("Int8DynamicActivationIntxWeightConfig", **FOUR, weight_granularity=IN_32),
    "by module": config(
        "ModuleFqnToConfig",
        module_fqn_to_config={
            "a": None,
            "b": config("IntxWeightOnlyConfig", **FOUR)["quant_type"]["default"],
            "_default": config(granularity=IN_32)["quant_type"]["default"],
        },
    ),
    "of transformers 4": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
}


@pytest.mark.parametrize("kind", READ)
def test_config_json_is_read(kind: str) -> None:
    """It names classes; bits and groups are those of each weight's header."""
    expected = Scheme("torchao", frozenset({4, 8}), frozenset())
    assert read_scheme({"quantization_config": READ[kind]}) == expected


MIXED = config(
    "FqnToConfig",
    fqn_to_config={
        "a": config()["quant_type"]["default"],
        "b": config("Float8WeightOnlyConfig")["quant_type"]["default"],
    },
)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (config("Float8WeightOnlyConfig"), "quant_type is .*Float8WeightOnlyConfig.*: Int8Weight"),
        (config("Int4WeightOnlyConfig", group_size=32), "is .*Int4WeightOnlyConfig"),
        (config("Int8StaticActivationInt8WeightConfig"), "is .*Int8StaticActivation"),
        (MIXED, "Float8WeightOnlyConfig"),
        ({"quant_method": "torchao"}, "quant_type is None"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "'int4_weight_only'"),
        ({"quant_method": "torchao", "quant_type": {"default": None}}, "quant_type is {'default'"),
        ({"quant_method": "torchao", "quant_type": {"other": {}}}, "quant_type is {'other'"),
    ],
)
def test_other_configurations_are_not_read(about: About, reason: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=reason):
        read_scheme({"quantization_config": about})
