"""Checks of weights against the configuration, before and after a model is built from them.

Before: the names and shapes in the files' headers must show as many layers as the configuration
says, and tensors of its vocabulary and hidden size. So a model that its weights cannot fill is
never built. After: transformers' loading report must show no parameter left at random, and no
layer's weight left out.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.models.files import tensor_shapes

__all__ = ["check_decoder", "check_report", "check_speaker"]

# Multi-token prediction: layers after the last one that draft tokens and are not run here.
_DRAFT_LAYERS = "num_nextn_predict_layers"
_MATRIX = ("num_hidden_layers", "hidden_size")  # of every layer, times what it makes of a row
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(.*(weight|bias))")
_LEARNED_POSITIONS = re.compile(r".*(wpe|embed_positions|position_embeddings)\.weight")


def check_decoder(folder: Path, config: PreTrainedConfig, ignored: Collection[str] = ()) -> None:
    """Raise `DamagedModelError` unless the weights in `folder` fit the decoder of `config`.

    `ignored` are patterns of names that the model's class does not load. Only safetensors files
    have headers to check; weights in other formats are not checked.
    """
    text = config.get_text_config()
    shapes = tensor_shapes(folder)
    if not shapes:
        return
    _check_layers(folder, text, [n for n in shapes if not any(re.search(p, n) for p in ignored)])
    if getattr(config, "quantization_config", None) is None:  # whose tensors have other shapes
        _check_experts(folder, shapes)
        _check_sizes(folder, text, shapes)
    if text is config:
        _check_positions(folder, text, shapes)


def check_speaker(folder: Path, config: Any) -> None:
    """`check_decoder` for a thinker and its talker; refuses a model without a talker."""
    if not config.enable_audio_output:
        raise UnsupportedModelError(f"{folder} has no talker: it cannot speak")
    for part in (config.thinker_config, config.talker_config):
        check_decoder(folder, part)


def _check_layers(folder: Path, config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Check the number of layers; the first number in a parameter's name is its layer's."""
    wanted = getattr(config, "num_hidden_layers", None)
    if wanted is None:
        return
    drafts = getattr(config, _DRAFT_LAYERS, None)
    counts = {wanted, wanted + drafts} if isinstance(drafts, int) else {wanted}
    stacks: dict[str, set[int]] = defaultdict(set)
    for stack, layer in map(split_layer, names):
        if layer:
            stacks[stack].add(int(layer))
    if any(len(found) in counts and max(found) < len(found) for found in stacks.values()):
        return
    held = ", ".join(f"{len(found)} in {stack}" for stack, found in sorted(stacks.items()))
    raise DamagedModelError(
        f"{_unfit(folder)}: num_hidden_layers is {wanted}, and the weights hold these layers: "
        f"{held or 'none'}"
    )


