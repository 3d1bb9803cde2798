"""Beam search finds transformers' beams with the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart import LLM, RequestError
from headstart.engine.metrics import Counter, Gauge
from headstart.sampling_params import BeamSearchParams
from tests.engine.tiny_llm import make_llm, save_smallest

PROMPTS = [list(range(3, 60)), list(range(100, 140)), [5, 9, 77]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = make_llm(folder, num_blocks=60, debug=True)
    yield llm
    llm.close()


def their_beams(folder: Path, prompt: list[int], **options: Any) -> list[tuple[list[int], float]]:
    """Return token ids and scores by transformers, best first."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"max_new_tokens": 7, "do_sample": False, **options}
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_return_sequences=options["num_beams"],
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
            **options,
        )
    rows = result.sequences[:, len(prompt) :].tolist()
    return list(zip(rows, result.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_match_transformers(llm: LLM, folder: Path, width: int, penalty: float) -> None:
    """No token ends the text, so both searches have the same length."""
    params = BeamSearchParams(width, 7, ignore_eos=True, length_penalty=penalty)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = their_beams(
            folder, prompt, num_beams=width, length_penalty=penalty, eos_token_id=None
        )
        beams = [(beam.tokens[len(prompt) :], beam.score(penalty)) for beam in output.sequences]
        assert [ids for ids, _ in beams] == [ids for ids, _ in expected]
        assert [score for _, score in beams] == pytest.approx(
            [score for _, score in expected], abs=1e-4
        )


def test_one_beam_is_the_greedy_answer(llm: LLM) -> None:
    from_beams = llm.beam_search(PROMPTS[0], BeamSearchParams(1, 7, ignore_eos=True))
    ids = PROMPTS[0]
    for _ in range(7):
        [output] = llm.beam_search(ids, BeamSearchParams(1, 1, ignore_eos=True))
        ids = output.sequences[0].tokens
    assert from_beams[0].sequences[0].tokens == ids


def test_a_finished_beam_leaves_the_search(llm: LLM, tmp_path: Path) -> None:
    """The best beam is the same as in transformers, without the token that ended it."""
    prompt = PROMPTS[0]
    [output] = llm.beam_search(prompt, BeamSearchParams(2, 3, ignore_eos=True))
    ending = output.sequences[0].tokens[-1]
    save_smallest(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ending}}}')
    ends = make_llm(tmp_path, num_blocks=60)
    for shown in (False, True):
        params = BeamSearchParams(2, 7, length_penalty=0.0, include_stop_str_in_output=shown)
        best = ends.beam_search(prompt, params)[0].sequences[0]
        expected = their_beams(tmp_path, prompt, num_beams=2, length_penalty=0.0)[0]
        assert (best.finish_reason, best.stop_reason) == ("stop", ending)
        theirs = expected[0][: expected[0].index(ending) + shown]
        assert best.tokens[len(prompt) :] == theirs
        assert best.cum_logprob == pytest.approx(expected[1], abs=1e-4)
    ends.close()


def test_beams_hit_all_but_their_last_tokens(llm: LLM) -> None:
    """A step computes one or two tokens of each beam; the rest is cached."""
    prompt, width, steps = PROMPTS[0], 4, 6
    llm.beam_search([prompt], BeamSearchParams(width, steps, ignore_eos=True))
    values = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter | Gauge)}
    computed = values["vllm:prefix_cache_queries"] - values["vllm:prefix_cache_hits"]
    assert values["vllm:prefix_cache_queries"] > width * (steps - 1) * len(prompt)
    assert computed <= len(prompt) + 2 * width * (steps - 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0, "max_tokens": 3}, "beam_width is 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 2, "max_tokens": 3, "length_penalty": "a"}, "length_penalty is 'a'"),
    ],
)
def test_invalid_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**params)


def test_prompts_of_a_beam_search_are_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params are None"):
        llm.beam_search([PROMPTS[0]], None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="images"):
        prompt = {"prompt": "a", "multi_modal_data": {"image": 3}}
        llm.beam_search([prompt], BeamSearchParams(2, 2))
