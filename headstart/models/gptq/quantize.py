"""From a checkpoint of floats to one of 4 bits, layer after layer.

Each layer is read in float32, is given units by what it sees of a text, and then rounded by GPTQ in
four stages, each of which sees what the rounded layers and stages before it give. The floats of one
layer are in memory at a time, beside the rows of the text.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from headstart.errors import ConfigError, ModelError, UnsupportedModelError
from headstart.models.dense.decoder import DenseModules, Description
from headstart.models.dense.loader import check_tensors, describe_decoder
from headstart.models.dense.modules import DecoderLayer, LayerStep
from headstart.models.dense.shape import DecoderShape
from headstart.models.files import check_files, find_folder, is_gguf, read_json, weight_files
from headstart.models.gptq.folder import CheckpointFolder, pack
from headstart.models.gptq.inputs import linear_of, make_step, see_input, see_inputs, stages
from headstart.models.gptq.rounding import Rows, round_weight
from headstart.models.gptq.text import cut_windows, describe_text, read_text
from headstart.models.gptq.units import apply_units
from headstart.models.tokenizer import load_tokenizer
from headstart.validation import describe
from headstart.weights.checkpoint import SafetensorsCheckpoint
from headstart.weights.grouped import GROUP
from headstart.weights.reader import Outline, TorchReader
from headstart.weights.scheme import UnsupportedLayerError

__all__ = ["Plan", "Written", "check_target", "plan_quantizing", "quantize"]

_LAYERS = "model.layers."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done, checked. tokens: int64 `[windows, length]`, of what `text` names."""

    source: Path
    target: Path
    about: Description
    names: frozenset[str]
    tokens: Tensor
    text: str

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.about.shape.layers)


class Written(NamedTuple):
    """Bytes of the weights' files before and after, and seconds that it took."""

    before: int
    after: int
    seconds: float


def plan_quantizing(model: str | Path, target: Path, text: Path | None = None) -> Plan:
    """Check everything that can be known before the work.

    Raises `ModelError`, also for a model that is quantised already or of no family of
    `headstart.models.families`, and `ConfigError` for a target that is there, or a text that cannot
    be read or is too short.
    """
    target = check_target(target)
    given = Path(model).expanduser()
    if given.suffix == ".gguf" and given.is_file():  # to find its folder takes minutes
        raise UnsupportedModelError(
            f"{model} is a GGUF file; allowed: a checkpoint of safetensors, in float"
        )
    source = find_folder(model)
    check_files(source)
    about, names = _check_model(source)
    read = read_text(text)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise ModelError(f"{source} has no tokenizer, and none can read a text for it")
    told = describe_text(text)
    tokens = cut_windows(read, told, tokenizer, about.max_model_len)
    if int(tokens.max()) >= about.shape.vocab_size:
        raise UnsupportedModelError(f"{source} has a tokenizer with more tokens than embeddings")
    return Plan(source=source, target=target, about=about, names=names, tokens=tokens, text=told)


def check_target(target: Path) -> Path:
    """The whole path of a folder that can be made; raises `ConfigError` for any other."""
    target = target.expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise ConfigError(f"the folder {target} is there already; allowed: a new one")
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be made: {target.parent} is no folder; make it first")
    return target


def _check_model(source: Path) -> tuple[Description, frozenset[str]]:
    """The decoder in a folder, and the names of its tensors."""
    given = read_json(source / "config.json").get("quantization_config")
    if given is not None or is_gguf(source):
        kind = given.get("quant_method") if isinstance(given, dict) else "GGUF"
        raise UnsupportedModelError(
            f"{source} is quantised already, as {describe(kind)}; allowed: weights in float"
        )
    outline = Outline()
    try:
        about, _ = describe_decoder(source)
        DenseModules(about.shape, outline)
        with SafetensorsCheckpoint(weight_files(source)) as checkpoint:
            check_tensors(checkpoint, outline, about.shape.tied)
    except UnsupportedLayerError as error:
        raise UnsupportedModelError(f"{source} cannot be quantised: {error}") from error
    shape = about.shape
    for width in (shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim):
        if width % GROUP:
            raise UnsupportedModelError(
                f"{source} has layers of {width} inputs; allowed: multiples of {GROUP}, which "
                "share a step (weights that are quantised at load may have any width)"
            )
    return about, frozenset(outline.shapes)


