"""Qwen2.5-Omni as a pipeline: thinker, talker, token2wav."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt, RotaryPositions
from headstart.errors import RequestError
from headstart.models.tokenizer import load_tokenizer
from headstart.omni.content_cache import ContentCache, content_digest
from headstart.omni.engine_stage import EngineStage
from headstart.omni.families.spoken_prompts import TEXT, SpokenPrompts
from headstart.omni.feeds import Feed
from headstart.omni.function_stage import Job, WholeStage
from headstart.omni.graph import Factory, StageNode
from headstart.omni.models.qwen2_5 import Qwen25Omni, Voice
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import SpokenPrompt
from headstart.omni.stage import TOKENS, Input, OmniRequest, Stage
from headstart.omni.stage_options import no_options, stage_config
from headstart.omni.talker import TalkerFeed, TalkerPlan

__all__ = ["Qwen25Stages"]

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

_SPEECH = SamplingParams(
    max_tokens=4096, temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05
)


class Qwen25Stages:
    """Makes the stages of one loaded model, and prompts for them.

    A request's options: `voice` for `talker` and `token2wav`, `seed` for `token2wav`.
    """

    graph = _GRAPH
    audio = Input("token2wav", "audio")
    codes = Input("talker", TOKENS)
    text_params = TEXT
    speech_params = _SPEECH
    spelling: Mapping[str, str] = MappingProxyType(
        {
            "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
            "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        }
    )

    def __init__(self, model: Qwen25Omni, folder: str | Path, cache: OutputCache) -> None:
        self._model = model
        self._cache = cache
        self._prompts = SpokenPrompts(model, cache)
        self.sample_rate = model.sample_rate
        self.tokenizer = load_tokenizer(folder)
        self.voices = tuple(model.voices)
        self.vocab_size = model.vocab_size
        self.factories: Mapping[str, Factory] = {
            "thinker": self._make_thinker,
            "talker": self._make_talker,
            "token2wav": self._make_token2wav,
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

    # Stages

    def _make_thinker(self, node: StageNode) -> Stage:
        return self._prompts.make_thinker(node, self._model.thinker(), self.tokenizer)

    def _make_talker(self, node: StageNode) -> Stage:
        decoder = self._model.talker()
        speech, model = self._model.speech, self._model
        pad, eos = model.embed_text(speech.text_pad), model.embed_text(speech.text_end)

        def feed(request: OmniRequest) -> Feed:
            plan = TalkerPlan(
                rows=node.spec.takes[0],
                block_size=config.block_size,
                mask_id=speech.mask,
                lead_ids=(speech.pad, speech.bos),
                bos=model.embed_text(self._voice(request).bos_token),
                eos=eos,
                pad=pad,
                embed=decoder.embed,
                params=request.params.get("talker", _SPEECH),
                voice=self._voice_name(request),
                limit=stage.engine.max_model_len,
                positions=self._talker_positions(request),
                anonymous=not node.spec.enable_prefix_caching,
            )
            return TalkerFeed(request, plan)

        config = stage_config(node)
        stage = EngineStage(node.spec, decoder, feed, config, self._cache)
        return stage

    def _make_token2wav(self, node: StageNode) -> Stage:
        no_options(node)
        end = (self._model.speech.end, self._model.speech.pad)

        def codes_of(job: Job) -> Tensor:
            codes = job.inputs[Input("talker", TOKENS)]
            return codes[:-1] if len(codes) and int(codes[-1]) in end else codes

        def seed_of(job: Job) -> int:
            return int(job.request.options.get("token2wav", {}).get("seed", 0))

        def make(job: Job) -> dict[str, Tensor]:
            voice = self._voice(job.request)
            return {"audio": self._model.make_wave(codes_of(job), voice, seed_of(job))}

        def identity(job: Job) -> bytes:
            voice = self._voice(job.request)
            return content_digest(
                codes_of(job), voice.conditioning, voice.reference_mel, seed_of(job)
            )

        if node.spec.enable_prefix_caching:
            speakers = ContentCache(self._cache, "speakers")
            self._model.remember_speakers(
                lambda mel, make: speakers.recall(content_digest(mel), make)
            )
        return WholeStage(node.spec, make, identity, self._cache)

    # Requests

    def _voice_name(self, request: OmniRequest) -> str:
        name = request.options.get("talker", {}).get("voice") or self.voices[0]
        if name not in self.voices:
            raise RequestError(f"there is no voice {name!r}; there are {', '.join(self.voices)}")
        return str(name)

    def _voice(self, request: OmniRequest) -> Voice:
        return self._model.voices[self._voice_name(request)]

    def _talker_positions(self, request: OmniRequest) -> RotaryPositions | None:
        """The thinker's rotary positions, over its prompt and two tokens of text."""
        prompt: SpokenPrompt = request.prompt
        if prompt.prepared.extras is None:
            return None
        bos = self._voice(request).bos_token
        ids = [*prompt.prepared.token_ids, bos, bos]
        table, delta = self._model.positions(ids, prompt.features, of_talker=True)
        return RotaryPositions(table.numpy(), delta)
