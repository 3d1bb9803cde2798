"""The engine compared with `generate` of transformers, with caching, batching and preemption."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.cache import MissReason
from headstart.engine.engine import EngineCore
from headstart.errors import ConfigError, EngineError, OutOfMemoryError, RequestError
from tests.tiny_models import save_tiny

MAX_TOKENS = 17  # one more than a block has: each answer crosses the end of a block
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Return 12 prompts of 20 to 130 tokens that begin alike."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocab_size, (count,), generator=generator).tolist()

    shared = tokens(100)
    lengths = torch.randint(20, 100, (12,), generator=generator).tolist()
    return [shared[:length] + tokens(1 + length % 30) for length in lengths]


@pytest.fixture(scope="module")
def prompts(oracle: PreTrainedModel) -> list[list[int]]:
    return make_prompts(oracle.config.vocab_size)


@pytest.fixture(scope="module")
def expected(oracle: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' greedy answers, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            full = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=MAX_TOKENS,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=None,
            )
        answers.append(full[0, len(prompt) :].tolist())
    return answers


@pytest.fixture
def engines(folder: Path) -> Iterator[Any]:
    """Return a factory of engines that check every invariant after every step; close them."""
    llms: list[LLM] = []

    def make(**options: Any) -> LLM:
        llms.append(LLM(folder, **({"num_blocks": 200, "debug": True} | options)))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


OPTIONS = {
    "plain": {},
    "cache off": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 33},
    "chunks of a token": {"max_num_batched_tokens": 13},
    "preempted": {"num_blocks": 24},
    "hardly any memory": {"num_blocks": 10, "max_num_batched_tokens": 20},
    "small blocks": {"block_size": 2, "num_blocks": 300},
    "blocks of a token": {"block_size": 1, "num_blocks": 300},
    "append-only": {"deduplicate": False},
    "whole blocks": {"partial_hits": False, "eviction": "lru"},
    "alone": {"max_num_seqs": 1},
    "deterministic": {"deterministic": True, "num_blocks": 40},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_answers_are_those_of_transformers(
    name: str, engines: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Cold, and again when the prompts and the answers are cached."""
    llm = engines(**OPTIONS[name])
    assert answers(llm, prompts) == expected
    assert answers(llm, prompts) == expected
    assert llm.engine.manager.num_free_blocks == llm.engine.manager.config.num_blocks


def test_preemption_happens_and_resumes_by_hits(engines: Any, prompts: list[list[int]]) -> None:
    llm = engines(num_blocks=24)
    answers(llm, prompts)
    stats = llm.engine.manager.stats
    assert llm.engine.num_preemptions > 0
    assert stats.resumed_hit_tokens > 0
    assert stats.requests == len(prompts)


def test_a_repeated_prompt_computes_one_token(engines: Any, prompts: list[list[int]]) -> None:
    llm = engines()
    llm.generate(prompts[0], GREEDY)
    [output] = llm.generate(prompts[0], GREEDY)
    assert output.num_cached_tokens == len(prompts[0]) - 1
    assert output.why_missed.reason is MissReason.NONE


def test_generated_tokens_are_hit_by_the_next_turn(engines: Any, prompts: list[list[int]]) -> None:
    """All but the last one, whose K/V were never computed."""
    llm = engines()
    [first] = llm.generate(prompts[0], GREEDY)
    turn = prompts[0] + first.outputs[0].token_ids + [5, 6, 7]
    [second] = llm.generate(turn, GREEDY)
    assert second.num_cached_tokens == len(prompts[0]) + MAX_TOKENS - 1


def test_twins_compute_their_prefix_once(engines: Any, prompts: list[list[int]]) -> None:
    """Two requests arrive together; only one of them computes each full block."""
    llm = engines(max_num_batched_tokens=16, partial_hits=False)
    computed = spy_on_tokens(llm)
    llm.generate([prompts[1]] * 4, SamplingParams(temperature=0, max_tokens=1))
    full = len(prompts[1]) // 16 * 16
    assert sum(computed) <= full + 4 * (len(prompts[1]) - full or 1)


