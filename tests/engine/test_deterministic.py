"""`deterministic=True`: logits are bitwise equal for any cache and any batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart import LLM, SamplingParams
from headstart.engine.runner import StepLogits
from headstart.engine.step import Batch
from tests.engine.internals import runner_of
from tests.tiny_models import save_tiny

MODES = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "weights": "int8"},
    {"dtype": "bfloat16", "weights": "int4"},
    {"dtype": "float32", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
)


# Quantized weights differ in layers with experts, and quantized K/V in how attention is computed.
CASES = {
    "llama": MODES,
    "qwen3_moe": MODES[:4],
    "gemma2": (MODES[1], MODES[4]),
    "gemma4_text": (MODES[0], MODES[5]),
    "gpt_oss": (MODES[0], MODES[3], MODES[5]),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, path)
    return path


@pytest.fixture
def engines(folder: Path) -> Iterator[Any]:
    llms: list[LLM] = []

    def make(**options: Any) -> LLM:
        sizes = {"num_blocks": 64, "block_size": 8, "deterministic": True, "speculation": "off"}
        options = sizes | options
        llms.append(LLM(folder, debug=True, **options))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


def record(llm: LLM) -> dict[tuple[int, ...], Tensor]:
    """Record the logits of every sampled token from now on, by the tokens before it."""
    seen: dict[tuple[int, ...], Tensor] = {}
    runner = runner_of(llm.engine)
    run = runner.run

    def recording(batch: Batch) -> StepLogits:
        logits = run(batch)
        rows = iter(logits.values.split(logits.counts))
        for part, values in zip(batch.scheduled, rows, strict=True):
            if part.samples:
                seen[tuple(part.request.sequence.token_ids)] = values[-1].clone()
        return logits

    runner.run = recording  # type: ignore[method-assign]
    return seen


def same_bits(left: dict[tuple[int, ...], Tensor], right: dict[tuple[int, ...], Tensor]) -> bool:
    """Return True if two recordings have the same prefixes with bitwise equal logits."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def turns(tokens: list[int], answer: list[int]) -> list[int]:
    """Return the next turn of a chat, which hits blocks that decoding has written."""
    return [*tokens, *answer, 7, 9, 11]


@pytest.mark.parametrize(
    ("folder", "options"),
    [(name, options) for name, modes in CASES.items() for options in modes],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
    indirect=["folder"],
    scope="module",
)
def test_logits_are_bitwise_equal_with_the_cache_on_and_off(
    engines: Any, options: dict[str, str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    generator = torch.Generator().manual_seed(1)
    # All answers continue from one block into the next.
    first = torch.randint(3, 131, (44,), generator=generator).tolist()
    twin = first[:21] + torch.randint(3, 131, (9,), generator=generator).tolist()
    on, off = engines(**options), engines(**options, enable_prefix_caching=False)
    batched, small = engines(**options), engines(**options, num_blocks=12)
    recordings = [record(llm) for llm in (on, off, batched, small)]
    cached = []
    for llm in (on, off):
        [answer] = llm.generate(first, params)
        llm.generate(twin, params)
        [later] = llm.generate(turns(first, answer.outputs[0].token_ids), params)
        cached.append(later.num_cached_tokens)
    later_prompt = turns(first, answer.outputs[0].token_ids)
    for llm in (batched, small):  # all together; and with so little memory that some must wait
        llm.generate([first, twin, later_prompt], params, use_tqdm=False)
    assert cached[0] >= 48 and cached[1] == 0  # decoded blocks were hit
    assert all(same_bits(recordings[0], other) for other in recordings[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_have_the_same_logprobs_alone_and_in_a_batch(engines: Any, dtype: str) -> None:
    """Regression: chunks that ended inside a block gave experts different numbers of rows."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 131, (n,), generator=generator).tolist() for n in (45, 30, 18, 60)]
    llm = engines(dtype=dtype, max_num_batched_tokens=53, enable_prefix_caching=False)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    for left, right in zip(alone, llm.generate(prompts, params), strict=True):
        assert left.prompt_logprobs == right.prompt_logprobs
        assert left.outputs[0].token_ids == right.outputs[0].token_ids


def test_the_plain_mode_is_near_but_not_bitwise(engines: Any, folder: Path) -> None:
    """Without deterministic mode a hit changes the rounding, within the dtype's tolerance."""
    # With log-probabilities, the plain mode computes all logits.
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    prompt = torch.randint(3, 131, (61,), generator=torch.Generator().manual_seed(2)).tolist()
    llm = engines(deterministic=False, dtype="float32")
    cold = record(llm)
    llm.generate(prompt, params)
    cold = dict(cold)
    warm = record(llm)
    llm.generate(prompt, params)
    largest = max(float((cold[key] - warm[key]).abs().max()) for key in cold)
    scale = max(float(value.abs().max()) for value in cold.values())
    print(f"largest difference of a logit, cold against warm: {largest:.2e} of {scale:.1f}")
    assert largest <= 1e-4 * scale
