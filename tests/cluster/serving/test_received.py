"""No token is missing when two streams overlap, overtake each other or fail."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.cluster.serving.messages import OutputDelta, RequestDelta
from headstart.engine.outputs import RequestOutput
from headstart.engine.params import RequestOutputKind
from headstart.engine.request import RequestGroup

PARAMS = SamplingParams(max_tokens=6, temperature=0, logprobs=1, n=2, ignore_eos=True)
PROMPT = "Anna is 31. Ben is 45. How old is Ben?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("headstart-tiny", num_blocks=64, dtype="float32", speculation=0)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def deltas(llm: LLM) -> list[RequestOutput]:
    params = PARAMS.clone()
    params.output_kind = RequestOutputKind.DELTA
    return list(llm.stream(PROMPT, params))


def parts_of(deltas: list[RequestOutput]) -> tuple[RequestDelta, list[RequestDelta], RequestDelta]:
    """Split deltas as a replica sends them: the first, intermediate ones, and the rest joined."""
    counts: Counter[int] = Counter()
    first, *later = [
        RequestDelta.of(delta, counts, is_first=not i) for i, delta in enumerate(deltas)
    ]
    return first, later[:-1], RequestDelta.joined(later)


def answers(group: RequestGroup) -> list[Any]:
    return [
        (output.text, output.token_ids, output.finish_reason, output.logprobs)
        for output in group.output().outputs
    ]


@pytest.mark.parametrize("lost", list(itertools.product([False, True], repeat=4)))
def test_an_answer_is_complete_if_intermediate_parts_are_lost(
    llm: LLM, deltas: list[RequestOutput], lost: tuple[bool, ...]
) -> None:
    first, between, last = parts_of(deltas)
    assert len(between) == len(lost)
    group = llm.frontend.prepare(PROMPT, PARAMS)
    first.add_to(group, 0.0)
    for part, is_lost in zip(between, lost, strict=True):
        if not is_lost:
            part.add_to(group, 0.0)
            part.add_to(group, 0.0)  # it arrives twice
    last.add_to(group, 0.0)
    [expected] = llm.generate(PROMPT, PARAMS)
    assert answers(group) == [
        (output.text, output.token_ids, output.finish_reason, output.logprobs)
        for output in expected.outputs
    ]
    assert group.finished


class _Copied(list[int]):
    """A list that counts the tokens copied by additions."""

    count = 0

    def __add__(self, other: list[int]) -> "_Copied":  # type: ignore[override]
        _Copied.count += len(self)
        return _Copied([*self, *other])


def test_parts_of_a_long_answer_are_joined_in_one_pass() -> None:
    """Regression: each part copied all earlier tokens; 30,000 took seconds of the event loop."""
    parts = [
        RequestDelta(None, (OutputDelta(0, i, _Copied([i]), None, None),), False) for i in range(99)
    ]
    [answer] = RequestDelta.joined(parts).answers
    assert answer.token_ids == [*range(99)]
    assert [part_.answers[0].token_ids for part_ in parts] == [[i] for i in range(99)]
    assert _Copied.count <= 2 * 99


def test_deltas_without_tokens_are_skipped_at_the_start(
    llm: LLM, deltas: list[RequestOutput]
) -> None:
    _, between, _ = parts_of(deltas)
    group = llm.frontend.prepare(PROMPT, PARAMS)
    between[0].add_to(group, 0.0)
    assert [output.token_ids for output in group.output().outputs] == [[], []]


def test_the_last_part_has_the_counts_of_drafts(llm: LLM, deltas: list[RequestOutput]) -> None:
    for number, delta in enumerate(deltas):
        delta.metrics = replace(
            delta.metrics, num_drafted_tokens=3 * number, num_accepted_tokens=number
        )
    first, between, last = parts_of(deltas)
    group = llm.frontend.prepare(PROMPT, PARAMS)
    for part in (first, between[1], between[0], last):
        part.add_to(group, 0.0)
    metrics, number = group.output().metrics, len(deltas) - 1
    assert (metrics.num_drafted_tokens, metrics.num_accepted_tokens) == (3 * number, number)


def test_the_first_part_has_the_prompts_results(llm: LLM, deltas: list[RequestOutput]) -> None:
    first, _, last = parts_of([replace(deltas[0], num_cached_tokens=7), *deltas[1:]])
    assert last.head is None
    group = llm.frontend.prepare(PROMPT, PARAMS)
    first.add_to(group, 0.0)
    assert group.output().num_cached_tokens == 7
