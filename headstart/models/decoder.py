"""A loaded decoder: token ids and positions in, logits of chosen rows out."""

import hashlib
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headstart.attention.backend import AttentionBackend
from headstart.attention.layout import LayerLayout
from headstart.attention.register import BackendFunction, register, unregister
from headstart.models.files import fingerprint_files
from headstart.models.fused import FusionSwitch
from headstart.models.greedy_head import greedy_tokens
from headstart.models.lora.files import Widths
from headstart.models.packed import PackedLinear
from headstart.models.plain import PlainDecoder

__all__ = ["DecoderModel", "EmbeddingOverlay", "forward_rows", "text_part"]

# Configuration keys for the longest sequence, in order of preference.
_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_UNKNOWN_LENGTH = 2048


class EmbeddingOverlay(NamedTuple):
    """Embeddings that replace those of some tokens.

    `rows` int64 `[given]` of the flat batch, `values` `[given, hidden]`.
    """

    rows: Tensor
    values: Tensor


class DecoderModel:
    """A transformers causal language model that runs over paged K/V.

    One step's rows of all sequences form one flat batch; attention takes each row's sequence from
    the attached backend's plan. A model has one backend at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layouts: tuple[LayerLayout, ...],
        folder: Path | None = None,
        fusion: FusionSwitch | None = None,
    ) -> None:
        self._model = model
        self._folder = folder
        self._attention: str | None = None
        self._fingerprint: str | None = None
        self.layouts = layouts
        """K and V of one token, per layer."""
        self.fusion = fusion or FusionSwitch()
        """Switched off for a step in which single layers are wrapped or replaced."""
        self.plain: PlainDecoder | None = None
        """The same model called part by part, without transformers; None if it is not supported."""
        self.fallback_reason: str | None = None
        """Why `plain` does not replace all of transformers' forward; None if it does."""

    @property
    def module(self) -> PreTrainedModel:
        """transformers' model itself."""
        return self._model

    @property
    def folder(self) -> Path | None:
        """The folder that it was loaded from; None for a model built in memory."""
        return self._folder

    @property
    def config(self) -> PreTrainedConfig:
        """transformers' configuration of the model."""
        return self._model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's recommended sampling parameters."""
        found = self._model.generation_config
        return found if isinstance(found, GenerationConfig) else GenerationConfig()

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids lie in `0 .. vocab_size - 1`."""
        count = self._model.get_input_embeddings().num_embeddings
        assert isinstance(count, int)
        return count

    @property
    def max_model_len(self) -> int:
        """Length in tokens of the longest sequence that the model supports."""
        return context_length(self.config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text; may be empty."""
        found = self.generation_config.eos_token_id
        if found is None:
            found = getattr(self.config.get_text_config(), "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of K and V."""
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._model.device

    @property
    def output_layer(self) -> str | None:
        """The dotted name of the layer whose outputs are the logits."""
        head = self._model.get_output_embeddings()
        return next((n for n, module in self._model.named_modules() if module is head), None)

    def layer(self, name: str) -> nn.Module:
        """The module of this dotted name."""
        return self._model.get_submodule(name)

    def linear_widths(self) -> dict[str, Widths]:
        """Widths of the linear layers that every row passes, by dotted name.

        Layers of single experts and of a vision tower, whose rows are not tokens, are left out.
        """
        found = {}
        rows = {*text_part(self._model).modules(), self._model.get_output_embeddings()}
        for name, module in self._model.named_modules():
            if module not in rows or ".experts." in name:
                continue
            if isinstance(module, Conv1D):
                found[name] = Widths(*module.weight.shape)
            elif isinstance(module, (nn.Linear, PackedLinear)):
                found[name] = Widths(module.in_features, module.out_features)
        return found

    def weight(self, name: str) -> Tensor | None:
        """The weight of the layer of this dotted name, None if there is none."""
        module = dict(self._model.named_modules()).get(name)
        if isinstance(module, PackedLinear):
            return module.packed.unpack()
        found = dict(self._model.named_parameters(remove_duplicate=False)).get(f"{name}.weight")
        return None if found is None else found.detach()

    def fingerprint(self) -> str:
        """SHA-256 in hex of configuration and weights; the first call reads all weights."""
        if self._fingerprint is None:
            if self._folder is not None:
                self._fingerprint = fingerprint_files(self._folder)
            else:
                self._fingerprint = _fingerprint_memory(self._model)
        return self._fingerprint

    def recall_fingerprint(self, fingerprint: str) -> None:
        """What `fingerprint` said of the same files before."""
        self._fingerprint = fingerprint

    def attach(self, backend: AttentionBackend) -> None:
        """Send all attention to `backend` from now on; detaches an earlier one."""
        self.detach()
        self._attention = register(BackendFunction(backend))
        weakref.finalize(self, unregister, self._attention)
        text_part(self._model).set_attn_implementation(self._attention)
        self.fusion.backend = backend

    def detach(self) -> None:
        """Release the backend and its memory; safe to call twice."""
        if self._attention is not None:
            text_part(self._model).set_attn_implementation("eager")
            unregister(self._attention)
            self._attention = None
            self.fusion.backend = None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        """Logits float32 `[rows, vocab]` of the rows in `logit_rows` int64 `[rows]`.

        `token_ids` is int64 `[tokens]`, `positions` the same or, for M-RoPE, `[axes, tokens]`.
        The attached backend's step must have begun, with slots for exactly these tokens.
        """
        plain = self._plain_for(positions, embeddings)
        if plain is not None:
            return plain.logits(plain.hidden(token_ids, positions, logit_rows))
        return forward_rows(self._model, token_ids, positions, logit_rows, embeddings).float()

    def choose(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> list[int]:
        """The greedy token of each row: argmax of `forward`'s logits, often in less time.

        Ties go to the lowest id. -1 for a row whose largest logit is not finite: one with NaN or
        +inf, or with only -inf.
        """
        plain = self._plain_for(positions, embeddings)
        if plain is not None:
            return plain.choose(plain.hidden(token_ids, positions, logit_rows))
        return greedy_tokens(self.forward(token_ids, positions, logit_rows, embeddings))

    def _plain_for(
        self, positions: Tensor, embeddings: EmbeddingOverlay | None
    ) -> PlainDecoder | None:
        """`plain` if it can compute a step with these inputs, else None."""
        fits = self.fusion.enabled and embeddings is None and positions.dim() == 1
        return self.plain if fits else None


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The part whose attention is paged: all of a text model, the decoder of a vision model.

    A vision tower keeps transformers' own attention.
    """
    if model.config.get_text_config() is model.config:
        return model
    decoder = model.get_decoder()
    assert isinstance(decoder, PreTrainedModel)
    return decoder


def forward_rows(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    embeddings: EmbeddingOverlay | None = None,
) -> Tensor:
    """One flat batch through `model`: logits `[rows, vocab]` in the model's dtype.

    The rows are chosen between decoder and LM head, inside transformers, so that a model's changes
    to its logits (capping, scaling) apply to them.
    """
    inputs: dict[str, Tensor] = {}
    with torch.inference_mode():
        if embeddings is None:
            inputs["input_ids"] = token_ids.unsqueeze(0)
        else:
            embedded = model.get_input_embeddings()(token_ids)
            embedded.index_copy_(0, embeddings.rows, embeddings.values.to(embedded))
            inputs["inputs_embeds"] = embedded.unsqueeze(0)
        output: Any = model(
            **inputs,
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: Tensor = output.logits[0]
    return logits


def context_length(config: PreTrainedConfig) -> int:
    """The number of positions that a model supports.

    If the rotary frequencies depend on the length of the longest sequence in the batch (`longrope`,
    `dynamic`), K of a prefix would depend on later tokens and on other requests. Such a model is
    used up to the length for which the frequencies are constant.
    """
    text = config.get_text_config()
    length = _UNKNOWN_LENGTH
    for name in _LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            length = value
            break
    for rope in _rope_parameters(text):
        original = rope.get("original_max_position_embeddings")
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic") and original:
            length = min(length, int(original))
        elif kind == "yarn" and original:
            length = max(length, int(original * rope.get("factor", 1.0)))
    return length


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """One dict per kind of layer, or one for all layers."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _fingerprint_memory(model: PreTrainedModel) -> str:
    """SHA-256 over configuration, names and weights of a model that was built in memory."""
    digest = hashlib.sha256()

    def frame(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    frame(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        frame(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        frame(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
