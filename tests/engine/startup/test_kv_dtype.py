"""`kv_cache_dtype="int8"`: more blocks, and the same hits and pauses as float K/V."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.attention import make_backend
from headstart.engine import engine as loading
from headstart.errors import ConfigError
from headstart.native import avx2_library
from tests.engine.internals import kv_memory
from tests.engine.tiny_llm import VOCABULARY, make_llm, save_smallest
from tests.tiny_models import save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines(folder: Path) -> Iterator[Any]:
    llms: list[LLM] = []

    def make(**options: Any) -> LLM:
        llms.append(make_llm(folder, debug=True, **{"kv_cache_dtype": "int8"} | options))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False
    )


def answers(outputs: list[Any]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Return tokens and the exact bits of their log-probabilities."""
    tokens_and_logprobs = []
    for output in outputs:
        [answer] = output.outputs
        logprobs = [{token: one.logprob for token, one in row.items()} for row in answer.logprobs]
        tokens_and_logprobs.append((answer.token_ids, logprobs))
    return tokens_and_logprobs


@pytest.mark.parametrize(("dtype", "more"), [("float32", 3.2), ("bfloat16", 1.6)])
def test_the_same_memory_holds_more_blocks(engines: Any, dtype: str, more: float) -> None:
    """Heads of 16 dims take 20 bytes instead of 64 or 32; wider heads come closer to 4x and 2x."""
    options = {"num_blocks": None, "kv_cache_memory": 1 << 20, "dtype": dtype}
    float_llm, llm = engines(**options, kv_cache_dtype="auto"), engines(**options)
    assert llm.engine.kv_cache_bytes <= float_llm.engine.kv_cache_bytes * 1.01
    blocks = [one.engine.manager.config.num_blocks for one in (float_llm, llm)]
    assert blocks[1] == pytest.approx(more * blocks[0], rel=0.01)


def test_a_hit_answers_as_if_computed(engines: Any) -> None:
    """The rows of a partial block are copied with their scales."""
    first, twin = random_prompt(90, 1), [*random_prompt(90, 1)[:75], *random_prompt(20, 2)]
    llm, cold = engines(), engines(enable_prefix_caching=False)
    expected = answers(generate(cold, [first]) + generate(cold, [twin]))
    generate(llm, [first])
    outputs = generate(llm, [first]) + generate(llm, [twin])
    assert [output.num_cached_tokens for output in outputs] == [89, 75]
    for (tokens, logprobs), (wanted, wanted_logprobs) in zip(
        answers(outputs), expected, strict=True
    ):
        assert tokens == wanted
        for row, other in zip(logprobs, wanted_logprobs, strict=True):
            assert row == pytest.approx(other, abs=2e-3)


def test_preempted_requests_continue_unchanged(engines: Any) -> None:
    """Four requests outgrow a pool of 14 blocks; deterministic answers are bitwise equal."""
    prompts = [random_prompt(30 + at, at) for at in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    small = engines(num_blocks=14, deterministic=True)
    large = engines(num_blocks=64, deterministic=True)
    outputs, expected = generate(small, prompts, params), generate(large, prompts, params)
    assert small.engine.num_preemptions > 0 and large.engine.num_preemptions == 0
    assert answers(outputs) == answers(expected)


def test_a_tier_loads_the_same_bytes(engines: Any, tmp_path: Path) -> None:
    """The pool after loading has the bytes that the first process wrote, scales included."""
    prompt = random_prompt(100, 3)
    held = []
    for expected in (0, 96):
        llm = engines(cache_dir=str(tmp_path))
        [output] = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=1))
        assert output.num_cached_tokens == expected
        written = kv_memory(llm.engine).read_blocks(range(24)).tolist()
        held.append([block for block in written if any(block)])
        llm.close()
    computed, loaded = (sorted(blocks) for blocks in held)
    whole = [block for block in loaded if block in computed]
    assert len(whole) >= 6


def test_attention_is_compiled_where_the_cpu_can(
    engines: Any, use_kernels: Callable[..., None]
) -> None:
    for switch in ("1", "0"):
        use_kernels(switch)
        compiled = switch == "1" and avx2_library() is not None
        name = type(make_backend(kv_memory(engines().engine))).__name__
        assert name == ("NativeAttention" if compiled else "TorchAttention")


@pytest.mark.parametrize("wrong", ["fp8", "int4", 8, torch.int8])
def test_other_kinds_are_refused_before_weights_are_read(
    folder: Path, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is .*; allowed: auto, int8"):
        LLM(folder, kv_cache_dtype=wrong)


def test_weights_may_be_in_4_bits_too(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path)
    llm = make_llm(model, weights="int4", kv_cache_dtype="int8")
    prompt = [3 + at % 100 for at in range(50)]
    cold, warm = (generate(llm, [prompt])[0] for _ in range(2))
    llm.close()
    assert warm.num_cached_tokens == 49
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
