"""Wrong prompts, sounds and parameters are refused in one sentence, before any work."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
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

JUST_TEXT = OmniParams(text=SamplingParams(temperature=0, max_tokens=2), audio=False)
WAVE = np.sin(np.arange(8000) * 0.3)
HEARD = {"prompt_token_ids": [5, AUDIO_START, AUDIO, AUDIO_END, 9]}
SEEN = {"prompt_token_ids": [5, VISION_START, IMAGE, VISION_END, 9]}
MASK = torch.ones(1, 50, dtype=torch.int64)
SOUND = {"input_features": torch.ones(1, 16, 50), "feature_attention_mask": MASK}
GRID = torch.tensor([[1, 8, 8]])
PICTURE = {"pixel_values": torch.ones(64, 96), "image_grid_thw": GRID}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen25(tmp_path_factory.mktemp("qwen25"))


@pytest.fixture(scope="module")
def omni(folder: Path) -> Iterator[Omni]:
    omni = Omni(folder)
    yield omni
    omni.close()


def answer(omni: Omni, prompt: Any) -> OmniOutput:
    assert omni.reset_cache()
    [output] = omni.generate(prompt, JUST_TEXT)
    return output


@pytest.mark.parametrize("params", [SamplingParams(), "x", {"seed": 3}])
def test_parameters_of_a_wrong_type_are_refused(omni: Omni, params: Any) -> None:
    for call in (omni.generate, omni.stream):
        with pytest.raises(RequestError, match=r"the parameters are .*; allowed: an OmniParams"):
            call([5], params)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"text": 3}, "text is 3; allowed: a SamplingParams or None"),
        ({"speech": "x"}, "speech is 'x'; allowed: a SamplingParams or None"),
        ({"voice": ["Ada"]}, "voice is ['Ada']; allowed: a string or None"),
        ({"audio": "x"}, "audio is 'x'; allowed: True or False"),
        ({"seed": "x"}, "seed is 'x'; allowed: a whole number from"),
        ({"seed": 2**70}, "seed is 1180591620717411303424; allowed: a whole number from"),
    ],
)
def test_a_parameter_outside_its_range_is_refused(options: dict[str, Any], complaint: str) -> None:
    """Regression: a seed of type str failed only in the vocoder, at the end."""
    with pytest.raises(RequestError, match=re.escape(complaint)):
        OmniParams(**options)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"prompt": "a", "audios": []}, "has the keys ['prompt', 'audios']; allowed: 'prompt' or"),
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data']; allowed: 'prompt' or"),
        ({"audio": [WAVE]}, "has the keys ['audio']; allowed: 'prompt' or"),
        (HEARD | {"features": 5}, "features are 5, a int; allowed: a mapping of tensors"),
        (HEARD | {"features": "ab"}, "features are 'ab', a str; allowed"),
        (HEARD | {"features": {5: MASK}}, "features have the key 5; allowed: input_features"),
        (HEARD | {"features": SOUND | {"input_features": 3}}, "input_features is 3; allowed"),
        (HEARD | {"features": {"input_features": SOUND["input_features"]}}, "need a feature_"),
        (HEARD | {"features": SOUND | {"feature_attention_mask": MASK * 5}}, "of zeros and ones"),
        (HEARD | {"features": SOUND | {"feature_attention_mask": MASK[0]}}, "the shape [50]"),
        (HEARD | {"features": SOUND | {"feature_attention_mask": MASK * 0}}, "sound of 0 frames"),
        (
            HEARD | {"features": SOUND | {"feature_attention_mask": MASK.float()}},
            "type torch.float32; allowed: [sounds, frames] of integers",
        ),
        (
            HEARD | {"features": SOUND | {"input_features": torch.full((1, 16, 50), torch.inf)}},
            "input_features has values that are not finite",
        ),
        (
            HEARD
            | {
                "prompt_token_ids": [AUDIO] * 12,
                "features": SOUND | {"input_features": torch.ones(1, 5, 50)},
            },
            "the audio at token 0 cannot be encoded: RuntimeError",
        ),
        (SEEN | {"features": PICTURE | {"image_grid_thw": GRID[0]}}, "the shape [3]"),
        (SEEN | {"features": PICTURE | {"image_grid_thw": -GRID}}, "is [[-1, -8, -8]]; allowed"),
        (
            SEEN | {"features": PICTURE | {"image_grid_thw": torch.tensor([[1, 64, 1]])}},
            "with multiples of 2 as height and width",
        ),
        (HEARD | {"audio": [WAVE], "features": SOUND}, "has audio, and features of audio"),
        (HEARD | {"audio": 5}, "a sound is 5, a int; allowed: an array [samples] of floats"),
        (HEARD | {"audio": "x.wav"}, "a sound is 'x.wav', a str; allowed"),
        (HEARD | {"audio": {"array": WAVE}}, "a dict; allowed"),
        (HEARD | {"audio": [(WAVE, 16000)]}, "a tuple; allowed"),
        (HEARD | {"audio": [0.1, 0.2]}, "a sound has the shape []; allowed: [samples]"),
        (HEARD | {"audio": WAVE[None]}, "a sound has the shape [1, 8000]; allowed: [samples]"),
        (HEARD | {"audio": WAVE[:0]}, "a sound has the shape [0]; allowed: [samples]"),
        (HEARD | {"audio": WAVE[:1]}, "a sound of 1 frames is too short"),
        (HEARD | {"audio": WAVE + 1j}, "a sound is array(["),
        (HEARD | {"audio": WAVE > 0}, "a sound is array(["),
        (HEARD | {"audio": np.arange(8000)}, "of floats from -1 to 1, int16 or int32"),
        (HEARD | {"audio": np.array([None])}, "dtype=object), a ndarray; allowed"),
        (HEARD | {"audio": WAVE * 1e300}, "a sound has samples that are not finite"),
        (HEARD | {"audio": WAVE * 1e30}, "a sound has samples of up to 1e+30; allowed: -1 to 1"),
        (SEEN | {"images": 5}, "images cannot be read"),
        (SEEN | {"images": "x.png"}, "an image is a str; allowed: a Pillow image or an array"),
    ],
)
def test_an_invalid_prompt_is_refused(omni: Omni, prompt: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=re.escape(complaint)):
        omni.generate([[5, 6], prompt], JUST_TEXT)
    assert not omni.pipeline.has_unfinished


@pytest.mark.parametrize(
    "sound",
    [
        WAVE.astype(np.float32),
        [WAVE],
        (list(WAVE),),
        torch.tensor(WAVE, requires_grad=True),
        np.ascontiguousarray(WAVE, dtype=">f8"),
    ],
    ids=["array", "list", "numbers", "tensor", "big endian"],
)
def test_every_type_of_array_gives_the_same_sound(omni: Omni, sound: Any) -> None:
    wanted = answer(omni, HEARD | {"audio": [WAVE]})
    written = omni.cache.stats.written
    [output] = omni.generate(HEARD | {"audio": sound}, JUST_TEXT)
    assert output.token_ids == wanted.token_ids
    assert omni.cache.stats.written == written  # known by its content


@pytest.mark.parametrize(("kind", "largest"), [("int16", 2**15), (">i2", 2**15), ("int32", 2**31)])
def test_integer_samples_are_scaled(omni: Omni, kind: str, largest: int) -> None:
    """Regression: they were used unscaled, 32,768 times as loud."""
    whole = np.round(WAVE[:4000] * (largest - 1)).astype(kind)
    answer(omni, HEARD | {"audio": whole.astype(np.float32) / largest})
    written = omni.cache.stats.written
    for same in (whole, torch.from_numpy(whole.astype(whole.dtype.newbyteorder("=")))):
        omni.generate(HEARD | {"audio": same}, JUST_TEXT)
        assert omni.cache.stats.written == written


def test_an_image_is_rotated_upright_and_put_on_white(omni: Omni) -> None:
    """Regression: the model saw the colors of transparent pixels."""
    clear, white = Image.new("RGBA", (64, 32), (0, 0, 0, 0)), Image.new("RGB", (32, 64), "white")
    clear.getexif()[0x0112] = 6  # to be turned by 90 degrees
    answer(omni, SEEN | {"images": white})
    written = omni.cache.stats.written
    omni.generate(SEEN | {"images": clear}, JUST_TEXT)
    assert omni.cache.stats.written == written  # known by its content


def test_one_image_needs_no_list(omni: Omni) -> None:
    picture = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    wanted = answer(omni, SEEN | {"images": [picture]})
    for same in (picture, np.asarray(picture)):
        assert answer(omni, SEEN | {"images": same}).token_ids == wanted.token_ids
    none = {"audio": None, "images": [], "features": None}
    assert answer(omni, {"prompt_token_ids": [5, 6]} | none).token_ids


def test_an_invalid_call_is_refused(omni: Omni) -> None:
    before = answer(omni, [5, 6]).token_ids
    with pytest.raises(RequestError, match="audio is 'n'; allowed: True or False"):
        omni.generate([5], changed("n"))
    assert not omni.pipeline.has_unfinished
    omni.cache.check()
    assert answer(omni, [5, 6]).token_ids == before


def changed(audio: Any) -> OmniParams:
    params = replace(JUST_TEXT)
    params.audio = audio
    return params


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": []}, "dtype is []; allowed: auto, float32"),
        ({"dtype": np.array([[1], [2]])}, "dtype is array([[1], [2]]); allowed: auto"),
        ({"device": None}, "device is None; allowed: a string such as cpu or cuda"),
        ({"device": "gpu"}, "device is 'gpu', which torch cannot use here"),
    ],
)
def test_options_of_a_wrong_type_are_refused(
    folder: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        Omni(folder, **options)
    assert "\n" not in str(caught.value)
