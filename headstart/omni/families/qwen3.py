"""Qwen3-Omni as a pipeline: thinker, talker of frames, causal vocoder."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt, RotaryPositions
from headstart.errors import DamagedModelError, RequestError
from headstart.models.tokenizer import load_tokenizer
from headstart.omni.families.spoken_prompts import TEXT, SpokenPrompts
from headstart.omni.frame_talker import CODES, FrameTalker, FrameTalkerFeed, FrameTalkerPlan
from headstart.omni.function_stage import FramesPlan, FramesStage
from headstart.omni.graph import Factory, StageNode
from headstart.omni.models.qwen3 import CausalVocoder, Qwen3Omni
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import SpokenPrompt
from headstart.omni.stage import Input, OmniRequest, Stage
from headstart.omni.stage_options import no_options, stage_config

__all__ = ["Qwen3Stages", "vocoder_plan"]

_GRAPH = """
collects = ["thinker.tokens", "talker.codes", "code2wav.audio"]

[stages.thinker]
gives = {{ handed = "token" }}

[stages.talker]
takes = ["thinker.handed"]
gives = {{ codes = "request" }}

[stages.code2wav]
autoregressive = false
takes = ["talker.codes"]
gives = {{ audio = {{ alignment = "frames({ratio})", dtype = "float32" }} }}
"""

_SPEECH = SamplingParams(
    max_tokens=4096, temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05
)
_BLOCK = 25
"""Codes per block of the vocoder."""
_SEGMENT, _CONTEXT = 300, 25
"""Codes per vocoder pass of transformers' `generate`, and how many codes earlier a pass begins."""


def vocoder_plan(vocoder: CausalVocoder) -> FramesPlan:
    """The vocoder's plan: small blocks that together give the samples of transformers' passes."""
    return FramesPlan(function=vocoder, block=_BLOCK, context=_CONTEXT, segment=_SEGMENT)


class Qwen3Stages:
    """Makes the stages of one loaded model, and prompts for them.

    A request's options: `voice` for `talker`.
    """

    audio = Input("code2wav", "audio")
    codes = Input("talker", CODES)
    text_params = TEXT
    speech_params = _SPEECH
    spelling: Mapping[str, str] = MappingProxyType(
        {
            "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
        }
    )

    def __init__(self, model: Qwen3Omni, folder: str | Path, cache: OutputCache) -> None:
        if not model.voices:
            raise DamagedModelError(f"{folder} names no voices (speaker_id)")
        self._model = model
        self._cache = cache
        self._prompts = SpokenPrompts(model, cache)
        self._seeds = itertools.count()
        self.graph = _GRAPH.format(ratio=model.vocoder.ratio)
        self.sample_rate = model.sample_rate
        self.tokenizer = load_tokenizer(folder)
        self.voices = tuple(model.voices)
        self.vocab_size = model.vocab_size
        self.factories: Mapping[str, Factory] = {
            "thinker": self._make_thinker,
            "talker": self._make_talker,
            "code2wav": self._make_code2wav,
        }

    @property
    def sound_rate(self) -> int:
        """Samples a second of what the model hears. Raises ModelError if it hears nothing."""
        return self._model.media.sound_rate

    def prepare(
        self, text: PreparedPrompt, media: Mapping[str, Any], salt: str | None
    ) -> SpokenPrompt:
        """A prompt with its audio and images in place. Raises RequestError."""
        return self._prompts.prepare(text, media, salt)

    def _make_thinker(self, node: StageNode) -> Stage:
        return self._prompts.make_thinker(node, self._model.thinker(), self.tokenizer)

    def _make_talker(self, node: StageNode) -> Stage:
        model, config = self._model, stage_config(node)
        turns, codec = model.turns, model.codec
        bos, eos, pad = map(model.embed_text, (turns.text_bos, turns.text_eos, turns.text_pad))

        def feed(request: OmniRequest) -> FrameTalkerFeed:
            params = request.params.get("talker", _SPEECH)
            seed = config.seed + next(self._seeds) if params.seed is None else params.seed
            voice = self._voice(request)
            prompt: SpokenPrompt = request.prompt
            ids = torch.tensor(prompt.prepared.token_ids)
            spoken_to, start = self._turns(ids)
            user = ids[spoken_to]
            media = torch.tensor(list(model.placeholders.values()))
            plan = FrameTalkerPlan(
                rows=node.spec.takes[0],
                block_size=config.block_size,
                spoken_to=spoken_to,
                is_media=torch.isin(user, media),
                answer_start=start,
                blank_id=codec.pad,
                lead_ids=(
                    codec.nothink,
                    codec.think_bos,
                    codec.think_eos,
                    model.voices[voice],
                    codec.pad,
                    codec.bos,
                ),
                bos=bos,
                eos=eos,
                pad=pad,
                model=model,
                params=params,
                generator=torch.Generator().manual_seed(seed),
                voice=voice,
                positions=self._positions(user.tolist(), prompt),
                anonymous=not node.spec.enable_prefix_caching,
            )
            return FrameTalkerFeed(request, plan)

        return FrameTalker(node.spec, model.talker(), feed, config, self._cache, model)

    def _make_code2wav(self, node: StageNode) -> Stage:
        no_options(node)
        return FramesStage(node.spec, vocoder_plan(self._model.vocoder), self._cache)

    def _voice(self, request: OmniRequest) -> str:
        name = request.options.get("talker", {}).get("voice") or self.voices[0]
        if name not in self.voices:
            raise RequestError(f"there is no voice {name!r}; there are {', '.join(self.voices)}")
        return str(name)

    def _turns(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A mask of the user's tokens in a prompt, and the start of the answer's turn.

        Raises RequestError unless the last turn is the assistant's.
        """
        turns = self._model.turns
        starts = (ids == turns.start).nonzero().flatten()
        if not len(starts) or ids[starts[-1] + 1 :][:1].tolist() != [turns.assistant]:
            raise RequestError("a prompt that is to be spoken to ends with the assistant's turn")
        turn = torch.searchsorted(starts, torch.arange(len(ids)), right=True) - 1
        # Tokens before the first turn count as part of it, as in transformers.
        roles = ids[torch.where(turn < 0, 0, starts[turn]) + 1]
        is_user = roles == turns.user
        return is_user, int(starts[-1])

    def _positions(self, user: list[int], prompt: SpokenPrompt) -> RotaryPositions | None:
        """The thinker's rotary positions, over the user's turns and the next nine tokens."""
        if "image_grid_thw" not in prompt.features:
            return None
        ids = [*user, *[self._model.turns.text_pad] * 9]
        table, delta = self._model.positions(ids, prompt.features)
        return RotaryPositions(table.numpy(), delta)
