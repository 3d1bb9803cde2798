"""A restarted pipeline has the hits of its stages before, and the same answers."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.small_models.omni import write_omni
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError
from headstart.omni.engine_stage import EngineStage
from headstart.omni.media import PlacedItem
from headstart.omni.omni import Omni
from headstart.omni.output_cache import ENTRY_BYTES
from headstart.omni.params import OmniOutput, OmniParams
from headstart.omni.qwen2_5 import Qwen25Omni
from headstart.tiers.files import SlotFile
from tests.omni.test_qwen2_5 import PROMPTS
from tests.omni.test_qwen3_omni import ANSWER, turn
from tests.omni.tiny_omni import TINY, save_qwen25
from tests.omni.tiny_qwen3 import save_qwen3

pytestmark = pytest.mark.usefixtures("loads_always")

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PARAMS = OmniParams(text=GREEDY, speech=GREEDY, voice="Ada", seed=3)
PROMPT = list(range(20, 51))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen25(tmp_path_factory.mktemp("model"))


@contextmanager
def opened(model: Path, folder: Path | None, **more: Any) -> Iterator[Omni]:
    options = {
        "num_blocks": 64,
        "block_size": 4,
        "debug": True,
        "cache_dir": folder and str(folder),
    }
    omni = Omni(model, options=options, **more)
    try:
        yield omni
    finally:
        omni.close()


def ask(omni: Omni, salt: str | None = None, params: OmniParams = PARAMS) -> OmniOutput:
    [output] = omni.generate({"prompt_token_ids": PROMPT}, params, cache_salt=salt)
    omni.cache.check()
    return output


def skipped(output: OmniOutput) -> dict[str, int]:
    """Return the tokens that each stage did not compute."""
    return {name: output.metrics[name].cached_tokens for name in ("thinker", "talker")}


def result_of(output: OmniOutput) -> tuple[Any, ...]:
    return output.token_ids, output.codes.tolist(), output.audio.tolist()


NOTHING = {"thinker": 0, "talker": 0}
ALL = {"thinker": 28, "talker": 28}


def test_a_second_process_skips_the_firsts_tokens(model: Path, tmp_path: Path) -> None:
    with opened(model, None) as omni:
        alone = ask(omni)
        assert skipped(alone) == NOTHING
        again = ask(omni)
    with opened(model, tmp_path) as omni:
        assert skipped(ask(omni)) == NOTHING
    with opened(model, tmp_path) as omni:
        restarted = ask(omni)
        assert skipped(restarted) == skipped(again)
        assert skipped(restarted) == ALL
        assert [restarted.metrics[name].loaded_tokens for name in ALL] == [28, 28]
        assert ask(omni).metrics["thinker"].loaded_tokens == 0
        assert restarted.metrics["thinker"].hit_rows == {"spoken": 28}
    assert result_of(restarted) == result_of(again) == result_of(alone)


def test_frames_of_several_codes_are_the_same_after_a_restart(tmp_path: Path) -> None:
    model = save_qwen3(tmp_path / "model")
    speech = SamplingParams(temperature=0, max_tokens=12)
    params = OmniParams(text=GREEDY, speech=speech, voice="ada")
    prompt = {"prompt_token_ids": [*turn("user", *range(20, 45)), *ANSWER]}
    results = []
    for _ in range(2):
        with opened(model, tmp_path / "kept") as omni:
            [output] = omni.generate(prompt, params)
            again = omni.generate(prompt, params)[0]
            results.append((skipped(output), result_of(output)))
            assert result_of(again) == result_of(output)
    assert results[0][0] == NOTHING
    assert results[1][0] == skipped(again) and min(results[1][0].values()) >= 28
    assert results[0][1] == results[1][1]


def test_another_voice_hits_no_talker_blocks_after_a_restart(model: Path, tmp_path: Path) -> None:
    bob = OmniParams(text=GREEDY, speech=GREEDY, voice="Bob", seed=3)
    with opened(model, None) as omni:
        alone = ask(omni, params=bob)
    with opened(model, tmp_path) as omni:
        ask(omni)
    with opened(model, tmp_path) as omni:
        output = ask(omni, params=bob)
        assert skipped(output) == {"thinker": 28, "talker": 0}
        assert result_of(output) == result_of(alone)


def test_images_and_sounds_are_not_encoded_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = Qwen25Omni.encode, []

    def count(of_model: Qwen25Omni, placed: PlacedItem) -> Tensor:
        encoded.append(placed.kind)
        return encode(of_model, placed)

    monkeypatch.setattr(Qwen25Omni, "encode", count)
    answers = []
    for expected, skips in ((["image", "audio"], False), ([], True)):
        with opened(model, tmp_path) as omni:
            [output] = omni.generate(PROMPTS["both"], PARAMS, cache_salt="a")
            assert encoded == expected
            assert skipped(output) == ({"thinker": 32, "talker": 36} if skips else NOTHING)
            answers.append(result_of(output))
            encoded.clear()
    assert answers[0] == answers[1]
    with opened(model, tmp_path) as omni:
        omni.generate(PROMPTS["both"], PARAMS, cache_salt="b")
        assert encoded == ["image", "audio"], "another tenant encodes it again"


def test_an_embedding_with_a_nan_is_not_stored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Qwen25Omni.encode
    with monkeypatch.context() as patch, opened(model, tmp_path) as omni:
        patch.setattr(Qwen25Omni, "encode", lambda *args: encode(*args) * torch.nan)
        with pytest.raises(EngineError):
            omni.generate(PROMPTS["image"], PARAMS)
    with opened(model, None) as omni:
        [alone] = omni.generate(PROMPTS["image"], PARAMS)
    with opened(model, tmp_path) as omni:
        [output] = omni.generate(PROMPTS["image"], PARAMS)
        assert skipped(output) == NOTHING and result_of(output) == result_of(alone)


def test_other_weights_under_the_same_path_hit_nothing(tmp_path: Path) -> None:
    model, cache_dir = tmp_path / "model", tmp_path / "kept"
    save_qwen25(model)
    with opened(model, cache_dir) as omni:
        ask(omni)
    write_omni(model, TINY, seed=12)
    with opened(model, None) as omni:
        other = ask(omni)
    with opened(model, cache_dir) as omni:
        output = ask(omni)
        assert skipped(output) == NOTHING and result_of(output) == result_of(other)


def test_other_weights_of_an_encoder_are_another_model(tmp_path: Path) -> None:
    """The thinker's K/V depend on the encoder's output, although its weights are the same."""
    model, cache_dir = save_qwen25(tmp_path / "model"), tmp_path / "kept"
    with opened(model, cache_dir) as omni:
        [first] = omni.generate(PROMPTS["sound"], PARAMS)
    weights = load_file(file := model / "model.safetensors")
    for name in weights:
        if "audio_tower.layers" in name:
            weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, file, {"format": "pt"})
    with opened(model, None) as omni:
        [other] = omni.generate(PROMPTS["sound"], PARAMS)
    assert result_of(other) != result_of(first)
    with opened(model, cache_dir) as omni:
        [output] = omni.generate(PROMPTS["sound"], PARAMS)
        assert skipped(output) == NOTHING and result_of(output) == result_of(other)


def test_salts_share_nothing_after_a_restart(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as omni:
        first = ask(omni, "a")
    with opened(model, tmp_path) as omni:
        for salt, hit in (("b", NOTHING), (None, NOTHING), ("a", ALL)):
            output = ask(omni, salt)
            assert skipped(output) == hit and result_of(output) == result_of(first)


@pytest.mark.parametrize("kept_rows", [0, 3], ids=["none", "few"])
def test_rows_that_do_not_fit_are_a_miss(model: Path, tmp_path: Path, kept_rows: int) -> None:
    """K/V without their rows are not hit, and the answer is the same."""
    with opened(model, tmp_path) as omni:
        first = ask(omni)
    room = kept_rows * (4 * 64 * 4 + 2 * ENTRY_BYTES)
    with opened(model, tmp_path, cache_bytes=room) as omni:
        for _ in range(2):
            output = ask(omni)
            assert output.metrics["thinker"].cached_tokens <= 4 * kept_rows
            assert result_of(output) == result_of(first)


def test_blocks_whose_rows_were_evicted_are_not_saved(model: Path, tmp_path: Path) -> None:
    """Such a block is not stored, as a restarted pipeline could not use it."""
    with opened(model, tmp_path, cache_bytes=0) as omni:
        first = ask(omni)
        stage = omni.pipeline.stages["thinker"]
        assert isinstance(stage, EngineStage) and stage.engine.tiers is not None
        assert stage.engine.tiers.flush(30)
        stats = stage.engine.tiers.stats
        assert (stats.saved_blocks, stats.dropped_blocks) == (0, 9)
    with opened(model, tmp_path) as omni:
        output = ask(omni)
        assert output.metrics["thinker"].cached_tokens == 0
        assert result_of(output) == result_of(first)


def test_a_damaged_store_only_costs_time(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as omni:
        first = ask(omni)
    for damage in (lambda data: data[: len(data) // 2], lambda data: bytes(len(data))):
        for file in [*tmp_path.glob("*.kv"), *tmp_path.glob("index*")]:
            file.write_bytes(damage(file.read_bytes()))
        with opened(model, tmp_path) as omni:
            output = ask(omni)
            assert (
                result_of(output) == result_of(first)
                and output.metrics["thinker"].cached_tokens < 28
            )
        with opened(model, tmp_path) as omni:
            assert skipped(ask(omni)) == ALL, "it was computed and stored again"


@pytest.mark.parametrize("method", ["find", "load", "save"])
def test_a_failing_store_is_a_miss(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The answer is the same with a full or missing disk."""
    with opened(model, tmp_path) as omni:
        first = ask(omni)
    if method == "save":
        shutil.rmtree(tmp_path)

    def fail(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SlotFile, "write" if method == "save" else "read", fail)
    with opened(model, tmp_path) as omni:
        for _ in range(2):
            assert result_of(ask(omni)) == result_of(first)
