"""Every name of vLLM's Python interface has a row, and what the row says is what a call does."""

import ast
import asyncio
import copy
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart import LLM, AsyncLLM, ConfigError, HeadstartError, RequestError, SamplingParams
from headstart.frontend.vllm_api import calls, members, sampling
from headstart.frontend.vllm_api.options import ENGINE, read_options
from headstart.frontend.vllm_api.rows import Names, Verdict
from headstart.frontend.vllm_api.signatures import check_calls
from headstart.lora.request import LoRARequest
from headstart.outputs import CompletionOutput, RequestOutput
from headstart.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    StructuredOutputsParams,
)
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.house.source import ROOT
from tests.tiny_tokenizers import TINY_TOKENIZERS

SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))
TABLES: dict[str, list[Names]] = {
    "vllm": [members.EXPORTS],
    "LLM.__init__()": [ENGINE],
    "EngineArgs": [ENGINE],
    "LLM.generate()": [calls.GENERATE],
    "LLM.chat()": [calls.CHAT],
    "LLM.beam_search()": [calls.BEAM_SEARCH_CALL],
    "LLM.reset_prefix_cache()": [calls.RESET],
    "AsyncLLM.generate()": [calls.ASYNC_GENERATE],
    "AsyncLLM.reset_prefix_cache()": [calls.RESET],
    "LLMEngine.add_request()": [calls.ADD_REQUEST],
    "LLMEngine.reset_prefix_cache()": [calls.RESET],
    "SamplingParams": [sampling.SAMPLING],
    "StructuredOutputsParams": [sampling.STRUCTURED],
    "BeamSearchParams": [sampling.BEAM_SEARCH],
    "LoRARequest": [calls.LORA],
    "TextPrompt": [calls.PROMPT],
    "TokensPrompt": [calls.PROMPT],
    "CompletionOutput": [members.COMPLETION_OUTPUT],
    "RequestOutput": [members.REQUEST_OUTPUT],
    "LLM.": [members.LLM],
    "AsyncLLM.": [members.ASYNC_LLM],
    "LLMEngine.": [members.LLM_ENGINE],
    "SamplingParams.": [members.PARAMS],
    "CompletionOutput.": [members.COMPLETION_OUTPUT],
}
NO_TABLE = {"Logprob", "RequestOutputKind", "inputs", "modules"}  # see below, and test_imports
# See tests/cli/test_serve_flags.py and tests/server/test_vllm_fields.py.
OF_A_SERVER = {"FrontendArgs", "flags", "ChatCompletionRequest", "CompletionRequest"}
MISSING = object()
DELTA = RequestOutputKind.DELTA


class Anything:
    """A value that no option takes."""


def names_of(table: Names, *verdicts: Verdict) -> list[str]:
    return [name for name, row in table.rows.items() if row.verdict in verdicts]


def default_of(part: str, name: str) -> object:
    """vLLM's own default, MISSING where it must be given or is computed."""
    source = SURFACE[part].get(name)
    if source in (None, "..."):
        return MISSING
    return set() if source == "set()" else ast.literal_eval(source)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = make_llm(save_smallest(tmp_path_factory.mktemp("model")))
    yield made
    made.close()


@pytest.fixture(scope="module")
def output(llm: LLM) -> RequestOutput:
    return llm.generate([5, 6], SamplingParams(max_tokens=2, logprobs=1))[0]


def test_every_part_of_the_surface_has_a_table() -> None:
    assert set(SURFACE) == set(TABLES) | NO_TABLE | OF_A_SERVER


@pytest.mark.parametrize("part", TABLES)
def test_every_name_has_a_row(part: str) -> None:
    rows = {name for table in TABLES[part] for name in table.rows}
    assert set(SURFACE[part]) - rows == set()


@pytest.mark.parametrize("part", ["EngineArgs", "LLM.__init__()"])
def test_vllm_s_own_defaults_are_taken(part: str) -> None:
    for name in SURFACE[part]:
        default = default_of(part, name)
        if name != "model" and default is not MISSING:
            read_options("headstart-tiny", {name: default})


