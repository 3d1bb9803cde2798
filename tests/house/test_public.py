"""The public names: a change of these names needs a change of this list."""

import subprocess
import sys

import pytest

import headstart
from tests.house.source import ROOT

PUBLIC = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "LLMEngine",
    "SamplingParams",
    "StructuredOutputsParams",
    "LoRARequest",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "EngineArgs",
    "AsyncEngineArgs",
    "RequestOutput",
    "CompletionOutput",
    "Omni",
    "AsyncOmni",
    "OmniParams",
    "OmniOutput",
    "HeadstartError",
    "ConfigError",
    "RequestError",
    "ModelError",
    "ModelNotFoundError",
    "DamagedModelError",
    "UnsupportedModelError",
    "AdapterError",
    "AdapterNotFoundError",
    "DamagedAdapterError",
    "UnsupportedAdapterError",
    "OutOfMemoryError",
    "CacheError",
    "EngineError",
    "__version__",
    "__version_tuple__",
]


def test_public_names_match_the_list() -> None:
    assert headstart.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(headstart))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_documented(name: str) -> None:
    value = getattr(headstart, name)
    assert isinstance(value, str | tuple) or value.__doc__


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headstart' has no attribute 'LLN'"):
        getattr(headstart, "LLN")  # noqa: B009 (mypy would refuse headstart.LLN)


def test_every_error_is_a_headstart_error() -> None:
    for name in PUBLIC:
        if name.endswith("Error"):
            assert issubclass(getattr(headstart, name), headstart.HeadstartError)


def test_importing_headstart_loads_no_torch() -> None:
    program = "import headstart, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
