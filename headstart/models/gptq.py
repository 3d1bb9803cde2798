"""Quantization of a floating-point checkpoint to 4 bits, layer by layer.

Each layer is read in float32 and runs over a calibration text. Its weights are scaled (see below),
and rounded by GPTQ in four stages: (q, k, v), (o), (gate, up), (down). A stage runs over the
outputs of the layers and stages before it, whose weights are already rounded. Memory holds the
float weights of one layer, and the hidden states of the text. The layers are headstart's own
modules. They attend over whole windows of the text, without paged memory.

Inputs are scaled as in AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978). This reduces the
rounding error without a cost at inference. Input i of a linear layer is divided by a unit u[i], and
column i of its weight is multiplied by u[i]. This changes no output. A group of columns shares a
quantization step, so a larger column has a smaller relative error. For this reason u[i] is larger
for a large input, and for a small column. The inputs are divided by changing the weights that
produce them:

    inputs of          are divided in
    q, k, v            the norm before them
    o                  the outputs of v, one unit for all query heads of a KV head
    gate, up           the norm before them
    down               the outputs of up

OLMo 2 has no norms before its projections, so only o and down have units.

The result is a checkpoint of compressed-tensors, with one file per layer and one for all other
tensors. Weights `[outputs, inputs]` are "pack-quantized":
`weight_packed` int32 `[outputs, inputs / 8]`, `weight_scale` `[outputs, groups]`,
`weight_zero_point` int32 `[outputs / 8, groups]`. The lowest 4 bits of a word are its first value.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from headstart.attention.backend import AttentionOptions
from headstart.errors import ConfigError, ModelError, UnsupportedModelError
from headstart.models.dense.decoder import DenseModules, Description
from headstart.models.dense.layer import DecoderLayer
from headstart.models.dense.loader import check_tensors, describe_decoder
from headstart.models.dense.modules import AngleTable, LayerStep
from headstart.models.files import check_files, find_folder, is_gguf, read_json, weight_files
from headstart.models.gptq_rounding import InputStatistics, round_weight
from headstart.models.shapes import DecoderShape, NormKind
from headstart.models.tokenizer import load_tokenizer
from headstart.models.transformers_tools import silence_transformers
from headstart.validation import describe
from headstart.weights.checkpoint import SafetensorsCheckpoint
from headstart.weights.grouped import GROUP
from headstart.weights.prequantized import Grouped
from headstart.weights.reader import Outline, TorchReader
from headstart.weights.scheme import UnsupportedLayerError

SCHEME: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
        }
    },
}
"""The `quantization_config` of the checkpoint."""

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
_FIELDS = 8  # values in a word
_LAYERS = "model.layers."
# The unit of an input is proportional to size ** _BY_INPUT / column ** _BY_COLUMN. `size` is the
# mean absolute value of the input. `column` is the root mean square of its column in the weight,
# after each row is divided by its largest element.
_BY_INPUT = 0.4
_BY_COLUMN = 0.75
_LARGEST_UNIT = 16.0
_EPSILON = 1e-20  # avoids a division by zero
_TINY = 1e-6  # minimum size relative to the largest; an input may be 0 throughout the text


def apply_units(
    layer: DecoderLayer, shape: DecoderShape, sizes: Mapping[str, Tensor], stored_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Divide inputs and multiply columns by units, in place; return the units by layer name.

    The layer's outputs do not change. sizes: the mean of |x| of the inputs of each linear layer.
    stored_dtype: the dtype of norms in the file. Units are adjusted so that the divided norms are
    exact in this dtype.
    """
    order = stages(shape)
    if shape.norms == "before":
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
    elif shape.norms == "around":
        norms = [layer.input_layernorm, layer.pre_feedforward_layernorm]
    else:
        norms = []
    linears = {name: _linear_of(layer, name) for names in order for name in names}
    all_units = {name: torch.ones_like(size) for name, size in sizes.items()}
    for norm, names in zip(norms, order[::2], strict=False):
        target_units = _units(sizes[names[0]], [linears[name] for name in names])
        units = _divide_norm(norm.weight, shape.norm, target_units, stored_dtype)
        all_units[names[0]] = units
        for name in names:
            linears[name].weight.mul_(units)
    (*_, value), [output], (*_, up), [down] = ([linears[name] for name in names] for names in order)
    units = all_units["mlp.down_proj"] = _units(sizes["mlp.down_proj"], [down])
    _divide_outputs(up, units)
    down.weight.mul_(units)
    by_head = (shape.kv_heads, -1, shape.head_dim)
    units = _units(sizes["self_attn.o_proj"], [output]).view(by_head)
    shared = units.log().mean(dim=1, keepdim=True).exp()
    _divide_outputs(value, shared.flatten())
    units = all_units["self_attn.o_proj"] = shared.expand_as(units).flatten()
    output.weight.mul_(units)
    return all_units


