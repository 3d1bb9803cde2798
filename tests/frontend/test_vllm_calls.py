"""vLLM's parameters of methods, keys of prompts, and members and fields of outputs."""

import asyncio
import copy
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from headstart.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiny_tokenizers import TINY_TOKENIZERS

GREEDY = SamplingParams(temperature=0, max_tokens=2)
CHAT = [{"role": "user", "content": "a"}]
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("m"), tokenizer=TINY_TOKENIZERS["byte_level"]())


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    engine = make_llm(folder, chat_template=TEMPLATE)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def output(llm: LLM) -> RequestOutput:
    return llm.generate([5, 6], SamplingParams(max_tokens=2, logprobs=1))[0]


EVERY_CALL = [
    {"lora_request": None, "priority": 3},
    {"lora_request": [None], "priority": [3], "cache_salt": "a", "adapter": None},
]
READING: dict[str, Any] = {"tokenization_kwargs": {}, "mm_processor_kwargs": None}
TEMPLATES: dict[str, Any] = {
    "chat_template": TEMPLATE,
    "chat_template_content_format": "string",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "tools": None,
    "chat_template_kwargs": {"a": 1},
}


@pytest.mark.parametrize("options", EVERY_CALL)
def test_parameters_of_calls(llm: LLM, options: dict[str, Any]) -> None:
    assert llm.generate([5, 6], GREEDY, use_tqdm=print, **options, **READING)[0].finished
    assert llm.chat(CHAT, GREEDY, False, **options, **READING, **TEMPLATES)[0].finished
    beams = BeamSearchParams(beam_width=1, max_tokens=1)
    assert llm.beam_search([5, 6], beams, use_tqdm=False, concurrency_limit=3, **options)
    single = {name: v[0] if isinstance(v, list) else v for name, v in options.items()}
    assert list(llm.stream([5, 6], GREEDY, **single))[-1].finished
    assert list(llm.stream_chat(CHAT, GREEDY, **single, **TEMPLATES))[-1].finished


@pytest.mark.parametrize(
    ("name", "prompt", "option"),
    [
        ("generate", [5], {"tokenization_kwargs": {"truncation": True}}),
        ("generate", [5], {"mm_processor_kwargs": {"fps": 2}}),
        ("chat", CHAT, {"tokenization_kwargs": {"truncation": True}}),
        ("chat", CHAT, {"mm_processor_kwargs": {"fps": 2}}),
    ],
)
def test_an_absent_parameter_accepts_no_value(
    llm: LLM, name: str, prompt: Any, option: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="not an option of headstart; see docs/vllm"):
        getattr(llm, name)(prompt, GREEDY, **option)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": [1, 2]}, "2 priorities for 1 prompts"),
        ({"lora_request": 3}, "adapter is 3; allowed: a name, a LoRARequest"),
        ({"adapter": "missing"}, "missing"),
        ({"cache_salt": 3}, "cache_salt is 3"),
    ],
)
def test_a_wrong_value_is_named(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate([5, 6], GREEDY, **options)


@pytest.mark.parametrize("key", ["media_io_kwargs", "mm_processor_kwargs", "token_type_ids"])
def test_an_absent_key_of_a_prompt_is_refused(llm: LLM, key: str) -> None:
    prompt = {"prompt_token_ids": [5, 6], "prompt_token_offsets": object()}
    for nothing in (None, {}):
        assert llm.generate({**prompt, key: nothing}, GREEDY)[0].finished
    with pytest.raises(RequestError, match=f"{key} is .*; not an option of headstart"):
        llm.generate({**prompt, key: {"a": 1}}, GREEDY)


def test_wrong_arguments_raise_pythons_errors(llm: LLM) -> None:
    with pytest.raises(TypeError, match="'lora_reqest'"):
        llm.generate([5], GREEDY, lora_reqest=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'prompts'"):
        llm.generate()  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="'generat'"):
        llm.generat([5])  # type: ignore[attr-defined]
    assert not hasattr(llm, "embed")


def test_parameters_of_an_asynchronous_call(folder: Path) -> None:
    nothing: dict[str, Any] = {
        "prompt_text": None,
        "tokenization_kwargs": {},
        "mm_processor_kwargs": None,
        "data_parallel_rank": 0,
        "kv_hints": None,
        "reasoning_ended": False,
        "reasoning_parser_kwargs": {},
        "trace_headers": {"a": "b"},  # of no effect, as the next
        "session_id": "c",
    }

    async def run() -> None:
        llm = AsyncLLM(folder, dtype="float32", num_blocks=24, chat_template=TEMPLATE)
        outputs = [
            output async for output in llm.generate([5], GREEDY, "name", priority=2, **nothing)
        ]
        assert outputs[-1].finished and outputs[-1].request_id == "name"
        assert [output async for output in llm.chat(CHAT, GREEDY, **TEMPLATES)][-1].finished
        for name in ("prompt_text", "kv_hints", "data_parallel_rank", "reasoning_ended"):
            with pytest.raises(RequestError, match=f"{name} is 2; not an option"):
                [output async for output in llm.generate([5], GREEDY, **{name: 2})]
        assert (llm.is_running, llm.is_stopped, llm.errored) == (True, False, False)
        assert await llm.get_tokenizer() is llm.tokenizer
        await llm.check_health()
        await llm.abort("unknown")
        llm.shutdown(timeout=3)

    asyncio.run(run())


def test_parameters_of_a_stepped_request(folder: Path) -> None:
    arguments = EngineArgs(str(folder), dtype="float32", num_blocks=24)
    more: dict[str, Any] = {"usage_context": "ENGINE", "stat_loggers": None}
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False, **more)
    nothing = {"arrival_time": 3.0, "trace_headers": {}, "session_id": "a", "kv_hints": None}
    engine.add_request("a", [5], GREEDY, tokenization_kwargs={}, prompt_text=None, **nothing)
    for name in ("tokenization_kwargs", "prompt_text", "kv_hints"):
        with pytest.raises(RequestError, match=f"{name} is 2; not an option"):
            engine.add_request("b", [5], GREEDY, **{name: 2})
    assert engine.get_num_unfinished_requests() == 1
    engine.close()


