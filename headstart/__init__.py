"""headstart: an LLM inference engine whose KV cache never computes the same prefix twice.

Names are imported when first used, so that `import headstart.cache` loads neither torch nor
transformers.

>>> import headstart
>>> headstart.SamplingParams(max_tokens=8).max_tokens
8
"""

import os
from typing import TYPE_CHECKING

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
from headstart.imports import load_module
from headstart.version import __version__, __version_tuple__

# torch's threads spin while they wait for one another. If other processes use the cores too, a step
# takes 2 to 10 times as long. So a waiting thread gives up its core after a thousand iterations.
# This costs nothing on an idle machine. OpenMP reads the variable when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from headstart.engine.adapter_names import LoRARequest
    from headstart.engine.outputs import CompletionOutput, RequestOutput
    from headstart.engine.params import SamplingParams
    from headstart.engine.structured_outputs import StructuredOutputsParams
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

__all__ = ["LLM", "AsyncLLM", "AsyncLLMEngine", "LLMEngine"]
__all__ += ["SamplingParams", "StructuredOutputsParams", "LoRARequest"]
__all__ += ["PromptType", "TextPrompt", "TokensPrompt", "EngineArgs", "AsyncEngineArgs"]
__all__ += ["RequestOutput", "CompletionOutput", "Omni", "AsyncOmni", "OmniParams", "OmniOutput"]
__all__ += ["HeadstartError", "ConfigError", "RequestError"]
__all__ += ["ModelError", "ModelNotFoundError", "DamagedModelError", "UnsupportedModelError"]
__all__ += ["AdapterError", "AdapterNotFoundError", "DamagedAdapterError"]
__all__ += ["UnsupportedAdapterError", "OutOfMemoryError", "CacheError", "EngineError"]
__all__ += ["__version__", "__version_tuple__"]

_MODULES = {
    "engine.adapter_names": ("LoRARequest",),
    "engine.outputs": ("CompletionOutput", "RequestOutput"),
    "engine.params": ("SamplingParams",),
    "engine.structured_outputs": ("StructuredOutputsParams",),
    "frontend.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "frontend.llm": ("LLM", "LLMEngine"),
    "frontend.vllm_compat": (
        *("AsyncEngineArgs", "EngineArgs", "PromptType", "TextPrompt", "TokensPrompt"),
    ),
    "omni.omni": ("AsyncOmni", "Omni"),
    "omni.params": ("OmniOutput", "OmniParams"),
}
_MODULE_OF = {name: f"headstart.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(load_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
