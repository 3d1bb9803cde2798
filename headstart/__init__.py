"""headstart: an LLM inference engine whose KV cache never computes the same prefix twice.

Names are imported when first used, so that `import headstart.cache` loads neither torch nor
transformers.

>>> import headstart
>>> headstart.SamplingParams(max_tokens=8).max_tokens
8
"""

import os
from typing import TYPE_CHECKING

from headstart.imports import load_module
from headstart.version import __version__, __version_tuple__

# torch's threads spin while they wait for one another. If another process takes the core of the
# thread that they wait for, a step takes 2 to 10 times as long. So a waiting thread gives up its
# core after a thousand iterations, which costs nothing on an idle machine. OpenMP reads the
# variable when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from headstart.engine.adapter_names import LoRARequest
    from headstart.engine.outputs import CompletionOutput, RequestOutput
    from headstart.engine.params import SamplingParams
    from headstart.engine.structured_outputs import StructuredOutputsParams
    from headstart.errors import (
        AdapterError,
        AdapterNotFoundError,
        CacheError,
        ConfigError,
        DamagedAdapterError,
        DamagedModelError,
        EngineError,
        HeadstartError,
        ModelError,
        ModelNotFoundError,
        OutOfMemoryError,
        RequestError,
        UnsupportedAdapterError,
        UnsupportedModelError,
    )
    from headstart.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from headstart.frontend.llm import LLM, LLMEngine
    from headstart.frontend.vllm_compat import (
        AsyncEngineArgs,
        EngineArgs,
        PromptType,
        TextPrompt,
        TokensPrompt,
    )
    from headstart.omni.omni import AsyncOmni, Omni
    from headstart.omni.params import OmniOutput, OmniParams

__all__ = [
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

_HOMES = {
    "LLM": "headstart.frontend.llm",
    "AsyncLLM": "headstart.frontend.async_llm",
    "AsyncLLMEngine": "headstart.frontend.async_llm",
    "LLMEngine": "headstart.frontend.llm",
    "SamplingParams": "headstart.engine.params",
    "StructuredOutputsParams": "headstart.engine.structured_outputs",
    "LoRARequest": "headstart.engine.adapter_names",
    "PromptType": "headstart.frontend.vllm_compat",
    "TextPrompt": "headstart.frontend.vllm_compat",
    "TokensPrompt": "headstart.frontend.vllm_compat",
    "EngineArgs": "headstart.frontend.vllm_compat",
    "AsyncEngineArgs": "headstart.frontend.vllm_compat",
    "RequestOutput": "headstart.engine.outputs",
    "CompletionOutput": "headstart.engine.outputs",
    "Omni": "headstart.omni.omni",
    "AsyncOmni": "headstart.omni.omni",
    "OmniParams": "headstart.omni.params",
    "OmniOutput": "headstart.omni.params",
}

_HOMES |= {name: "headstart.errors" for name in __all__ if name.endswith("Error")}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(load_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
