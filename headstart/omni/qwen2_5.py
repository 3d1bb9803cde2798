"""Qwen2.5-Omni: thinker, talker and token2wav.

The thinker takes text, audio and images and generates text. The talker generates codes from the
thinker's rows. token2wav makes a waveform from codes and a voice. The talker's prompt consists of
constant codec tokens; the content is in the thinker's rows:

    position   0 ......... T-1   T         T+1       T+2       T+3  ...
    token      mask ..... mask   pad       start     code 0    code 1
    row        thinker's prompt  bos       answer 0  answer 1  answer 2 ... eos  pad  pad ...

From position T on, the token's embedding is added to the row. The talker's prompt is complete when
the first row of the thinker's answer arrives. Each later code needs one more row.

Source: `Qwen2_5OmniForConditionalGeneration.generate` in transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2_5OmniForConditionalGeneration

from headstart.engine.params import SamplingParams
from headstart.engine.request import RotaryPositions
from headstart.errors import DamagedModelError
from headstart.omni.engine_stage import EngineStage, Feed, TalkerFeed
from headstart.omni.family import OmniModel
from headstart.omni.function_stage import StageCall, WholeStage
from headstart.omni.media import PlacedItem
from headstart.omni.output_cache import ContentCache, OutputCache, content_digest
from headstart.omni.params import SpokenPrompt
from headstart.omni.pipeline import StageNode, no_options, stage_config
from headstart.omni.stage import TOKENS, Input, OmniRequest, Stage
from headstart.omni.stage_decoder import PassTensors, StageDecoder, StageParts


@dataclass(frozen=True, slots=True)
class Voice:
    """A voice: the text token that begins its speech, and the vocoder's inputs."""

    bos_token: int
    conditioning: Tensor
    reference_mel: Tensor


class _Cached(nn.Module):
    """A module that runs once per distinct input."""

    def __init__(self, inner: nn.Module, cache: ContentCache) -> None:
        super().__init__()
        self._inner, self._cache = inner, cache

    def forward(self, tensor: Tensor) -> Tensor:
        digest = content_digest(tensor)
        return self._cache.recall(digest, lambda: self._inner(tensor)).to(tensor.device)


@dataclass(kw_only=True, eq=False)
class CodecTalkerFeed(TalkerFeed):
    """One request's feed. The talker generates code `n` when the row of `answer n` has arrived.

    mask_id: the token id of all positions of the prompt except the last two. lead_ids: the token
    ids of the last two positions. embed: maps token ids, int64 `[n]`, to embeddings `[n, width]`.
    positions: the rotary positions of the thinker's prompt and of `lead_ids`. limit: maximum number
    of tokens.
    """

    mask_id: int
    lead_ids: tuple[int, int]
    embed: Callable[[Tensor], Tensor]
    limit: int

    def _take_rows(self, rows: Tensor) -> None:
        """Add rows, and `bos` between the rows of the thinker's prompt and of its answer."""
        assert self._prompt_tokens is not None
        left = self._prompt_tokens - self._num_rows
        self._num_rows += len(rows)
        if left > 0:
            self._add(rows[:left])
            if len(rows) >= left:
                self._add(self.bos[None].to(rows))
            rows = rows[left:]
        if len(rows):
            self._add(rows)

    def _end_rows(self) -> None:
        self._close(self.limit)

    def _token_ids(self) -> list[int] | None:
        length, lead = self._prompt_tokens, self.lead_ids
        if length is None or self._num_positions < length + len(lead):
            return None
        return [self.mask_id] * length + list(lead)

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        assert self._prompt_tokens is not None
        first = max(0, self._prompt_tokens - position)
        if first >= len(rows):
            return rows
        embeddings = self.embed(torch.tensor(token_ids[first:]))
        return torch.cat([rows[:first].to(embeddings), rows[first:].to(embeddings) + embeddings])


_GRAPH = """
collects = ["thinker.tokens", "talker.tokens", "token2wav.audio"]

[stages.thinker]
gives = { spoken = "token" }

[stages.talker]
takes = ["thinker.spoken"]

[stages.token2wav]
autoregressive = false
takes = ["talker.tokens"]
gives = { audio = { alignment = "request", dtype = "float32" } }
"""


