"""Qwen2.5-Omni: transformers' modules, taken apart into what each stage runs.

The thinker hears, sees and writes; the talker speaks the thinker's rows in codes; token2wav makes
a waveform of codes, given a voice. Everything that a model computes is transformers' own; what is
here says which part goes where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    Qwen2_5OmniForConditionalGeneration,
)

from headstart.errors import DamagedModelError, RequestError, UnsupportedModelError
from headstart.models.files import check_files, find_folder
from headstart.models.quiet import quiet
from headstart.models.stage_decoder import PassTensors, StageDecoder, StageParts

__all__ = ["HEARD_AND_SEEN", "Placed", "Qwen25Omni", "SpeechIds", "Voice"]

HEARD_AND_SEEN = ("input_features", "feature_attention_mask", "pixel_values", "image_grid_thw")
"""What a prompt may bring beside token ids, by the names of transformers' processor."""


@dataclass(frozen=True, slots=True)
class Voice:
    """A speaker: the text token that begins its speech, and what its waveform is made with."""

    bos_token: int
    conditioning: Tensor
    reference_mel: Tensor


@dataclass(frozen=True, slots=True)
class SpeechIds:
    """Token ids around speech: of codes (mask, pad, bos, end), and of the text stream."""

    mask: int
    pad: int
    bos: int
    end: int
    text_end: int
    text_pad: int


@dataclass(frozen=True, slots=True)
class Placed:
    """One audio or image in a prompt.

    offset, length: of its placeholders, in tokens. content: the tensors that it is.
    """

    kind: str
    offset: int
    length: int
    content: Mapping[str, Tensor]


