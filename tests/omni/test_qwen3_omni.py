"""Qwen3-Omni has the same text, frames and waveform as transformers' `generate`."""

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    Qwen3OmniMoeForConditionalGeneration,
)

from headstart.cache import TokenSequence
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, ModelError, RequestError
from headstart.models.transformers_tools import silence_transformers
from headstart.omni.engine_stage import EngineStage
from headstart.omni.omni import Omni
from headstart.omni.params import OmniOutput, OmniParams
from headstart.omni.qwen3 import FrameTalker, FrameTalkerFeed
from headstart.omni.stage import Chunk, OutputEvent, StageStarted
from tests.omni.tiny_qwen3 import IDS, QUANTIZERS, save_qwen3

WORDS, CODES = 6, 10
TEXT = SamplingParams(temperature=0, max_tokens=WORDS)
SPEECH = SamplingParams(temperature=0, max_tokens=CODES)
ADA = OmniParams(text=TEXT, speech=SPEECH, voice="ada")
DELAY = 6  # samples of the tiny vocoder's delay


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int) -> dict[str, Tensor]:
    return {"pixel_values": noise(seed, 64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}


def sound(seed: int) -> dict[str, Tensor]:
    mask = torch.zeros(1, 60, dtype=torch.int64)
    mask[:, :50] = 1
    return {"input_features": noise(seed, 1, 16, 60), "feature_attention_mask": mask}


def turn(role: str, *token_ids: int) -> list[int]:
    return [IDS["<|im_start|>"], IDS[f"<|{role}|>"], 10, *token_ids, IDS["<|im_end|>"], 10]


LOOK = [IDS["<|vision_start|>"], *[IDS["<|image_pad|>"]] * 16, IDS["<|vision_end|>"]]
LISTEN = [IDS["<|audio_start|>"], *[IDS["<|audio_pad|>"]] * 7, IDS["<|audio_end|>"]]
ANSWER = turn("assistant")[:3]
PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"prompt_token_ids": turn("user", 70, 71, 72, 73, 74) + ANSWER},
    "system": {"prompt_token_ids": turn("system", 65, 66) + turn("user", 70, 71) + ANSWER},
    "turns": {
        "prompt_token_ids": turn("user", 80, 81)
        + turn("assistant", 90, 91, 92)
        + turn("user", 82, 83, 84)
        + ANSWER
    },
    "sound": {"prompt_token_ids": turn("user", *LISTEN, 75, 76) + ANSWER, "features": sound(1)},
    "image": {"prompt_token_ids": turn("user", 7, *LOOK, 75) + ANSWER, "features": image(1)},
    "other image": {"prompt_token_ids": turn("user", 7, *LOOK, 75) + ANSWER, "features": image(2)},
    "both": {
        "prompt_token_ids": turn("user", *LOOK, 8, *LISTEN, 9) + ANSWER,
        "features": {**image(1), **sound(1)},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    with silence_transformers():
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).eval()
    # Without it the talker fails on positions with both sounds and images (5.23).
    model.talker.config.audio_config = model.thinker.config.audio_config
    return model