def test_vllm_s_own_defaults_of_a_request_are_ours() -> None:
    for name in SURFACE["SamplingParams"]:
        default = default_of("SamplingParams", name)
        if default is not MISSING:
            assert SamplingParams(**{name: default}) == SamplingParams(), name


@pytest.mark.parametrize("name", names_of(ENGINE, Verdict.REFUSED))
def test_a_refused_option_says_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("headstart-tiny", **{name: Anything()})
    assert str(caught.value).startswith(f"{name} is ")
    assert str(caught.value).endswith(ENGINE.rows[name].note)


@pytest.mark.parametrize("name", names_of(ENGINE, Verdict.ACCEPTED))
def test_an_accepted_option_may_be_anything(name: str) -> None:
    assert read_options("headstart-tiny", {name: Anything()}).config == {}


@pytest.mark.parametrize("name", names_of(ENGINE, Verdict.WORKS))
def test_an_option_that_works_is_checked(name: str) -> None:
    if name == "model":
        with pytest.raises(HeadstartError, match="the model is"):
            LLM(Anything())  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigError, match=r"is .?<"):
            LLM("headstart-tiny", **{name: Anything()})


def test_a_call_that_does_not_fit_says_what_does(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"missing .*'model'; allowed: LLM\(model, \*\*options\)"):
        LLM()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="LLM: too many positional arguments; allowed: LLM"):
        LLM("headstart-tiny", "auto")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"LLM.generate: .*'prompts'; allowed: .*params=None"):
        llm.generate()  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"LoRARequest: .*'lora_name'; allowed: "):
        LoRARequest()  # type: ignore[call-arg]


def test_a_type_error_from_within_a_call_stays_one() -> None:
    @check_calls(RequestError)
    class Adder:
        def add(self, one: object) -> object:
            return one + 1  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        Adder().add(None)
    with pytest.raises(RequestError, match=r"Adder.add: .*; allowed: Adder.add\(one\)"):
        Adder().add(1, 2)  # type: ignore[call-arg]


def test_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    tokenizer = TINY_TOKENIZERS["byte_level"]()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = save_smallest(tmp_path / "model")
    llm = make_llm(model, tokenizer=str(tmp_path / "tokenizer"))
    try:
        [output] = llm.generate("BA", SamplingParams(temperature=0, max_tokens=1))
        assert output.prompt_token_ids == tokenizer.encode("BA")
    finally:
        llm.close()
    assert read_options(model, {"tokenizer": str(model)}).tokenizer is None
    with pytest.raises(ConfigError, match="tokenizer is 'no/where'; allowed: the path of a folder"):
        LLM(model, tokenizer="no/where")
    with pytest.raises(ConfigError, match=r"tokenizer is .*, a folder without one"):
        LLM("headstart-tiny", tokenizer=tmp_path)


def test_an_unknown_option_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="LLM knows no 'max_modl_len'; the nearest is max_model"):
        LLM("headstart-tiny", max_modl_len=3)


@pytest.mark.parametrize(
    ("make", "name", "ours"),
    [
        (LLM, "n_ctx", "max_model_len"),
        (LLM, "torch_dtype", "dtype"),
        (LLM, "load_in_8bit", "weights"),
        (SamplingParams, "repeat_penalty", "repetition_penalty"),
    ],
)
def test_names_of_transformers_and_llama_cpp_are_told_ours(make: Any, name: str, ours: str) -> None:
    given = ("headstart-tiny",) if make is LLM else ()
    with pytest.raises(
        (ConfigError, RequestError), match=f"knows no {name!r}; the nearest is {ours}$"
    ):
        make(*given, **{name: 1})


