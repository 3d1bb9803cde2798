"""The code predictor of a talker with several codebooks: a frame's codes after the first.

A small decoder predicts them one after another from the talker's hidden row and the first code. It
keeps no state from one frame to the next:

    position   0             1              2              3 ...
    input      talker's row  first code     second code    third code
    predicts                 second code    third code     ...
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
    _get_feat_extract_output_lengths,
)

from headstart.models.dtypes import fast_dtype, find_device, find_dtype
from headstart.models.files import check_files, find_folder, stamp_files
from headstart.models.transformers_backend.loader import check_speaker, load_config, load_weights
from headstart.models.transformers_tools import silence_transformers
from headstart.omni.inputs import Media, Placed
from headstart.omni.models.stage_decoder import Checkpoint, PassTensors, StageDecoder, StageParts

__all__ = [
    "CausalVocoder",
    "Choose",
    "CodePredictor",
    "CodecIds",
    "Qwen3Omni",
    "TurnIds",
    "thinker_decoder",
]

Choose = Callable[[Tensor], Sequence[int]]
"""Chooses one code for each row of logits float32 `[rows, codes]`."""


class CodePredictor:
    """transformers' predictor for many frames at once. `others`: codes after a frame's first."""

    def __init__(
        self, predictor: Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration
    ) -> None:
        self._predictor: Any = predictor
        self.others = int(predictor.config.num_code_groups) - 1
        self.vocab_size = int(predictor.config.vocab_size)

    def embed(self, codes: Tensor) -> Tensor:
        """Embeddings `[n, others, hidden]` of codes int64 `[n, others]`."""
        tables = self._predictor.get_input_embeddings()
        return torch.stack([table(codes[:, at]) for at, table in enumerate(tables)], dim=1)

    def predict(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """The other codes int64 `[n, others]` of frames, on the host.

        `hidden` are the talker's rows `[n, hidden]` that gave the first codes, `first` those
        codes' embeddings `[n, hidden]`.
        """
        tables = self._predictor.get_input_embeddings()
        past, found = None, []
        with torch.inference_mode():
            inputs = torch.stack([hidden.to(first), first], dim=1)
            for table, head in zip(tables, self._predictor.lm_head, strict=True):
                output = self._predictor.model(
                    inputs_embeds=inputs, past_key_values=past, use_cache=True
                )
                past = output.past_key_values
                codes = torch.tensor(choose(head(output.last_hidden_state[:, -1]).float()))
                found.append(codes)
                inputs = table(codes.to(first.device))[:, None]
        return torch.stack(found, dim=1)


_UNSPOKEN = 1024
"""Number of the talker's last token ids that are not codes; of them only the end is sampled."""


@dataclass(frozen=True, slots=True)
class TurnIds:
    """The thinker's token ids for the roles of turns, and for the ends of spoken text."""

    start: int
    user: int
    assistant: int
    text_bos: int
    text_eos: int
    text_pad: int


@dataclass(frozen=True, slots=True)
class CodecIds:
    """The talker's special token ids: before a voice, after it, and the end."""

    nothink: int
    think_bos: int
    think_eos: int
    pad: int
    bos: int
    end: int


