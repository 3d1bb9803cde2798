"""Tiny models with and without sliding-window layers, whose K/V behind the window are released.

They answer as transformers does, from any resume point. The oracle is its pass over prompt and
answer at once, without a cache.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config

from headstart import LLM, LLMEngine, RequestOutput, SamplingParams
from headstart.sampling_params import BeamSearchParams
from tests.engine.tiny_llm import draft_always
from tests.tiny_models import VOCABULARY, save_tiny, tiny_config, tiny_model, write_once

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
TEXT = torch.randint(3, VOCABULARY, (150,), generator=torch.Generator().manual_seed(0)).tolist()
POOL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 200,
    "num_window_blocks": 24,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "debug": True,
}
# Layers with a window are the first and the last, or the last two in one compiled call with others.
NAMES = ("gemma2", "gemma3", "gemma4_text", "gpt_oss", "qwen2")
each_model = pytest.mark.parametrize("name", NAMES)
# The use of window blocks does not depend on the other layers.
two_models = pytest.mark.parametrize("name", ["gemma4_text", "qwen2"])
each_mode = pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])


def make_reference(name: str) -> PreTrainedModel:
    config = tiny_config(name)
    if name == "qwen2":
        windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        content = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
        config = Qwen2Config(**content | windows)
    model = tiny_model(config)
    model.set_attn_implementation("eager")
    return model


def save(folder: Path, name: str) -> None:
    make_reference(name).save_pretrained(folder)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    llms: list[LLM] = []

    def make(name: str, **options: Any) -> LLM:
        llm = LLM(write_once(save, tmp_path, name), **POOL | options)
        llms.append(llm)
        return llm

    yield make
    for llm in llms:
        llm.close()


def check(reference: PreTrainedModel, outputs: list[RequestOutput]) -> list[int]:
    """Check all answers and their log-probabilities; return the hit tokens of each prompt."""
    for output in outputs:
        prompt = list(output.prompt_token_ids or ())
        for completion in output.outputs:
            answer = list(completion.token_ids)
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + answer])).logits[0]
            expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
            rows = zip(completion.logprobs or (), answer, strict=True)
            own = torch.tensor([row[token].logprob for row, token in rows])
            chosen = expected.gather(1, torch.tensor([answer]).T)[:, 0]
            torch.testing.assert_close(own, chosen, rtol=0.0, atol=1e-4)
    return [output.num_cached_tokens or 0 for output in outputs]


@each_mode
@each_model
def test_answers_after_hits(name: str, deterministic: bool, load: Callable[..., LLM]) -> None:
    reference, llm = make_reference(name), load(name, deterministic=deterministic)
    windows = llm.engine.manager.windows
    assert windows is not None and windows.num_blocks == 24

    def run(prompts: list[list[int]]) -> list[int]:
        return check(reference, llm.generate(prompts, PARAMS, use_tqdm=False))

    assert run([TEXT]) == [0]  # its 41 blocks are more than there are window blocks
    assert run([TEXT]) == [148 if deterministic else 149]
    turn = llm.generate([TEXT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    [hit] = run([[*TEXT, *turn, 5]])
    assert hit == (160 if deterministic else 161)
    for length in (149, 147, 120, 61, 60, 9, 3):  # forks within the last window and before it
        run([[*TEXT[:length], 7, length % 50]])
    run([[*TEXT[:length], 8, 8] for length in (3, 9, 30, 60, 77, 101, 150)])


@two_models
def test_drafts_do_not_change_answers(name: str, load: Callable[..., LLM]) -> None:
    reference, llm = make_reference(name), draft_always(load(name, speculation=4))
    for _ in range(2):  # the second time all tokens are drafted
        outputs = llm.generate([TEXT[:n] for n in (9, 60, 77, 150)], PARAMS, use_tqdm=False)
        check(reference, outputs)
    assert any(output.metrics.num_accepted_tokens for output in outputs if output.metrics)


@two_models
def test_without_prefix_caching(name: str, load: Callable[..., LLM]) -> None:
    llm = load(name, enable_prefix_caching=False)
    prompts = [TEXT[:length] for length in (3, 9, 30, 60, 77, 101, 150)]
    assert check(make_reference(name), llm.generate(prompts, PARAMS, use_tqdm=False)) == [0] * 7


@two_models
def test_preempted_requests_resume(name: str, load: Callable[..., LLM]) -> None:
    llm = load(name, num_blocks=40, num_window_blocks=20)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = [TEXT[start : start + 30] for start in range(6)]
    check(make_reference(name), llm.generate(prompts, long, use_tqdm=False))
    assert llm.engine.num_preemptions


@two_models
def test_several_answers_and_beams(name: str, load: Callable[..., LLM]) -> None:
    reference, llm = make_reference(name), load(name)
    several = SamplingParams(n=3, temperature=1, max_tokens=30, ignore_eos=True, logprobs=1)
    check(reference, llm.generate([TEXT[:50], TEXT[:21]], several, use_tqdm=False))
    beams = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": TEXT[:50]}]
    alone = load(name, num_window_blocks=200).beam_search(prompts, beams)
    grouped = llm.beam_search(prompts, beams)
    for own, other in zip(grouped[0].sequences, alone[0].sequences, strict=True):
        assert own.tokens == other.tokens
        assert own.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-3)


@two_models
def test_aborted_requests_cause_no_wrong_answer(name: str, tmp_path: Path) -> None:
    reference = make_reference(name)
    engine = LLMEngine(write_once(save, tmp_path, name), **POOL)
    for number in range(5):
        for length in (40 + number, 90 + number, 101, 33):
            engine.add_request(f"{number} {length}", {"prompt_token_ids": TEXT[:length]}, PARAMS)
        outputs = [output for _ in range(2 + 2 * number) for output in engine.step()]
        engine.abort_request([f"{number} {length}" for length in (40 + number, 90 + number)])
        while engine.has_unfinished_requests():
            outputs += engine.step()
        finished = [output for output in outputs if output.finished]
        assert len(finished) >= 2
        check(reference, finished)
    engine.close()


@each_model
def test_bits_do_not_depend_on_the_pool(name: str, load: Callable[..., LLM]) -> None:
    """Bit for bit the log-probabilities of an engine whose layers share one pool."""
    prompts = [TEXT[:length] for length in (3, 30, 77, 78, 150)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    results = []
    for options in ({"num_window_blocks": 200}, {}, {"enable_prefix_caching": False}):
        llm = load(name, deterministic=True, **options)
        assert (llm.engine.manager.windows is None) == ("num_window_blocks" in options)
        outputs = [o for _ in range(2) for o in llm.generate(prompts, params, use_tqdm=False)]
        results.append(
            [
                (completion.token_ids, completion.cumulative_logprob, completion.logprobs)
                for output in outputs
                for completion in output.outputs
            ]
        )
    assert results[0] == results[1] == results[2]


def test_options_without_effect_are_logged(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    for name, options in (("lfm2", {"speculation": 4}), ("llama", {"num_states": 4})):
        LLM(save_tiny(name, tmp_path / name), **POOL | options).close()
    messages = [record.getMessage() for record in logged if record.name == "headstart.engine"]
    assert [message.split(":")[0] for message in messages] == [
        "num_window_blocks has no effect",
        "speculation has no effect",
        "num_states has no effect",
        "num_window_blocks has no effect",
    ]