@pytest.mark.parametrize("part", TABLES)
def test_no_name_that_is_refused_is_suggested(part: str) -> None:
    """`quantisation` was told that the nearest is `quantization`, which was refused in its turn."""
    for table in TABLES[part]:
        for name, row in table.rows.items():
            if row.verdict is Verdict.REFUSED and not name.startswith("__"):
                said = str(table.missing(f"{name}x"))
                assert said.endswith(f"and refuses {name}: {row.note}") or (
                    table.rows[said.rpartition(" ")[2]].verdict is not Verdict.REFUSED
                )
    if part == "LLM.__init__()":
        with pytest.raises(ConfigError, match="and refuses quantization: leave it out"):
            LLM("headstart-tiny", quantisation="awq")


@pytest.mark.parametrize(
    ("kind", "table", "given"),
    [
        (SamplingParams, sampling.SAMPLING, {}),
        (BeamSearchParams, sampling.BEAM_SEARCH, {"beam_width": 2, "max_tokens": 2}),
        (StructuredOutputsParams, sampling.STRUCTURED, {"regex": "a"}),
        (LoRARequest, calls.LORA, {"lora_name": "a", "lora_int_id": 1, "lora_path": "b"}),
    ],
)
def test_every_row_of_a_dataclass(kind: Any, table: Names, given: dict[str, Any]) -> None:
    for name in names_of(table, Verdict.ACCEPTED):
        assert kind(**given, **{name: Anything()}) == kind(**given)
    for name in names_of(table, Verdict.REFUSED):
        for taken in (None, *table.rows[name].allowed):
            assert kind(**given, **{name: taken}) == kind(**given)
        with pytest.raises(RequestError, match=f"{name} is .*; allowed: None"):
            kind(**given, **{name: Anything()})
    for name in names_of(table, Verdict.WORKS):
        if name not in FORMS:
            with pytest.raises(RequestError, match=f"{name} (is|has) "):
                kind(**{**given, name: Anything()})


FORMS = (
    "json",
    "choice",
    "grammar",
    "json_object",
    "structural_tag",
)  # not beside a regex: see the wrong values