class Qwen3Omni:
    """A loaded model. Raises ConfigError or ModelError."""

    sample_rate = 24_000

    def __init__(self, model: str | Path, dtype: str = "auto", device: str = "cpu") -> None:
        weights_dtype, wanted = find_dtype(dtype), find_device(device)
        folder = find_folder(model)
        check_files(folder)
        self.checkpoint = Checkpoint(folder, stamp_files(folder))
        """The files that it was read from."""
        options = {
            "dtype": fast_dtype(weights_dtype, folder, wanted),
            "attn_implementation": "eager",
        }
        kind = Qwen3OmniMoeForConditionalGeneration
        with silence_transformers():
            config: Any = load_config(folder)
            check_speaker(folder, config)
            loaded: Any = load_weights(kind.from_pretrained, folder, config=config, **options)
        self._whole = loaded.to(wanted).eval()
        self._thinker, self._talker = self._whole.thinker, self._whole.talker
        talker = self._talker.config
        seen, heard = config.thinker_config.vision_config, config.thinker_config.audio_config
        self._num_deep = len(seen.deepstack_visual_indexes)
        self.placeholders = {
            "audio": config.thinker_config.audio_token_id,
            "image": config.thinker_config.image_token_id,
        }
        self.media = Media(
            folder,
            self.placeholders,
            lambda counts: _get_feat_extract_output_lengths(counts, heard.n_window),
            seen.spatial_merge_size,
            padding=True,
        )
        self.voices: dict[str, int] = dict(talker.speaker_id or {})
        self.turns = TurnIds(
            start=config.im_start_token_id,
            user=config.user_token_id,
            assistant=config.assistant_token_id,
            text_bos=config.tts_bos_token_id,
            text_eos=config.tts_eos_token_id,
            text_pad=config.tts_pad_token_id,
        )
        self.codec = CodecIds(
            nothink=talker.codec_nothink_id,
            think_bos=talker.codec_think_bos_id,
            think_eos=talker.codec_think_eos_id,
            pad=talker.codec_pad_id,
            bos=talker.codec_bos_id,
            end=talker.codec_eos_token_id,
        )
        self._predictor = CodePredictor(self._talker.code_predictor)
        self.num_others, self.num_codes = self._predictor.others, self._predictor.vocab_size
        self.vocoder = CausalVocoder(self._whole.code2wav)

    @property
    def vocab_size(self) -> int:
        """Size of the text vocabulary."""
        return int(self._thinker.get_input_embeddings().weight.shape[0])

    def thinker(self) -> StageDecoder:
        """Generates text; gives `handed`."""
        ends = frozenset([int(self._whole.config.im_end_token_id)])
        accept = int(self._talker.config.accept_hidden_layer)
        return thinker_decoder(
            self._thinker, accept, ends, self._num_deep, checkpoint=self.checkpoint
        )

    def talker(self) -> StageDecoder:
        """Generates first codes; gives `hidden`, the predictor's input."""
        count = int(self._talker.config.text_config.vocab_size)
        unspoken = set(range(count - _UNSPOKEN, count)) - {self.codec.end}
        return StageDecoder(
            StageParts(
                text_model=self._talker.model,
                head=self._talker.codec_head,
                give=lambda tensors: {"hidden": tensors.hidden},
                eos_token_ids=frozenset([self.codec.end]),
                hidden_ids=tuple(sorted(unspoken)),
                checkpoint=self.checkpoint,
            )
        )

    def embed_text(self, token_id: int) -> Tensor:
        """The thinker's embedding `[hidden]` of a token."""
        ids = torch.tensor([token_id], device=self._whole.device)
        with torch.inference_mode():
            row: Tensor = self._thinker.get_input_embeddings()(ids)[0]
        return row

    def embed_codes(self, ids: Tensor, others: Tensor | None = None) -> Tensor:
        """The talker's embeddings `[n, hidden]` of its token ids int64 `[n]`.

        With `others` int64 `[n, others]`, the other codes of their frames: the frames' embeddings.
        """
        device = self._whole.device
        with torch.inference_mode():
            rows: Tensor = self._talker.get_input_embeddings()(ids.to(device))
            if others is not None:
                all_rows = [rows[:, None], self._predictor.embed(others.to(device))]
                rows = torch.cat(all_rows, dim=1).sum(1)
        return rows

    def predict_others(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """The other codes int64 `[n, others]` of frames, on the host.

        `hidden` are the talker's rows `[n, hidden]` that gave the first codes int64 `[n]`.
        """
        return self._predictor.predict(hidden, self.embed_codes(first), choose)

    def project(self, rows: Tensor, is_media: Tensor) -> Tensor:
        """The thinker's rows `[n, hidden]`, projected for the talker.

        is_media: bool `[n]`, true for rows of audio and images.
        """
        given = rows.to(self._whole.device, self._whole.dtype)
        with torch.inference_mode():
            projected: Tensor = self._talker.text_projection(given)
            if is_media.any():
                at = is_media.to(given.device)
                projected[at] = self._talker.hidden_projection(given[at])
        return projected

    def encode(self, placed: Placed) -> Tensor:
        """The rows that replace an item's placeholders, `[length, hidden * (1 + deep layers)]`.

        A row is an embedding, then the rows added after each of the first layers, zeros for audio.
        """
        content = {name: value.to(self._whole.device) for name, value in placed.content.items()}
        with torch.inference_mode():
            if placed.kind == "audio":
                heard: Tensor = self._thinker.get_audio_features(**content).last_hidden_state
                return torch.cat([heard, heard.new_zeros(len(heard), self._added(heard))], dim=1)
            seen = self._thinker.get_image_features(**content)
            rows = [seen.pooler_output[0], *(deep[0] for deep in seen.deepstack_features)]
            return torch.cat(rows, dim=1)

    def _added(self, rows: Tensor) -> int:
        return self._num_deep * rows.shape[1]

    def positions(
        self, token_ids: Sequence[int], features: Mapping[str, Tensor]
    ) -> tuple[Tensor, int]:
        """Rotary positions `[3, tokens]`, and the offset of later tokens' positions.

        The talker's positions are counted in the same way over its own prompt.
        """
        ids = torch.tensor([list(token_ids)])
        mask = features.get("feature_attention_mask")
        table, deltas = self._thinker.get_rope_index(
            ids,
            image_grid_thw=features.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
            audio_seqlens=mask.sum(-1) if mask is not None else None,
        )
        return table[:, 0].long(), int(deltas.view(-1)[0])


def thinker_decoder(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    accept_layer: int,
    eos_token_ids: frozenset[int] = frozenset(),
    num_deep: int = 0,
    *,
    checkpoint: Checkpoint | None = None,
) -> StageDecoder:
    """The thinker; gives `handed` `[tokens, hidden]`.

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
        """Samples float32 `[(n - context) * ratio]` of codes int64 `[n, quantizers]`.

        The first `context` codes are only context.
        """
        skipped = max(0, context - self.reach)
        wave = self._wave(codes, skipped)
        if not context:
            return torch.cat([torch.zeros(self.delay), wave])
        return wave[(context - skipped) * self.ratio - self.delay :]

    def _wave(self, codes: Tensor, skipped: int = 0) -> Tensor:
        """The model's own pass; the convolutions skip the first `skipped` codes."""
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
    """The convolutions' context in codes, for the sample `delay` before a code's first sample."""
    at = -delay
    for part in (code2wav.decoder, code2wav.upsample):
        for module in reversed(list(part.modules())):
            if isinstance(module, Qwen3OmniMoeCausalConvNet):
                at -= module.padding
            elif isinstance(module, Qwen3OmniMoeCausalTransConvNet):
                kernel, stride = module.conv.kernel_size[0], module.conv.stride[0]
                at = -((kernel - 1 - module.left_pad - at) // stride)
    return -at
