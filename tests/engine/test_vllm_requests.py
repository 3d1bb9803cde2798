"""vLLM's request features: kinds of streams, priorities, prompts as dicts, tools."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, AsyncEngineArgs, AsyncLLM, RequestError, SamplingParams, TokensPrompt
from headstart.engine.metrics import Counter, Gauge
from headstart.outputs import RequestOutput
from headstart.sampling_params import RequestOutputKind
from tests.engine.internals import remembered_chats
from tests.engine.tiny_llm import make_llm, save_smallest

PROMPT = list(range(3, 60))
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 400, "speculation": "off"}
    llm = LLM("headstart-tiny", debug=True, **options)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    llm = make_llm(folder, debug=True, speculation="off")
    yield llm
    llm.close()


def greedy(count: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)  # type: ignore[arg-type]


def join(outputs: list[RequestOutput], index: int) -> tuple[str, list[int], int]:
    """Return the text, ids and number of log-probabilities of one answer's parts."""
    parts = [one for output in outputs for one in output.outputs if one.index == index]
    ids = [token_id for one in parts for token_id in one.token_ids]
    return "".join(one.text for one in parts), ids, sum(len(one.logprobs or ()) for one in parts)


def test_deltas_make_the_whole(tiny: LLM) -> None:
    """Deltas add up where text is held back, and for several answers."""
    for more in ({}, {"stop": ["zq", "qz"]}, {"n": 2, "logprobs": 1}):
        params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **more)  # type: ignore[arg-type]
        [whole] = tiny.generate("A gentle breeze", params)
        params.output_kind = DELTA
        outputs = list(tiny.stream("A gentle breeze", params))
        assert len(outputs) > 3
        assert [output.finished for output in outputs] == [*[False] * (len(outputs) - 1), True]
        for answer in whole.outputs:
            count = len(answer.logprobs or ())
            assert join(outputs, answer.index) == (answer.text, answer.token_ids, count)


def test_only_the_last_output_is_returned(tiny: LLM) -> None:
    [output] = tiny.stream("A gentle breeze", greedy(6, output_kind=FINAL))
    assert output.finished
    assert len(output.outputs[0].token_ids) == 6


def test_an_asynchronous_stream_has_its_kind() -> None:
    async def run() -> None:
        args = AsyncEngineArgs(model="headstart-tiny", num_blocks=100, enforce_eager=True)
        llm = AsyncLLM.from_engine_args(args)
        outputs = [one async for one in llm.generate("A gentle", greedy(8, output_kind=DELTA), "a")]
        [whole] = [one async for one in llm.generate("A gentle", greedy(8, output_kind=FINAL), "b")]
        assert {one.request_id for one in outputs} == {"a"}
        answer = whole.outputs[0]
        assert join(outputs, 0) == (answer.text, answer.token_ids, 0)
        assert llm.is_running
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        llm.shutdown()
        assert llm.is_stopped

    asyncio.run(run())


def test_without_detokenizing_there_is_no_text(tiny: LLM) -> None:
    [output] = tiny.generate("A gentle", greedy(4, detokenize=False, logprobs=0))
    [answer] = output.outputs
    assert (answer.text, len(answer.token_ids)) == ("", 4)
    assert answer.logprobs is not None
    assert all(entry.decoded_token is None for row in answer.logprobs for entry in row.values())


def test_log_probabilities_have_their_tokens_texts(tiny: LLM) -> None:
    [output] = tiny.generate("A gentle", greedy(4, logprobs=2, prompt_logprobs=0))
    tokenizer = tiny.get_tokenizer()
    assert tokenizer is not None
    rows = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]]
    assert len(rows) == 4 + len(output.prompt_token_ids) - 1
    for row in rows:
        for token_id, entry in (row or {}).items():
            assert entry.decoded_token == tokenizer.decode([token_id])


