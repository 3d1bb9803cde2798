"""A transformers causal language model as a decoder over paged K/V."""

import hashlib
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headstart.attention.backend import AttentionBackend, LayerLayout
from headstart.attention.register import BackendFunction, register, unregister
from headstart.imports import load_module
from headstart.models.context_length import context_length
from headstart.models.decoder import DecoderModel, EmbeddingOverlay
from headstart.models.files import fingerprint_files
from headstart.models.lora.files import Widths
from headstart.weights.format import Linear

__all__ = ["TransformersDecoder", "fingerprint_memory", "forward_rows", "text_part"]


class TransformersDecoder(DecoderModel):
    """A transformers causal language model that runs over paged K/V."""

    def __init__(
        self,
        model: PreTrainedModel,
        layouts: tuple[LayerLayout, ...],
        folder: Path | None = None,
    ) -> None:
        super().__init__(layouts, folder)
        self._model = model
        self._attention: str | None = None
        self._experts: str | None = None  # the implementation to return to

    @property
    def module(self) -> PreTrainedModel:
        """transformers' model itself."""
        return self._model

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
        head = self._model.get_output_embeddings()
        if head is not None:  # an input embedding may have rows more, for padding
            return int(head.out_features)
        count = self._model.get_input_embeddings().num_embeddings
        assert isinstance(count, int)
        return count

    @property
    def max_model_len(self) -> int:
        return context_length(self.config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        found = self.generation_config.eos_token_id
        if found is None:
            found = getattr(self.config.get_text_config(), "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    @property
    def takes_images(self) -> bool:
        return text_part(self._model) is not self._model

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def output_layer(self) -> str | None:
        head = self._model.get_output_embeddings()
        return next((n for n, module in self._model.named_modules() if module is head), None)

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
            elif isinstance(module, nn.Linear | Linear):
                found[name] = Widths(module.in_features, module.out_features)
        return found

    def _compute_fingerprint(self) -> str:
        if self._folder is not None:
            return fingerprint_files(self._folder)
        return fingerprint_memory(self._model)

    def attach(self, backend: AttentionBackend) -> None:
        self._release_backend()
        self._attention = register(BackendFunction(backend))
        weakref.finalize(self, unregister, self._attention)
        text_part(self._model).set_attn_implementation(self._attention)

    def fix_rows(self) -> None:
        self.detach()
        # It imports forward_rows from here.
        experts = load_module("headstart.models.transformers_backend.experts")
        self._experts = experts.compute_all_rows(text_part(self._model))
        if self.output_layer is not None:  # a stage of a pipeline has logits of its own
            experts.check_rows(self._model)

    def detach(self) -> None:
        self._release_backend()
        if self._experts is not None:
            text_part(self._model).set_experts_implementation(self._experts)
            self._experts = None

    def _release_backend(self) -> None:
        if self._attention is not None:
            text_part(self._model).set_attn_implementation("eager")
            unregister(self._attention)
            self._attention = None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        return forward_rows(self._model, token_ids, positions, logit_rows, embeddings).float()


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
    positions: Tensor | None,
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
            position_ids=positions.unsqueeze(-2) if positions is not None else None,
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: Tensor = output.logits[0]
    return logits


def fingerprint_memory(model: nn.Module) -> str:
    """SHA-256 over configuration, names and weights of a model that was built in memory."""
    digest = hashlib.sha256()

    def frame(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    if isinstance(model, PreTrainedModel):
        frame(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        frame(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        frame(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
