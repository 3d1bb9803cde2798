"""What vLLM's own KV cache manager costs under the load of `manager.py`, which starts this.

    build/peers/vllm/bin/python bench/manager_vllm.py [--blocks 100000] [--repeats 30]

vLLM's code as it is, with its default hash (SHA-256) and one group of full attention. What
`manager.py` calls naming is here the request's construction and its block hashes. Needs nothing
of headstart. Ends in one JSON line.
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
import tracemalloc

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

TOKENS, BLOCK, RUNNING = 8192, 16, 256
MICRO = 1e6
HASH = get_hash_fn_by_name("sha256")
SAMPLING = SamplingParams(max_tokens=1024)


def make_manager(num_blocks: int) -> KVCacheManager:
    """A manager of one group of layers, prefix caching on."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config, max_model_len=2 * TOKENS, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids of a large vocabulary."""
    return [rng.randrange(150_000) for _ in range(count)]


def make_request(name: str, tokens: list[int]) -> Request:
    """A request with its block hashes."""
    hasher = get_request_block_hasher(BLOCK, HASH)
    return Request(name, tokens, SAMPLING, None, block_hasher=hasher)


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> Request:
    """Admit and compute a whole prompt in one step."""
    request = make_request(name, tokens)
    manager.new_step_starts()
    blocks, hit, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is not None
    manager.take_new_block_ids()
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = request.num_tokens
    return request


def fill(manager: KVCacheManager, num_blocks: int, rng: random.Random) -> None:
    """Cache something in every block."""
    for at in range(num_blocks // (TOKENS // BLOCK) + 1):
        manager.free(run(manager, f"fill {at}", random_tokens(rng, TOKENS)))


def time_requests(manager: KVCacheManager, rng: random.Random, repeats: int) -> dict[str, float]:
    """Median microseconds of each part of a request's life."""
    parts: dict[str, list[float]] = {p: [] for p in ("naming", "lookup", "allocation", "free")}
    for at in range(repeats):
        head = random_tokens(rng, TOKENS // 2)
        manager.free(run(manager, f"head {at}", head))
        tokens = head + random_tokens(rng, TOKENS // 2)
        marks = [time.thread_time()]
        request = make_request(f"request {at}", tokens)
        marks.append(time.thread_time())
        manager.new_step_starts()
        blocks, hit, _ = manager.get_computed_blocks(request)
        marks.append(time.thread_time())
        manager.allocate_slots(request, TOKENS - hit, hit, blocks)
        manager.take_new_block_ids()
        marks.append(time.thread_time())
        manager.free(request)
        marks.append(time.thread_time())
        assert hit == TOKENS // 2
        for part, start, end in zip(parts, marks, marks[1:], strict=False):
            parts[part].append((end - start) * MICRO)
    return {part: statistics.median(times) for part, times in parts.items()}


def time_decode(manager: KVCacheManager, rng: random.Random, repeats: int) -> float:
    """Median over runs of 16 steps, so that each request fills a block once in each run."""
    running = [
        run(manager, f"decode {i}", random_tokens(rng, 512 + i % BLOCK)) for i in range(RUNNING)
    ]
    token = iter(random_tokens(rng, RUNNING * BLOCK * repeats))
    times = []
    for _ in range(repeats):
        spent = 0.0
        for _ in range(BLOCK):
            tokens = [next(token) for _ in running]
            start = time.thread_time()
            manager.new_step_starts()
            for request, generated in zip(running, tokens, strict=True):
                request.append_output_token_ids(generated)
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
            manager.take_new_block_ids()
            spent += time.thread_time() - start
        times.append(spent / BLOCK / RUNNING * MICRO)
    assert all(len(one.block_hashes) == one.num_tokens // BLOCK for one in running)
    return statistics.median(times)


def measure_memory() -> tuple[float, float]:
    """Seconds to make a pool of a million blocks; bytes a cached block costs, all told."""
    start = time.thread_time()
    manager = make_manager(1_000_000)
    init = time.thread_time() - start
    del manager
    gc.collect()
    tracemalloc.start()
    blocks = 20_000
    manager = make_manager(blocks)
    rng = random.Random(0)
    for _ in range(3):
        fill(manager, blocks, rng)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] / blocks
    tracemalloc.stop()
    assert all(b.block_hash is not None for b in manager.block_pool.blocks if not b.is_null)
    return init, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    init_none_hash(HASH)
    rng = random.Random(0)
    manager = make_manager(options.blocks)
    fill(manager, options.blocks, rng)
    parts = time_requests(manager, rng, options.repeats)
    decode = time_decode(manager, rng, options.repeats)
    del manager
    init, used = measure_memory()
    figures = {
        "request_us": round(sum(parts.values()), 1),
        "decode_us": round(decode, 3),
        "pool_init_s": round(init, 3),
        "bytes_per_block": round(used),
    }
    print(json.dumps(figures | {f"{part}_us": round(v, 1) for part, v in parts.items()}))


if __name__ == "__main__":
    main()
