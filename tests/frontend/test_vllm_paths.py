"""vLLM's import paths under the name of headstart."""

import importlib
import subprocess
import sys

import pytest

import headstart
from headstart import envs
from headstart.utils import random_uuid
from tests.house.source import ROOT

PATHS = {
    "distributed": ["cleanup_dist_env_and_memory"],
    "distributed.parallel_state": ["cleanup_dist_env_and_memory"],
    "engine.arg_utils": ["AsyncEngineArgs", "EngineArgs"],
    "engine.async_llm_engine": ["AsyncLLMEngine"],
    "engine.llm_engine": ["LLMEngine"],
    "entrypoints": ["LLM"],
    "entrypoints.llm": ["LLM"],
    "inputs": ["PromptType", "TextPrompt", "TokensPrompt"],
    "inputs.data": ["PromptType", "TextPrompt", "TokensPrompt"],
    "inputs.llm": ["PromptType", "TextPrompt", "TokensPrompt"],
    "logger": ["init_logger"],
    "logprobs": ["Logprob"],
    "lora.request": ["LoRARequest"],
    "multimodal.utils": ["encode_image_base64"],
    "outputs": ["CompletionOutput", "Logprob", "RequestOutput"],
    "sampling_params": [
        "BeamSearchParams",
        "RequestOutputKind",
        "SamplingParams",
        "SamplingType",
        "StructuredOutputsParams",
    ],
    "sequence": ["Logprob"],
    "utils": ["FlexibleArgumentParser", "random_uuid"],
    "utils.argparse_utils": ["FlexibleArgumentParser"],
    "v1.engine.async_llm": ["AsyncLLM"],
    "v1.engine.llm_engine": ["LLMEngine"],
    "v1.metrics.reader": ["Counter", "Gauge", "Histogram", "Metric", "Vector"],
}


@pytest.mark.parametrize("path", PATHS)
def test_each_path_has_its_names(path: str) -> None:
    module = importlib.import_module(f"headstart.{path}")
    assert sorted(module.__all__) == PATHS[path]
    for name in PATHS[path]:
        value = getattr(module, name)
        assert value is getattr(headstart, name, value)


def test_every_public_name_can_be_imported() -> None:
    for name in headstart.__all__:
        assert getattr(headstart, name) is not None
    assert set(headstart.__all__) <= set(dir(headstart))


def test_unknown_names_raise_pythons_errors() -> None:
    for line in ("from headstart import PoolingParams", "from headstart.envs import VLLM_USE_V1"):
        with pytest.raises(ImportError, match="cannot import name"):
            exec(line)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("headstart.model_executor")
    assert not hasattr(headstart, "generate")
    assert not hasattr(envs, "VLLM_USE_V1")


def test_ids_of_requests_differ() -> None:
    ids = {random_uuid() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in ids)


def test_paths_load_no_torch() -> None:
    modules = ", ".join(f"headstart.{path}" for path in PATHS)
    program = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
