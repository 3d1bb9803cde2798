"""A restarted pipeline skips what its stages skipped before, and answers the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headstart.engine.params import SamplingParams
from headstart.omni.omni import Omni
from headstart.omni.params import OmniOutput, OmniParams
from tests.omni.tiny_omni import save_qwen25

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


def ask(omni: Omni, tokens: list[int] = PROMPT, salt: str | None = None) -> OmniOutput:
    [output] = omni.generate({"prompt_token_ids": tokens}, PARAMS, cache_salt=salt)
    return output


def skipped(output: OmniOutput) -> dict[str, int]:
    """Tokens that each stage did not compute."""
    return {name: output.metrics[name].cached_tokens for name in ("thinker", "talker")}


def says(output: OmniOutput) -> tuple[Any, ...]:
    return output.token_ids, output.codes.tolist(), output.audio.tolist()


NOTHING = {"thinker": 0, "talker": 0}


def test_a_second_process_skips_what_the_first_computed(model: Path, tmp_path: Path) -> None:
    with opened(model, None) as omni:
        alone = ask(omni)
        assert skipped(alone) == NOTHING
        again = ask(omni)
    with opened(model, tmp_path) as omni:
        assert skipped(ask(omni)) == NOTHING
    with opened(model, tmp_path) as omni:
        restarted = ask(omni)
        assert skipped(restarted) == skipped(again)
        assert skipped(restarted) == {"thinker": 28, "talker": 28}
        assert restarted.metrics["thinker"].hit_rows == {"spoken": 28}
    assert says(restarted) == says(again) == says(alone)