@pytest.fixture(scope="module")
def oracle(model: Any) -> Any:
    @cache
    def answer(name: str, voice: str = "ada") -> tuple[list[int], list[list[int]], Tensor]:
        """Row 0 of a batch of two, the other being shorter and padded.

        Alone, a mask of all ones would be dropped, and images would have plain positions.
        """
        prompt = PROMPTS[name]["prompt_token_ids"]
        other = turn("user", 75)[-3:] + ANSWER
        other = turn("user")[:3] + other
        ids = torch.tensor([prompt, [0] * (len(prompt) - len(other)) + other])
        mask = torch.ones_like(ids)
        mask[1, : -len(other)] = 0
        features = PROMPTS[name].get("features", {})
        codes_: list[Tensor] = []
        decode = model.code2wav.chunked_decode

        def listen(codes: Tensor, **options: Any) -> Tensor:
            codes_.append(codes)
            return decode(codes, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.code2wav, "chunked_decode", listen)
            sequences, waves = model.generate(
                input_ids=ids,
                attention_mask=mask,
                speaker=voice,
                thinker_max_new_tokens=WORDS,
                thinker_eos_token_id=IDS["<|im_end|>"],
                thinker_do_sample=False,
                talker_max_new_tokens=CODES,
                talker_do_sample=False,
                talker_repetition_penalty=1.0,
                **{f"thinker_{k}" if k.startswith("pixel") else k: v for k, v in features.items()},
            )
        frames = codes_[0][0].T[: (len(waves[0]) + DELAY) // 8]
        return sequences[0, ids.shape[1] :].tolist(), frames.tolist(), waves[0]

    return answer


def check(output: OmniOutput, wanted: tuple[list[int], list[list[int]], Tensor]) -> None:
    text, frames, wave = wanted
    assert output.token_ids == text[: len(output.token_ids)]
    assert output.codes.tolist() == frames
    assert output.audio.shape == (len(frames) * 8,)
    assert torch.equal(output.audio[:DELAY], torch.zeros(DELAY))
    assert torch.allclose(output.audio[DELAY:], wave, atol=1e-5)


def make(folder: Path) -> Omni:
    return Omni(folder, options={"num_blocks": 128, "block_size": 4, "debug": True})


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Omni]:
    omni = make(folder)
    yield omni
    omni.close()


@pytest.fixture
def omni(loaded: Omni) -> Iterator[Omni]:
    """Return a model with an empty cache."""
    assert loaded.reset_cache()
    yield loaded
    assert not loaded.pipeline.has_unfinished
    loaded.cache.check()


@pytest.mark.parametrize("name", PROMPTS)
def test_cold_and_warm_answers_match_transformers(omni: Omni, oracle: Any, name: str) -> None:
    for round_ in range(2):
        [output] = omni.generate(PROMPTS[name], ADA)
        check(output, oracle(name))
        length = len(PROMPTS[name]["prompt_token_ids"])
        thinker, talker = output.metrics["thinker"], output.metrics["talker"]
        whole = min(length // 4 * 4, length - 1)
        assert thinker.cached_tokens == whole * round_
        assert thinker.hit_rows == ({"handed": whole} if round_ else {})
        assert (talker.cached_tokens > 0) == bool(round_)
        assert len(output.codes[0]) == QUANTIZERS


OFF = """
collects = ["thinker.tokens", "talker.codes", "code2wav.audio"]
[stages.thinker]
gives = { handed = "token" }
enable_prefix_caching = false
[stages.talker]
takes = ["thinker.handed"]
gives = { codes = "request" }
enable_prefix_caching = false
[stages.code2wav]
autoregressive = false
takes = ["talker.codes"]
gives = { audio = "frames(8)" }
enable_prefix_caching = false
"""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pipeline": OFF},
        {"options": {"max_num_batched_tokens": 7, "num_blocks": 18}},
        {"options": {"block_size": 8}, "cache_bytes": 20_000},
        {"options": {"deterministic": True}},
    ],
    ids=["on", "off", "chunked and preempted", "short of bytes", "deterministic"],
)
def test_concurrent_answers_match_single_ones(
    folder: Path, oracle: Any, more: dict[str, Any]
) -> None:
    options = {"num_blocks": 128, "block_size": 4, "debug": True, **more.pop("options", {})}
    omni = Omni(folder, options=options, **more)
    names = ["text", "turns", "image", "both", "sound"]
    for _ in range(2):
        outputs = omni.generate([PROMPTS[name] for name in names], ADA)
        for name, output in zip(names, outputs, strict=True):
            check(output, oracle(name))
            assert not (output.metrics["thinker"].cached_tokens and "pipeline" in more)
    stages = [omni.pipeline.stages[name] for name in ("thinker", "talker")]
    preempted = sum(s.engine.num_preemptions for s in stages if isinstance(s, EngineStage))
    assert (preempted > 0) == (options["num_blocks"] == 18)
    omni.close()


