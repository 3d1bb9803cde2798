"""The environment variables that headstart reads, as attributes, like `vllm.envs`.

Each flag of the command line also has an environment variable. Those variables are not attributes
of this module.
"""

import os

_DEFAULTS = {
    "HEADSTART_CPU": "",
    "HEADSTART_DEMO_DIR": "",
    "HEADSTART_GGUF_DIR": "",
    "HEADSTART_NATIVE": "1",
}

__all__ = ["is_set"]
__all__ += list(_DEFAULTS)


def is_set(name: str) -> bool:
    """Return True if `name` is an attribute of this module and is set in the environment."""
    return name in _DEFAULTS and name in os.environ


def __getattr__(name: str) -> str:
    if name not in _DEFAULTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return os.environ.get(name, _DEFAULTS[name])
