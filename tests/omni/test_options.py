"""Each engine option in `Omni(..., options=...)` applies to the stages, or is refused."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError
from headstart.omni.engine_stage import EngineStage
from headstart.omni.omni import Omni
from headstart.omni.params import OmniParams
from tests.omni.tiny_omni import save_qwen25
from tests.omni.tiny_qwen3 import save_qwen3

TAKEN: dict[str, Any] = {
    "enable_prefix_caching": False,
    "block_size": 8,
    "num_blocks": 33,
    "kv_cache_memory": 1 << 20,
    "kv_cache_fraction": 0.1,
    "kv_cache_dtype": "int8",
    "max_model_len": 99,
    "max_num_batched_tokens": 77,
    "max_num_seqs": 5,
    "max_bypassed": 3,
    "speculation": 0,
    "num_states": 4,
    "num_window_blocks": 5,
    "eviction": "lru",
    "deduplicate": False,
    "partial_hits": False,
    "share_attention": False,
    "deterministic": True,
    "seed": 7,
    "debug": True,
}
REFUSED: dict[str, Any] = {
    "dtype": "float32",
    "weights": "int8",
    "device": "cpu",
    "partial_hits": True,
    "encoder_cache_rows": 100,
    "max_images": 1,
    "max_image_pixels": 1000,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
}
OF_THE_PROCESS = {"num_threads"}
OF_STORES = {"cache_dir", "cache_dir_bytes", "cache_words", "remote_cache"}
"""Taken for all stages together: `test_restart.py`."""
GRAPH = """
collects = ["thinker.tokens", "talker.tokens", "token2wav.audio"]
[stages.thinker]
gives = {{ spoken = "token" }}
options = {{ {thinker} }}
[stages.talker]
takes = ["thinker.spoken"]
[stages.token2wav]
autoregressive = false
takes = ["talker.tokens"]
gives = {{ audio = "request" }}
options = {{ {token2wav} }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen25(tmp_path_factory.mktemp("options"))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_option_is_either_accepted_or_refused() -> None:
    assert TAKEN.keys() | REFUSED.keys() | OF_THE_PROCESS | OF_STORES == {
        field.name for field in fields(EngineConfig)
    }


def test_options_reach_the_engines_of_all_stages(folder: Path) -> None:
    omni = Omni(folder, options=TAKEN)
    for name in ("thinker", "talker"):
        stage = omni.pipeline.stages[name]
        assert isinstance(stage, EngineStage)
        assert {name: getattr(stage.engine.config, name) for name in TAKEN} == TAKEN
    omni.close()


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_effect_is_refused_before_the_model_is_read(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Omni("no such folder", options={name: REFUSED[name]})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"blocks": 3}, "unknown option blocks"),
        ({"block_size": 3}, "block_size is 3"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching is 0"),
    ],
)
def test_invalid_options_are_refused_before_the_model_is_read(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Omni("no such folder", options=options)


@pytest.mark.parametrize("stage", ["thinker", "token2wav"])
@pytest.mark.parametrize(
    "option", ["enable_prefix_caching = false", "num_threads = 1", "cache_dir = 'kept'"]
)
def test_an_option_at_the_wrong_place_of_a_graph_is_refused(
    folder: Path, stage: str, option: str
) -> None:
    graph = GRAPH.format(**{"thinker": "", "token2wav": "", stage: option})
    with pytest.raises(ConfigError, match=option.split(" ")[0]):
        Omni(folder, pipeline=graph)


def test_threads_are_set_for_the_process(folder: Path, threads: None) -> None:
    wanted = 3 - min(torch.get_num_threads(), 2)
    Omni(folder, options={"num_threads": wanted, "num_blocks": 16}).close()
    assert torch.get_num_threads() == wanted


@pytest.mark.parametrize("save", [save_qwen25, save_qwen3])
def test_without_prefix_caching_no_stage_stores_anything(save: Any, tmp_path: Path) -> None:
    """Regression: the option was accepted, but the second prompt still hit."""
    options = {"num_blocks": 64, "block_size": 4, "enable_prefix_caching": False}
    omni = Omni(save(tmp_path), options=options)
    few = SamplingParams(temperature=0, max_tokens=4)
    prompt = "<|im_start|><|user|>A prefix.<|im_end|>\n<|im_start|><|assistant|>\n"
    for _ in range(2):
        [output] = omni.generate(prompt, OmniParams(text=few, speech=few))
        assert not any(metrics.cached_tokens for metrics in output.metrics.values())
    assert omni.cache.stats.written == 0
    omni.close()