def test_another_voice_shares_only_the_thinkers_blocks(omni: Omni, oracle: Any) -> None:
    assert omni.voices == ("ada", "bob")
    omni.generate(PROMPTS["image"], ADA)
    bob = OmniParams(text=TEXT, speech=SPEECH, voice="bob")
    [output] = omni.generate(PROMPTS["image"], bob)
    check(output, oracle("image", "bob"))
    assert output.metrics["thinker"].cached_tokens > 0
    assert output.metrics["talker"].cached_tokens == 0
    with pytest.raises(RequestError, match="no voice 'eve'; allowed: ada, bob"):
        omni.generate(PROMPTS["text"], OmniParams(voice="eve"))


def test_only_the_users_turns_determine_the_talkers_blocks(omni: Omni, oracle: Any) -> None:
    """The system's text affects only the rows of sounds and images that the talker gets."""
    omni.generate(PROMPTS["system"], ADA)
    prompt = {"prompt_token_ids": turn("system", 67, 68, 69) + turn("user", 70, 71) + ANSWER}
    [output] = omni.generate(prompt, ADA)
    assert output.metrics["thinker"].cached_tokens == 0
    assert output.metrics["talker"].cached_tokens == 12  # up to the answer's first word
    check(omni.generate(PROMPTS["system"], ADA)[0], oracle("system"))


LONG = OmniParams(
    text=TEXT,
    speech=SamplingParams(temperature=0.9, top_k=50, seed=5, max_tokens=70, ignore_eos=True),
    voice="ada",
)


def test_a_sampled_answer_is_streamed_and_the_same_from_the_cache(omni: Omni, model: Any) -> None:
    outputs = list(omni.stream(PROMPTS["sound"], LONG))
    cold = outputs[-1]
    [warm] = omni.generate(PROMPTS["sound"], LONG)
    other_seed = OmniParams(text=TEXT, speech=dataclasses.replace(LONG.speech, seed=6), voice="ada")
    [other] = omni.generate(PROMPTS["sound"], other_seed)
    assert cold.codes.shape == (69, QUANTIZERS)
    assert torch.equal(cold.codes, warm.codes) and not torch.equal(cold.codes, other.codes)
    assert torch.equal(cold.audio, warm.audio)
    first_heard = next(output for output in outputs if len(output.audio))
    assert len(first_heard.codes) < 30
    assert warm.metrics["code2wav"].hit_rows == {"audio": 50}
    assert other.metrics["code2wav"].hit_rows == {}
    with torch.inference_mode():
        whole = model.code2wav(cold.codes.T[None]).reshape(-1)
    assert torch.allclose(cold.audio[DELAY:], whole, atol=1e-5)


def test_frames_with_the_same_first_code_are_different_prefixes(omni: Omni) -> None:
    talker = omni.pipeline.stages["talker"]
    assert isinstance(talker, FrameTalker)
    items = []
    for others in ([1, 2, 3], [1, 2, 4], [1, 2, 3]):
        request = omni.prepare(PROMPTS["text"], LONG, None).request
        feed = talker._feeder(request)
        length = len(PROMPTS["text"]["prompt_token_ids"])
        feed.take(
            "thinker", StageStarted(request.request_id, length, 4, [b"one", b"two", b"three"])
        )
        rows = noise(3, length + 6, 48)
        rows[:4] += len(items)  # whose block has a name
        feed.take("thinker", OutputEvent(request.request_id, Chunk("handed", 0, rows)))
        prompt = feed.prompt()
        assert prompt is not None and isinstance(feed, FrameTalkerFeed)
        chosen = feed.sampling.params
        assert (chosen.temperature, chosen.top_k, chosen.top_p) == (1, 50, 0.8)
        sequence = TokenSequence("r", [*prompt.prompt.token_ids, 7, 7, 7])
        feed.begin(sequence)
        assert not feed.is_ready(len(sequence.token_ids))
        for _ in range(3):
            feed.add_frame(torch.tensor(others))
        assert feed.is_ready(len(sequence.token_ids))
        items.append(sequence.items)
    assert items[0] == items[2] != items[1]
    assert items[0][:4] == items[1][:4]  # of the prompt


