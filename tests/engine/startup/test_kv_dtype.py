"""`kv_cache_dtype="int8"`: more blocks, and the same hits, pauses and ways in as float K/V."""

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
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(make_llm(folder, debug=True, **{"kv_cache_dtype": "int8"} | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False
    )


def answers(outputs: list[Any]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens, and their log-probabilities bit for bit."""
    found = []
    for output in outputs:
        [answer] = output.outputs
        said = [{token: one.logprob for token, one in row.items()} for row in answer.logprobs]
        found.append((answer.token_ids, said))
    return found


@pytest.mark.parametrize(("dtype", "more"), [("float32", 3.2), ("bfloat16", 1.6)])
def test_the_same_memory_holds_more_blocks(engines: Any, dtype: str, more: float) -> None:
    """Heads of 16 dims: 20 bytes for 64 or 32; wider heads come nearer to 4 and 2 times."""
    options = {"num_blocks": None, "kv_cache_memory": 1 << 20, "dtype": dtype}
    float_llm, llm = engines(**options, kv_cache_dtype="auto"), engines(**options)
    assert llm.engine.kv_cache_bytes <= float_llm.engine.kv_cache_bytes * 1.01
    blocks = [one.engine.manager.config.num_blocks for one in (float_llm, llm)]
    assert blocks[1] == pytest.approx(more * blocks[0], rel=0.01)


def test_a_hit_answers_as_computing_it_does(engines: Any) -> None:
    """Also of a part of a block, whose rows are copied with their scales."""
    first, twin = random_prompt(90, 1), [*random_prompt(90, 1)[:75], *random_prompt(20, 2)]
    llm, cold = engines(), engines(enable_prefix_caching=False)
    expected = answers(ask(cold, [first]) + ask(cold, [twin]))
    ask(llm, [first])
    outputs = ask(llm, [first]) + ask(llm, [twin])
    assert [output.num_cached_tokens for output in outputs] == [89, 75]
    for (tokens, said), (wanted, wanted_said) in zip(answers(outputs), expected, strict=True):
        assert tokens == wanted
        for row, other in zip(said, wanted_said, strict=True):
            assert row == pytest.approx(other, abs=2e-3)


def test_paused_requests_go_on_as_if_they_had_not_been(engines: Any) -> None:
    """Four of them grow beyond a pool of 14 blocks; bit for bit, in the mode that promises it."""
    prompts = [random_prompt(30 + at, at) for at in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    small = engines(num_blocks=14, deterministic=True)
    large = engines(num_blocks=64, deterministic=True)
    found, expected = ask(small, prompts, params), ask(large, prompts, params)
    assert small.engine.num_preemptions > 0 and large.engine.num_preemptions == 0
    assert answers(found) == answers(expected)


def test_a_tier_gives_back_the_same_bytes(engines: Any, tmp_path: Path) -> None:
    """The pool after loading has the bytes that the first process wrote, scales included."""
    prompt = random_prompt(100, 3)
    held = []
    for expected in (0, 96):
        llm = engines(cache_dir=str(tmp_path))
        [output] = ask(llm, [prompt], SamplingParams(temperature=0, max_tokens=1))
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
    cold, warm = (ask(llm, [prompt])[0] for _ in range(2))
    llm.close()
    assert warm.num_cached_tokens == 49
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
