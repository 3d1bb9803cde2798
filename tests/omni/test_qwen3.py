"""Qwen3-Omni's output of a middle layer and its causal vocoder match transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)

from headstart.cache import MultiModalItem
from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.engine.request import PlacedRows, PrecomputedEmbeddings, PreparedPrompt, PromptExtras
from headstart.models.decoder import EmbeddingOverlay
from headstart.omni.engine_stage import EngineStage, PromptFeed, StagePrompt
from headstart.omni.function_stage import FramesPlan, FramesStage, WholeStage
from headstart.omni.output_cache import OutputCache
from headstart.omni.pipeline import Pipeline
from headstart.omni.qwen3 import CausalVocoder, _reach, thinker_decoder, vocoder_plan
from headstart.omni.stage import TOKENS, Input, OmniRequest, Output, StageSpec, parse_alignment
from tests.omni.pipelines import start

ACCEPT, AUDIO, QUANTIZERS, BLOCK, CONTEXT = 2, 90, 4, 8, 40


@pytest.fixture(scope="module")
def thinker() -> Qwen3OmniMoeThinkerForConditionalGeneration:
    config = Qwen3OmniMoeThinkerConfig(
        audio_config={"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2,
                      "encoder_ffn_dim": 32, "num_mel_bins": 16, "output_dim": 48,
                      "max_source_positions": 50, "downsample_hidden_size": 8},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                       "out_hidden_size": 48, "deepstack_visual_indexes": []},
        text_config={"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64,
                     "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 4,
                     "num_experts_per_tok": 2, "max_position_embeddings": 512,
                     "initializer_range": 0.3,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                         "mrope_section": [2, 2, 2]}},
        audio_token_id=AUDIO,
    )  # fmt: skip
    torch.manual_seed(5)
    return Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()


def sound(seed: int) -> Tensor:
    return torch.randn(7, 48, generator=torch.Generator().manual_seed(seed))


PROMPT = [5, 6, *[AUDIO] * 7, 7, 8, 9, 10, 11]


def wanted(thinker: Any, seed: int, words: int) -> tuple[list[int], Tensor]:
    """Return greedy tokens and the passed-on rows by full passes of transformers' text model."""
    ids = list(PROMPT)
    for _ in range(words):
        with torch.inference_mode():
            embedded = thinker.get_input_embeddings()(torch.tensor(ids))
            embedded[2:9] = sound(seed)
            output = thinker.model.language_model(
                inputs_embeds=embedded[None], use_cache=False, output_hidden_states=True
            )
            ids.append(int(thinker.lm_head(output.last_hidden_state[0, -1]).argmax()))
    rows = output.hidden_states[0][0].clone()
    rows[2:9] = output.hidden_states[ACCEPT][0, 2:9]
    return ids[len(PROMPT) :], rows


def test_rows_from_a_middle_layer_cold_and_warm(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
) -> None:
    expected = {seed: wanted(thinker, seed, 6) for seed in (1, 2)}

    def feed(request: OmniRequest) -> PromptFeed:
        seed = request.prompt
        items = (MultiModalItem(b"sound %d" % seed, 2, 7),)
        extras = PromptExtras(items, PrecomputedEmbeddings([PlacedRows(2, sound(seed))]))
        params = SamplingParams(temperature=0, max_tokens=6)
        return PromptFeed(StagePrompt(PreparedPrompt(PROMPT, extras=extras), params, None))

    stage = EngineStage(
        StageSpec(name="thinker", gives=(Output("handed"),)),
        thinker_decoder(thinker, ACCEPT),
        feed,
        EngineConfig(num_blocks=32, block_size=4, partial_hits=False, debug=True),
        OutputCache(1 << 20),
    )
    pipeline = Pipeline([stage], [Input("thinker", "handed"), Input("thinker", TOKENS)])
    for name, (seed, hit) in enumerate([(1, 0), (2, 0), (1, 12)]):
        progress = start(pipeline, OmniRequest(request_id=f"{name}", prompt=seed))
        while pipeline.has_unfinished:
            pipeline.step()
        text, rows = expected[seed]
        chunks = progress.chunks
        assert torch.cat([c.rows for c in chunks[Input("thinker", TOKENS)]]).tolist() == text
        handed = torch.cat([c.rows for c in chunks[Input("thinker", "handed")]])
        assert torch.allclose(handed, rows, atol=1e-4)
        assert progress.metrics["thinker"].hit_rows == ({"handed": hit} if hit else {})
    pipeline.close()


def test_rows_for_the_first_layers_are_in_the_order_of_their_tokens(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
) -> None:
    decoder = thinker_decoder(thinker, ACCEPT, num_deep=2)
    values = torch.arange(2.0)[:, None] + torch.tensor([[0.0, 10.0, 20.0]]).repeat_interleave(48, 1)
    is_own = torch.tensor([True, False, True, False])
    inputs = decoder._deep_rows(EmbeddingOverlay(torch.tensor([3, 1]), values), is_own)
    assert inputs["visual_pos_masks"].tolist() == [[False, True, False, True]]
    assert [rows[:, 0].tolist() for rows in inputs["deepstack_visual_embeds"]] == [
        [11, 10],
        [21, 20],
    ]


@pytest.fixture(scope="module")
def code2wav() -> Qwen3OmniMoeCode2Wav:
    config = Qwen3OmniMoeCode2WavConfig(
        codebook_size=32, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
        sliding_window=12, intermediate_size=32, num_hidden_layers=2, num_quantizers=QUANTIZERS,
        upsample_rates=(2, 2), upsampling_ratios=(2,), decoder_dim=16,
        layer_scale_initial_scale=1.0,
    )  # fmt: skip
    torch.manual_seed(6)
    return Qwen3OmniMoeCode2Wav(config).eval()


