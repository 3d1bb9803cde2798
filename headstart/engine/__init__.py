"""Token ids in, token ids out: scheduler, runner, sampler, driver."""

from headstart.vllm_imports import find_names

__getattr__ = find_names(__name__, [])