def test_all_log_probabilities_of_a_token(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, greedy(1, logprobs=-1))
    [row] = output.outputs[0].logprobs or ()
    assert len(row) == 151
    total = torch.tensor([entry.logprob for entry in row.values()]).exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-4)


def test_lower_priorities_run_first(folder: Path) -> None:
    """With one place, requests run in the order of priorities, then of arrival."""
    llm = make_llm(folder, max_num_seqs=1, debug=True)
    engine = llm.engine
    names = {"a": 0, "b": 5, "c": -1, "d": 0, "e": 5, "f": -1}
    for at, (name, priority) in enumerate(names.items()):
        prompt = [at + 1, *range(20, 40)]
        engine.submit(llm.frontend.prepare(prompt, greedy(2), request_id=name, priority=priority))
    done: list[str] = []
    while engine.has_unfinished:
        done += [group.request_id for group, _ in engine.step() if group.finished]
    assert done == ["c", "f", "a", "d", "b", "e"]
    llm.close()


def test_the_least_urgent_request_gives_up_its_blocks(folder: Path) -> None:
    """It does so although it was admitted first."""
    llm = make_llm(folder, num_blocks=6, debug=True)
    engine = llm.engine
    groups = {}
    for name, priority in (("late", 1), ("soon", 0)):
        prompt = [priority + 1, *range(10, 40)]
        groups[name] = llm.frontend.prepare(prompt, greedy(40), request_id=name, priority=priority)
        engine.submit(groups[name])
        engine.step()
    while engine.has_unfinished:
        engine.step()
    count = {name: group.requests[0].num_preemptions for name, group in groups.items()}
    assert count["late"] > 0
    assert count["soon"] == 0
    llm.close()


def test_each_prompt_needs_a_priority(llm: LLM) -> None:
    assert len(llm.generate([[5], [6]], greedy(1), priority=[1, 0])) == 2
    with pytest.raises(RequestError, match="3 priorities for 2 prompts"):
        llm.generate([[5], [6]], greedy(1), priority=[1, 0, 2])


def test_prompts_as_dicts_bring_their_salts(llm: LLM) -> None:
    prompts = [TokensPrompt(prompt_token_ids=PROMPT, cache_salt=salt) for salt in ("a", "a", "b")]
    hits = [llm.generate(prompt, greedy(1))[0].num_cached_tokens for prompt in prompts]
    assert hits == [0, len(PROMPT) - 1, 0]


def test_a_request_may_skip_reading_the_cache(llm: LLM) -> None:
    unread = greedy(1, skip_reading_prefix_cache=True)
    hits = [
        llm.generate(PROMPT, params)[0].num_cached_tokens for params in (unread, unread, greedy(1))
    ]
    assert hits == [0, 0, len(PROMPT) - 1]


def test_a_request_may_leave_nothing_in_the_cache(llm: LLM) -> None:
    """No block stays cached, of any answer or while it runs; the blocks that it hits stay."""
    unstored = greedy(20, n=2, skip_storing_prefix_cache=True)
    assert llm.generate(PROMPT, unstored)[0].num_cached_tokens == 0
    assert llm.generate(PROMPT, greedy(20))[0].num_cached_tokens == 0
    [output] = llm.generate(PROMPT, unstored)
    assert output.num_cached_tokens == len(PROMPT) - 1
    longer = [*PROMPT, *range(60, 120)]
    assert llm.generate(longer, greedy(1, skip_storing_prefix_cache=True))[0].num_cached_tokens > 0
    assert llm.generate(longer, greedy(1))[0].num_cached_tokens <= len(PROMPT)


def test_a_turn_that_is_not_stored_is_not_remembered(tiny: LLM) -> None:
    turns = [{"role": "user", "content": "Who is never stored?"}]
    chats = remembered_chats(tiny)
    tiny.chat(turns, greedy(4, skip_storing_prefix_cache=True))
    assert remembered_chats(tiny) == chats
    tiny.chat(turns, greedy(4))
    assert remembered_chats(tiny) > chats


