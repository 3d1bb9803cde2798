"""A talker's inputs: a constant codec prompt, and the thinker's rows, which carry the content.

    position   0 ......... T-1   T         T+1       T+2       T+3  ...
    token      mask ..... mask   lead[0]   lead[1]   code 0    code 1
    row        thinker's prompt  bos       reply 0   reply 1   reply 2 ... eos  pad  pad ...

If a token has an embedding of its own (from T on), it is added to the row. The prompt is complete
with the thinker's first reply row; from there on, the talker runs one row behind the thinker.

Source: `Qwen2_5OmniForConditionalGeneration.generate` in transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headstart.cache import TokenSequence
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PreparedPrompt, PromptExtras, RotaryPositions
from headstart.errors import EngineError, RequestError
from headstart.models.tokenizer import load_tokenizer
from headstart.omni.engine_stage import EngineStage
from headstart.omni.feeds import Conditions, Feed, StagePrompt
from headstart.omni.function_stage import Job, WholeStage
from headstart.omni.graph import Factory, StageNode, no_options, stage_config
from headstart.omni.inputs import TEXT, SpokenPrompts
from headstart.omni.models.qwen2_5 import Qwen25Omni, Voice
from headstart.omni.output_cache import ContentCache, OutputCache, content_digest
from headstart.omni.params import SpokenPrompt
from headstart.omni.stage import TOKENS, Input, OmniRequest, OutputEvent, Stage, StageStarted

__all__ = ["Qwen25Stages", "TalkerFeed", "TalkerPlan"]


@dataclass(frozen=True, kw_only=True)
class TalkerPlan:
    """The parts of one request's talker prompt.

    rows: the thinker's output that feeds it. mask_id, lead_ids: its token ids. bos, eos, pad: rows
    `[width]`, the only rows besides the thinker's. embed: token ids int64 `[n]` to embeddings
    `[n, width]`. voice: part of the identity; talkers of different voices share no block.
    positions: of the thinker's prompt and the lead, None for 0, 1, 2, ... limit: maximum number of
    tokens.
    """

    rows: Input
    block_size: int
    mask_id: int
    lead_ids: tuple[int, int]
    bos: Tensor
    eos: Tensor
    pad: Tensor
    embed: Callable[[Tensor], Tensor]
    params: SamplingParams
    voice: str
    limit: int
    positions: RotaryPositions | None = None
    anonymous: bool = False


class TalkerFeed:
    """One request's feed; it is ready when the thinker is one row ahead."""

    def __init__(self, request: OmniRequest, plan: TalkerPlan) -> None:
        self._request = request
        self._plan = plan
        self._prompt_tokens: int | None = None
        self._num_rows = 0
        self._conditions = Conditions(plan.block_size, self._combine, anonymous=plan.anonymous)

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        if source != self._plan.rows.stage:
            return
        if isinstance(event, StageStarted):
            self._prompt_tokens = event.prompt_tokens
            if event.block_size == self._plan.block_size:
                self._conditions.name(event.names)
        elif event.chunk.output == self._plan.rows.output:
            self._add(event.chunk.rows)

    def _add(self, rows: Tensor) -> None:
        """Take the thinker's next rows; the bos row goes between its prompt's and its reply's."""
        assert self._prompt_tokens is not None
        left = self._prompt_tokens - self._num_rows
        self._num_rows += len(rows)
        if left > 0:
            self._conditions.add(rows[:left])
            if len(rows) >= left:
                self._conditions.add(self._plan.bos[None].to(rows))
            rows = rows[left:]
        if len(rows):
            self._conditions.add(rows)

    def end(self, source: str) -> None:
        if source == self._plan.rows.stage:
            if self._prompt_tokens is None or self._num_rows < self._prompt_tokens:
                raise EngineError(
                    f"{source!r} ended with {self._num_rows} rows of {self._plan.rows.output!r} "
                    f"for a prompt of {self._prompt_tokens} tokens"
                )
            self._conditions.close(self._plan.eos[None], self._plan.pad, self._plan.limit)

    def prompt(self) -> StagePrompt | None:
        length = self._prompt_tokens
        if length is None or self._conditions.count < length + len(self._plan.lead_ids):
            return None
        token_ids = [self._plan.mask_id] * length + list(self._plan.lead_ids)
        self._conditions.attach(token_ids)
        size = self._plan.block_size
        items = self._conditions.items[: len(token_ids) // size]
        extras = PromptExtras(items, self._conditions, self._plan.positions)
        salt = json.dumps([self._request.salt, self._plan.voice])
        return StagePrompt(PreparedPrompt(token_ids, extras=extras), self._plan.params, salt)

    def begin(self, sequence: TokenSequence) -> None:
        self._conditions.begin(sequence)

    def is_ready(self, num_tokens: int) -> bool:
        return num_tokens <= self._conditions.count

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """The rows, plus the embeddings of the token ids from the lead on."""
        assert self._prompt_tokens is not None
        first = max(0, self._prompt_tokens - position)
        if first >= len(rows):
            return rows
        own = self._plan.embed(torch.tensor(token_ids[first:]))
        return torch.cat([rows[:first].to(own), rows[first:].to(own) + own])


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
