"""A transformers causal language model as a decoder over paged K/V.

In deterministic mode, the bits of a row must not depend on later rows. In transformers' modules an
expert computes only the rows that chose it, and the number of these rows changes the last bits of
its products. In this mode, a chosen expert computes all rows, and the results of rows that did not
choose it are discarded. This reads no additional weights, since only chosen experts compute.
"""

import hashlib
import weakref
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, __version__
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from headstart.attention.backend import AttentionBackend, LayerLayout
from headstart.attention.memory import StateMemory
from headstart.attention.register import (
    CallOrder,
    attend_with,
    number_in_model,
    register,
    unregister,
)
from headstart.errors import UnsupportedModelError
from headstart.models.config_values import context_length
from headstart.models.decoder import DecoderModel, EmbeddingOverlay, Widths
from headstart.models.transformers_backend.recurrent import (
    WITHOUT_ATTENTION,
    MixerStates,
    RecurrentMixer,
    SequenceRows,
)
from headstart.weights.format import Linear

_NAME = "headstart_all_rows"
_ROWS = 16
_CUTS = (1, 6, 11, 15)
_ANY_LENGTH = 1 << 20  # tokens, for a model without positions


def compute_all_rows(model: PreTrainedModel) -> str | None:
    """Let every expert compute all rows from now on; return the name of the old implementation.

    Returns None and changes nothing if transformers cannot replace the model's experts.
    """
    if not model._can_set_experts_implementation():
        return None
    earlier = model.config._experts_implementation
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _mix_experts)
    model.set_experts_implementation(_NAME)
    return str(earlier or "eager")


