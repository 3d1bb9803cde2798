"""The names of `vllm.utils` that programs import."""

from uuid import uuid4

from headstart.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """A new id for a request: 16 hexadecimal digits, drawn at random."""
    return uuid4().hex[16:]
