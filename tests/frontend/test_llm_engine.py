"""`LLMEngine`: programs that make the steps themselves, as vLLM's llm_engine_example.py does."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import headstart.engine.engine
import headstart.engine.outputs
import headstart.engine.scheduler
import headstart.frontend.llm_engine
from headstart import (
    AdapterNotFoundError,
    EngineArgs,
    EngineError,
    LLMEngine,
    LoRARequest,
    RequestError,
    SamplingParams,
)
from headstart.engine.outputs import ShownOutputs
from headstart.engine.step import StepResult
from headstart.outputs import RequestOutput
from headstart.sampling_params import RequestOutputKind
from headstart.v1.engine.llm_engine import LLMEngine as SameEngine
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.interruptions import Interruption, points

PROMPTS = {"0": [5, 6, 7], "1": [9] * 40, "2": [5, 6, 8]}
POISON = 31


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"), poison=POISON)


@pytest.fixture
def engine(folder: Path) -> Iterator[LLMEngine]:
    arguments = EngineArgs(model=str(folder), dtype="float32", num_blocks=24, num_threads=1)
    made = LLMEngine.from_engine_args(arguments)
    yield made
    made.engine.manager.check()
    assert list(map(len, made.engine.requests)) == [0, 0]
    made.close()


def few(count: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def run(engine: LLMEngine) -> list[RequestOutput]:
    told = []
    while engine.has_unfinished_requests():
        told += engine.step()
    return told


def test_a_program_of_vllm_s_examples(engine: LLMEngine, folder: Path) -> None:
    assert SameEngine is LLMEngine
    waiting = [(name, prompt, few(4 + int(name))) for name, prompt in PROMPTS.items()]
    finished: dict[str, RequestOutput] = {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            name, prompt, params = waiting.pop(0)
            assert engine.add_request(name, prompt, params) == name
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    llm = make_llm(folder)
    try:
        for name, prompt in PROMPTS.items():
            [expected] = llm.generate(prompt, few(4 + int(name)))
            assert finished[name].outputs[0].token_ids == expected.outputs[0].token_ids
    finally:
        llm.close()


def test_outputs_are_of_the_kind_that_was_asked_for(engine: LLMEngine) -> None:
    engine.add_request("all", [5, 6], few(4, n=2))
    engine.add_request("new", [5, 6], few(4, output_kind=RequestOutputKind.DELTA))
    engine.add_request("last", [5, 6], few(4, output_kind=RequestOutputKind.FINAL_ONLY))
    assert engine.get_num_unfinished_requests() == 3
    told = run(engine)
    of = {name: [one for one in told if one.request_id == name] for name in ("all", "new", "last")}
    [last] = of["last"]
    answer = last.outputs[0].token_ids
    assert [len(one.outputs[0].token_ids) for one in of["new"]] == [1, 1, 1, 1]
    assert [token for one in of["new"] for token in one.outputs[0].token_ids] == answer
    assert len(of["all"]) == 4
    assert [one.token_ids for one in of["all"][-1].outputs] == [answer, answer]


def test_an_aborted_request_is_told_no_more(engine: LLMEngine) -> None:
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, few(5))
    engine.step()
    engine.abort_request(["0", "nobody"])
    engine.abort_request("1")
    assert {output.request_id for output in run(engine)} == {"2"}
    engine.add_request("0", [5], few(2))
    assert run(engine)[-1].finished


def test_a_request_that_fails_is_raised_once_and_the_others_go_on(engine: LLMEngine) -> None:
    engine.add_request("bad", [5, POISON], few(4))
    engine.add_request("good", [5, 6], few(4))
    told, errors = [], 0
    while engine.has_unfinished_requests():
        try:
            told += engine.step()
        except EngineError:
            errors += 1
    assert errors == 1
    assert [len(output.outputs[0].token_ids) for output in told] == [1, 2, 3, 4]


def test_what_cannot_be_is_refused_and_nothing_is_queued(engine: LLMEngine) -> None:
    engine.add_request("a", [5], few(2))
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        engine.add_request("a", [5], few(2))
    with pytest.raises(RequestError, match="request_id is 3"):
        engine.add_request(3, [5], few(2))  # type: ignore[arg-type]
    assert len(run(engine)) == 2


def test_members(engine: LLMEngine) -> None:
    assert engine.get_metrics()
    assert engine.reset_prefix_cache()
    assert engine.get_tokenizer() is engine.tokenizer is None
    with pytest.raises(AdapterNotFoundError):
        engine.add_lora(LoRARequest("a", 1, "no/where"))


def told_in_spite_of(
    engine: LLMEngine, interruption: Interruption
) -> tuple[dict[str, list[int]], list[EngineError]]:
    """The tokens of each request that came to its end, and errors; Ctrl-C only repeats a step."""
    assert engine.reset_prefix_cache()
    tokens: dict[str, list[int]] = defaultdict(list)
    ended, errors = [], []
    for name, prompt in {**PROMPTS, "poisoned": [POISON, 3]}.items():
        engine.add_request(name, prompt, few(3, output_kind=RequestOutputKind.DELTA))
    with interruption:
        while True:
            try:
                if not engine.has_unfinished_requests():
                    break
                for output in engine.step():
                    tokens[output.request_id] += output.outputs[0].token_ids
                    ended += [output.request_id] * output.finished
            except KeyboardInterrupt:
                pass
            except EngineError as error:
                errors.append(error)
    assert sorted({*ended}) == sorted(ended), "told twice"
    return {name: tokens[name] for name in ended}, errors


def test_ctrl_c_at_any_line_takes_away_no_output(engine: LLMEngine) -> None:
    """What a step had computed was lost between its last line and the program's."""
    shown = (headstart.frontend.llm_engine, headstart.engine.outputs)
    expected, [poisoned] = told_in_spite_of(engine, counted := Interruption(-1, None, *shown))
    assert expected.keys() == PROMPTS.keys()
    for at in points(counted.lines):
        interruption = Interruption(at, KeyboardInterrupt(), *shown)
        told, errors = told_in_spite_of(engine, interruption)
        assert interruption.raised and told == expected
        assert list(map(str, errors)) == [str(poisoned)]