def spy_on_tokens(llm: LLM) -> list[int]:
    """Record the number of tokens of every forward pass from now on."""
    counts: list[int] = []
    model = llm.engine.model
    forward = model.forward

    def counting(token_ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        counts.append(len(token_ids))
        return forward(token_ids, *rest)

    model.forward = counting  # type: ignore[method-assign]
    return counts


def test_the_second_twin_continues_when_the_first_is_aborted(
    engines: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    longest = max(range(len(prompts)), key=lambda at: len(prompts[at]))
    llm = engines(max_num_batched_tokens=20)
    engine: EngineCore = llm.engine
    first = llm.frontend.prepare(prompts[longest], GREEDY, request_id="first")
    second = llm.frontend.prepare(prompts[longest], GREEDY, request_id="second")
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.step()
    assert engine.abort("first").outputs[0].finish_reason == "abort"
    while engine.has_unfinished:
        engine.step()
    output = second.output()
    assert output.outputs[0].token_ids == expected[longest]
    assert output.num_cached_tokens == 40


def test_salts_keep_tenants_apart(engines: Any, prompts: list[list[int]]) -> None:
    llm = engines()
    llm.generate(prompts[0], GREEDY, cache_salt="a")
    [other] = llm.generate(prompts[0], GREEDY, cache_salt="b")
    [same] = llm.generate(prompts[0], GREEDY, cache_salt="a")
    assert other.num_cached_tokens == 0
    assert other.why_missed.reason is MissReason.UNSEEN  # and not a word about tenant a
    assert same.num_cached_tokens == len(prompts[0]) - 1


def test_a_failed_step_leaves_the_memory_unchanged(
    engines: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The step's requests end with the error; nothing of the step is hit later."""
    llm = engines()
    model = llm.engine.model
    forward = model.forward

    def failing(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a kernel broke")

    model.forward = failing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="a kernel broke"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    model.forward = forward  # type: ignore[method-assign]
    llm.engine.manager.check()
    assert llm.engine.manager.num_free_blocks == 200
    [output] = llm.generate(prompts[0], GREEDY)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected[0]
    stats = llm.engine.manager.stats
    assert (stats.requests, stats.queried_tokens) == (1, len(prompts[0])), "the step counted"
    assert llm.engine.num_preemptions == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([3, -1], "-1"),
        ([3, 131], "from 0 to 130"),
        ([3, "4"], "'4'"),
        ([True, 3], "True"),
        ([3] * 256, "255"),
        ({"promt": "a"}, "promt"),
        (b"bytes", "bytes"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_work(engines: Any, prompt: Any, message: str) -> None:
    llm = engines()
    with pytest.raises(RequestError, match=message):
        llm.generate([[3, 4, 5], prompt], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.stats.requests == 0
    llm.engine.manager.check()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_size": 3}, ConfigError),
        ({"block_size": 0}, ConfigError),
        ({"num_blocks": 0}, ConfigError),
        ({"dtype": "int8"}, ConfigError),
        ({"kv_cache_dtype": "fp8"}, ConfigError),
        ({"eviction": "fifo"}, ConfigError),
        ({"kv_cache_fraction": 1.5}, ConfigError),
        ({"max_num_seqs": 0}, ConfigError),
        ({"max_bypassed": -1}, ConfigError),
        ({"blocksize": 16}, ConfigError),
        ({"num_blocks": None, "kv_cache_memory": 10}, OutOfMemoryError),
        ({"num_blocks": 10**9}, OutOfMemoryError),
        ({"num_blocks": 4, "max_model_len": 65}, OutOfMemoryError),
        ({"max_model_len": 10**6}, ConfigError),
    ],
)
def test_a_bad_option_is_refused(engines: Any, options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        engines(**options)


def test_a_length_beyond_the_model_s_is_refused(engines: Any) -> None:
    """Regression: it was silently limited, and prompts that should fit were refused."""
    limit = engines().engine.max_model_len
    with pytest.raises(ConfigError, match=f"max_model_len is {limit + 1}; allowed: up to {limit},"):
        engines(max_model_len=limit + 1, num_blocks=2 * limit)
    assert engines(max_model_len=limit).engine.max_model_len == limit


def test_a_sequence_ends_at_the_pool_s_end(engines: Any) -> None:
    """The pool is smaller than the model's context, so it sets the limit."""
    llm = engines(num_blocks=4)
    [output] = llm.generate([5] * 60, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    with pytest.raises(RequestError, match="63"):
        llm.generate([5] * 64, GREEDY)


def test_a_reset_of_tiers_works_without_tiers(engines: Any) -> None:
    llm = engines()
    assert llm.engine.tiers is None
    llm.generate([5] * 60, GREEDY)
    assert llm.reset_prefix_cache(reset_connector=True)
    [output] = llm.generate([5] * 60, GREEDY)
    assert output.num_cached_tokens == 0
