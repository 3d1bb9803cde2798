"""Values that programs read from vLLM's engine."""

import asyncio
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headstart import LLM, AsyncLLM, LLMEngine, RequestError, SamplingParams
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = save_smallest(
        tmp_path_factory.mktemp("model"), tokenizer=TINY_TOKENIZERS["byte_level"]()
    )
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = make_llm(folder, num_blocks=24, max_model_len=48, seed=3, max_num_seqs=5)
    yield llm
    llm.close()


def test_attributes_of_the_view(llm: LLM, folder: Path) -> None:
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


def test_methods_of_the_view(llm: LLM) -> None:
    llm.generate([5] * 40, SamplingParams(max_tokens=1), use_tqdm=False)
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    assert [metric.name for metric in engine.get_metrics()] == [
        metric.name for metric in llm.get_metrics()
    ]
    assert engine.reset_prefix_cache()
    [output] = llm.generate([5] * 40, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.num_cached_tokens == 0
    with pytest.raises(RequestError, match=r"^reset_running_requests is 5"):
        engine.reset_prefix_cache(5)  # type: ignore[arg-type]


def test_the_configuration_is_a_plain_value(llm: LLM) -> None:
    config = llm.llm_engine.vllm_config
    assert copy.copy(config) == pickle.loads(pickle.dumps(config)) == config
    assert config.speculative_config is not None and llm.llm_engine.kv_transfer_config is None
    assert (config.model_config.quantization, llm.model_config.runner_type) == (None, "generate")
    with pytest.raises(AttributeError):
        llm.model_config.max_model_len = 7  # type: ignore[misc]
    assert not hasattr(llm.model_config, "errored")


@pytest.mark.parametrize("name", ["config", "max_model_len", "num_blocks", "vllm_config", "tiers"])
def test_facts_of_an_engine_cannot_be_set(llm: LLM, name: str) -> None:
    before = getattr(llm, name)
    with pytest.raises(AttributeError):
        setattr(llm, name, 7)
    assert getattr(llm, name) is before


def test_other_engines_have_the_view(folder: Path) -> None:
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