def quantize(plan: Plan, progress: Callable[[int], None] = lambda layers: None) -> Written:
    """Write the checkpoint; `progress` is told how many layers are done.

    Raises `ModelError`. Whatever is raised, Ctrl-C included, the target is then not there.
    """
    began = time.perf_counter()
    try:
        with (
            torch.no_grad(),
            SafetensorsCheckpoint(weight_files(plan.source)) as checkpoint,
            CheckpointFolder(plan.target, plan.source) as folder,
        ):
            _write_layers(plan, checkpoint, folder, progress)
            for name in sorted(plan.names):
                if not name.startswith(_LAYERS):
                    folder.add(name, checkpoint.tensor(name))
            folder.finish(read_json(plan.source / "config.json"))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{plan.target} cannot be written: {error}") from error
    before, after = (_weigh(folder) for folder in (plan.source, plan.target))
    return Written(before, after, time.perf_counter() - began)


def _weigh(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def _write_layers(
    plan: Plan,
    checkpoint: SafetensorsCheckpoint,
    folder: CheckpointFolder,
    progress: Callable[[int], None],
) -> None:
    about = plan.about
    read = TorchReader(checkpoint, torch.float32, torch.device("cpu"))
    step = make_step(about, *plan.tokens.shape)
    rows = checkpoint.tensor("model.embed_tokens.weight")[plan.tokens.flatten()].float()
    if about.shape.embedding_scale is not None:
        rows *= about.shape.embedding_scale
    by_float = rows
    for index in range(plan.layers):
        prefix = f"{_LAYERS}{index}"
        layer = DecoderLayer(about.shape, index, prefix, read)
        own = {
            name: checkpoint.dtypes([f"{prefix}.{name}"])[0] for name, _ in layer.named_parameters()
        }
        seen = see_inputs(layer, [names[0] for names in stages(about.shape)], by_float, step)
        by_float = seen.out
        found = _round_layer(layer, about.shape, _Streams(rows, seen.inputs, step), own)
        for name, tensor in found.items():
            folder.add(f"{prefix}.{name}", tensor)
        rows = layer(rows, step)
        if not torch.isfinite(rows).all():
            raise UnsupportedModelError(f"{prefix} of {plan.source} gives what is not finite")
        read.release()
        progress(index + 1)


class _Streams(NamedTuple):
    """The rows that the quantised layers before one give, and what it is given by float ones.

    by_float: the inputs `[rows, inputs]` of its linear layers.
    """

    rows: Tensor
    by_float: dict[str, Tensor]
    step: LayerStep


def _round_layer(
    layer: DecoderLayer, shape: DecoderShape, streams: _Streams, own: dict[str, torch.dtype]
) -> dict[str, Tensor]:
    """Round a layer, in place; returns its tensors as the file has them, by name.

    own: the dtypes that they have in the file of the model.
    """
    sizes = {name: inputs.abs().mean(dim=0) for name, inputs in streams.by_float.items()}
    units = apply_units(layer, shape, sizes, own["post_attention_layernorm.weight"])
    packed: dict[str, Tensor] = {}
    for names in stages(shape):
        inputs = see_input(layer, names[0], streams.rows, streams.step)
        rows = Rows.of(inputs, streams.by_float.pop(names[0]).div_(units[names[0]]))
        del inputs
        layers = [linear_of(layer, name) for name in names]
        kept = own[f"{names[0]}.weight"]
        # Steps in float32 would be a bit more for each weight.
        kept = torch.float16 if kept != torch.bfloat16 else kept
        together = round_weight(torch.cat([one.weight for one in layers]), rows, kept)
        rounded = together.split([one.out_features for one in layers])
        for name, linear, weight in zip(names, layers, rounded, strict=True):
            linear.weight.copy_(weight.weight())
            packed |= pack(name, weight, kept)
    plain = {
        name: tensor.to(own[name])
        for name, tensor in layer.named_parameters()
        if f"{name}_packed" not in packed
    }
    return packed | plain
