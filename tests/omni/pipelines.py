"""A tiny speech pipeline of no known model: two small Llamas and a causal filter.

The thinker is a language model. The talker is another one, conditioned on the thinker's hidden
rows and a second feature. The vocoder returns four samples per code.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.omni.engine_stage import EngineStage, Feed, PromptFeed, StagePrompt
from headstart.omni.function_stage import FramesPlan, FramesStage
from headstart.omni.output_cache import OutputCache
from headstart.omni.pipeline import Pipeline, Progress
from headstart.omni.qwen2_5 import CodecTalkerFeed
from headstart.omni.stage import TOKENS, Input, OmniRequest, Output, StageSpec, parse_alignment
from headstart.omni.stage_decoder import PassTensors, StageDecoder, StageParts

WIDTH = 32
TEXT_VOCABULARY, CODES, MASK, PAD, BOS = 97, 40, 41, 42, 43
RATIO, VOCODER_BLOCK = 4, 4


def model(seed: int, vocabulary: int) -> LlamaForCausalLM:
    """Return a new model with the same weights each time."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def stage_rows(seed: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


BOS_ROW, EOS_ROW, PAD_ROW = stage_rows(7, 3)


def vocode(request: OmniRequest, codes: Tensor, context: int) -> Tensor:
    """Return samples that depend on their code and the three before.

    Weights and codes are small integers, so every sum is exact. The waveform has the same bits for
    any order of additions and any number of rows per call.
    """
    weights = torch.tensor([1.0, 2.0, 3.0, 10.0])
    padded = torch.cat([torch.zeros(3), codes.float()])
    mixed = padded.unfold(0, 4, 1) @ weights
    return (mixed[context:, None] * torch.arange(1.0, RATIO + 1)).flatten()


class Speech:
    """The pipeline with helpers. `options` are passed to both engines."""

    def __init__(
        self,
        *,
        caching: bool = True,
        max_bytes: int = 1 << 24,
        undeclared: bool = False,
        talker_options: dict[str, Any] | None = None,
        store: OutputCache | None = None,
        text_seed: int = 1,
        **options: Any,
    ) -> None:
        self.cache = OutputCache(max_bytes) if store is None else store
        self.break_pass = 0  # the thinker's pass of this number, counted from 1, fails
        self.more: dict[str, Tensor] = {}  # further outputs of the thinker
        config: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": 4,
            "partial_hits": False,
            "enable_prefix_caching": caching,
            "debug": True,
            **options,
        }
        gives = () if undeclared else (Output("hidden"), Output("feature"))
        text = model(text_seed, TEXT_VOCABULARY)
        self.embeddings = text.get_input_embeddings().weight.data  # of the thinker
        self.thinker = EngineStage(
            StageSpec(
                name="thinker",
                gives=gives,
                find_outputs=undeclared,
                enable_prefix_caching=caching,
            ),
            StageDecoder(
                StageParts(text_model=text.model, head=text.lm_head, give=self._give_hidden)
            ),
            self._think,
            EngineConfig(**config),
            self.cache,
        )
        takes = (Input("thinker", "hidden"), Input("thinker", "feature"))
        codes = model(2, CODES + 4)
        self._talk_decoder = StageDecoder(
            StageParts(
                text_model=codes.model,
                head=codes.lm_head,
                give=lambda tensors: {},
                eos_token_ids=frozenset([3]),
                suppressed_ids=(MASK, PAD, BOS),
            )
        )
        self.talker = EngineStage(
            StageSpec(name="talker", takes=takes, enable_prefix_caching=caching),
            self._talk_decoder,
            self._talk,
            EngineConfig(**(config | (talker_options or {}))),
            self.cache,
        )
        self.vocoder = FramesStage(
            StageSpec(
                name="vocoder",
                takes=(Input("talker", TOKENS),),
                gives=(Output("audio", parse_alignment(f"frames({RATIO})"), "float32"),),
                autoregressive=False,
                enable_prefix_caching=caching,
            ),
            FramesPlan(function=vocode, block=VOCODER_BLOCK, context=3),
            self.cache,
        )
        self.pipeline = Pipeline(
            [self.vocoder, self.thinker, self.talker],
            [Input("thinker", TOKENS), Input("talker", TOKENS), Input("vocoder", "audio")],
        )

    def _give_hidden(self, tensors: PassTensors) -> dict[str, Tensor]:
        if self.break_pass:
            self.break_pass -= 1
            if not self.break_pass:
                raise ValueError("broken on purpose")
        hidden, embedded = tensors.hidden, tensors.embedded
        return {"hidden": hidden + embedded, "feature": hidden[:, :16] * 2, **self.more}

    def _think(self, request: OmniRequest) -> Feed:
        params = request.params.get("thinker", SamplingParams(temperature=0, max_tokens=6))
        return PromptFeed(StagePrompt(request.prompt, params, request.salt))

    def _talk(self, request: OmniRequest) -> Feed:
        options = request.options.get("talker", {})
        return CodecTalkerFeed(
            request=request,
            rows=Input("thinker", "hidden"),
            block_size=self.talker.engine.manager.block_size,
            mask_id=MASK,
            lead_ids=(PAD, BOS),
            bos=BOS_ROW,
            eos=EOS_ROW,
            pad=PAD_ROW,
            embed=self._talk_decoder.embed,
            params=request.params.get("talker", SamplingParams(temperature=0, max_tokens=11)),
            voice=str(options.get("voice", "")),
            limit=self.talker.engine.max_model_len,
            anonymous=bool(options.get("anonymous", not self.talker.spec.enable_prefix_caching)),
        )

    def run(self, *requests: OmniRequest) -> list[Progress]:
        """Run requests together to their end, and check every invariant at each step."""
        progress = [start(self.pipeline, request) for request in requests]
        while self.pipeline.has_unfinished:
            self.pipeline.step()
            self.cache.check()
        return progress

    def check_idle(self) -> None:
        """Check that no request holds anything."""
        for stage in (self.thinker, self.talker):
            assert not stage.engine.has_unfinished and not stage._states
            manager = stage.engine.manager
            assert manager.num_free_blocks == len(manager.pool.blocks)
        assert not self.vocoder._states

    def close(self) -> None:
        self.pipeline.close()

    def __enter__(self) -> "Speech":
        return self

    def __exit__(self, *_: object) -> None:
        self.check_idle()
        self.close()