@pytest.fixture(scope="module")
def deep_code2wav() -> Qwen3OmniMoeCode2Wav:
    """Return a vocoder with a window of 72 codes in two layers, and weights that use all of it."""
    config = Qwen3OmniMoeCode2WavConfig(
        codebook_size=32, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, num_hidden_layers=2, num_quantizers=QUANTIZERS,
        upsample_rates=(4, 2), upsampling_ratios=(2, 2), decoder_dim=16,
        layer_scale_initial_scale=1.0,
    )  # fmt: skip
    torch.manual_seed(6)
    model = Qwen3OmniMoeCode2Wav(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight[0].numel() ** -0.5)
            elif name.endswith("gamma"):  # otherwise a block of the upsampling adds almost nothing
                weight.fill_(1)
        model.decoder[-1].conv.weight.mul_(0.02)
    return model


@pytest.mark.parametrize("count", [50, 60, 120, 299, 300, 301, 700])
def test_a_waveform_in_blocks_matches_transformers(
    deep_code2wav: Qwen3OmniMoeCode2Wav, count: int
) -> None:
    """Regression: blocks had a context of only 25 codes, so results differed from code 50 on.

    transformers omits the last samples of each pass of 300 codes; headstart returns them.
    """
    vocoder = CausalVocoder(deep_code2wav)
    stage = FramesStage(_vocoder_spec(vocoder), vocoder_plan(vocoder), None)
    pipeline = Pipeline([_echo_stage("codes"), stage], [Input("vocoder", "audio")])
    codes = torch.randint(
        0, 32, (count, QUANTIZERS), generator=torch.Generator().manual_seed(count)
    )
    progress = start(pipeline, OmniRequest(request_id="r", prompt=codes))
    while pipeline.has_unfinished:
        pipeline.step()
    chunks = progress.chunks[Input("vocoder", "audio")]
    assert [len(chunk.rows) // vocoder.ratio for chunk in chunks] == [
        min(25, count - start) for start in range(0, count, 25)
    ]
    audio = torch.cat([chunk.rows for chunk in chunks])
    passes = torch.split(audio, 300 * vocoder.ratio)
    ours = torch.cat([samples[vocoder.delay :] for samples in passes])
    with torch.inference_mode():
        theirs = deep_code2wav.chunked_decode(codes.T[None], 300, 25).reshape(-1)
    assert theirs.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    pipeline.close()


def test_the_context_of_convolutions_is_exact(
    deep_code2wav: Qwen3OmniMoeCode2Wav,
) -> None:
    vocoder = CausalVocoder(deep_code2wav)
    codes = torch.randint(0, 32, (60, QUANTIZERS), generator=torch.Generator().manual_seed(1))
    whole = vocoder(None, codes, 0)[40 * vocoder.ratio :]
    far = {}
    for reach in (vocoder.reach, vocoder.reach - 1):
        vocoder.reach = reach
        far[reach] = float((vocoder(None, codes, 40) - whole).abs().max())
    reach = max(far)
    assert far[reach] < 1e-5 and far[reach - 1] > 1e-4
    with torch.device("meta"):
        released = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig())
    assert _reach(released, 555) == 10


def _vocoder_spec(vocoder: CausalVocoder) -> StageSpec:
    return StageSpec(
        name="vocoder",
        takes=(Input("codes", "codes"),),
        gives=(Output("audio", parse_alignment(f"frames({vocoder.ratio})"), "float32"),),
        autoregressive=False,
    )


def test_frames_in_blocks_match_the_whole_waveform_and_are_cached_by_codes(
    code2wav: Qwen3OmniMoeCode2Wav,
) -> None:
    vocoder = CausalVocoder(code2wav)
    calls: list[int] = []

    def frames(request: OmniRequest, codes: Tensor, context: int) -> Tensor:
        calls.append(len(codes) - context)
        return vocoder(request, codes, context)

    source = _echo_stage("codes")
    stage = FramesStage(
        _vocoder_spec(vocoder),
        FramesPlan(function=frames, block=BLOCK, context=CONTEXT),
        OutputCache(1 << 20),
    )
    pipeline = Pipeline([source, stage], [Input("vocoder", "audio")])
    codes = torch.randint(0, 32, (45, QUANTIZERS), generator=torch.Generator().manual_seed(1))
    other = codes.clone()
    other[20:] = 3

    def speak(name: str, codes_: Tensor) -> tuple[Tensor, int]:
        calls.clear()
        progress = start(pipeline, OmniRequest(request_id=name, prompt=codes_))
        while pipeline.has_unfinished:
            pipeline.step()
        assert progress.error is None, progress.error
        chunks = progress.chunks[Input("vocoder", "audio")]
        assert len(chunks) == 6
        return torch.cat([chunk.rows for chunk in chunks]), sum(calls)

    for name, codes_, computed in (
        ("cold", codes, 45),
        ("warm", codes, 5),
        ("another end", other, 45 - 16),
    ):
        audio, count = speak(name, codes_)
        with torch.inference_mode():
            whole = code2wav(codes_.T[None]).reshape(-1)
        assert torch.equal(audio[: vocoder.delay], torch.zeros(vocoder.delay))
        assert torch.allclose(audio[vocoder.delay :], whole, atol=1e-5)
        assert count == computed
    pipeline.close()


def _echo_stage(name: str) -> WholeStage:
    """Return a stage that outputs its prompt."""
    return WholeStage(
        StageSpec(
            name=name,
            gives=(Output(name, parse_alignment("request")),),
            autoregressive=False,
            enable_prefix_caching=False,
        ),
        lambda job: {name: job.request.prompt},
    )
