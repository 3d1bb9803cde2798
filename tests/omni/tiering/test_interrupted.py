"""Ctrl-C, or no memory, at any line of a pipeline that loads what it kept: nothing is wrong."""

import random
from collections.abc import Iterator

import pytest

import headstart.engine.tiering
import headstart.omni.kept_outputs
import headstart.omni.output_cache
from headstart.errors import HeadstartError
from headstart.omni.engine_stage import EngineStage
from headstart.omni.omni import Omni
from headstart.omni.params import OmniOutput
from tests.interruptions import Interruption
from tests.omni.test_interruptions import PARAMS, POINTS, PROMPTS, check_idle, said
from tests.omni.tiny_omni import save_qwen25

WITHIN = (headstart.engine.tiering, headstart.omni.kept_outputs, headstart.omni.output_cache)


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    """A pipeline whose store has all prompts."""
    kept = str(tmp_path_factory.mktemp("kept"))
    options = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 60, "cache_dir": kept}
    omni = Omni(save_qwen25(tmp_path_factory.mktemp("model")), options=options)
    omni.generate(PROMPTS, PARAMS)
    flush(omni)
    yield omni
    omni.close()


def flush(omni: Omni) -> None:
    """Have all that was computed saved, or the next prompts would find less."""
    for stage in omni.pipeline.stages.values():
        if isinstance(stage, EngineStage):
            assert stage.engine.tiers is not None and stage.engine.tiers.flush(30)


def ask(omni: Omni) -> list[OmniOutput]:
    """Both prompts, with nothing in memory."""
    assert omni.reset_cache()
    return omni.generate(PROMPTS, PARAMS)


def test_an_exception_at_any_line_that_loads_or_saves(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.engine.tiering.tiers.is_worth_loading", lambda *_: True)
    wanted = said(ask(omni))
    flush(omni)
    with Interruption(-1, None, *WITHIN) as counted:
        loaded = ask(omni)
    assert said(loaded) == wanted
    assert all(output.metrics["thinker"].hit_rows["spoken"] for output in loaded)
    chance = random.Random(3)
    places = sorted(set(counted.lines))
    assert len(places) > 200, "too little ran"
    for place in chance.sample(places, min(POINTS, len(places))):
        at = chance.choice([at for at, line in enumerate(counted.lines) if line == place])
        error = chance.choice([KeyboardInterrupt, MemoryError])
        flush(omni)
        assert omni.reset_cache()
        try:
            with Interruption(at, error("injected"), *WITHIN):
                omni.generate(PROMPTS, PARAMS)
        except (error, HeadstartError):
            pass
        omni.pipeline.abort("nothing")  # whatever call comes next
        check_idle(omni)
        assert said(omni.generate(PROMPTS, PARAMS)) == wanted, place
        assert said(ask(omni)) == wanted, place
        check_idle(omni)
