"""Replies outlive the process: a prompt that is repeated after a restart is drafted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart import LLM, SamplingParams
from tests.engine.tiny_llm import draft_always, make_llm, save_smallest

PROMPT = list(range(3, 67))  # whole blocks
TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@contextmanager
def opened(model: Path, folder: Path, **options: Any) -> Iterator[LLM]:
    llm = draft_always(
        make_llm(model, debug=True, speculation=15, cache_dir=str(folder), **options)
    )
    try:
        yield llm
    finally:
        llm.close()


def answer(llm: LLM, **options: Any) -> tuple[int, list[int]]:
    """Return the number of accepted tokens, and the answer.

    Without a reply to draft from, the few repetitions in the answer itself are drafted.
    """
    salt = options.pop("cache_salt", None)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **options)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, cache_salt=salt)
    assert output.metrics is not None
    return output.metrics.num_accepted_tokens, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["", "deterministic"])
def test_a_repeated_prompt_is_drafted(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with opened(model, tmp_path, **options) as llm:
        repeated, first = answer(llm)
    with opened(model, tmp_path, **options) as llm:
        accepted, second = answer(llm)
        assert accepted > repeated + TOKENS // 2
    assert second == first


@pytest.mark.parametrize("public", [[], PROMPT], ids=["", "a public prompt"])
def test_replies_of_other_tenants_are_not_read(
    model: Path, tmp_path: Path, public: list[int]
) -> None:
    with opened(model, tmp_path) as llm:
        llm.engine.manager.hasher.publish(public)
        repeated, tokens = answer(llm, cache_salt="a")
    with opened(model, tmp_path) as llm:
        llm.engine.manager.hasher.publish(public)
        accepted = [answer(llm, cache_salt=salt)[0] for salt in ("b", None, "a")]
        assert accepted[:2] == [repeated, repeated]
        assert accepted[2] > repeated + TOKENS // 2
    for path in tmp_path.iterdir():
        assert np.array(tokens, "<u4").tobytes() not in path.read_bytes()


def test_a_request_that_is_not_stored_leaves_no_reply(model: Path, tmp_path: Path) -> None:
    accepted = []
    for _ in range(2):
        with opened(model, tmp_path) as llm:
            accepted.append(answer(llm, skip_storing_prefix_cache=True)[0])
    assert accepted[0] == accepted[1]
