"""`LLMEngine`: programs that call `step`, like vLLM's llm_engine_example.py."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart import (
    AdapterNotFoundError,
    EngineArgs,
    EngineError,
    LLMEngine,
    LoRARequest,
    RequestError,
    SamplingParams,
)
from headstart.outputs import RequestOutput
from headstart.sampling_params import RequestOutputKind
from headstart.v1.engine.llm_engine import LLMEngine as SameEngine
from tests.engine.tiny_llm import make_llm, save_smallest

PROMPTS = {"0": [5, 6, 7], "1": [9] * 40, "2": [5, 6, 8]}
POISON = 31


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"), poison=POISON)


@pytest.fixture
def engine(folder: Path) -> Iterator[LLMEngine]:
    arguments = EngineArgs(model=str(folder), dtype="float32", num_blocks=24, num_threads=1)
    engine = LLMEngine.from_engine_args(arguments)
    yield engine
    engine.engine.manager.check()
    assert list(map(len, engine.engine.requests)) == [0, 0]
    engine.close()


def few(count: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_a_program_from_vllms_examples(engine: LLMEngine, folder: Path) -> None:
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


def test_outputs_have_the_requested_kind(engine: LLMEngine) -> None:
    engine.add_request("all", [5, 6], few(4, n=2))
    engine.add_request("new", [5, 6], few(4, output_kind=RequestOutputKind.DELTA))
    engine.add_request("last", [5, 6], few(4, output_kind=RequestOutputKind.FINAL_ONLY))
    assert engine.get_num_unfinished_requests() == 3
    outputs = run(engine)
    by_name = {
        name: [output for output in outputs if output.request_id == name]
        for name in ("all", "new", "last")
    }
    [last] = by_name["last"]
    answer = last.outputs[0].token_ids
    assert [len(output.outputs[0].token_ids) for output in by_name["new"]] == [1, 1, 1, 1]
    assert [token for output in by_name["new"] for token in output.outputs[0].token_ids] == answer
    assert len(by_name["all"]) == 4
    assert [output.token_ids for output in by_name["all"][-1].outputs] == [answer, answer]


def test_an_aborted_request_has_no_more_outputs(engine: LLMEngine) -> None:
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, few(5))
    engine.step()
    engine.abort_request(["0", "unknown"])
    engine.abort_request("1")
    assert {output.request_id for output in run(engine)} == {"2"}
    engine.add_request("0", [5], few(2))
    assert run(engine)[-1].finished


def test_a_failed_request_raises_once_and_others_continue(engine: LLMEngine) -> None:
    engine.add_request("bad", [5, POISON], few(4))
    engine.add_request("good", [5, 6], few(4))
    outputs, errors = [], 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except EngineError:
            errors += 1
    assert errors == 1
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]


def test_invalid_requests_are_refused_and_not_queued(engine: LLMEngine) -> None:
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


def interrupted_step(engine: LLMEngine) -> list[RequestOutput]:
    """Run a step whose caller is interrupted while it waits; the step still runs."""

    def interrupt(items: object, groups: object = None) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.driver, "wait", interrupt)
        try:
            return engine.step()
        except KeyboardInterrupt:
            return []


def test_ctrl_c_loses_no_output(engine: LLMEngine) -> None:
    def generate(interrupts: bool) -> tuple[dict[str, list[int]], list[str]]:
        assert engine.reset_prefix_cache()
        tokens: dict[str, list[int]] = defaultdict(list)
        finished, errors = [], []
        for name, prompt in {**PROMPTS, "poisoned": [POISON, 3]}.items():
            engine.add_request(name, prompt, few(3, output_kind=RequestOutputKind.DELTA))
        turn = 0
        while engine.has_unfinished_requests():
            turn += 1
            try:
                for output in (
                    interrupted_step(engine) if interrupts and turn % 2 else engine.step()
                ):
                    tokens[output.request_id] += output.outputs[0].token_ids
                    finished += [output.request_id] * output.finished
            except EngineError as error:
                errors.append(str(error))
        assert sorted(finished) == sorted(PROMPTS), "a final output was lost or repeated"
        return tokens, errors

    assert generate(True) == generate(False)


def test_an_abort_drops_outputs_of_an_interrupted_step(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6], few(1))
    engine.add_request("b", [5, 7], few(1))
    assert interrupted_step(engine) == []
    engine.abort_request("a")
    assert [output.request_id for output in run(engine)] == ["b"]


def test_an_id_is_in_use_until_its_last_output_is_returned(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6], few(1))
    assert interrupted_step(engine) == []
    with pytest.raises(RequestError, match="'a' exists: the next call of step returns its output"):
        engine.add_request("a", [7, 8, 9], few(2))
    [output] = run(engine)
    assert output.prompt_token_ids == [5, 6] and output.finished
    engine.add_request("a", [7, 8, 9], few(2))
    assert run(engine)[-1].prompt_token_ids == [7, 8, 9]


def test_an_abort_drops_an_error_of_an_interrupted_step(engine: LLMEngine) -> None:
    engine.add_request("bad", [5, POISON], few(2))
    engine.add_request("good", [5, 6], few(2))
    assert [output.request_id for output in engine.step()] == ["good"]
    engine.abort_request("bad")
    assert run(engine)[-1].finished


def test_an_engine_failure_ends_all_requests_and_later_ones_run(engine: LLMEngine) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("on purpose")

    engine.add_request("a", [5, 6], few(2))
    engine.add_request("b", [5, 7], few(2))
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.engine, "_deliver", broken)
        for _ in range(2):
            with pytest.raises(EngineError, match="the engine broke: RuntimeError: on purpose"):
                engine.step()
    assert not engine.has_unfinished_requests()
    engine.add_request("c", [5, 6], few(2))
    assert run(engine)[-1].finished


def test_generated_ids_are_unique(engine: LLMEngine) -> None:
    first = engine.frontend.prepare([5, 6], few(2)).request_id
    engine.add_request(first.rpartition("-")[0] + "-1x", [5, 6], few(2))
    assert first.startswith("request-") and not first.removeprefix("request-").isdecimal()
    assert engine.frontend.prepare([5, 6], few(2)).request_id != first
    run(engine)


def test_a_closed_engine_is_reported(folder: Path) -> None:
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