def test_the_cache_is_reset_while_requests_run(llm: LLM) -> None:
    """Requests are computed again, with the same answers."""
    [expected] = llm.generate(PROMPT, greedy(20))
    engine = llm.engine
    group = llm.frontend.prepare(PROMPT, greedy(20))
    engine.submit(group)
    for _ in range(5):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    while engine.has_unfinished:
        engine.step()
    assert group.output().outputs[0].token_ids == expected.outputs[0].token_ids
    assert group.requests[0].num_preemptions == 1


def test_lists_that_were_changed_are_checked(llm: LLM) -> None:
    params = greedy(2)
    params.stop_token_ids.append(-1)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="stop_token_ids has -1"):
        llm.generate(PROMPT, params)


def test_metrics_count_hits(llm: LLM) -> None:
    for _ in range(2):
        llm.generate(PROMPT, greedy(1))
    values = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter | Gauge)}
    assert values["vllm:prefix_cache_queries"] == 2 * len(PROMPT)
    assert values["vllm:prefix_cache_hits"] == len(PROMPT) - 1
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0


def test_a_model_s_generation_config_is_the_default(tmp_path: Path) -> None:
    save_smallest(tmp_path)
    config = tmp_path / "generation_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "temperature": 0.5, "top_k": 7, "max_new_tokens": 3}))
    for options, expected in (
        ({}, SamplingParams(temperature=0.5, top_k=7, max_tokens=3)),
        ({"generation_config": "vllm"}, SamplingParams()),
        ({"generation_config": str(tmp_path), "override_generation_config": {"top_k": 2}},
         SamplingParams(temperature=0.5, top_k=2, max_tokens=3)),
    ):  # fmt: skip
        llm = make_llm(tmp_path, **options)
        assert llm.get_default_sampling_params() == expected
        [output] = llm.generate([5, 6])
        assert len(output.outputs[0].token_ids) <= (expected.max_tokens or 0)
        llm.close()


@pytest.mark.parametrize("dtype", [torch.float32, "float", "float32"])
def test_dtypes_have_vllm_s_names(folder: Path, dtype: object) -> None:
    llm = make_llm(folder, dtype=dtype)
    assert llm.engine.config.dtype == "float32"
    llm.close()


TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "{% endfor %}]{% endfor %}{% if add_generation_prompt %}[{{ mood }}:{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATION = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Yes.", "tool_call_id": "1"},
]


def test_a_chat_has_tools_and_a_custom_template(tiny: LLM) -> None:
    [output] = tiny.chat(
        CONVERSATION,
        greedy(1),
        False,
        tools=[{"type": "function", "function": {"name": "weather"}}],
        chat_template=TEMPLATE,
        chat_template_kwargs={"mood": "dry"},
    )
    assert output.prompt == "<weather>[user:Rain?][assistant:weather(Oslo)][tool:Yes.][dry:"


def test_the_last_message_may_be_continued(tiny: LLM) -> None:
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Once up"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    [output] = tiny.chat(messages, greedy(1), chat_template=TEMPLATE, **options)  # type: ignore[arg-type]
    assert output.prompt == "[user:Go][assistant:Once up"
    with pytest.raises(RequestError, match="both True"):
        tiny.chat(messages, greedy(1), continue_final_message=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "weather"}, "tools are 'weather'"),
        ({"chat_template": 3}, "chat_template is 3"),
        ({"chat_template": "{% if %}"}, "chat template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "has 'tokenize'"),
        ({"chat_template_content_format": "xml"}, "auto, string, openai"),
    ],
)
def test_a_wrong_option_of_a_template(tiny: LLM, options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.chat(CONVERSATION[:1], greedy(1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("calls", ["weather", [3], [{"function": 3}]])
def test_an_invalid_tool_call(tiny: LLM, calls: object) -> None:
    with pytest.raises(RequestError, match=r"tool call|tool_calls"):
        tiny.chat([{"role": "assistant", "content": "", "tool_calls": calls}], greedy(1))
