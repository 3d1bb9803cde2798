"""Qwen3-Omni: a talker that generates a frame of several codes per step, and a causal vocoder.

    position  0 ...... U-1   U .. U+2    U+3      U+4  U+5  U+6    U+7  U+8   U+9     U+10 ...
    token     blank          blank       nothink  bos  eos  voice  pad  bos   frame 0 frame 1
    row       user's turns   answer 0-2  pad      pad  pad  pad    bos  3     4       5 ... eos pad

Rows come from the thinker: U rows of the user's turns, then the rows of the answer's turn. From
position U + 3 on, the token's embedding is added to the row. The embedding of a frame is the sum of
the embeddings of its codes.

The talker generates a frame's first code. Then a small decoder, the predictor, predicts the frame's
other codes, the residual codes, one after another, since the talker's next step needs them. The
predictor has no state between frames:

    position   0             1              2              3 ...
    input      talker's row  first code     second code    third code
    predicts                 second code    third code     ...

Frames with equal first codes may differ in the residual codes. So the residual codes are stored
with the rows, and are part of a block's identity.

Source: `Qwen3OmniMoeForConditionalGeneration.generate` in transformers.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
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

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.engine.request import RotaryPositions
from headstart.engine.sampling import Sampler, SamplingState
from headstart.engine.step import Batch
from headstart.errors import EngineError, RequestError
from headstart.omni.engine_stage import EngineStage, Feed, TalkerFeed
from headstart.omni.family import OmniModel
from headstart.omni.function_stage import FramesPlan, FramesStage
from headstart.omni.media import PlacedItem
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import SpokenPrompt
from headstart.omni.pipeline import StageNode, no_options, stage_config
from headstart.omni.stage import Chunk, Input, OmniRequest, Stage, StageSpec
from headstart.omni.stage_decoder import (
    PassTensors,
    StageCheckpoint,
    StageDecoder,
    StageParts,
)

_NUM_SPECIAL_IDS = 1024
"""Number of token ids at the end of the talker's vocabulary that are not codes. Of these ids, only
the end token may be sampled."""


def thinker_decoder(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    accept_layer: int,
    eos_token_ids: frozenset[int] = frozenset(),
    num_deep: int = 0,
    *,
    checkpoint: StageCheckpoint | None = None,
) -> StageDecoder:
    """Return a thinker's decoder with the output `handed` `[tokens, hidden]`.

    A text token's row is its embedding. A placeholder's row is the output of layer `accept_layer`.
    """

    def give(tensors: PassTensors) -> Mapping[str, Tensor]:
        is_token = tensors.is_token[:, None]
        return {"handed": torch.where(is_token, tensors.layers[0], tensors.layers[accept_layer])}

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

    A frame of codes becomes `ratio` samples. The last `delay` samples of a frame depend on the next
    frame, so the convolutions return only `n * ratio - delay` samples for `n` frames. The vocoder
    shifts all samples by `delay`: the wave begins with `delay` samples of silence, and each block
    begins with the samples that the block before it could not compute.

    The transformer before the convolutions has a longer context and is cheaper. So it runs over all
    codes of a call, and the convolutions run only over the block and the `reach` frames before it.
    """

    def __init__(self, code2wav: Qwen3OmniMoeCode2Wav) -> None:
        self._code2wav: Any = code2wav
        self.ratio = int(code2wav.total_upsample)
        quantizers = int(code2wav.config.num_quantizers)
        self.delay = 2 * self.ratio - len(self._wave(torch.zeros(2, quantizers, dtype=torch.int64)))
        self.reach = _reach(code2wav, self.delay)

    def __call__(self, request: object, codes: Tensor, context: int) -> Tensor:
        """Return samples float32 `[(n - context) * ratio]` of codes int64 `[n, quantizers]`.

        context: number of frames at the start of `codes` whose samples are not returned.
        """
        skipped = max(0, context - self.reach)
        wave = self._wave(codes, skipped)
        if not context:
            return torch.cat([torch.zeros(self.delay), wave])
        return wave[(context - skipped) * self.ratio - self.delay :]

    def _wave(self, codes: Tensor, skipped: int = 0) -> Tensor:
        """Run the model; the convolutions skip the first `skipped` frames."""
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
    """Return the number of earlier frames on which the samples of a frame depend.

    Go from the output of the convolutions back to their input, and compute the first position that
    each layer reads. In the output, the samples of frame 0 begin at position `-delay`, because
    `CausalVocoder` shifts them.
    """
    position = -delay
    for part in (code2wav.decoder, code2wav.upsample):
        for module in reversed(list(part.modules())):
            if isinstance(module, Qwen3OmniMoeCausalConvNet):
                position -= module.padding
            elif isinstance(module, Qwen3OmniMoeCausalTransConvNet):
                kernel, stride = module.conv.kernel_size[0], module.conv.stride[0]
                position = -((kernel - 1 - module.left_pad - position) // stride)
    return -position


CODES = "codes"
"""Name of the output with a talker's frames, int64 `[frames, codes]`."""

_NUM_HEADER = 3
"""Rows at the start of the answer's turn: the turn's start, the role, and a newline."""

_OTHER_CODE_PARAMS = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)
"""Sampling parameters of the residual codes, as in transformers, unless the request is greedy."""