class Qwen25Omni(OmniModel):
    """Qwen2.5-Omni. A request also has the option `seed` for `token2wav`."""

    kind = Qwen2_5OmniForConditionalGeneration
    graph = _GRAPH
    audio = Input("token2wav", "audio")
    codes = Input("talker", TOKENS)
    sound_padding = "max_length"
    speech_params = SamplingParams(
        max_tokens=4096, temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05
    )
    placeholder_texts = MappingProxyType(
        {
            "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
            "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        }
    )

    def __init__(self, folder: Path, dtype: str, device: str, cache: OutputCache) -> None:
        super().__init__(folder, dtype, device, cache)
        self.factories = {
            "thinker": self.make_thinker,
            "talker": self._make_talker,
            "token2wav": self._make_token2wav,
        }
        self._token2wav = self._whole.token2wav.float()
        talker = self.talker_config
        self.end_codes = (talker.tts_codec_end_token_id, talker.tts_codec_pad_token_id)

    def _load_voices(self, folder: Path) -> dict[str, Voice]:
        file = folder / "spk_dict.pt"
        if not file.is_file():
            raise DamagedModelError(f"{file.parent} has no {file.name}, which holds the voices")
        try:
            entries = torch.load(file, map_location="cpu", weights_only=True)
            return {
                str(name): Voice(int(e["bos_token"]), e["cond"].float(), e["ref_mel"].float())
                for name, e in entries.items()
            }
        except Exception as error:  # a damaged file raises exceptions of many types
            reason = f"{type(error).__name__}: {error}"
            raise DamagedModelError(f"{file} has no voices: {reason}") from error

    def thinker(self) -> StageDecoder:
        """Return a decoder that generates text, with the output `spoken` `[tokens, hidden]`.

        A text token's row is the sum of its final hidden state and its embedding. A placeholder's
        row is the final hidden state alone.
        """

        def give(tensors: PassTensors) -> dict[str, Tensor]:
            return {"spoken": tensors.hidden + tensors.embedded * tensors.is_token[:, None]}

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
        """Return a decoder that generates codes, with inputs of the thinker's width."""
        return StageDecoder(
            StageParts(
                text_model=self._talker.model,
                head=self._talker.codec_head,
                give=lambda tensors: {},
                eos_token_ids=frozenset(self.end_codes),
                project=self._talker.thinker_to_talker_proj,
                suppressed_ids=(self.talker_config.tts_codec_start_token_id,),
                checkpoint=self.checkpoint,
            )
        )

    def encode(self, item: PlacedItem) -> Tensor:
        """Return the embeddings `[length, hidden]` that replace an item's placeholders."""
        content = self._on_device(item.content)
        with torch.inference_mode():
            if item.kind == "audio":
                audio: Tensor = self._thinker.get_audio_features(**content).last_hidden_state
                return audio
            return torch.cat(self._thinker.get_image_features(**content).pooler_output)

    def _sound_lengths(self, counts: Tensor) -> Tensor:
        tower = self._thinker.model.audio_tower
        lengths: Tensor = tower._get_feat_extract_output_lengths(counts)[1]
        return lengths

    def _rope_model(self, *, of_talker: bool) -> Any:
        return self._talker if of_talker else self._thinker.model

    def make_wave(self, codes: Tensor, voice: Voice, seed: int) -> Tensor:
        """Return the waveform, float32 `[samples]`, of codes int64 `[codes]`.

        seed: seed of the noise from which the vocoder starts.
        """
        if not len(codes):
            return torch.empty(0)
        device = self._whole.device
        mel = voice.reference_mel.to(device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            wave: Tensor = self._token2wav(
                codes[None].to(device),
                conditioning=voice.conditioning.to(device).view(1, -1),
                reference_mel=mel[None] if mel.ndim == 2 else mel,
            )
        return wave.reshape(-1).float().cpu()

    def _make_talker(self, node: StageNode) -> Stage:
        talker = self.talker_config
        decoder, config = self.talker(), stage_config(node)
        text_ids = (talker.tts_text_pad_token_id, talker.tts_text_end_token_id)
        pad, eos = map(self.embed_text, text_ids)

        def feed(request: OmniRequest) -> Feed:
            voice = self.voice(request)
            bos = self.voices[voice].bos_token
            return CodecTalkerFeed(
                request=request,
                rows=node.spec.takes[0],
                block_size=config.block_size,
                mask_id=talker.tts_codec_mask_token_id,
                lead_ids=(talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id),
                bos=self.embed_text(bos),
                eos=eos,
                pad=pad,
                embed=decoder.embed,
                params=request.params.get("talker", self.speech_params),
                voice=voice,
                limit=stage.engine.max_model_len,
                positions=self._talker_positions(request.prompt, bos),
                anonymous=not node.spec.enable_prefix_caching,
            )

        stage = EngineStage(node.spec, decoder, feed, config, self._cache)
        return stage

    def _talker_positions(self, prompt: SpokenPrompt, bos: int) -> RotaryPositions | None:
        """Return the rotary positions of the talker's prompt.

        They are the positions of the thinker's prompt followed by two text tokens. Return None for
        a prompt without audio and images, whose positions are consecutive.
        """
        if prompt.prepared.extras is None:
            return None
        ids = [*prompt.prepared.token_ids, bos, bos]
        return self.positions(ids, prompt.features, of_talker=True)

    def _make_token2wav(self, node: StageNode) -> Stage:
        no_options(node)

        def arguments(call: StageCall) -> tuple[Tensor, Voice, int]:
            codes = call.inputs[self.codes]
            if len(codes) and int(codes[-1]) in self.end_codes:
                codes = codes[:-1]
            seed = int(call.request.options.get("token2wav", {}).get("seed", 0))
            return codes, self.voices[self.voice(call.request)], seed

        def make(call: StageCall) -> dict[str, Tensor]:
            return {"audio": self.make_wave(*arguments(call))}

        def identity(call: StageCall) -> bytes:
            codes, voice, seed = arguments(call)
            return content_digest(codes, voice.conditioning, voice.reference_mel, seed)

        if node.spec.enable_prefix_caching:  # each step of the diffusion embeds the voice
            inputs, cache = self._token2wav.code2wav_dit_model.input_embed, self._cache
            inputs.spk_encoder = _Cached(inputs.spk_encoder, ContentCache(cache, "speakers"))
        return WholeStage(node.spec, make, identity, self._cache)
