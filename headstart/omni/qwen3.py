"""A talker that generates a frame of several codes per step, as Qwen3-Omni's does.

    position  0 ...... U-1   U .. U+2    U+3      U+4  U+5  U+6    U+7  U+8   U+9     U+10 ...
    token     blank          blank       nothink  bos  eos  voice  pad  bos   frame 0 frame 1
    row       user's turns   answer 0-2  pad      pad  pad  pad    bos  3     4       5 ... eos pad

Rows are the thinker's: of the user's turns, then of the answer's turn. If a token has an embedding
(from U + 3 on) it is added to the row; a frame's embedding is the sum of those of its codes. The
other codes of a frame are predicted right after its first code, since the next step needs them.
Equal first codes with different other codes are a different prefix. So the other codes are stored
with the rows, and are part of a block's identity.

Source: `Qwen3OmniMoeForConditionalGeneration.generate` in transformers.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import RotaryPositions
from headstart.engine.sampling import SampledToken, Sampler, SamplingState
from headstart.engine.step import Batch
from headstart.errors import EngineError, RequestError
from headstart.omni.engine_stage import EngineStage, TokenEvent
from headstart.omni.family import OmniStages
from headstart.omni.feeds import TalkerFeed
from headstart.omni.function_stage import FramesPlan, FramesStage
from headstart.omni.graph import StageNode, no_options, stage_config
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import SpokenPrompt
from headstart.omni.qwen3_model import CausalVocoder, Qwen3Omni
from headstart.omni.stage import Chunk, Input, OmniRequest, Stage, StageSpec
from headstart.omni.stage_decoder import StageDecoder

CODES = "codes"
"""A frame talker gives frames, int64 `[frames, codes]`, beside its tokens."""

_NOW = 3
"""Rows of the answer's turn that are in the prompt: its start, its role, a newline."""

_OTHERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)
"""transformers' sampling of the other codes, independent of the first code's sampling."""