def _units(sizes: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Return units `[inputs]` around 1, for layers with the same input.

    Units are limited to the range 1/16 to 16, so that the norms and weights that they change stay
    in the range of float16.
    """
    weights = [
        layer.weight / layer.weight.abs().amax(dim=1, keepdim=True).clamp_min(_EPSILON)
        for layer in layers
    ]
    columns = torch.cat(weights).square_().mean(dim=0).sqrt_()
    sizes, columns = (
        part.clamp_min(max(_TINY * float(part.max()), _EPSILON)) for part in (sizes, columns)
    )
    units = sizes.log_() * _BY_INPUT - columns.log_() * _BY_COLUMN
    return (units - units.mean()).exp_().clamp_(1 / _LARGEST_UNIT, _LARGEST_UNIT)


def _divide_norm(
    weight: Tensor, kind: NormKind, units: Tensor, stored_dtype: torch.dtype
) -> Tensor:
    """Divide a norm's weight in place and round it for storage; return the exact units."""
    offset = 1.0 if kind == "gemma" else 0.0  # Gemma multiplies by 1 + weight
    divided = ((weight + offset) / units - offset).to(stored_dtype).float()
    exact = (weight + offset) / (divided + offset)
    usable = torch.isfinite(exact) & (exact != 0)
    weight.copy_(torch.where(usable, divided, weight))
    return torch.where(usable, exact, 1.0)


def _divide_outputs(linear: nn.Linear, units: Tensor) -> None:
    """Divide the outputs of v or up by `units`; in a fused layer, they are the last outputs."""
    linear.weight[-len(units) :].div_(units.unsqueeze(1))
    if linear.bias is not None:
        linear.bias[-len(units) :].div_(units)


LENGTH = 512  # tokens in a window
_MAX_WINDOWS = 32
_MIN_WINDOWS = 4
_CHARACTERS = 4_000_000


def _read_text(file: Path | None) -> str:
    """Return the first 4 million characters of a file; for None, the topics of Python's `help()`.

    Raises `ConfigError` for a file that cannot be read, or is not UTF-8.
    """
    if file is None:
        try:
            topics: dict[str, str] = import_module("pydoc_data.topics").topics
        except ImportError as error:
            raise ConfigError(
                "this Python has no help topics to calibrate on; pass a file with --text"
            ) from error
        return "\n\n".join(topics.values())
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(_CHARACTERS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the text file {file} cannot be read: {reason}; allowed: a file in UTF-8"
        ) from error


def cut_windows(text: str, name: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> Tensor:
    """Return windows int64 `[windows, tokens]` evenly spaced in the text, at most 32 of 512 tokens.

    A window begins with BOS if the tokenizer adds it. name: the text's name, for errors. longest:
    the model's context in tokens. Raises `ConfigError` for text of fewer than 2,048 tokens.
    """
    with silence_transformers():  # it warns about texts longer than the context
        lead = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
        tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    length = max(1, min(LENGTH, longest) - len(lead))
    minimum = _MIN_WINDOWS * LENGTH
    if len(tokens) < minimum:
        raise ConfigError(f"{name} has {len(tokens):,} tokens; allowed: at least {minimum:,}")
    available = len(tokens) // length
    count = min(available, _MAX_WINDOWS * LENGTH // length)
    starts = [number * available // count * length for number in range(count)]
    cut = torch.stack([tokens[start : start + length] for start in starts])
    return torch.cat((torch.tensor(lead, dtype=torch.int64).expand(count, -1), cut), dim=1)


def stages(shape: DecoderShape) -> list[list[str]]:
    """Return the names of a layer's linear layers, grouped by the input that they share."""
    qkv = [f"self_attn.{part}_proj" for part in (["qkv"] if shape.fused else ["q", "k", "v"])]
    gate_up = [f"mlp.{part}_proj" for part in (["gate_up"] if shape.fused else ["gate", "up"])]
    return [qkv, ["self_attn.o_proj"], gate_up, ["mlp.down_proj"]]


def _linear_of(layer: DecoderLayer, name: str) -> nn.Linear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def make_step(description: Description, windows: int, length: int) -> LayerStep:
    """Return a step over `windows` windows of `length` tokens each."""
    positions = torch.arange(length).repeat(windows)
    like = torch.empty(0)
    angles = {
        kind: AngleTable(frequencies, like)(positions)
        for kind, frequencies in description.frequencies.items()
    }
    return LayerStep(_Windows(length), angles)  # type: ignore[arg-type]


class _Stop(Exception):
    """Raised by a hook to end a layer's forward pass."""


def collect_inputs(
    layer: DecoderLayer, names: Sequence[str], rows: Tensor, step: LayerStep, stop: bool = False
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return a layer's output `[rows, hidden]`, and the inputs `[rows, inputs]` of linear layers.

    stop: end the pass at the first of `names`, and return None as the output.
    """
    inputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name in names:

            def hook(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                inputs[name] = args[0]
                if stop:
                    raise _Stop

            stack.callback(_linear_of(layer, name).register_forward_pre_hook(hook).remove)
        with suppress(_Stop):
            return layer(rows, step), inputs
    return None, inputs


@dataclass(frozen=True)
class _Windows:
    """An attention backend for a batch of windows of `length` tokens."""

    length: int

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the result of `AttentionBackend.attend`, without storing K/V."""
        queries, keys, values = (torch.split(part, self.length) for part in (query, key, value))
        windows = zip(queries, keys, values, strict=True)
        return torch.cat([_attend(*window, options) for window in windows])


def _attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Return the output of attention `[tokens, heads, head_dim]` within one window."""
    tokens, heads, width = query.shape
    by_head = query.reshape(tokens, key.shape[1], -1, width).permute(1, 2, 0, 3)
    keys, values = key.permute(1, 2, 0).unsqueeze(1), value.transpose(0, 1).unsqueeze(1)
    scores = by_head @ keys * options.scaling
    if options.softcap is not None:
        scores = (scores / options.softcap).tanh_() * options.softcap
    positions = torch.arange(tokens)
    distances = positions.unsqueeze(1) - positions
    hidden = distances < 0
    if options.sliding_window is not None:
        hidden |= distances >= options.sliding_window
    mixed = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values
    return mixed.permute(2, 0, 1, 3).reshape(tokens, heads, width)


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """The checked inputs of a quantization.

    names: the names of the model's tensors. text: the name of the calibration text. tokens: its
    windows, int64 `[windows, length]`.
    """

    source: Path
    target: Path
    description: Description
    names: frozenset[str]
    tokens: Tensor
    text: str

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.description.shape.layers)


class QuantizationResult(NamedTuple):
    """Bytes of the weight files before and after, and the time that quantization took."""

    before: int
    after: int
    seconds: float


def plan_quantization(
    model: str | Path, target: Path, text: Path | None = None
) -> QuantizationPlan:
    """Check model, target and text before quantizing.

    Raises `ModelError` for a damaged model, a model that is already quantized, or a model whose
    family is not in `headstart.models.families`. Raises `ConfigError` for a target that exists, or
    text that is unreadable or too short.
    """
    target = check_target(target)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():  # finding its folder would take minutes
        raise UnsupportedModelError(
            f"{model} is a GGUF file; allowed: a floating-point checkpoint in safetensors"
        )
    source = find_folder(model)
    check_files(source)
    description, names = _check_model(source)
    content = _read_text(text)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise ModelError(f"{source} has no tokenizer, which is needed to read the calibration text")
    name = "Python's help topics" if text is None else str(text)
    tokens = cut_windows(content, name, tokenizer, description.max_model_len)
    if int(tokens.max()) >= description.shape.vocab_size:
        raise UnsupportedModelError(f"{source} has a tokenizer with more tokens than embeddings")
    return QuantizationPlan(
        source=source, target=target, description=description, names=names, tokens=tokens, text=name
    )


def check_target(target: Path) -> Path:
    """Return the absolute path of a new folder. Raises `ConfigError` if it cannot be made."""
    target = target.expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise ConfigError(f"the folder {target} exists already; choose another path")
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be created, as {target.parent} is not a folder")
    return target


def _check_model(source: Path) -> tuple[Description, frozenset[str]]:
    """Return the description of the decoder in a folder, and the names of its tensors."""
    config = read_json(source / "config.json").get("quantization_config")
    if config is not None or is_gguf(source):
        kind = config.get("quant_method") if isinstance(config, dict) else "GGUF"
        raise UnsupportedModelError(
            f"{source} is already quantized ({describe(kind)}); allowed: floating-point weights"
        )
    outline = Outline()
    try:
        description, _ = describe_decoder(source)
        if any(layer.mixer is not None for layer in description.shape.layers):
            raise UnsupportedLayerError(
                "it has recurrent layers; allowed: attention in every layer (quantization at "
                "load allows both)"
            )
        if "model" in description.shape.names:
            raise UnsupportedLayerError("it has parts other than a decoder; allowed: a text model")
        if description.shape.value_norm:
            raise UnsupportedLayerError("it has a norm of values, which cancels any scaling of v")
        DenseModules(description.shape, outline)
        with SafetensorsCheckpoint(weight_files(source)) as checkpoint:
            check_tensors(checkpoint, outline, description.shape.tied)
    except UnsupportedLayerError as error:
        raise UnsupportedModelError(f"{source} cannot be quantized: {error}") from error
    shape = description.shape
    for width in (shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim):
        if width % GROUP:
            raise UnsupportedModelError(
                f"{source} has layers of {width} inputs; allowed: multiples of {GROUP}, the size "
                "of a group (quantization at load allows any width)"
            )
    return description, frozenset(outline.shapes)


def quantize(
    plan: QuantizationPlan, progress: Callable[[int], None] = lambda layers: None
) -> QuantizationResult:
    """Write the checkpoint. progress: called with the number of finished layers.

    Raises `ModelError`. After any exception, even Ctrl-C, the target does not exist.
    """
    start = time.perf_counter()
    try:
        with (
            torch.no_grad(),
            SafetensorsCheckpoint(weight_files(plan.source)) as checkpoint,
            TemporaryDirectory(prefix=f".{plan.target.name}.", dir=plan.target.parent) as temporary,
        ):
            writer = _Writer(Path(temporary) / plan.target.name, plan.layers + 1)
            _write_layers(plan, checkpoint, writer, progress)
            others = sorted(name for name in plan.names if not name.startswith(_LAYERS))
            writer.add({name: checkpoint.tensor(name) for name in others})
            writer.finish(plan.source)
            writer.folder.rename(plan.target)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{plan.target} cannot be written: {error}") from error
    before, after = (
        sum(file.stat().st_size for file in weight_files(folder))
        for folder in (plan.source, plan.target)
    )
    return QuantizationResult(before, after, time.perf_counter() - start)


def _write_layers(
    plan: QuantizationPlan,
    checkpoint: SafetensorsCheckpoint,
    writer: "_Writer",
    progress: Callable[[int], None],
) -> None:
    description = plan.description
    read = TorchReader(checkpoint, torch.float32, torch.device("cpu"))
    step = make_step(description, *plan.tokens.shape)
    rows = checkpoint.tensor("model.embed_tokens.weight")[plan.tokens.flatten()].float()
    if description.shape.embedding_scale is not None:
        rows *= description.shape.embedding_scale
    float_rows = rows
    for index in range(plan.layers):
        prefix = f"{_LAYERS}{index}"
        layer = DecoderLayer(description.shape, index, prefix, read)
        dtypes = {
            name: checkpoint.dtypes([f"{prefix}.{name}"])[0] for name, _ in layer.named_parameters()
        }
        first_names = [names[0] for names in stages(description.shape)]
        output, inputs = collect_inputs(layer, first_names, float_rows, step)
        assert output is not None
        float_rows = output
        tensors = _round_layer(layer, description.shape, rows, inputs, step, dtypes)
        writer.add({f"{prefix}.{name}": tensor for name, tensor in tensors.items()})
        rows = layer(rows, step)
        if not torch.isfinite(rows).all():
            raise UnsupportedModelError(f"{prefix} of {plan.source} returns non-finite values")
        read.release()
        progress(index + 1)


def _round_layer(
    layer: DecoderLayer,
    shape: DecoderShape,
    rows: Tensor,
    float_inputs: dict[str, Tensor],
    step: LayerStep,
    dtypes: dict[str, torch.dtype],
) -> dict[str, Tensor]:
    """Round a layer in place; return the tensors to write, by name.

    rows: outputs of the preceding quantized layers. float_inputs: the inputs `[rows, inputs]` of
    the linear layers in the float model; it is emptied. dtypes: the dtypes of the layer's tensors
    in the file.
    """
    sizes = {name: inputs.abs().mean(dim=0) for name, inputs in float_inputs.items()}
    units = apply_units(layer, shape, sizes, dtypes["post_attention_layernorm.weight"])
    packed: dict[str, Tensor] = {}
    for names in stages(shape):
        _, inputs = collect_inputs(layer, names[:1], rows, step, stop=True)
        statistics = InputStatistics.of(
            inputs.pop(names[0]), float_inputs.pop(names[0]).div_(units[names[0]])
        )
        layers = [_linear_of(layer, name) for name in names]
        dtype = dtypes[f"{names[0]}.weight"]
        # Steps are stored in 16 bits, since float32 would cost half a bit more per weight.
        dtype = torch.float16 if dtype != torch.bfloat16 else dtype
        grouped = round_weight(torch.cat([part.weight for part in layers]), statistics, dtype)
        rounded = grouped.split([part.out_features for part in layers])
        for name, linear, weight in zip(names, layers, rounded, strict=True):
            linear.weight.copy_(weight.weight())
            packed |= pack(name, weight, dtype)
    plain = {
        name: tensor.to(dtypes[name])
        for name, tensor in layer.named_parameters()
        if f"{name}_packed" not in packed
    }
    return packed | plain


def pack(name: str, weight: Grouped, stored_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors to store for the weight of the linear layer `name`."""
    return {
        f"{name}.weight_packed": _words(weight.values),
        f"{name}.weight_scale": weight.steps.to(stored_dtype),
        f"{name}.weight_zero_point": _words(weight.zeros.T).T.contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.values.shape),
    }


def _words(values: Tensor) -> Tensor:
    """Return values below 16 `[rows, columns]` as int32 `[rows, columns / 8]`."""
    padded = nn.functional.pad(values.to(torch.uint8), (0, -values.shape[1] % _FIELDS))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)


class _Writer:
    """Writer of a checkpoint with transformers' file names."""

    def __init__(self, folder: Path, num_files: int) -> None:
        self.folder, self._num_files = folder, num_files
        folder.mkdir()
        self._num_written = self._size = 0
        self._files: dict[str, str] = {}
        """The file of each tensor."""

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to the next file."""
        self._num_written += 1
        file = f"model-{self._num_written:05}-of-{self._num_files:05}.safetensors"
        path = self.folder / file
        # safetensors does not write tensors that share memory.
        copies = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        save_file(copies, path, {"format": "pt"})
        path.chmod(self.folder.stat().st_mode & 0o666)  # safetensors lets only the owner read it
        self._files |= dict.fromkeys(tensors, file)
        self._size += sum(tensor.nbytes for tensor in copies.values())

    def finish(self, source: Path) -> None:
        """Write index and configuration, and copy the other files from `source`."""
        for file in sorted({file for pattern in _COPIED for file in source.glob(pattern)}):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, self.folder / file.name)
        index = {"metadata": {"total_size": self._size}, "weight_map": self._files}
        config = {**read_json(source / "config.json"), "quantization_config": SCHEME}
        for name, content in (("model.safetensors.index", index), ("config", config)):
            text = json.dumps(content, indent=2) + "\n"
            (self.folder / f"{name}.json").write_text(text, encoding="utf-8")