def start(pipeline: Pipeline, request: OmniRequest) -> Progress:
    """Submit a request, as a driver does."""
    progress = pipeline.prepare(request)
    pipeline.submit(progress)
    return progress


def request(name: str, prompt: list[int], **more: Any) -> OmniRequest:
    return OmniRequest(request_id=name, prompt=prompt, **more)


def collected(progress: Progress, stage: str, output: str) -> Tensor:
    """Return all rows of an output that a request received, checked to be complete and in order."""
    chunks = progress.chunks[Input(stage, output)]
    position = 0
    for chunk in chunks:
        assert chunk.start == position, f"{stage}.{output}: {position} to {chunk.start} missing"
        position = chunk.stop
    return torch.cat([chunk.rows for chunk in chunks])


def result_of(progress: Progress) -> tuple[list[int], list[int], list[float]]:
    """Return a request's text, codes and waveform."""
    assert progress.finish_reason == "done", progress.error
    return (
        collected(progress, "thinker", TOKENS).tolist(),
        collected(progress, "talker", TOKENS).tolist(),
        collected(progress, "vocoder", "audio").tolist(),
    )


@torch.inference_mode()
def oracle(
    prompt: list[int], *, think: int = 6, talk: int = 11, text_seed: int = 1
) -> tuple[list[int], list[int]]:
    """Return text and codes by full forward passes of transformers' models."""
    thinker, talker = model(text_seed, TEXT_VOCABULARY), model(2, CODES + 4)
    ids = list(prompt)
    for _ in range(think):
        ids.append(int(thinker(torch.tensor([ids])).logits[0, -1].argmax()))
    reply = ids[len(prompt) :]
    computed = torch.tensor([ids[:-1]])
    hidden = (
        thinker.model(computed).last_hidden_state[0] + thinker.get_input_embeddings()(computed)[0]
    )
    rows = [*hidden[: len(prompt)], BOS_ROW, *hidden[len(prompt) :], EOS_ROW]
    codes = [MASK] * len(prompt) + [PAD, BOS]
    for _ in range(talk):
        own = talker.get_input_embeddings()(torch.tensor(codes))
        own[: len(prompt)] = 0
        conditions = torch.stack([*rows, *[PAD_ROW] * len(codes)][: len(codes)])
        logits = talker(inputs_embeds=(own + conditions)[None]).logits[0, -1]
        logits[[MASK, PAD, BOS]] = -torch.inf
        codes.append(int(logits.argmax()))
        if codes[-1] == 3:
            break
    return reply, codes[len(prompt) + 2 :]