@dataclass(kw_only=True, eq=False)
class FrameTalkerFeed(TalkerFeed):
    """One request's feed. A step needs the previous frame and the thinker's next row.

    is_user: bool `[prompt]`, true for the user's turns in the thinker's prompt. is_media: bool for
    the tokens of these turns, true for audio and images. answer_start: the position where the
    answer's turn begins in the thinker's prompt. lead_ids: the six token ids before the first
    frame. generator: random numbers for the residual codes.
    """

    is_user: Tensor
    is_media: Tensor
    answer_start: int
    blank_id: int
    lead_ids: tuple[int, ...]
    model: "Qwen3Omni"
    generator: torch.Generator

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answer: list[Tensor] = []
        self._ended = False
        self._frames: list[Tensor] = []
        params = SamplingParams(temperature=0) if self.params.is_greedy else _OTHER_CODE_PARAMS
        self.sampling = SamplingState(params, (), [], self.generator, frozenset())
        """The sampling parameters of the residual codes."""
        self._num_user = len(self.is_media)  # rows of the user's turns
        self._num_prompt = self._num_user + _NUM_HEADER + len(self.lead_ids)

    def _aligned(self, identities: Sequence[bytes]) -> Sequence[bytes]:
        is_prefix = bool(self.is_user[: self._num_user].all())
        return identities[: self._num_user // self.block_size] if is_prefix else ()

    def _take_rows(self, rows: Tensor) -> None:
        first, mask = self._num_rows, self.is_user
        self._num_rows += len(rows)
        user_rows = rows[: max(0, len(mask) - first)][mask[first : self._num_rows]]
        if len(user_rows):
            self._add(self._with_residual_codes(user_rows))
        self._answer += rows[max(0, self.answer_start - first) :]
        self._advance()

    def _end_rows(self) -> None:
        self._ended = True
        self._advance()

    def add_frame(self, codes: Tensor) -> int:
        """Add the residual codes, int64 `[codes]`, of the next frame; return the frame's index."""
        self._frames.append(codes)
        self._advance()
        return len(self._frames) - 1

    def _advance(self) -> None:
        """Add the rows of all positions whose inputs have arrived."""
        if self._num_positions == self._num_user and (row := self._row(_NUM_HEADER)) is not None:
            header = [self._row(index) for index in range(_NUM_HEADER)]
            pads = [self.pad] * (len(self.lead_ids) - 2)
            rows = [part.to(row) for part in (*header, *pads, self.bos, row) if part is not None]
            self._add(self._with_residual_codes(torch.stack(rows)))
        frame = self._num_positions - self._num_prompt
        while (
            0 <= frame < len(self._frames)
            and (row := self._row(_NUM_HEADER + 1 + frame)) is not None
        ):
            self._add(self._with_residual_codes(row[None], self._frames[frame][None]))
            frame += 1

    def _row(self, index: int) -> Tensor | None:
        """Return a row of the answer; None if it has not arrived.

        The row after the last is `eos`; later rows are `pad`.
        """
        if index < len(self._answer):
            return self._answer[index]
        if not self._ended:
            return None
        return self.eos if index == len(self._answer) else self.pad

    def _with_residual_codes(self, rows: Tensor, codes: Tensor | None = None) -> Tensor:
        """Append the residual codes of frames to their rows. float32 represents both exactly."""
        if codes is None:
            codes = torch.zeros(len(rows), self.model.num_residual_codes)
        return torch.cat([rows.float().cpu(), codes.float()], dim=1)

    def _token_ids(self) -> list[int] | None:
        if self._num_positions < self._num_prompt:
            return None
        return [self.blank_id] * (self._num_user + _NUM_HEADER) + list(self.lead_ids)

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """Return projected rows; from position U + 3 on, add the tokens' embeddings."""
        model, count = self.model, self.model.num_residual_codes
        is_media = torch.zeros(len(rows), dtype=torch.bool)
        part = self.is_media[position : position + len(rows)]
        is_media[: len(part)] = part
        embeddings = model.project(rows[:, :-count], is_media)
        first = max(0, self._num_user + _NUM_HEADER - position)
        frames = max(first, self._num_prompt - position)
        ids = torch.tensor(token_ids, dtype=torch.int64)
        with torch.inference_mode():
            if first < min(frames, len(rows)):
                embeddings[first:frames] += model.embed_codes(ids[first:frames])
            if frames < len(rows):
                codes = rows[frames:, -count:].long()
                embeddings[frames:] += model.embed_codes(ids[frames:], codes)
        return embeddings


class FrameTalker(EngineStage):
    """An engine stage that generates first codes, and predicts the residual codes after each step.

    Its feeds are `FrameTalkerFeed`s; its decoder has the output `hidden` `[tokens, hidden]`.
    """

    def __init__(
        self,
        spec: StageSpec,
        decoder: StageDecoder,
        feeder: Callable[[OmniRequest], FrameTalkerFeed],
        config: EngineConfig,
        cache: OutputCache | None,
        model: "Qwen3Omni",
    ) -> None:
        super().__init__(spec, decoder, feeder, config, cache)
        self._model = model
        self._sampler = Sampler(model.num_codes)
        self._hidden: dict[str, Tensor] = {}

    def ran(self, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        """Store the rows that the predictor needs."""
        ends = itertools.accumulate(part.stop - part.start for part in batch.scheduled)
        self._hidden = {
            part.request.group.request_id: outputs["hidden"][end - 1]
            for part, end in zip(batch.scheduled, ends, strict=True)
        }

    def complete(self, tokens: Mapping[str, tuple[Feed, int]]) -> None:
        """Predict the residual codes of new frames, and pass the frames on."""
        feeds = {
            name: feed for name, (feed, _) in tokens.items() if isinstance(feed, FrameTalkerFeed)
        }
        states = [feed.sampling for feed in feeds.values()]

        def choose(logits: Tensor) -> list[int]:
            codes = []
            for sampled in self._sampler.sample(logits, states):
                if isinstance(sampled, EngineError):
                    raise sampled
                codes.append(sampled.token_id)
            return codes

        first = torch.tensor([tokens[name][1] for name in feeds])
        hidden = torch.stack([self._hidden[name] for name in feeds])
        residual = self._model.predict_residual_codes(hidden, first, choose)
        for row, (name, feed) in enumerate(feeds.items()):
            frame = torch.cat([first[row : row + 1], residual[row]])
            self.give(name, Chunk(CODES, feed.add_frame(residual[row]), frame[None]))


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
"""Frames per block of the vocoder."""
_SEGMENT, _CONTEXT = 300, 25
"""Frames per pass of the vocoder in transformers' `generate`, and frames of context before them."""


def vocoder_plan(vocoder: CausalVocoder) -> FramesPlan:
    """Return a plan whose small blocks give the same samples as transformers' longer passes."""
    return FramesPlan(function=vocoder, block=_BLOCK, context=_CONTEXT, segment=_SEGMENT)


class Qwen3Omni(OmniModel):
    """Qwen3-Omni, whose talker generates frames of several codes."""

    kind = Qwen3OmniMoeForConditionalGeneration
    audio = Input("code2wav", "audio")
    codes = Input("talker", CODES)
    sound_padding = True
    speech_params = SamplingParams(
        max_tokens=4096, temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05
    )
    placeholder_texts = MappingProxyType(
        {
            "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
        }
    )

    def __init__(self, folder: Path, dtype: str, device: str, cache: OutputCache) -> None:
        super().__init__(folder, dtype, device, cache)
        self.factories = {
            "thinker": self.make_thinker,
            "talker": self._make_talker,
            "code2wav": self._make_code2wav,
        }
        vision = self.config.thinker_config.vision_config
        self._num_deep = len(vision.deepstack_visual_indexes)
        self._predictor = self._talker.code_predictor
        self.num_residual_codes = int(self._predictor.config.num_code_groups) - 1
        """Number of codes of a frame after the first."""
        self.num_codes = int(self._predictor.config.vocab_size)
        """Number of possible values of each of these codes."""
        self._vocoder = CausalVocoder(self._whole.code2wav)
        self.graph = _GRAPH.format(ratio=self._vocoder.ratio)
        self._seeds = itertools.count()

    def _load_voices(self, folder: Path) -> dict[str, int]:
        return dict(self.config.talker_config.speaker_id or {})

    def thinker(self) -> StageDecoder:
        """Return a decoder that generates text, with the output `handed`."""
        ends = frozenset([int(self.config.im_end_token_id)])
        accept = int(self.talker_config.accept_hidden_layer)
        return thinker_decoder(
            self._thinker, accept, ends, self._num_deep, checkpoint=self.checkpoint
        )

    def talker(self) -> StageDecoder:
        """Return a decoder that generates first codes. Its output `hidden` feeds the predictor."""
        config = self.talker_config
        count, end = int(config.text_config.vocab_size), int(config.codec_eos_token_id)
        suppressed = set(range(count - _NUM_SPECIAL_IDS, count)) - {end}
        return StageDecoder(
            StageParts(
                text_model=self._talker.model,
                head=self._talker.codec_head,
                give=lambda tensors: {"hidden": tensors.hidden},
                eos_token_ids=frozenset([end]),
                suppressed_ids=tuple(sorted(suppressed)),
                checkpoint=self.checkpoint,
            )
        )

    def embed_codes(self, ids: Tensor, residual_codes: Tensor | None = None) -> Tensor:
        """Return the embeddings `[n, hidden]` of the talker's token ids, int64 `[n]`.

        residual_codes: int64 `[n, codes]`; with them, return the embeddings of whole frames.
        """
        device = self._whole.device
        with torch.inference_mode():
            rows: Tensor = self._talker.get_input_embeddings()(ids.to(device))
            if residual_codes is not None:
                codes, tables = residual_codes.to(device), self._predictor.get_input_embeddings()
                embedded = [table(codes[:, index]) for index, table in enumerate(tables)]
                rows = torch.cat([rows[:, None], torch.stack(embedded, dim=1)], dim=1).sum(1)
        return rows

    def predict_residual_codes(
        self, hidden: Tensor, first: Tensor, choose: Callable[[Tensor], Sequence[int]]
    ) -> Tensor:
        """Return the residual codes, int64 `[n, codes]`, of n frames, in host memory.

        first: the first codes, int64 `[n]`. hidden: the talker's rows `[n, hidden]` from which they
        were sampled. choose: samples one code per row of logits float32 `[n, codes]`.
        """
        tables, embedded = self._predictor.get_input_embeddings(), self.embed_codes(first)
        past, codes_list = None, []
        with torch.inference_mode():
            inputs = torch.stack([hidden.to(embedded), embedded], dim=1)
            for table, head in zip(tables, self._predictor.lm_head, strict=True):
                output = self._predictor.model(
                    inputs_embeds=inputs, past_key_values=past, use_cache=True
                )
                past = output.past_key_values
                codes = torch.tensor(choose(head(output.last_hidden_state[:, -1]).float()))
                codes_list.append(codes)
                inputs = table(codes.to(embedded.device))[:, None]
        return torch.stack(codes_list, dim=1)

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

    def encode(self, item: PlacedItem) -> Tensor:
        """Return the rows of an item's placeholders, `[length, hidden * (1 + deep layers)]`.

        A row is the placeholder's embedding, followed by the vectors that DeepStack adds to the
        outputs of the first layers. For audio these vectors are zeros.
        """
        content = self._on_device(item.content)
        with torch.inference_mode():
            if item.kind == "audio":
                audio: Tensor = self._thinker.get_audio_features(**content).last_hidden_state
                zeros = audio.new_zeros(len(audio), self._num_deep * audio.shape[1])
                return torch.cat([audio, zeros], dim=1)
            images = self._thinker.get_image_features(**content)
            rows = [images.pooler_output[0], *(deep[0] for deep in images.deepstack_features)]
            return torch.cat(rows, dim=1)

    def _sound_lengths(self, counts: Tensor) -> Tensor:
        n_window = self.config.thinker_config.audio_config.n_window
        lengths: Tensor = _get_feat_extract_output_lengths(counts, n_window)
        return lengths

    def _rope_model(self, *, of_talker: bool) -> Any:
        return self._thinker  # for the talker too

    def _make_talker(self, node: StageNode) -> Stage:
        config, ids, codec = stage_config(node), self.config, self.talker_config
        bos, eos, pad = map(
            self.embed_text, (ids.tts_bos_token_id, ids.tts_eos_token_id, ids.tts_pad_token_id)
        )

        def feed(request: OmniRequest) -> FrameTalkerFeed:
            params = request.params.get("talker", self.speech_params)
            seed = config.seed + next(self._seeds) if params.seed is None else params.seed
            voice = self.voice(request)
            prompt: SpokenPrompt = request.prompt
            token_ids = torch.tensor(prompt.prepared.token_ids)
            is_user, start = self._turns(token_ids)
            user = token_ids[is_user]
            media = torch.tensor(list(self.placeholders.values()))
            return FrameTalkerFeed(
                request=request,
                rows=node.spec.takes[0],
                block_size=config.block_size,
                is_user=is_user,
                is_media=torch.isin(user, media),
                answer_start=start,
                blank_id=codec.codec_pad_id,
                lead_ids=(
                    codec.codec_nothink_id,
                    codec.codec_think_bos_id,
                    codec.codec_think_eos_id,
                    self.voices[voice],
                    codec.codec_pad_id,
                    codec.codec_bos_id,
                ),
                bos=bos,
                eos=eos,
                pad=pad,
                model=self,
                params=params,
                generator=torch.Generator().manual_seed(seed),
                voice=voice,
                positions=self._positions(user.tolist(), prompt),
                anonymous=not node.spec.enable_prefix_caching,
            )

        return FrameTalker(node.spec, self.talker(), feed, config, self._cache, self)

    def _make_code2wav(self, node: StageNode) -> Stage:
        no_options(node)
        return FramesStage(node.spec, vocoder_plan(self._vocoder), self._cache)

    def _turns(self, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return a mask of the user's tokens in a prompt, and the start of the answer's turn.

        Raises RequestError unless the last turn is the assistant's.
        """
        config = self.config
        starts = (ids == config.im_start_token_id).nonzero().flatten()
        if not len(starts) or ids[starts[-1] + 1 :][:1].tolist() != [config.assistant_token_id]:
            raise RequestError(
                "the prompt does not end with the assistant's turn, which a spoken answer needs"
            )
        turn = torch.searchsorted(starts, torch.arange(len(ids)), right=True) - 1
        # As in transformers, tokens before the first turn belong to the first turn.
        roles = ids[torch.where(turn < 0, 0, starts[turn]) + 1]
        return roles == config.user_token_id, int(starts[-1])

    def _positions(self, user: list[int], prompt: SpokenPrompt) -> RotaryPositions | None:
        """Return the rotary positions of the talker's prompt, as the thinker computes them.

        The prompt has the user's turns, then 3 tokens for the header and 6 lead tokens. Return None
        for a prompt without images, whose positions are consecutive.
        """
        if "image_grid_thw" not in prompt.features:
            return None
        ids = [*user, *[self.config.tts_pad_token_id] * 9]
        return self.positions(ids, prompt.features)
