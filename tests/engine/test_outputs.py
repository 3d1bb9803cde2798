"""Outputs of a request: several answers, log-probabilities, stops, streams, errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart import LLM, SamplingParams
from headstart.cache import MissReason
from headstart.engine.sampling import SamplingState
from headstart.errors import RequestError
from tests.tiny_models import save_tiny

PROMPT = [5, 9, 14, 20, *range(30, 75)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("qwen2", path)
    return path


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder, num_blocks=100, debug=True)
    yield llm
    llm.close()


def log_softmax(folder: Path, tokens: list[int]) -> Tensor:
    """Return the log-probabilities of transformers after each token, `[tokens, vocab]`."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


def test_prompt_logprobs_are_complete_with_and_without_the_cache(llm: LLM, folder: Path) -> None:
    """Such a request reads nothing from the cache, and others hit the blocks that it writes."""
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    expected = log_softmax(folder, PROMPT)
    for _ in range(2):
        [output] = llm.generate(PROMPT, params)
        assert output.num_cached_tokens == 0
        assert output.why_missed is not None
        assert output.why_missed.reason is MissReason.NOT_READ
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(PROMPT)
        for at, entries in enumerate(output.prompt_logprobs[1:]):
            assert entries is not None
            best = expected[at].topk(2).indices.tolist()
            assert set(entries) == {PROMPT[at + 1], *best}
            for token_id, entry in entries.items():
                assert entry.logprob == pytest.approx(float(expected[at, token_id]), abs=1e-4)
                assert entry.rank == 1 + int((expected[at] > expected[at, token_id]).sum())
    [plain] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3))
    assert plain.num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"deterministic": True}])
def test_prompt_logprobs_of_a_prompt_in_chunks(folder: Path, options: dict[str, Any]) -> None:
    llm = LLM(folder, num_blocks=100, debug=True, **options)
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    llm.close()
    expected = log_softmax(folder, PROMPT)
    assert output.prompt_logprobs is not None
    logprobs = [
        entries[token].logprob
        for token, entries in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
        if entries
    ]
    wanted = [float(expected[at, token]) for at, token in enumerate(PROMPT[1:])]
    assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_logprobs_of_the_answer(llm: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=3, ignore_eos=True)
    [output] = llm.generate(PROMPT, params)
    [answer] = output.outputs
    expected = log_softmax(folder, PROMPT + answer.token_ids)[len(PROMPT) - 1 : -1]
    assert answer.logprobs is not None
    for token_id, entries, row in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        assert set(entries) == {token_id, *row.topk(3).indices.tolist()}
        assert entries[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    total = sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_several_answers_share_the_prompt(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1, seed=1, max_tokens=10, ignore_eos=True)
    [output] = llm.generate(PROMPT, params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    stats = llm.engine.manager.stats
    assert stats.hit_tokens >= 3 * (len(PROMPT) // 16 * 16)
    [again] = llm.generate(PROMPT, params)
    assert [a.token_ids for a in again.outputs] == [a.token_ids for a in output.outputs]


def test_a_seeded_request_does_not_depend_on_its_neighbors(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=11, max_tokens=12, ignore_eos=True)
    [alone] = llm.generate(PROMPT, params)
    others = [PROMPT[:20] + [at] * 5 for at in range(5)]
    first, *_ = llm.generate([PROMPT, *others], params, use_tqdm=False)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_a_stop_id_ends_the_answer(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [free] = llm.generate(PROMPT, greedy)
    stop = free.outputs[0].token_ids[6]
    at = free.outputs[0].token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    [stopped] = llm.generate(PROMPT, params)
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: at + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_a_stream_grows_and_ends_like_generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = list(llm.stream(PROMPT, params))
    [whole] = llm.generate(PROMPT, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 10))
    assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert [output.finished for output in outputs] == [False] * 8 + [True]


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True)):
        break
    assert llm.reset_prefix_cache()  # it comes after what the stream ordered
    assert not llm.engine.has_unfinished
    assert llm.engine.manager.num_free_blocks == 100


def test_metrics_are_in_order(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    times = output.metrics
    assert times.queue is not None and times.time_to_first_token is not None
    assert times.total is not None and times.time_per_token is not None
    assert 0 <= times.queue <= times.time_to_first_token <= times.total
    assert times.total == pytest.approx(times.time_to_first_token + 4 * times.time_per_token)


def test_one_set_of_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 5)]
    outputs = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(RequestError, match="2 sampling parameters for 1"):
        llm.generate([PROMPT], params)


def test_a_row_that_cannot_be_sampled_ends_alone(llm: LLM) -> None:
    """Logits that are not finite cannot be sampled; other requests are not affected."""
    engine = llm.engine
    process = engine._sampler.process

    def failing(logits: Tensor, state: SamplingState) -> Tensor:
        if state.params.seed == 13:
            raise RuntimeError("probability tensor contains nan")
        return process(logits, state)

    engine._sampler.process = failing  # type: ignore[method-assign]
    bad = llm.frontend.prepare(PROMPT, SamplingParams(n=2, seed=13), request_id="bad")
    good = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.submit(bad)
    engine.submit(good)
    errors = {}
    while engine.has_unfinished:
        errors |= {r.group.request_id: r.error for r in engine.step() if r.error is not None}
    assert list(errors) == ["bad"] and "contains nan" in str(errors["bad"])
    assert len(good.output().outputs[0].token_ids) == 5
    assert engine.manager.num_free_blocks == 100


def test_a_bar_shows_the_progress_of_many_prompts(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm.generate([PROMPT] * 4, params)
    captured = capsys.readouterr()
    assert "4/4" in captured.err and "12 tokens generated" in captured.err
    assert captured.out == ""
    llm.generate(PROMPT, params)
    llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_the_cache_can_be_reset_between_requests(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm.generate(PROMPT, params)
    unfinished = llm.frontend.prepare(PROMPT, params)
    llm.engine.submit(unfinished)
    llm.engine.step()  # no stream: that could be at its end by the time of the next line
    assert not llm.reset_prefix_cache()
    llm.engine.abort(unfinished.request_id)
    assert llm.reset_prefix_cache()
    [output] = llm.generate(PROMPT, params)
    assert output.num_cached_tokens == 0
    assert llm.get_tokenizer() is None