CALLS = {
    "generate": (calls.GENERATE, [5, 6]),
    "chat": (calls.CHAT, [{"role": "user", "content": "a"}]),
    "beam_search": (calls.BEAM_SEARCH_CALL, [5, 6]),
    "stream": (calls.STREAM, [5, 6]),
    "stream_chat": (calls.STREAM_CHAT, [{"role": "user", "content": "a"}]),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_of_a_call(llm: LLM, call: str) -> None:
    """A wrong value is refused with its name, and nothing else is looked at before."""
    table, prompt = CALLS[call]
    own = {"prompts", "messages", "params", "sampling_params"}
    params = BeamSearchParams(beam_width=1, max_tokens=1) if call == "beam_search" else None
    for name in {*table.rows, "cache_salt", "adapter", "lora_reqest"} - own:
        row = table.rows.get(name)
        if row is None or row.verdict is not Verdict.ACCEPTED:
            with pytest.raises(RequestError):
                getattr(llm, call)(prompt, params, **{name: Anything()})
    with pytest.raises(RequestError, match="knows no 'lora_reqest'; the nearest is lora_request"):
        getattr(llm, call)(prompt, params, lora_reqest=None)


def test_every_argument_of_an_asynchronous_call(tmp_path: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(save_smallest(tmp_path), num_blocks=24, dtype="float32")
        for name, row in calls.ASYNC_GENERATE.rows.items():
            if name in ("prompt", "sampling_params"):
                continue
            if row.verdict is Verdict.ACCEPTED:
                done = [one async for one in llm.generate([5], GREEDY, **{name: Anything()})]
                assert done[-1].finished
            else:
                with pytest.raises(RequestError):
                    [one async for one in llm.generate([5], GREEDY, **{name: Anything()})]
        for name in names_of(members.ASYNC_LLM, Verdict.WORKS):
            assert getattr(llm, name, MISSING) is not MISSING, name
        for name in names_of(members.ASYNC_LLM, Verdict.REFUSED):
            with pytest.raises(RequestError, match=f"AsyncLLM has no {name}: "):
                getattr(llm, name)
        llm.close()

    asyncio.run(run())


GREEDY = SamplingParams(temperature=0, max_tokens=2)


@pytest.mark.parametrize("name", names_of(calls.PROMPT, Verdict.REFUSED, Verdict.ACCEPTED))
def test_every_key_of_a_prompt(llm: LLM, name: str) -> None:
    prompt = {"prompt_token_ids": [5, 6]}
    for taken in (None, *calls.PROMPT.rows[name].allowed):
        assert llm.generate({**prompt, name: taken}, GREEDY)[0].finished
    if calls.PROMPT.rows[name].verdict is Verdict.REFUSED:
        with pytest.raises(RequestError, match=calls.PROMPT.rows[name].note):
            llm.generate({**prompt, name: Anything()})


def test_members_of_llm(llm: LLM) -> None:
    for name in names_of(members.LLM, Verdict.WORKS):
        assert getattr(llm, name, MISSING) is not MISSING, name
    for name in names_of(members.LLM, Verdict.REFUSED):
        assert not hasattr(llm, name)
        with pytest.raises(RequestError, match=f"LLM has no {name}: "):
            getattr(llm, name)
    with pytest.raises(RequestError, match="LLM knows no 'generat'; the nearest is generate"):
        llm.generat([5])


def test_members_of_parameters() -> None:
    params = SamplingParams(logprobs=3)
    assert (params.num_logprobs, params.sampling_type.name) == (3, "RANDOM")
    for name in names_of(members.PARAMS, Verdict.WORKS):
        assert getattr(params, name, MISSING) is not MISSING
    for name in names_of(members.PARAMS, Verdict.REFUSED):
        with pytest.raises(RequestError, match=f"SamplingParams has no {name}: "):
            getattr(params, name)


def test_fields_of_outputs(output: RequestOutput) -> None:
    completion: CompletionOutput = output.outputs[0]
    assert completion.logprobs is not None
    entry = completion.logprobs[0][completion.token_ids[0]]
    for table, value in (
        (members.REQUEST_OUTPUT, output),
        (members.COMPLETION_OUTPUT, completion),
        (members.REQUEST_METRICS, output.metrics),
        (members.LOGPROB, entry),
    ):
        for name in names_of(table, Verdict.WORKS):
            assert getattr(value, name, MISSING) is not MISSING, name
        for name in names_of(table, Verdict.ACCEPTED):
            assert getattr(value, name) is None
        for name in [*names_of(table, Verdict.REFUSED), "txt"]:
            with pytest.raises(RequestError, match=f"^{table.owner} (has|knows) no '?{name}"):
                getattr(value, name)
            assert not hasattr(value, name)
        assert copy.copy(value) == pickle.loads(pickle.dumps(value)) == value
    assert completion.finished()
    assert {name: getattr(entry, name) for name in SURFACE["Logprob"]}["rank"] >= 1


def test_times_of_an_output(output: RequestOutput) -> None:
    """`metrics.first_token_time` was a bare AttributeError."""
    metrics = output.metrics
    assert metrics.queued_ts <= metrics.scheduled_ts < metrics.first_token_ts
    assert metrics.last_token_ts == metrics.queued_ts + metrics.total
    assert metrics.first_token_time - metrics.arrival_time == pytest.approx(
        metrics.time_to_first_token, abs=1e-5
    )
    assert metrics.first_scheduled_time <= metrics.last_token_time < time.time() + 1
    assert (metrics.time_in_queue, metrics.num_generation_tokens) == (metrics.queue, 2)


def test_outputs_are_the_program_s_own(llm: LLM) -> None:
    """Setting a field was a bare FrozenInstanceError; what was told of a stream stays told."""
    params = SamplingParams(max_tokens=3, temperature=0, detokenize=False, output_kind=DELTA)
    ids = []
    for output in llm.stream([5, 6], params):
        ids += output.outputs[0].token_ids
        output.outputs[0].token_ids, output.outputs[0].text = [], "changed"
        output.score = 3  # type: ignore[attr-defined]
    assert len(ids) == 3
