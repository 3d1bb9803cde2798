"""Counterpart of `vllm.utils`, for programs written for vLLM."""

from uuid import uuid4

from headstart.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """Return a new id for a request: 16 random hexadecimal digits."""
    return uuid4().hex[16:]