def test_an_answer_of_one_word_is_spoken(omni: Omni) -> None:
    """transformers fails, as its talker needs a row of the first word, which is not computed."""
    short = OmniParams(text=SamplingParams(temperature=0, max_tokens=1), speech=SPEECH)
    [output] = omni.generate(PROMPTS["text"], short)
    assert len(output.token_ids) == 1 and len(output.codes) == CODES - 1


def test_a_prompt_without_the_assistants_turn_gets_only_a_text(omni: Omni) -> None:
    for ids in ([70, 71], turn("user", 70), ANSWER[:1]):
        with pytest.raises(RequestError, match="end with the assistant's turn"):
            omni.generate({"prompt_token_ids": ids}, ADA)
        [output] = omni.generate({"prompt_token_ids": ids}, OmniParams(text=TEXT, audio=False))
        assert len(output.token_ids) > 0


def test_incomplete_frames_end_with_an_error_that_names_the_stage(
    omni: Omni, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Tensor:
        raise ValueError("no code")

    with monkeypatch.context() as patch:
        patch.setattr("headstart.omni.qwen3.Qwen3Omni.predict_residual_codes", fail)
        with pytest.raises(EngineError, match="stage 'talker': ValueError: no code"):
            omni.generate([PROMPTS["text"], PROMPTS["image"]], ADA)
    check(omni.generate(PROMPTS["text"], ADA)[0], oracle("text"))


def test_an_abandoned_stream_holds_nothing(omni: Omni) -> None:
    for steps in (1, 4, 9):
        stream = omni.stream(PROMPTS["both"], ADA)
        for _ in range(steps):
            next(stream)
        stream.close()
        assert not omni.pipeline.has_unfinished
        assert omni.reset_cache()


def test_raw_sounds_and_images(omni: Omni) -> None:
    wave = np.sin(np.arange(8000) * 0.3)
    picture = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    prompt = {
        "prompt": "<|im_start|><|user|>\n<|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|><|assistant|>\n",
        "audio": [wave],
        "images": [picture],
    }
    [first] = omni.generate(prompt, ADA)
    encoded = omni.cache.stats.written
    [second] = omni.generate(prompt, ADA)
    length = first.metrics["thinker"].prompt_tokens
    assert length > 16 + 7
    assert second.token_ids == first.token_ids and torch.equal(second.codes, first.codes)
    assert second.metrics["thinker"].cached_tokens == min(length // 4 * 4, length - 1)
    assert omni.cache.stats.written == encoded


def test_processors_are_read_from_disk_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they were read again for every prompt."""
    omni = make(folder)
    reads: list[str] = []
    for kind in (AutoFeatureExtractor, AutoImageProcessor):
        monkeypatch.setattr(
            kind, "from_pretrained", noting(reads, kind.__name__, kind.from_pretrained)
        )
    prompt = {
        "prompt": "<|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|image_pad|><|vision_end|>",
        "audio": [np.sin(np.arange(8000) * 0.3)],
        "images": [Image.new("RGB", (32, 32), "red")],
    }
    for _ in range(3):
        omni.generate(prompt, OmniParams(text=TEXT, audio=False))
    assert sorted(reads) == ["AutoFeatureExtractor", "AutoImageProcessor"]
    omni.close()


def noting(calls: list[str], name: str, function: Any) -> Any:
    def wrapper(*args: Any, **more: Any) -> Any:
        calls.append(name)
        return function(*args, **more)

    return wrapper


def test_a_model_without_talker_or_voices_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for change, complaint in (
        ({"enable_audio_output": False}, "no talker"),
        ({"talker_config": config["talker_config"] | {"speaker_id": {}}}, "has no voices"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=complaint):
            Omni(tmp_path)
