"""Requests in, tokens out: scheduler, runner, sampler, driver, and the API over them."""

from headstart.vllm_imports import find_names

__getattr__ = find_names(__name__, [])
