"""The names of `vllm.utils` that programs import."""

from headstart.utils.argparse_utils import FlexibleArgumentParser
from headstart.vllm_imports import find_names

__all__ = ["FlexibleArgumentParser"]

__getattr__ = find_names(__name__, __all__)
