"""Qwen2.5-Omni: transformers' modules, split into the parts that each stage runs.

The thinker takes text, audio and images and generates text. The talker generates codes from the
thinker's rows. token2wav makes a waveform from codes and a voice. All computation is transformers'
own; this file only assigns its parts to stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2_5OmniForConditionalGeneration

from headstart.errors import DamagedModelError
from headstart.models.dtypes import fast_dtype, find_device, find_dtype
from headstart.models.files import check_files, find_folder, stamp_files
from headstart.models.transformers_backend.loader import check_speaker, load_config, load_weights
from headstart.models.transformers_tools import silence_transformers
from headstart.omni.inputs import Media, Placed
from headstart.omni.models.stage_decoder import Checkpoint, PassTensors, StageDecoder, StageParts

__all__ = ["Qwen25Omni", "Recall", "SpeechIds", "Voice"]


@dataclass(frozen=True, slots=True)
class Voice:
    """A speaker: the text token that begins its speech, and the vocoder's inputs for its voice."""

    bos_token: int
    conditioning: Tensor
    reference_mel: Tensor


@dataclass(frozen=True, slots=True)
class SpeechIds:
    """Special token ids of speech: of codes (mask, pad, bos, end), and of the text stream."""

    mask: int
    pad: int
    bos: int
    end: int
    text_end: int
    text_pad: int


Recall = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""Returns the cached result for a tensor, or computes it now."""


class _Remembered(nn.Module):
    """A module that runs once per distinct input."""

    def __init__(self, inner: nn.Module, recall: Recall) -> None:
        super().__init__()
        self._inner = inner
        self._recall = recall

    def forward(self, given: Tensor) -> Tensor:
        return self._recall(given, lambda: self._inner(given)).to(given.device)


class Qwen25Omni:
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
        self.voices = _load_voices(folder / "spk_dict.pt")
        kind = Qwen2_5OmniForConditionalGeneration
        with silence_transformers():
            config: Any = load_config(folder)
            check_speaker(folder, config)
            # The class's own `from_pretrained` reads the voices and gives no loading report.
            loaded: Any = load_weights(
                super(kind, kind).from_pretrained, folder, config=config, **options
            )
        self._whole = loaded.to(wanted).eval()
        self._thinker, self._talker = self._whole.thinker, self._whole.talker
        self._token2wav = self._whole.token2wav.float()
        config = config.thinker_config
        tower = self._thinker.model.audio_tower
        self.media = Media(
            folder,
            {"audio": config.audio_token_id, "image": config.image_token_id},
            lambda counts: tower._get_feat_extract_output_lengths(counts)[1],
            self._thinker.model.spatial_merge_size,
            padding="max_length",
        )
        talker = self._talker.config
        self.speech = SpeechIds(
            mask=talker.tts_codec_mask_token_id,
            pad=talker.tts_codec_pad_token_id,
            bos=talker.tts_codec_start_token_id,
            end=talker.tts_codec_end_token_id,
            text_end=talker.tts_text_end_token_id,
            text_pad=talker.tts_text_pad_token_id,
        )

    @property
    def vocab_size(self) -> int:
        """Size of the text vocabulary."""
        return int(self._thinker.get_input_embeddings().weight.shape[0])

    def thinker(self) -> StageDecoder:
        """Generates text; gives `spoken` `[tokens, hidden]`: last hidden rows plus text embeddings.

        At placeholders of audio and images, the hidden row alone.
        """

        def give(tensors: PassTensors) -> dict[str, Tensor]:
            return {"spoken": tensors.hidden + tensors.embedded * tensors.is_own[:, None]}

        eos = self._thinker.generation_config.eos_token_id
        return StageDecoder(
            StageParts(
                text_model=self._thinker.model.language_model,
                head=self._thinker.lm_head,
                give=give,
                eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
                checkpoint=self.checkpoint,
            )
        )

    def talker(self) -> StageDecoder:
        """Generates codes; its inputs are rows of the thinker's width."""
        return StageDecoder(
            StageParts(
                text_model=self._talker.model,
                head=self._talker.codec_head,
                give=lambda tensors: {},
                eos_token_ids=frozenset([self.speech.pad, self.speech.end]),
                project=self._talker.thinker_to_talker_proj,
                hidden_ids=(self.speech.bos,),
                checkpoint=self.checkpoint,
            )
        )

    def embed_text(self, token_id: int) -> Tensor:
        """The thinker's embedding `[hidden]` of a token."""
        ids = torch.tensor([token_id], device=self._whole.device)
        with torch.inference_mode():
            row: Tensor = self._thinker.get_input_embeddings()(ids)[0]
        return row

    def encode(self, placed: Placed) -> Tensor:
        """The embeddings `[length, hidden]` that replace an item's placeholders."""
        content = {name: value.to(self._whole.device) for name, value in placed.content.items()}
        with torch.inference_mode():
            if placed.kind == "audio":
                heard: Tensor = self._thinker.get_audio_features(**content).last_hidden_state
                return heard
            seen: Tensor = torch.cat(self._thinker.get_image_features(**content).pooler_output)
            return seen

    def positions(
        self, token_ids: Sequence[int], features: Mapping[str, Tensor], *, of_talker: bool = False
    ) -> tuple[Tensor, int]:
        """Rotary positions `[3, tokens]`, and the offset of later tokens' positions."""
        model = self._talker if of_talker else self._thinker.model
        ids = torch.tensor([list(token_ids)])
        mask = features.get("feature_attention_mask")
        table, deltas = model.get_rope_index(
            ids,
            image_grid_thw=features.get("image_grid_thw"),
            attention_mask=torch.ones_like(ids),
            audio_seqlens=mask.sum(-1) if mask is not None else None,
        )
        return table[:, 0], int(deltas.view(-1)[0])

    def remember_speakers(self, recall: Recall) -> None:
        """Embed each speaker once, not at every step of every waveform."""
        inputs = self._token2wav.code2wav_dit_model.input_embed
        inputs.spk_encoder = _Remembered(inputs.spk_encoder, recall)

    def make_wave(self, codes: Tensor, voice: Voice, seed: int) -> Tensor:
        """A waveform float32 `[samples]` of codes int64 `[codes]`; noise comes from `seed`."""
        if not len(codes):
            return torch.empty(0)
        device = self._whole.device
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            wave: Tensor = self._token2wav(
                codes[None].to(device),
                conditioning=voice.conditioning.to(device).view(1, -1),
                reference_mel=voice.reference_mel.to(device)[None]
                if voice.reference_mel.ndim == 2
                else voice.reference_mel.to(device),
            )
        return wave.reshape(-1).float().cpu()


def _load_voices(file: Path) -> dict[str, Voice]:
    if not file.is_file():
        raise DamagedModelError(f"{file.parent} has no {file.name}, which holds the voices")
    try:
        entries = torch.load(file, map_location="cpu", weights_only=True)
        return {
            str(name): Voice(int(e["bos_token"]), e["cond"].float(), e["ref_mel"].float())
            for name, e in entries.items()
        }
    # torch raises RuntimeError, EOFError, UnpicklingError; a wrong entry KeyError, TypeError, ...
    except Exception as error:
        raise DamagedModelError(
            f"{file} holds no voices: {type(error).__name__}: {error}"
        ) from error
