"""Qwen3-Omni: its model, the code predictor of its talker, and its vocoder.

The talker has several codebooks. A small decoder predicts a frame's codes after the first, one
after another, from the talker's hidden row and the first code. It has no state between frames:

    position   0             1              2              3 ...
    input      talker's row  first code     second code    third code
    predicts                 second code    third code     ...
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    _get_feat_extract_output_lengths,
)

from headstart.models.files import find_folder
from headstart.omni.media import Media, Placed
from headstart.omni.stage_decoder import (
    Checkpoint,
    OmniModel,
    PassTensors,
    StageDecoder,
    StageParts,
)

Choose = Callable[[Tensor], Sequence[int]]
"""Chooses one code for each row of logits float32 `[rows, codes]`."""


_UNSPOKEN = 1024
"""Number of the talker's last token ids that are not codes; of them only the end is sampled."""


class Qwen3Omni(OmniModel):
    """A loaded model. Raises ConfigError or ModelError."""

    voices: dict[str, int]

    def __init__(self, model: str | Path, dtype: str = "auto", device: str = "cpu") -> None:
        super().__init__(model, dtype, device, Qwen3OmniMoeForConditionalGeneration)
        self.config = self._config
        """The configuration that names the thinker's special token ids: `..._token_id`."""
        self.codec: Any = self._talker.config
        """The configuration that names the talker's special token ids: `codec_..._id`."""
        config = self.config.thinker_config
        seen, heard = config.vision_config, config.audio_config
        self._num_deep = len(seen.deepstack_visual_indexes)
        self.placeholders = {"audio": config.audio_token_id, "image": config.image_token_id}
        self.media = Media(
            find_folder(model),
            self.placeholders,
            lambda counts: _get_feat_extract_output_lengths(counts, heard.n_window),
            seen.spatial_merge_size,
            padding=True,
        )
        self.voices = dict(self.codec.speaker_id or {})
        self._predictor = self._talker.code_predictor
        self.num_others = int(self._predictor.config.num_code_groups) - 1
        """Number of codes of a frame after the first."""
        self.num_codes = int(self._predictor.config.vocab_size)
        """Number of values of each of these codes."""
        self.vocoder = CausalVocoder(self._whole.code2wav)

    def thinker(self) -> StageDecoder:
        """Return a decoder that generates text and gives `handed`."""
        ends = frozenset([int(self.config.im_end_token_id)])
        accept = int(self.codec.accept_hidden_layer)
        return thinker_decoder(
            self._thinker, accept, ends, self._num_deep, checkpoint=self.checkpoint
        )

    def talker(self) -> StageDecoder:
        """Return a decoder that generates first codes and gives `hidden`, the predictor's input."""
        count, end = int(self.codec.text_config.vocab_size), int(self.codec.codec_eos_token_id)
        unspoken = set(range(count - _UNSPOKEN, count)) - {end}
        return StageDecoder(
            StageParts(
                text_model=self._talker.model,
                head=self._talker.codec_head,
                give=lambda tensors: {"hidden": tensors.hidden},
                eos_token_ids=frozenset([end]),
                hidden_ids=tuple(sorted(unspoken)),
                checkpoint=self.checkpoint,
            )
        )

    def embed_codes(self, ids: Tensor, others: Tensor | None = None) -> Tensor:
        """Return the talker's embeddings `[n, hidden]` of its token ids int64 `[n]`.

        With `others` int64 `[n, others]`, the other codes of their frames: the frames' embeddings.
        """
        device = self._whole.device
        with torch.inference_mode():
            rows: Tensor = self._talker.get_input_embeddings()(ids.to(device))
            if others is not None:
                codes, tables = others.to(device), self._predictor.get_input_embeddings()
                embedded = [table(codes[:, index]) for index, table in enumerate(tables)]
                rows = torch.cat([rows[:, None], torch.stack(embedded, dim=1)], dim=1).sum(1)
        return rows

    def predict_others(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """Return the other codes int64 `[n, others]` of many frames at once, on the host.

        `hidden` are the talker's rows `[n, hidden]` that gave the first codes int64 `[n]`.
        """
        tables, embedded = self._predictor.get_input_embeddings(), self.embed_codes(first)
        past, others = None, []
        with torch.inference_mode():
            inputs = torch.stack([hidden.to(embedded), embedded], dim=1)
            for table, head in zip(tables, self._predictor.lm_head, strict=True):
                output = self._predictor.model(
                    inputs_embeds=inputs, past_key_values=past, use_cache=True
                )
                past = output.past_key_values
                codes = torch.tensor(choose(head(output.last_hidden_state[:, -1]).float()))
                others.append(codes)
                inputs = table(codes.to(embedded.device))[:, None]
        return torch.stack(others, dim=1)

    def project(self, rows: Tensor, is_media: Tensor) -> Tensor:
        """Return the thinker's rows `[n, hidden]`, projected for the talker.

        is_media: bool `[n]`, true for rows of audio and images.
        """
        rows = rows.to(self._whole.device, self._whole.dtype)
        with torch.inference_mode():
            projected: Tensor = self._talker.text_projection(rows)
            if is_media.any():
                mask = is_media.to(rows.device)
                projected[mask] = self._talker.hidden_projection(rows[mask])
        return projected

    def encode(self, placed: Placed) -> Tensor:
        """Return the rows of an item's placeholders, `[length, hidden * (1 + deep layers)]`.

        A row is an embedding, then the rows added after each of the first layers, zeros for audio.
        """
        content = self._on_device(placed.content)
        with torch.inference_mode():
            if placed.kind == "audio":
                heard: Tensor = self._thinker.get_audio_features(**content).last_hidden_state
                zeros = heard.new_zeros(len(heard), self._num_deep * heard.shape[1])
                return torch.cat([heard, zeros], dim=1)
            seen = self._thinker.get_image_features(**content)
            rows = [seen.pooler_output[0], *(deep[0] for deep in seen.deepstack_features)]
            return torch.cat(rows, dim=1)

    def _rope_model(self, *, of_talker: bool) -> Any:
        return self._thinker  # the talker counts in the same way


def thinker_decoder(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    accept_layer: int,
    eos_token_ids: frozenset[int] = frozenset(),
    num_deep: int = 0,
    *,
    checkpoint: Checkpoint | None = None,
) -> StageDecoder:
    """Return a thinker's decoder, which gives `handed` `[tokens, hidden]`.

    A text token's row is its embedding, any other row the one after `accept_layer` layers.
    """

    def give(tensors: PassTensors) -> Mapping[str, Tensor]:
        own = tensors.is_own[:, None]
        return {"handed": torch.where(own, tensors.layers[0], tensors.layers[accept_layer])}

    return StageDecoder(
        StageParts(
            text_model=thinker.model.language_model,
            head=thinker.lm_head,
            give=give,
            eos_token_ids=eos_token_ids,
            needs_layers=True,
            num_deep=num_deep,
            checkpoint=checkpoint,
        )
    )


class CausalVocoder:
    """A causal vocoder that runs block by block; the function of a `FramesStage`.

    A code gives `ratio` samples. The last `delay` samples of a code need the next code, so the
    convolutions leave them out at the end of their input. So the wave is delayed by `delay`
    samples: it begins with silence, and blocks join without a gap.

    The transformer before the convolutions has a longer context (8 layers with windows of 72 codes,
    against 10 codes) and is the cheaper part. So it runs over all given codes, and the convolutions
    only over the block and the `reach` codes before it.
    """

    def __init__(self, code2wav: Qwen3OmniMoeCode2Wav) -> None:
        self._code2wav: Any = code2wav
        self.ratio = int(code2wav.total_upsample)
        quantizers = int(code2wav.config.num_quantizers)
        self.delay = 2 * self.ratio - len(self._wave(torch.zeros(2, quantizers, dtype=torch.int64)))
        self.reach = _reach(code2wav, self.delay)

    def __call__(self, request: object, codes: Tensor, context: int) -> Tensor:
        """Return samples float32 `[(n - context) * ratio]` of codes int64 `[n, quantizers]`.

        The first `context` codes are only context.
        """
        skipped = max(0, context - self.reach)
        wave = self._wave(codes, skipped)
        if not context:
            return torch.cat([torch.zeros(self.delay), wave])
        return wave[(context - skipped) * self.ratio - self.delay :]

    def _wave(self, codes: Tensor, skipped: int = 0) -> Tensor:
        """Run the model; the convolutions skip the first `skipped` codes."""
        model = self._code2wav
        with torch.inference_mode():
            ids = codes.T[None].to(model.device) + model.code_offset
            embedded = model.code_embedding(ids).mean(1)
            hidden = model.pre_transformer(inputs_embeds=embedded).last_hidden_state
            wave: Tensor = hidden[:, skipped:].permute(0, 2, 1)
            for block in (*itertools.chain.from_iterable(model.upsample), *model.decoder):
                wave = block(wave)
        return wave.clamp(-1, 1).reshape(-1).float().cpu()


def _reach(code2wav: Qwen3OmniMoeCode2Wav, delay: int) -> int:
    """Return the convolutions' context in codes, `delay` samples before a code's first one."""
    at = -delay
    for part in (code2wav.decoder, code2wav.upsample):
        for module in reversed(list(part.modules())):
            if isinstance(module, Qwen3OmniMoeCausalConvNet):
                at -= module.padding
            elif isinstance(module, Qwen3OmniMoeCausalTransConvNet):
                kernel, stride = module.conv.kernel_size[0], module.conv.stride[0]
                at = -((kernel - 1 - module.left_pad - at) // stride)
    return -at
