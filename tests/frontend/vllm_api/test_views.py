"""What programs read of vLLM's engine: the values that hold, or a sentence."""

import asyncio
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, AsyncLLM, HeadstartError, LLMEngine, RequestError, SamplingParams
from headstart.frontend.vllm_api.configs import CONFIGS
from headstart.frontend.vllm_api.members import ENGINE_VIEW
from headstart.frontend.vllm_api.rows import Verdict
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = save_smallest(
        tmp_path_factory.mktemp("model"), tokenizer=TINY_TOKENIZERS["byte_level"]()
    )
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = make_llm(folder, num_blocks=24, max_model_len=48, seed=3, max_num_seqs=5)
    yield made
    made.close()


def test_what_programs_read(llm: LLM, folder: Path) -> None:
    """`llm.llm_engine` was refused as a whole."""
    engine = llm.llm_engine
    model = engine.model_config
    assert (model.max_model_len, model.seed, model.dtype) == (48, 3, torch.float32)
    assert (model.model, model.runner_type, model.is_multimodal_model) == (
        str(folder),
        "generate",
        False,
    )
    assert model.hf_config.vocab_size == model.get_vocab_size() == model.vocab_size
    assert model.hf_text_config.num_hidden_layers >= 1
    assert engine.vllm_config.model_config == llm.model_config == model
    assert engine.cache_config.num_gpu_blocks == 24
    assert engine.vllm_config.cache_config.block_size == llm.engine.config.block_size
    assert engine.vllm_config.scheduler_config.max_num_seqs == 5
    assert engine.vllm_config.parallel_config.tensor_parallel_size == 1
    assert engine.get_tokenizer() is engine.tokenizer is llm.get_tokenizer()


def test_what_the_view_does(llm: LLM) -> None:
    llm.generate([5] * 40, SamplingParams(max_tokens=1), use_tqdm=False)
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    assert [one.name for one in engine.get_metrics()] == [one.name for one in llm.get_metrics()]
    assert engine.reset_prefix_cache()
    [output] = llm.generate([5] * 40, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.num_cached_tokens == 0
    with pytest.raises(RequestError, match=r"^lora_request is 5; allowed: a LoRARequest$"):
        engine.add_lora(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^reset_running_requests is 5"):
        engine.reset_prefix_cache(5)  # type: ignore[arg-type]


def test_every_row_is_what_it_says(llm: LLM) -> None:
    view = llm.llm_engine
    parts: dict[str, Any] = {"vllm_config": view.vllm_config} | {
        name: part for name, part in vars(view.vllm_config).items() if name in CONFIGS
    }
    assert set(parts) == set(CONFIGS)
    for owner, names in CONFIGS.items():
        own = [one for one in dir(parts[owner]) if not one.startswith("_")]
        assert set(own) == {one for one, row in names.rows.items() if row.verdict is Verdict.WORKS}
        for name in names.rows:
            assert hasattr(parts[owner], name) is (name in own)
        with pytest.raises(RequestError, match=f"^{owner} knows no 'max_modle_len'"):
            parts[owner].max_modle_len  # noqa: B018
    for name, row in ENGINE_VIEW.rows.items():
        if row.verdict is Verdict.WORKS:
            assert hasattr(view, name)
            continue
        with pytest.raises(RequestError) as caught:
            getattr(view, name)
        assert str(caught.value) == f"LLM.llm_engine has no {name}: {row.note}"
        assert not hasattr(view, name)


def test_nothing_can_be_changed(llm: LLM) -> None:
    """It was a bare FrozenInstanceError."""
    with pytest.raises(HeadstartError, match=r"^model_config\.max_model_len tells what ho") as e:
        llm.model_config.max_model_len = 7
    assert isinstance(e.value, AttributeError)
    with pytest.raises(HeadstartError, match=r"^vllm_config\.lora_config tells what holds"):
        llm.llm_engine.vllm_config.lora_config = None
    with pytest.raises(HeadstartError, match=r"^cache_config\.block_size tells what holds"):
        del llm.llm_engine.cache_config.block_size
    with pytest.raises(HeadstartError, match=r"^LLM\.llm_engine\.vllm_config tells what holds"):
        llm.llm_engine.vllm_config = None  # type: ignore[misc, assignment]
    assert llm.model_config.max_model_len == 48


def test_what_is_copied_and_what_is_not(llm: LLM) -> None:
    """A copy of an engine was a bare TypeError, of the lock that is in it."""
    config = llm.llm_engine.vllm_config
    assert (
        copy.copy(config) == copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    )
    for one in (llm, llm.llm_engine, llm.stream([5])):
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                HeadstartError, match="is neither copied nor pickled: hand over"
            ) as e:
                take(one)
            assert isinstance(e.value, TypeError)


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        ("llm_engine", "stats", "has no stats: nothing is logged: read the outputs' `metrics`"),
        ("llm_engine", "encode", "has no encode: models here generate"),
        ("llm_engine", "lora_config", "has no lora_config: read it of `vllm_config`"),
        ("llm_engine", "step_all", "knows no 'step_all'; it has engine, get_tokenizer, "),
        ("model_config", "get_hidden_size", "has no get_hidden_size: read it of `hf_text_config`"),
        ("model_config", "errored", "knows no 'errored'"),
        ("model_config", "max_modle_len", "knows no 'max_modle_len'; the nearest is max_model_len"),
    ],
)
def test_a_hint_is_near_or_says_what_to_do(llm: LLM, owner: str, name: str, said: str) -> None:
    """Asked for `errored`, the nearest was `seed`; for `encode`, `engine_core`."""
    with pytest.raises(RequestError) as caught:
        getattr(getattr(llm, owner), name)
    shown = "LLM.llm_engine" if owner == "llm_engine" else owner
    assert str(caught.value).startswith(f"{shown} {said}")
    if "nearest" not in said:
        assert "nearest" not in str(caught.value)


def test_the_other_engines_have_it_too(folder: Path) -> None:
    engine = LLMEngine(folder, dtype="float32", num_blocks=24, max_model_len=48)
    assert engine.vllm_config.model_config == engine.model_config
    assert engine.model_config.max_model_len == 48
    engine.close()

    async def read() -> None:
        llm = AsyncLLM(folder, dtype="float32", num_blocks=24, max_num_batched_tokens=64)
        assert llm.scheduler_config.max_num_batched_tokens == 64
        assert llm.model_config.hf_config.vocab_size == llm.vllm_config.model_config.vocab_size
        llm.close()

    asyncio.run(read())