def test_fields_of_outputs(output: RequestOutput) -> None:
    [completion] = output.outputs
    assert completion.logprobs is not None
    entry = completion.logprobs[0][completion.token_ids[0]]
    assert entry.rank >= 1 and entry.decoded_token is not None
    for name in (
        *("encoder_prompt", "encoder_prompt_token_ids", "num_cache_creation_tokens"),
        *("prompt_token_id_logprobs", "kv_transfer_params", "ec_transfer_params"),
    ):
        assert getattr(output, name) is None
    for name in ("routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions"):
        assert getattr(completion, name) is None
    for value in (output, completion, output.metrics, entry):
        assert copy.copy(value) == pickle.loads(pickle.dumps(value)) == value
        assert not hasattr(value, "txt")
    assert completion.finished()


def test_an_output_is_constructed_as_in_vllm() -> None:
    """Tests of programs construct outputs without the fields that have defaults in vLLM."""
    answer = CompletionOutput(0, "a", token_ids=[5], cumulative_logprob=None, logprobs=None)
    whole = RequestOutput("id", "b", [6], None, [answer], finished=True)
    assert (whole.num_cached_tokens, whole.metrics.total, answer.finished()) == (0, None, False)


def test_times_of_an_output(output: RequestOutput) -> None:
    metrics = output.metrics
    assert metrics.queued_ts <= metrics.scheduled_ts < metrics.first_token_ts
    assert metrics.last_token_ts == metrics.queued_ts + metrics.total
    assert metrics.first_token_time - metrics.arrival_time == pytest.approx(
        metrics.time_to_first_token, abs=1e-5
    )
    assert metrics.first_scheduled_time <= metrics.last_token_time < time.time() + 1
    assert (metrics.time_in_queue, metrics.num_generation_tokens) == (metrics.queue, 2)
    assert metrics.first_token_latency == metrics.time_to_first_token


def test_outputs_belong_to_the_program(llm: LLM) -> None:
    """A program may change an output without an effect on later outputs."""
    params = SamplingParams(
        max_tokens=3, temperature=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    ids = []
    for output in llm.stream([5, 6], params):
        ids += output.outputs[0].token_ids
        output.outputs[0].token_ids, output.outputs[0].text = [], "changed"
        output.score = 3  # type: ignore[attr-defined]
    assert len(ids) == 3


def test_a_lora_request() -> None:
    request = LoRARequest("sql", 3, "folder", base_model_name=object(), load_inplace=True)
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "folder")
    assert request == LoRARequest("sql", 3, "folder", is_3d_lora_weight=None)
    with pytest.raises(RequestError, match="is_3d_lora_weight is True; not an option"):
        LoRARequest("sql", 3, "folder", is_3d_lora_weight=True)
    for wrong in (("", 1, "a"), ("a", 0, "a"), ("a", 1, "")):
        with pytest.raises(RequestError, match=r"^lora_(name|int_id|path) is"):
            LoRARequest(*wrong)


def test_parameters_of_a_search() -> None:
    params = BeamSearchParams(2, 3, watermarking=object(), structured_outputs=None)
    assert params == BeamSearchParams(beam_width=2, max_tokens=3, watermarking=params.watermarking)
    for name in ("structured_outputs", "allowed_token_ids"):
        with pytest.raises(RequestError, match=f"{name} is 2; not an option"):
            BeamSearchParams(2, 3, **{name: 2})


def test_the_first_field_of_structured_outputs_is_the_schema() -> None:
    assert StructuredOutputsParams({"type": "object"}) == StructuredOutputsParams(
        json={"type": "object"}
    )
