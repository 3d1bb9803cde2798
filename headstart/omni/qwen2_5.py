"""Qwen2.5-Omni as a pipeline: thinker, talker, token2wav."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.cache import BlockKey, MultiModalItem, Namespace
from headstart.engine.config import EngineConfig
from headstart.engine.engine import make_config
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import (
    GivenRows,
    PlacedRows,
    PreparedPrompt,
    PromptExtras,
    RotaryPositions,
)
from headstart.errors import RequestError
from headstart.models.qwen2_5_omni import Placed, Qwen25Omni, Voice
from headstart.models.stage_decoder import StageDecoder
from headstart.models.tokenizer import load_tokenizer
from headstart.omni.engine_stage import EngineStage
from headstart.omni.feeds import Feed, PromptFeed, StagePrompt
from headstart.omni.function_stage import Job, WholeStage, content_digest
from headstart.omni.graph import Factory, StageNode
from headstart.omni.output_cache import BlockPath, OutputCache
from headstart.omni.params import SpokenPrompt
from headstart.omni.stage import TOKENS, Input, OmniRequest, Stage
from headstart.omni.talker import TalkerFeed, TalkerPlan

__all__ = ["QWEN25_GRAPH", "Qwen25Stages"]

QWEN25_GRAPH = """
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
_TEXT = SamplingParams(max_tokens=1024, temperature=0.0)


class Qwen25Stages:
    """Makes the stages of one loaded model, and prompts for them.

    A request's options: `talker` and `token2wav` are told the `voice`, `token2wav` the `seed`.
    """

    graph = QWEN25_GRAPH
    audio = Input("token2wav", "audio")
    text_params = _TEXT

    def __init__(self, model: Qwen25Omni, folder: str | Path, cache: OutputCache) -> None:
        self._model = model
        self._cache = cache
        self.sample_rate = model.sample_rate
        self.tokenizer = load_tokenizer(folder)
        self.voices = tuple(model.voices)
        self.vocab_size = model.vocab_size
        self.factories: Mapping[str, Factory] = {
            "thinker": self._make_thinker,
            "talker": self._make_talker,
            "token2wav": self._make_token2wav,
        }

    def prepare(
        self, text: PreparedPrompt, media: Mapping[str, Any], salt: str | None
    ) -> SpokenPrompt:
        """A prompt with what is heard and seen in place. Raises RequestError.

        media: `features` as transformers' processor makes them, or `audio` and `images` to make
        them of.

        Sounds and images that were encoded before, under the same salt, are known by content.
        """
        features: dict[str, Tensor] = dict(media.get("features") or {})
        if media.get("audio"):
            features |= self._model.hear(media["audio"])
        if media.get("images"):
            features |= self._model.see(media["images"])
        token_ids = self._model.expand(text.token_ids, features)
        placed = self._model.locate(token_ids, features)
        items, rows = [], []
        for thing in placed:
            digest = content_digest(thing.kind, *(thing.content[k] for k in sorted(thing.content)))
            items.append(MultiModalItem(digest, thing.offset, thing.length))
            rows.append(PlacedRows(thing.offset, self._encode(thing, digest, salt)))
        positions = None
        if placed:
            table, delta = self._model.positions(token_ids, features)
            positions = RotaryPositions(table.numpy(), delta)
        extras = PromptExtras(tuple(items), GivenRows(rows), positions) if placed else None
        return SpokenPrompt(PreparedPrompt(token_ids, text.text, extras), features)

    def _encode(self, placed: Placed, digest: bytes, salt: str | None) -> Tensor:
        path = BlockPath("encoder", Namespace(None, salt), [BlockKey(digest)])
        known = self._cache.find(path)
        if known:
            self._cache.touch(path)
            return known[0]["rows"]
        rows = self._model.encode(placed).cpu()
        if len(rows) != placed.length:
            raise RequestError(
                f"an {placed.kind} of {placed.length} placeholders became {len(rows)} embeddings"
            )
        self._cache.put(path, 0, {"rows": rows})
        return rows

    # Stages

    def _make_thinker(self, node: StageNode) -> Stage:
        return self._engine_stage(node, self._model.thinker(), self._think)

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
            )
            return TalkerFeed(request, plan)

        config = stage_config(node)
        stage = EngineStage(node.spec, decoder, feed, config, self._cache)
        return stage

    def _make_token2wav(self, node: StageNode) -> Stage:
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

        return WholeStage(node.spec, make, identity, self._cache)

    def _engine_stage(self, node: StageNode, decoder: StageDecoder, feeder: Any) -> EngineStage:
        return EngineStage(
            node.spec, decoder, feeder, stage_config(node), self._cache, self.tokenizer
        )

    # Requests

    @staticmethod
    def _think(request: OmniRequest) -> Feed:
        params = request.params.get("thinker", _TEXT)
        return PromptFeed(StagePrompt(request.prompt.prepared, params, request.salt))

    def _voice_name(self, request: OmniRequest) -> str:
        name = request.options.get("talker", {}).get("voice") or self.voices[0]
        if name not in self.voices:
            raise RequestError(f"there is no voice {name!r}; there are {', '.join(self.voices)}")
        return str(name)

    def _voice(self, request: OmniRequest) -> Voice:
        return self._model.voices[self._voice_name(request)]

    def _talker_positions(self, request: OmniRequest) -> RotaryPositions | None:
        """As the thinker's, over its prompt and two tokens of text."""
        prompt: SpokenPrompt = request.prompt
        if prompt.prepared.extras is None:
            return None
        bos = self._voice(request).bos_token
        ids = [*prompt.prepared.token_ids, bos, bos]
        table, delta = self._model.positions(ids, prompt.features, of_talker=True)
        return RotaryPositions(table.numpy(), delta)


def stage_config(node: StageNode) -> EngineConfig:
    """An engine's options for a stage: what the graph says, and what every stage needs."""
    options = {
        **node.options,
        "partial_hits": False,
        "enable_prefix_caching": node.spec.enable_prefix_caching,
    }
    return make_config(options)