class Qwen25Omni:
    """A loaded model. Raises ModelNotFoundError, DamagedModelError."""

    sample_rate = 24_000

    def __init__(self, model: str | Path, dtype: str = "auto", device: str = "cpu") -> None:
        folder = find_folder(model)
        check_files(folder)
        if not (folder / "spk_dict.pt").is_file():
            raise DamagedModelError(f"{folder} has no spk_dict.pt, which holds the voices")
        with quiet():
            loaded: Any = Qwen2_5OmniForConditionalGeneration.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", local_files_only=True
            )
        self._whole = loaded.to(device).eval()
        self._folder = folder
        self._thinker, self._talker = self._whole.thinker, self._whole.talker
        self._token2wav = self._whole.token2wav.float()
        config = self._thinker.config
        self._placeholders = {"audio": config.audio_token_id, "image": config.image_token_id}
        self.voices = {
            name: Voice(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
            for name, entry in self._whole.speaker_map.items()
        }
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
        """Of the text."""
        return int(self._thinker.get_input_embeddings().weight.shape[0])

    def thinker(self) -> StageDecoder:
        """Writes; gives `spoken` `[tokens, hidden]`: last hidden rows plus text embeddings.

        Where something is heard or seen, the hidden row alone.
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
            )
        )

    def talker(self) -> StageDecoder:
        """Speaks codes; its inputs are rows of the thinker's width."""
        return StageDecoder(
            StageParts(
                text_model=self._talker.model,
                head=self._talker.codec_head,
                give=lambda tensors: {},
                eos_token_ids=frozenset([self.speech.pad, self.speech.end]),
                project=self._talker.thinker_to_talker_proj,
                hidden_ids=(self.speech.bos,),
            )
        )

    def embed_text(self, token_id: int) -> Tensor:
        """The thinker's embedding `[hidden]` of a token."""
        ids = torch.tensor([token_id], device=self._whole.device)
        with torch.inference_mode():
            row: Tensor = self._thinker.get_input_embeddings()(ids)[0]
        return row

    def hear(self, sounds: Sequence[Any]) -> dict[str, Tensor]:
        """Features of sounds: float arrays `[samples]` at the extractor's rate.

        Raises RequestError for what is no sound, ModelError without a feature extractor.
        """
        extractor = _load(AutoFeatureExtractor, self._folder)
        waves = [np.asarray(sound, dtype=np.float32) for sound in sounds]
        for wave in waves:
            if wave.ndim != 1 or not len(wave) or not np.isfinite(wave).all():
                raise RequestError(f"a sound is numbers [samples], not {list(wave.shape)}")
        found = extractor(
            waves,
            sampling_rate=extractor.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = found["attention_mask"]
        longest = int(mask.sum(-1).max())
        return {
            "input_features": found["input_features"][..., :longest],
            "feature_attention_mask": mask[:, :longest],
        }

    def see(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """Features of Pillow images.

        Raises RequestError for what is no image, ModelError without an image processor.
        """
        processor = _load(AutoImageProcessor, self._folder, backend="pil")
        try:
            found = processor(images=list(images), return_tensors="pt")
        # ValueError, TypeError, OSError: whatever Pillow and numpy say of what they cannot read.
        except Exception as error:
            raise RequestError(f"images cannot be read: {type(error).__name__}: {error}") from error
        return {name: found[name] for name in ("pixel_values", "image_grid_thw")}

    def expand(self, token_ids: Sequence[int], features: Mapping[str, Tensor]) -> list[int]:
        """Token ids in which an item's one placeholder became as many as it has embeddings.

        Prompts that have all of them are as they were. Raises RequestError.
        """
        expanded = list(token_ids)
        for kind, (lengths, _) in self._contents(features).items():
            placeholder = self._placeholders[kind]
            if expanded.count(placeholder) != len(lengths):
                continue
            left = iter(lengths)
            expanded = [
                token
                for known in expanded
                for token in [known] * (next(left) if known == placeholder else 1)
            ]
        return expanded

    def _contents(
        self, features: Mapping[str, Tensor]
    ) -> dict[str, tuple[list[int], list[dict[str, Tensor]]]]:
        unknown = sorted(features.keys() - set(HEARD_AND_SEEN))
        if unknown:
            raise RequestError(f"the model takes no {unknown[0]!r}; it takes {HEARD_AND_SEEN}")
        return {"audio": self._audios(features), "image": self._images(features)}

    def locate(self, token_ids: Sequence[int], features: Mapping[str, Tensor]) -> list[Placed]:
        """Which audio and image stands where. Raises RequestError if they do not fit the tokens."""
        found = []
        for kind, (lengths, contents) in self._contents(features).items():
            placeholder = self._placeholders[kind]
            places = [at for at, token in enumerate(token_ids) if token == placeholder]
            if len(places) != sum(lengths):
                raise RequestError(
                    f"the prompt has {len(places)} {kind} placeholders, and what comes with it "
                    f"needs {sum(lengths)}"
                )
            at = 0
            for length, content in zip(lengths, contents, strict=True):
                mine = places[at : at + length]
                if mine and mine[-1] - mine[0] >= length:
                    raise RequestError(f"{kind} placeholders from token {mine[0]} on have a gap")
                found.append(Placed(kind, mine[0], length, content))
                at += length
        return sorted(found, key=lambda placed: placed.offset)

    def _audios(self, features: Mapping[str, Tensor]) -> tuple[list[int], list[dict[str, Tensor]]]:
        if "input_features" not in features:
            return [], []
        names = ("input_features", "feature_attention_mask")
        if names[1] not in features or len(features[names[0]]) != len(features[names[1]]):
            raise RequestError("input_features come with a feature_attention_mask for each audio")
        counts = features[names[1]].sum(-1)
        tower = self._thinker.model.audio_tower
        lengths = tower._get_feat_extract_output_lengths(counts)[1].tolist()
        contents = [
            {name: features[name][at : at + 1] for name in names} for at in range(len(lengths))
        ]
        return lengths, contents

    def _images(self, features: Mapping[str, Tensor]) -> tuple[list[int], list[dict[str, Tensor]]]:
        if "pixel_values" not in features:
            return [], []
        if "image_grid_thw" not in features:
            raise RequestError("pixel_values come with an image_grid_thw")
        grids = features["image_grid_thw"]
        patches = grids.prod(-1).tolist()
        if sum(patches) != len(features["pixel_values"]):
            raise RequestError(
                f"the image grids make {sum(patches)} patches; "
                f"pixel_values have {len(features['pixel_values'])}"
            )
        merged = self._thinker.model.spatial_merge_size**2
        pieces = torch.split(features["pixel_values"], patches)
        contents = [
            {"pixel_values": piece, "image_grid_thw": grids[at : at + 1]}
            for at, piece in enumerate(pieces)
        ]
        return [count // merged for count in patches], contents

    def encode(self, placed: Placed) -> Tensor:
        """The embeddings `[length, hidden]` that take its placeholders' places."""
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
        """Rotary positions `[3, tokens]`, and what later tokens' add to their places."""
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


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    """What turns sounds or images into features."""
    try:
        with quiet():
            return kind.from_pretrained(folder, local_files_only=True, **options)
    except ImportError as error:
        raise UnsupportedModelError(f"{folder}: a package is missing: {error}") from error
    # OSError, ValueError, KeyError: whatever a settings file can lack.
    except Exception as error:
        raise DamagedModelError(
            f"{folder} has no {kind.__name__.removeprefix('Auto')} that can be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