def test_ctrl_c_at_any_line_of_a_step_leaves_no_request_without_an_end(engine: LLMEngine) -> None:
    within = headstart.engine.engine
    expected, _ = told_in_spite_of(engine, counted := Interruption(-1, None, within))
    for at in points(counted.lines):
        told, errors = told_in_spite_of(engine, Interruption(at, KeyboardInterrupt(), within))
        assert told.items() <= expected.items()
        assert len(told) + len(errors) == len(expected) + 1


def test_what_an_interrupted_step_had_to_tell_is_gone_with_an_abort(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, output: object) -> None:
        raise KeyboardInterrupt

    engine.add_request("a", [5, 6], few(1))
    engine.add_request("b", [5, 7], few(1))
    with monkeypatch.context() as patch:
        patch.setattr(ShownOutputs, "next", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    engine.abort_request("a")
    assert [output.request_id for output in run(engine)] == ["b"]


def test_an_id_is_taken_until_its_last_output_was_told(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request("a", [5, 6], few(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ShownOutputs, "next", interrupt)
        engine.step()
    with pytest.raises(RequestError, match="'a' has an output that the next step tells"):
        engine.add_request("a", [7, 8, 9], few(2))
    [output] = run(engine)
    assert output.prompt_token_ids == [5, 6] and output.finished
    engine.add_request("a", [7, 8, 9], few(2))
    assert run(engine)[-1].prompt_token_ids == [7, 8, 9]


def test_an_error_nobody_was_told_goes_with_its_request(engine: LLMEngine) -> None:
    engine.add_request("bad", [5, POISON], few(2))
    engine.add_request("good", [5, 6], few(2))
    assert [output.request_id for output in engine.step()] == ["good"]
    engine.abort_request("bad")
    assert run(engine)[-1].finished


def test_an_interrupted_call_changes_nothing_of_a_step_that_came_about(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request("a", [*range(3, 30)], few(3))
    [before] = engine.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.engine._scheduler, "add", interrupt)
        engine.add_request("b", [5, 6], few(2))
    after = next(output for output in engine.step() if output.request_id == "a")
    assert (after.num_cached_tokens, after.why_missed) == (0, before.why_missed)
    assert after.why_missed is not None
    run(engine)


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_an_error_behind_the_delivery_reaches_the_caller_and_results_come_next(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: object, *arguments: object) -> None:
        deliver(step, *arguments)
        raise RuntimeError("behind the delivery")

    engine.add_request("a", [5, 6], few(2))
    deliver = engine.engine._deliver
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="behind the delivery"):
        patch.setattr(engine.engine, "_deliver", fail)
        engine.step()
    told = run(engine)
    assert len(told[-1].outputs[0].token_ids) == 2 and told[-1].finished


def test_an_id_that_is_made_is_nobody_elses(engine: LLMEngine) -> None:
    first = engine.engine.prepare([5, 6], few(2)).request_id
    engine.add_request(first.rpartition("-")[0] + "-1x", [5, 6], few(2))
    assert first.startswith("request-") and not first.removeprefix("request-").isdecimal()
    assert engine.engine.prepare([5, 6], few(2)).request_id != first
    run(engine)


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = LLMEngine(folder, dtype="float32", num_blocks=24)
    engine.add_request("a", [5], few(2))
    engine.add_request("bad", [5, POISON], few(2))
    engine.step()
    engine.close()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.step()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.add_request("b", [5], few(2))


def test_what_a_roll_back_ends_is_told(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking results completes a roll-back, which may end requests that nobody has seen yet."""
    engine.add_request("1", {"prompt_token_ids": PROMPTS["1"]}, SamplingParams(max_tokens=2))
    take = engine.engine.take_results

    def and_one_more() -> list[StepResult]:
        monkeypatch.undo()
        found = take()
        [request] = engine.engine._scheduler.waiting
        engine.engine.abort("1")
        return [*found, StepResult(request.group, EngineError("the step failed"))]

    monkeypatch.setattr(engine.engine, "take_results", and_one_more)
    engine.abort_request([])
    with pytest.raises(EngineError, match="the step failed"):
        engine.step()


def test_ctrl_c_in_an_abort_takes_away_all_of_a_request_or_nothing(engine: LLMEngine) -> None:
    """One of two answers ended with it, and the other went on."""
    within = (headstart.engine.engine, headstart.engine.scheduler)

    def abort(interruption: Interruption) -> list[str | None]:
        engine.add_request("a", [5, 6, 7], few(4, n=2))
        engine.step()
        with suppress(KeyboardInterrupt), interruption:
            engine.abort_request("a")
        ends = [answer.finish_reason for output in run(engine)[-1:] for answer in output.outputs]
        engine.abort_request("a")
        return ends

    counted = Interruption(-1, None, *within)
    assert abort(counted) == []
    for at in points(counted.lines):
        assert abort(Interruption(at, KeyboardInterrupt(), *within)) in ([], ["length"] * 2)
