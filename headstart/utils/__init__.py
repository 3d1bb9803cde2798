"""The names of `vllm.utils` that programs import."""

from headstart.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