@dataclass(kw_only=True, eq=False)
class FrameTalkerFeed(TalkerFeed):
    """One request's feed. A step needs the previous frame and the thinker's next row.

    spoken_to: bool `[prompt]`, the user's turns in the thinker's prompt; is_media: of these only,
    true for audio and images. answer_start: the position where the answer's turn begins. lead_ids:
    the six ids before the first frame. generator: of the other codes.
    """

    spoken_to: Tensor
    is_media: Tensor
    answer_start: int
    blank_id: int
    lead_ids: tuple[int, ...]
    model: Qwen3Omni
    generator: torch.Generator

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answer: list[Tensor] = []
        self._ended = False
        self._frames: list[Tensor] = []
        params = SamplingParams(temperature=0) if self.params.is_greedy else _OTHERS
        self.sampling = SamplingState(params, (), [], self.generator, frozenset())
        """The sampling parameters of the other codes."""
        self._num_user = len(self.is_media)  # rows of the user's turns
        self._num_prompt = self._num_user + _NOW + len(self.lead_ids)

    def _aligned(self, names: Sequence[bytes]) -> Sequence[bytes]:
        is_prefix = bool(self.spoken_to[: self._num_user].all())
        return names[: self._num_user // self.block_size] if is_prefix else ()

    def _take_rows(self, rows: Tensor) -> None:
        first, mask = self._num_rows, self.spoken_to
        self._num_rows += len(rows)
        chosen = rows[: max(0, len(mask) - first)][mask[first : self._num_rows]]
        if len(chosen):
            self._add(self._with_others(chosen))
        self._answer += rows[max(0, self.answer_start - first) :]
        self._advance()

    def _end_rows(self) -> None:
        self._ended = True
        self._advance()

    def add_frame(self, others: Tensor) -> int:
        """Add the other codes int64 `[others]` of the next frame; returns its number, from 0."""
        self._frames.append(others)
        self._advance()
        return len(self._frames) - 1

    def _advance(self) -> None:
        """Add the rows of all positions whose inputs have arrived."""
        if self._count == self._num_user and (row := self._row(_NOW)) is not None:
            pads = [self.pad] * (len(self.lead_ids) - 2)
            first = (self._row(index) for index in range(_NOW))
            rows = [early for early in first if early is not None] + pads + [self.bos, row]
            self._add(self._with_others(torch.stack([early.to(row) for early in rows])))
        frame = self._count - self._num_prompt
        while 0 <= frame < len(self._frames) and (row := self._row(_NOW + 1 + frame)) is not None:
            self._add(self._with_others(row[None], self._frames[frame][None]))
            frame += 1

    def _row(self, index: int) -> Tensor | None:
        """Return the row of the answer's token, eos or pad after its end, None if not there yet."""
        if index < len(self._answer):
            return self._answer[index]
        if not self._ended:
            return None
        return self.eos if index == len(self._answer) else self.pad

    def _with_others(self, rows: Tensor, others: Tensor | None = None) -> Tensor:
        """Append the frames' other codes to rows, in float32, which holds both exactly."""
        if others is None:
            others = torch.zeros(len(rows), self.model.num_others)
        return torch.cat([rows.float().cpu(), others.float()], dim=1)

    def _token_ids(self) -> list[int] | None:
        if self._count < self._num_prompt:
            return None
        return [self.blank_id] * (self._num_user + _NOW) + list(self.lead_ids)

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """Return rows projected for the talker, plus the tokens' embeddings from U + 3 on."""
        model, count = self.model, self.model.num_others
        is_media = torch.zeros(len(rows), dtype=torch.bool)
        part = self.is_media[position : position + len(rows)]
        is_media[: len(part)] = part
        embeddings = model.project(rows[:, :-count], is_media)
        first = max(0, self._num_user + _NOW - position)
        frames = max(first, self._num_prompt - position)
        ids = torch.tensor(token_ids, dtype=torch.int64)
        with torch.inference_mode():
            if first < min(frames, len(rows)):
                embeddings[first:frames] += model.embed_codes(ids[first:frames])
            if frames < len(rows):
                others = rows[frames:, -count:].long()
                embeddings[frames:] += model.embed_codes(ids[frames:], others)
        return embeddings


class FrameTalker(EngineStage):
    """An engine stage over first codes, whose frames are completed after each step.

    Its feeds are `FrameTalkerFeed`s; its decoder gives `hidden` `[tokens, hidden]`.
    """

    def __init__(
        self,
        spec: StageSpec,
        decoder: StageDecoder,
        feeder: Callable[[OmniRequest], FrameTalkerFeed],
        config: EngineConfig,
        cache: OutputCache | None,
        model: Qwen3Omni,
    ) -> None:
        super().__init__(spec, decoder, feeder, config, cache)
        self._model = model
        self._sampler = Sampler(model.num_codes)
        self._hidden: dict[str, Tensor] = {}

    def ran(self, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        """Keep the rows that the predictor needs."""
        ends = itertools.accumulate(part.stop - part.start for part in batch.scheduled)
        self._hidden = {
            part.request.group.request_id: outputs["hidden"][end - 1]
            for part, end in zip(batch.scheduled, ends, strict=True)
        }

    def complete(self, tokens: Mapping[str, TokenEvent]) -> None:
        """Predict the other codes of new frames; the end code begins no frame."""
        feeds = {
            name: feed for name, (feed, _) in tokens.items() if isinstance(feed, FrameTalkerFeed)
        }
        states = [feed.sampling for feed in feeds.values()]

        def choose(logits: Tensor) -> list[int]:
            return [_code(chosen) for chosen in self._sampler.sample(logits, states)]

        first = torch.tensor([tokens[name].token for name in feeds])
        hidden = torch.stack([self._hidden[name] for name in feeds])
        others = self._model.predict_others(hidden, first, choose)
        for row, (name, feed) in enumerate(feeds.items()):
            frame = torch.cat([first[row : row + 1], others[row]])
            self.give(name, Chunk(CODES, feed.add_frame(others[row]), frame[None]))


def _code(chosen: SampledToken | EngineError) -> int:
    if isinstance(chosen, EngineError):
        raise chosen
    return chosen.token_id


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

_BLOCK = 25
"""Codes per block of the vocoder."""
_SEGMENT, _CONTEXT = 300, 25
"""Codes per vocoder pass of transformers' `generate`, and how many codes earlier a pass begins."""


def vocoder_plan(vocoder: CausalVocoder) -> FramesPlan:
    """The vocoder's plan: small blocks that together give the samples of transformers' passes."""
    return FramesPlan(function=vocoder, block=_BLOCK, context=_CONTEXT, segment=_SEGMENT)


class Qwen3Stages(OmniStages):
    """Makes the stages of Qwen3-Omni."""

    model: Qwen3Omni
    audio = Input("code2wav", "audio")
    codes = Input("talker", CODES)
    speech_params = SamplingParams(
        max_tokens=4096, temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05
    )
    spelling = MappingProxyType(
        {
            "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
        }
    )

    def __init__(self, model: Qwen3Omni, folder: str | Path, cache: OutputCache) -> None:
        super().__init__(model, folder, cache)
        self._seeds = itertools.count()
        self.graph = _GRAPH.format(ratio=model.vocoder.ratio)
        self.factories = {
            "thinker": self.make_thinker,
            "talker": self._make_talker,
            "code2wav": self._make_code2wav,
        }

    def _make_talker(self, node: StageNode) -> Stage:
        model, config = self.model, stage_config(node)
        ids, codec = model.config, model.codec
        bos, eos, pad = map(
            model.embed_text, (ids.tts_bos_token_id, ids.tts_eos_token_id, ids.tts_pad_token_id)
        )

        def feed(request: OmniRequest) -> FrameTalkerFeed:
            params = request.params.get("talker", self.speech_params)
            seed = config.seed + next(self._seeds) if params.seed is None else params.seed
            voice = self.voice(request)
            prompt: SpokenPrompt = request.prompt
            token_ids = torch.tensor(prompt.prepared.token_ids)
            spoken_to, start = self._turns(token_ids)
            user = token_ids[spoken_to]
            media = torch.tensor(list(model.placeholders.values()))
            return FrameTalkerFeed(
                request=request,
                rows=node.spec.takes[0],
                block_size=config.block_size,
                spoken_to=spoken_to,
                is_media=torch.isin(user, media),
                answer_start=start,
                blank_id=codec.codec_pad_id,
                lead_ids=(
                    codec.codec_nothink_id,
                    codec.codec_think_bos_id,
                    codec.codec_think_eos_id,
                    model.voices[voice],
                    codec.codec_pad_id,
                    codec.codec_bos_id,
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

        return FrameTalker(node.spec, model.talker(), feed, config, self._cache, model)

    def _make_code2wav(self, node: StageNode) -> Stage:
        no_options(node)
        return FramesStage(node.spec, vocoder_plan(self.model.vocoder), self._cache)

    def _turns(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return a mask of the user's tokens in a prompt, and the start of the answer's turn.

        Raises RequestError unless the last turn is the assistant's.
        """
        config = self.model.config
        starts = (ids == config.im_start_token_id).nonzero().flatten()
        if not len(starts) or ids[starts[-1] + 1 :][:1].tolist() != [config.assistant_token_id]:
            raise RequestError("a prompt that is to be spoken to ends with the assistant's turn")
        turn = torch.searchsorted(starts, torch.arange(len(ids)), right=True) - 1
        # Tokens before the first turn count as part of it, as in transformers.
        roles = ids[torch.where(turn < 0, 0, starts[turn]) + 1]
        return roles == config.user_token_id, int(starts[-1])

    def _positions(self, user: list[int], prompt: SpokenPrompt) -> RotaryPositions | None:
        """Return the thinker's rotary positions, over the user's turns and the next nine tokens."""
        if "image_grid_thw" not in prompt.features:
            return None
        ids = [*user, *[self.model.config.tts_pad_token_id] * 9]
        table, delta = self.model.positions(ids, prompt.features)
        return RotaryPositions(table.numpy(), delta)
