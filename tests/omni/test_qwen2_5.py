"""Qwen2.5-Omni has the same text, codes and waveform as transformers' `generate`."""

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from headstart.engine.params import SamplingParams
from headstart.errors import DamagedModelError, EngineError, RequestError
from headstart.omni.omni import Omni
from headstart.omni.params import OmniOutput, OmniParams
from tests.omni.tiny_omni import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    VISION_END,
    VISION_START,
    save_qwen25,
)

WORDS, CODES, SEED = 8, 12, 3
TEXT = SamplingParams(temperature=0, max_tokens=WORDS)
SPEECH = SamplingParams(temperature=0, max_tokens=CODES)
ADA = OmniParams(text=TEXT, speech=SPEECH, voice="Ada", seed=SEED)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def image(seed: int) -> dict[str, Tensor]:
    return {"pixel_values": noise(seed, 64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}


def sound(seed: int) -> dict[str, Tensor]:
    mask = torch.zeros(1, 60, dtype=torch.int64)
    mask[:, :50] = 1
    return {"input_features": noise(seed, 1, 16, 60), "feature_attention_mask": mask}


LOOK = [VISION_START, *[IMAGE] * 16, VISION_END]
LISTEN = [AUDIO_START, *[AUDIO] * 12, AUDIO_END]
PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]},
    "image": {"prompt_token_ids": [5, 6, *LOOK, 9, 10], "features": image(1)},
    "other image": {"prompt_token_ids": [5, 6, *LOOK, 9, 10], "features": image(2)},
    "sound": {"prompt_token_ids": [5, 6, *LISTEN, 9, 10], "features": sound(1)},
    "both": {
        "prompt_token_ids": [5, 6, *LOOK, 8, *LISTEN, 9],
        "features": {**image(1), **sound(1)},
    },
    "image, then more": {"prompt_token_ids": [5, 6, *LOOK, 9, 11, 12], "features": image(1)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen25(tmp_path_factory.mktemp("qwen25"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder).eval()

    @cache
    def answer(name: str, voice: str = "Ada") -> tuple[list[int], list[int], Tensor]:
        """Row 0 of a batch of two, the other being shorter and padded.

        A single prompt would differ from the model's training: `generate` of transformers 5.23
        drops a mask of ones, and without a mask the talker adds no codec embeddings to its
        prompt and uses plain positions.
        """
        prompt = PROMPTS[name]["prompt_token_ids"]
        ids = torch.tensor([prompt, [0] * (len(prompt) - 3) + [5, 6, 7]])
        mask = torch.ones_like(ids)
        mask[1, :-3] = 0
        features = PROMPTS[name].get("features", {})
        codes_: list[Tensor] = []
        vocode = model.token2wav.forward

        def listen(code: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            codes_.append(code)
            return vocode(code, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.token2wav, "forward", listen)
            torch.manual_seed(SEED)
            sequences, waves = model.generate(
                input_ids=ids,
                attention_mask=mask,
                speaker=voice,
                thinker_max_new_tokens=WORDS,
                talker_max_new_tokens=CODES,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_repetition_penalty=1.0,
                talker_eos_token_id=[291, 292],
                **{f"thinker_{k}" if k.startswith("pixel") else k: v for k, v in features.items()},
            )
        return sequences[0, ids.shape[1] :].tolist(), codes_[0][0].tolist(), waves[0]

    return answer


def check(output: OmniOutput, wanted: tuple[list[int], list[int], Tensor]) -> None:
    text, codes, wave = wanted
    assert output.token_ids == text
    assert output.codes.tolist()[: len(codes)] == codes
    assert output.audio.shape == wave.shape
    assert torch.allclose(output.audio, wave, atol=1e-5)
    assert output.finished and output.finish_reason == "length"


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
        whole = min(length // 4 * 4, length - 1)
        thinker, talker = output.metrics["thinker"], output.metrics["talker"]
        assert thinker.cached_tokens == whole * round_
        assert thinker.hit_rows == ({"spoken": whole} if round_ else {})
        assert (talker.cached_tokens >= whole) == bool(round_)


OFF = """
collects = ["thinker.tokens", "talker.tokens", "token2wav.audio"]
[stages.thinker]
gives = { spoken = "token" }
enable_prefix_caching = false
[stages.talker]
takes = ["thinker.spoken"]
enable_prefix_caching = false
[stages.token2wav]
autoregressive = false
takes = ["talker.tokens"]
gives = { audio = "request" }
enable_prefix_caching = false
"""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pipeline": OFF},
        {"options": {"max_num_batched_tokens": 7, "num_blocks": 16}},
        {"options": {"block_size": 8}, "cache_bytes": 20_000},
    ],
    ids=["on", "off", "chunked and preempted", "short of bytes"],
)
def test_concurrent_answers_match_single_ones(
    folder: Path, oracle: Any, more: dict[str, Any]
) -> None:
    options = {"num_blocks": 128, "block_size": 4, "debug": True, **more.pop("options", {})}
    omni = Omni(folder, options=options, **more)
    names = ["text", "image", "both", "image, then more"]
    for _ in range(2):
        outputs = omni.generate([PROMPTS[name] for name in names], ADA)
        for name, output in zip(names, outputs, strict=True):
            check(output, oracle(name))
            assert (output.metrics["thinker"].cached_tokens == 0) or "pipeline" not in more
    omni.close()


def test_another_image_of_the_same_shape_hits_only_earlier_blocks(omni: Omni) -> None:
    for name, hit in (("image", 0), ("other image", 0), ("image, then more", 20)):
        [output] = omni.generate(PROMPTS[name], ADA)
        assert output.metrics["thinker"].cached_tokens == hit
        assert output.metrics["talker"].cached_tokens == hit


def test_another_voice_shares_only_the_thinkers_blocks(omni: Omni, oracle: Any) -> None:
    assert omni.voices == ("Ada", "Bob")
    omni.generate(PROMPTS["image"], ADA)
    bob = OmniParams(text=TEXT, speech=SPEECH, voice="Bob", seed=SEED)
    [output] = omni.generate(PROMPTS["image"], bob)
    check(output, oracle("image", "Bob"))
    assert output.metrics["thinker"].cached_tokens == 20
    assert output.metrics["talker"].cached_tokens == 0
    assert output.metrics["token2wav"].cached_tokens == 0


def test_a_voice_is_embedded_once_and_identified_by_its_sound(
    folder: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    omni = make(folder)
    calls: list[int] = []
    forward = ECAPA_TimeDelayNet.forward

    def counted(module: Any, features: Tensor) -> Tensor:
        calls.append(len(features))
        return forward(module, features)

    monkeypatch.setattr(ECAPA_TimeDelayNet, "forward", counted)
    check(omni.generate(PROMPTS["text"], ADA)[0], oracle("text"))
    check(omni.generate(PROMPTS["image"], ADA)[0], oracle("image"))
    assert len(calls) == 1  # transformers: at each step of the diffusion
    voices = omni._model.voices
    ada = voices["Ada"]
    voices["Eve"] = dataclasses.replace(ada, reference_mel=ada.reference_mel.clone())
    voices["Bob"] = dataclasses.replace(ada, reference_mel=ada.reference_mel + 0.5)
    waves = {}
    for name, count in (("Eve", 1), ("Bob", 2), ("Ada", 2)):
        params = dataclasses.replace(ADA, voice=name)
        [output] = omni.generate(PROMPTS["text"], params)
        assert len(calls) == count, name
        waves[name] = output.audio
        assert (output.metrics["token2wav"].cached_tokens > 0) == (name != "Bob")
    assert torch.equal(waves["Eve"], waves["Ada"]) and not torch.equal(waves["Bob"], waves["Ada"])
    omni.cache.check()
    omni.close()


def test_a_streams_text_grows_and_its_last_output_is_complete(omni: Omni, oracle: Any) -> None:
    outputs = list(omni.stream(PROMPTS["text"], ADA))
    counts = [len(output.token_ids) for output in outputs]
    assert counts == sorted(counts) and counts[0] < WORDS
    assert not outputs[0].finished and outputs[0].finish_reason is None
    check(outputs[-1], oracle("text"))


def test_an_abandoned_stream_holds_nothing(omni: Omni) -> None:
    stream = omni.stream(PROMPTS["both"], ADA)
    next(stream)
    stream.close()
    assert not omni.pipeline.has_unfinished
    assert omni.reset_cache()
    assert omni.cache.stats.entries == 0


def test_text_without_audio_needs_no_talker(omni: Omni, oracle: Any) -> None:
    [output] = omni.generate(PROMPTS["image"], OmniParams(text=TEXT, audio=False))
    assert output.token_ids == oracle("image")[0]
    assert output.metrics.keys() == {"thinker"}
    assert len(output.audio) == len(output.codes) == 0


def test_one_placeholder_for_each_item_is_enough(omni: Omni, oracle: Any) -> None:
    prompt = [5, 6, VISION_START, IMAGE, VISION_END, 8, AUDIO_START, AUDIO, AUDIO_END, 9]
    short = {"prompt_token_ids": prompt, "features": PROMPTS["both"]["features"]}
    check(omni.generate(short, ADA)[0], oracle("both"))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"prompt_token_ids": [5, IMAGE, IMAGE], "features": image(1)}, "2 image placeholders"),
        ({"prompt_token_ids": [5, IMAGE]}, "1 image placeholders; allowed: 0"),
        ({"prompt_token_ids": [5], "features": {"video": noise(1, 2)}}, "have the key 'video'"),
        ({"prompt_token_ids": [5, *LOOK], "features": {"pixel_values": noise(1, 64, 96)}}, "grid"),
        (
            {"prompt_token_ids": [IMAGE] * 8 + [5] + [IMAGE] * 8, "features": image(1)},
            "have a gap",
        ),
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_token_ids": [5] * 600}, "num_blocks|max_model_len"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(
    omni: Omni, prompt: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        omni.generate([PROMPTS["text"], prompt], ADA)


def test_an_unknown_voice_is_refused(omni: Omni) -> None:
    with pytest.raises(RequestError, match="no voice 'Eve'; allowed: Ada, Bob"):
        omni.generate(PROMPTS["text"], OmniParams(voice="Eve"))
    with pytest.raises(RequestError, match="allowed: 1 for a spoken"):
        omni.generate(PROMPTS["text"], OmniParams(text=SamplingParams(n=2)))


def test_failed_speech_ends_with_an_error_that_names_the_stage(
    omni: Omni, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Tensor:
        raise ValueError("no sound")

    with monkeypatch.context() as patch:
        patch.setattr("headstart.omni.qwen2_5.Qwen25Omni.make_wave", fail)
        with pytest.raises(EngineError, match="stage 'token2wav': ValueError: no sound"):
            omni.generate(PROMPTS["text"], ADA)
    check(omni.generate(PROMPTS["text"], ADA)[0], oracle("text"))


def test_a_checkpoint_without_voices_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "spk_dict.pt":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(DamagedModelError, match=r"no spk_dict\.pt"):
        Omni(tmp_path)


def test_raw_sounds_and_images(omni: Omni, tmp_path: Path) -> None:
    waves = [np.sin(np.arange(length) * 0.3) for length in (8000, 5000)]
    picture = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    prompt = {
        "prompt": "<|audio_bos|><|AUDIO|><|audio_eos|>and<|audio_bos|><|AUDIO|><|audio_eos|>with "
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "audio": waves,
        "images": [picture],
    }
    just_text = OmniParams(text=TEXT, audio=False)
    [first] = omni.generate(prompt, just_text)
    encoded = omni.cache.stats.written
    [second] = omni.generate(prompt, just_text)
    length = first.metrics["thinker"].prompt_tokens
    assert length > 16 + 12 + 7  # a picture of 8 by 8 patches, sounds of half a second and less
    assert second.token_ids == first.token_ids
    assert second.metrics["thinker"].cached_tokens == min(length // 4 * 4, length - 1)
    assert omni.cache.stats.written == encoded
    [other] = omni.generate(prompt | {"audio": waves[::-1]}, just_text)
    assert other.metrics["thinker"].cached_tokens == 0
    for sound, complaint in (
        ([[1.0]], r"shape \[1, 1\]; allowed: \[samples\]"),
        ("x", "a sound is 'x', a str"),
        ([math.nan], "not finite"),
    ):
        with pytest.raises(RequestError, match=complaint):
            omni.generate(prompt | {"audio": [sound]}, just_text)
    with pytest.raises(RequestError, match="images cannot be read"):
        omni.generate(prompt | {"images": [5]}, just_text)
    # transformers' processor opened the path and fetched the address.
    for image in ("http://127.0.0.1:9/secret.png", str(tmp_path), tmp_path):
        with pytest.raises(RequestError, match="allowed: a Pillow image or an array"):
            omni.generate(prompt | {"images": [image]}, just_text)
    with pytest.raises(RequestError, match="a prompt is a int"):
        omni.generate(5)  # type: ignore[arg-type]
