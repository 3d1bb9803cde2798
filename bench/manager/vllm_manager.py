"""vLLM's KV cache manager under the load of `manager.py`, which starts this program.

vLLM's code is unchanged, with its default hash (SHA-256) and one group of full attention. The part
that `manager.py` calls identity is the request's construction with its block hashes. Needs nothing
of headstart.
"""

import argparse
import os
from collections.abc import Iterator

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from load import BLOCK, TOKENS, Figures, Subject, answer, measure_memory
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

HASH = get_hash_fn_by_name("sha256")
SAMPLING = SamplingParams(max_tokens=TOKENS * BLOCK)


def make_manager(num_blocks: int) -> KVCacheManager:
    """Return a manager of one group of layers, with prefix caching."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config, max_model_len=TOKENS * BLOCK, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


class VLLM(Subject):
    """vLLM's manager."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = make_manager(num_blocks)
        super().__init__(num_blocks)

    def run(self, name: str, tokens: list[int]) -> Request:
        request = self._make(name, tokens)
        self.manager.new_step_starts()
        self._admit(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        return request

    def free(self, sequence: Request) -> None:
        self.manager.free(sequence)

    def parts(self, name: str, tokens: list[int]) -> Iterator[None]:
        request = self._make(name, tokens)
        yield
        self.manager.new_step_starts()
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        yield
        self.manager.allocate_slots(request, len(tokens) - hit, hit, blocks)
        self.manager.take_new_block_ids()
        yield
        self.manager.free(request)
        yield
        assert hit == TOKENS // 2

    def decode(self, sequences: list[Request], tokens: list[int]) -> None:
        self.manager.new_step_starts()
        for request, generated in zip(sequences, tokens, strict=True):
            request.append_output_token_ids(generated)
            self.manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        self.manager.take_new_block_ids()

    def check(self) -> None:
        blocks = self.manager.block_pool.blocks
        cached = sum(block.block_hash is not None for block in blocks)
        assert cached >= 0.9 * (len(blocks) - 1), "the pool is not full of cached blocks"

    def _make(self, name: str, tokens: list[int]) -> Request:
        hasher = get_request_block_hasher(BLOCK, HASH)
        return Request(name, tokens, SAMPLING, None, block_hasher=hasher)

    def _admit(self, request: Request) -> None:
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - hit
        assert self.manager.allocate_slots(request, new, hit, blocks) is not None
        self.manager.take_new_block_ids()


def memory() -> Figures:
    """Measure the memory of vLLM's manager."""
    return measure_memory(make_manager, VLLM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    options = parser.parse_args()
    init_none_hash(HASH)
    answer(VLLM(options.blocks), memory)


if __name__ == "__main__":
    main()
