"""The environment variables that headstart reads, as attributes: `vllm.envs` of vLLM's.

Every flag of the command line may stand in the environment too; those are no attributes here.
"""

import os
from functools import partial

from headstart.vllm_imports import find_names

_DEFAULTS = {
    "HEADSTART_CPU": "",
    "HEADSTART_DEMO_DIR": "",
    "HEADSTART_GGUF_DIR": "",
    "HEADSTART_NATIVE": "1",
}

__all__ = ["is_set"]
__all__ += list(_DEFAULTS)


def is_set(name: str) -> bool:
    """Return True if the environment has a variable that is an attribute here."""
    return name in _DEFAULTS and name in os.environ


__getattr__ = find_names(
    __name__,
    __all__,
    values={name: partial(os.environ.get, name, default) for name, default in _DEFAULTS.items()},
)