def check_rows(model: PreTrainedModel, mixers: MixerStates) -> None:
    """Raise `UnsupportedModelError` if the bits of a row depend on later rows.

    A model with recurrent layers also computes a second block from the states after the first.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (_ROWS,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(_ROWS, device=model.device)
    memory = mixers.make_memory(2)

    def compute(block: Tensor, source: int, target: int) -> Tensor:
        positions = rows if takes_positions(model) else None
        with mixers.running(memory, [SequenceRows(_ROWS, source, target)]):
            return forward_rows(model, block.to(model.device), positions, rows)

    for source, target in ((-1, 0), (0, 1)) if mixers.mixers else ((-1, 0),):
        expected = compute(tokens, source, target)
        for cut in _CUTS:
            padded = torch.where(torch.arange(_ROWS) < cut, tokens, 0)
            logits = compute(padded, source, 1)
            if not torch.equal(logits[:cut], expected[:cut]):
                raise UnsupportedModelError(
                    f"deterministic=True is not possible: in {type(model).__name__} the last bits "
                    "of a token's logits change with the tokens after it, as with experts whose "
                    "results depend on the number of rows"
                )


def _mix_experts(experts: Any, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
    """Return the weighted sum of the experts that each row chose."""
    chosen, weights = (*routing, *named.values())
    compute = type(experts).forward.__wrapped__
    ones = weights.new_ones((len(hidden_states), 1))
    output = torch.zeros_like(hidden_states)
    for expert in torch.unique(chosen).tolist():
        if not 0 <= expert < experts.num_experts:  # other ids mean no expert
            continue
        rows, choices = torch.where(chosen == expert)
        outputs = compute(experts, hidden_states, chosen.new_full((len(ones), 1), expert), ones)
        weighted = outputs[rows] * weights[rows, choices, None]
        output.index_add_(0, rows, weighted.to(output.dtype))
    return output


class TransformersDecoder(DecoderModel):
    """A transformers causal language model that runs over paged K/V."""

    module: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        layouts: tuple[LayerLayout, ...],
        folder: Path | None = None,
        mixers: tuple[RecurrentMixer, ...] = (),
    ) -> None:
        super().__init__(layouts, folder)
        self.module, self.config = model, model.config
        self.state_layouts = tuple(mixer.layout for mixer in mixers)
        self.without_adapters = tuple(f"{mixer.name}." for mixer in mixers)
        self._mixers = MixerStates(model, mixers)
        self._takes_positions = takes_positions(model)
        self.dtype, self.device = model.dtype, model.device
        self.max_model_len = _ANY_LENGTH
        if self._takes_positions:
            self.max_model_len = context_length(model.config)
        self.takes_images = text_part(model) is not model
        head = model.get_output_embeddings()
        # An input embedding may have more rows than the head, as padding.
        rows = model.get_input_embeddings().num_embeddings if head is None else head.out_features
        self.vocab_size = int(cast("int", rows))
        self.output_layer = next((n for n, part in model.named_modules() if part is head), None)
        generation = getattr(model, "generation_config", None)  # missing without an LM head
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = getattr(model.config.get_text_config(), "eos_token_id", None)
        eos = [eos] if isinstance(eos, int) else eos
        self.eos_token_ids: frozenset[int] = frozenset(eos or ())
        self._attention: str | None = None
        self._experts: str | None = None  # the implementation that `detach` restores
        self._pass_hook: RemovableHandle | None = None

    def linear_widths(self) -> dict[str, Widths]:
        widths = {}
        # The rows of an expert or of a vision tower are not the rows of the batch.
        rows = {*text_part(self.module).modules(), self.module.get_output_embeddings()}
        for name, module in self.module.named_modules():
            if module not in rows or ".experts." in name or name.startswith(self.without_adapters):
                continue
            if isinstance(module, Conv1D):
                widths[name] = Widths(*module.weight.shape)
            elif isinstance(module, nn.Linear | Linear):
                widths[name] = Widths(module.in_features, module.out_features)
        return widths

    def _compute_fingerprint(self) -> str:
        if self.folder is not None:
            return super()._compute_fingerprint()
        return fingerprint_memory(self.module)

    def products(self) -> str:
        products = super().products()
        # transformers computes recurrences in chunks. A new version may use another chunk size,
        # which changes the rounding.
        return f"{products}, transformers {__version__}" if self.state_layouts else products

    def attach(self, backend: AttentionBackend, states: StateMemory | None = None) -> None:
        self._release_backend()
        part, number = text_part(self.module), number_in_model
        if self.state_layouts:
            assert states is not None
            self._mixers.attach(states)
            number = order = CallOrder()
            self._pass_hook = part.register_forward_pre_hook(order.begin_pass)
        self._attention = register(attend_with(backend, number))
        weakref.finalize(self, unregister, self._attention)
        part.set_attn_implementation(self._attention)

    def fix_rows(self) -> None:
        self.detach()
        self._experts = compute_all_rows(text_part(self.module))
        if self.output_layer is not None:  # an Omni stage stores its LM head elsewhere
            check_rows(self.module, self._mixers)

    def detach(self) -> None:
        self._release_backend()
        if self._experts is not None:
            text_part(self.module).set_experts_implementation(self._experts)
            self._experts = None

    def _release_backend(self) -> None:
        if self._attention is not None:
            text_part(self.module).set_attn_implementation("eager")
            unregister(self._attention)
            self._attention = None
        self._mixers.detach()
        if self._pass_hook is not None:
            self._pass_hook.remove()
            self._pass_hook = None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        position_ids = positions if self._takes_positions else None
        return forward_rows(self.module, token_ids, position_ids, logit_rows, embeddings).float()


def takes_positions(model: PreTrainedModel) -> bool:
    """Return False for a model with only recurrent layers and without positions (Mamba)."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if not kinds or not set(kinds) <= WITHOUT_ATTENTION:
        return True
    return "position_ids" in signature(model.forward).parameters


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part with paged attention: a text model, or the decoder of a vision model."""
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
    """Run one flat batch; return logits `[rows, vocab]` of `logit_rows`, in the model's dtype.

    transformers computes the logits, so that a model's capping or scaling of logits applies.
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


def relative_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of each row's difference divided by the norm of the expected row."""
    size = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    errors: Tensor = (actual.float() - expected.float()).norm(dim=-1) / size
    return errors


def fingerprint_memory(model: nn.Module) -> str:
    """Return the SHA-256 of configuration, names and weights of a model built in memory."""
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