def _check_experts(folder: Path, names: Iterable[str]) -> None:
    """Check that all experts of a list have the same parameters; transformers hides gaps."""
    held: dict[tuple[str, str], set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for found in filter(None, map(_EXPERT.fullmatch, names)):
        held[found[1], found[3]].add(int(found[2]))
        counts[found[1]] = max(counts[found[1]], int(found[2]) + 1)
    missing = (
        f"{experts}.{number}.{rest}"
        for (experts, rest), numbers in held.items()
        for number in range(counts[experts])
        if number not in numbers
    )
    if first := list(islice(missing, 4)):
        raise DamagedModelError(
            f"{_unfit(folder)}: parameters of experts are missing, {_some(first)}"
        )


def _check_sizes(
    folder: Path, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that tensors have the configuration's sizes, and enough elements for all layers."""
    sides = {side for shape in shapes.values() for side in shape}
    for name in ("hidden_size", "vocab_size"):
        value = getattr(config, name, None)
        if value is not None and value not in sides:
            raise DamagedModelError(
                f"{_unfit(folder)}: {name} is {value}, and no tensor has a side of this size"
            )
    total = sum(map(math.prod, shapes.values()))
    varied = _varied(config)
    for names in (("intermediate_size",), ("num_attention_heads", "head_dim")):
        if varied.intersection(names):
            continue
        values = [getattr(config, name, 1) for name in (*_MATRIX, *names)]
        if all(isinstance(value, int) for value in values) and math.prod(values) > total:
            product = " * ".join((*_MATRIX, *names))
            raise DamagedModelError(
                f"{_unfit(folder)}: {product} is {math.prod(values)}, and they are {total} in all"
            )


def _varied(config: PreTrainedConfig) -> set[str]:
    """Return the names that differ between layers: the configuration refuses to read them.

    The first releases of transformers 5 have no such configurations.
    """
    if not getattr(config, "is_heterogeneous", False):
        return set()
    return {name for layer in config.to_dict()["per_layer_config"].values() for name in layer}


def _check_positions(
    folder: Path, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    wanted = getattr(config, "max_position_embeddings", None) or 0
    for name, shape in shapes.items():
        if _LEARNED_POSITIONS.fullmatch(name) and shape[0] < wanted:
            raise DamagedModelError(
                f"{_unfit(folder)}: max_position_embeddings is {wanted}, and {name} holds "
                f"{shape[0]} positions"
            )


def check_report(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raise `DamagedModelError` if loading left a parameter at random or skipped a weight.

    `report` is transformers' loading info.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise DamagedModelError(
            f"{_unfit(folder)}: {len(missing)} parameters are missing, {_some(missing)}"
        )
    mismatched = [
        f"{name} is {list(found)} and not {list(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if mismatched:
        raise DamagedModelError(
            f"{_unfit(folder)}: {len(mismatched)} parameters have another shape, "
            f"{_some(mismatched)}"
        )
    known = _Known(model)
    unused = sorted(name for name in report["unexpected_keys"] if known.misses(name))
    if unused:
        raise DamagedModelError(
            f"{_unfit(folder)}: {len(unused)} parameters have no place in such a model, "
            f"{_some(unused)}"
        )


class _Known:
    """A loaded model's parameters; tells if a weight that it did not load was needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = dict(model.named_modules())
        self._modules = modules.keys()
        self._leaves = {
            name
            for name, module in modules.items()
            if next(module.parameters(recurse=False), None) is not None
        }
        drafts = getattr(model.config.get_text_config(), _DRAFT_LAYERS, None)
        self._drafts = drafts if isinstance(drafts, int) else 0
        self._counts: dict[str, int] = {}  # of layers in each list
        for stack, layer in (split_layer(name) for name, _ in model.named_parameters()):
            if layer:
                self._counts[stack] = max(self._counts.get(stack, 0), int(layer) + 1)

    def misses(self, name: str) -> bool:
        """True if skipping this parameter changes answers.

        True for parameters of a module that has other parameters, or of a list of layers. False for
        draft layers, for parts of other models (a vision tower, another head), and for buffers of
        old versions, which belong to modules without parameters.
        """
        parent, _, leaf = name.rpartition(".")
        stack, layer = split_layer(name)
        if leaf not in ("weight", "bias"):
            return False
        if parent in self._modules:
            return parent in self._leaves
        if not layer or stack not in self._counts:
            return False
        return not self._counts[stack] <= int(layer) < self._counts[stack] + self._drafts


def split_layer(name: str) -> tuple[str, str]:
    """The list of layers that a parameter belongs to, and its layer's number in it.

    >>> split_layer("model.layers.7.mlp.up_proj.weight")
    ('model.layers', '7')
    >>> split_layer("model.norm.weight")
    ('', '')
    """
    parts = name.split(".")
    place = next((at for at, part in enumerate(parts) if re.fullmatch(r"\d{1,9}", part)), None)
    return ("", "") if place is None else (".".join(parts[:place]), parts[place])


def _unfit(folder: Path) -> str:
    return f"the weights in {folder} do not fit its config.json"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
