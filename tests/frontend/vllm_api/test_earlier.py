"""Keywords of earlier versions of vLLM, and of other libraries: each says what to write instead."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headstart.inputs
from headstart import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    ConfigError,
    EngineArgs,
    HeadstartError,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from headstart.engine.sampling.beam_search import BeamSearchOutput, BeamSearchSequence
from headstart.frontend.vllm_api import calls, earlier
from headstart.frontend.vllm_api.command_line import FLAGS
from headstart.frontend.vllm_api.options import ENGINE, read_options
from headstart.frontend.vllm_api.rows import Names, Verdict, accepted, refused
from headstart.frontend.vllm_api.sampling import SAMPLING
from headstart.lora.request import LoRARequest
from headstart.sampling_params import BeamSearchParams, StructuredOutputsParams
from headstart.v1.metrics.reader import Counter
from tests.engine.tiny_llm import make_llm, save_smallest

FEW = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = make_llm(save_smallest(tmp_path_factory.mktemp("model")))
    yield made
    made.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(prompt_token_ids=[[5, 6]], sampling_params=FEW),
        lambda llm: llm.generate(None, FEW, prompt_token_ids=[[5, 6]]),
        lambda llm: llm.stream([5, 6], FEW, prompt_token_ids=[5, 6]),
    ],
)
def test_token_ids_are_a_prompt_themselves(llm: LLM, call: Any) -> None:
    """It was said only that `prompts` are missing."""
    with pytest.raises(
        RequestError, match=r'ids are a prompt .*`\{"prompt_token_ids": \[5, 6\]\}`'
    ):
        call(llm)


def test_a_chat_s_documents_go_to_its_template(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r'give `chat_template_kwargs=\{"documents": ...\}`$'):
        llm.chat([{"role": "user", "content": "a"}], documents=["b"])  # type: ignore[call-arg]


@pytest.mark.parametrize("name", refused(earlier.SAMPLING_REFUSED))
def test_a_parameter_says_what_to_write(name: str) -> None:
    row = SAMPLING.rows[name]
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: object()})
    assert str(caught.value).endswith(f"; {row.note}")
    for harmless in (None, *row.allowed):
        assert SamplingParams(**{name: harmless}) == SamplingParams()


@pytest.mark.parametrize("name", [*earlier.ENGINE_ACCEPTED.values()], ids=lambda names: names[0])
def test_an_option_that_needs_nothing(name: list[str]) -> None:
    assert read_options("headstart-tiny", dict.fromkeys(name, object())).config == {}


@pytest.mark.parametrize("name", refused(earlier.ENGINE_REFUSED))
def test_an_option_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options("headstart-tiny", {name: object()})
    assert str(caught.value).endswith(f"; {ENGINE.rows[name].note}")
    for harmless in ENGINE.rows[name].allowed:
        assert read_options("headstart-tiny", {name: harmless}).config == {}


def test_none_is_a_flag() -> None:
    names = {*accepted(earlier.ENGINE_ACCEPTED), *refused(earlier.ENGINE_REFUSED)}
    assert not names & {*FLAGS}


@pytest.mark.parametrize("table", [calls.GENERATE, calls.CHAT, calls.ASYNC_GENERATE, calls.STREAM])
def test_every_call_refuses_token_ids_beside_its_prompt(table: Names) -> None:
    assert table.rows["prompt_token_ids"].verdict is Verdict.REFUSED


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda: LORA.lora_local_path,
            "LoRARequest has no lora_local_path: the name is `lora_path`",
        ),
        (lambda: setattr(LORA, "lora_path", "b"), "LoRARequest.lora_path tells what holds"),
        (lambda: FEW.max_token, "SamplingParams knows no 'max_token'; the nearest is max_tokens"),
        (lambda: FEW.logits_processor, "no 'logits_processor'; the nearest is logits_processors"),
        (lambda: headstart.config, "'headstart.config': options are arguments of `LLM`"),
        (
            lambda: headstart.inputs.PromptInputs,
            "headstart.inputs has no PromptInputs: `PromptType`",
        ),
        (lambda: FORM.all_constraints_none(), "no all_constraints_none: a form that is none is"),
        (lambda: setattr(FORM, "regex", "b"), "StructuredOutputsParams.regex tells what holds"),
        (lambda: BeamSearchParams(1, 1).width, "BeamSearchParams knows no 'width'"),
        (lambda: BeamSearchSequence([5]).token_ids, "has no token_ids: the name is `tokens`"),
        (lambda: BeamSearchOutput([]).outputs, "no outputs: each of `sequences` is an answer"),
        (lambda: Counter("a", {}, 1).values, "Counter knows no 'values'; the nearest is value"),
        (lambda: CompletionOutput(0, "a"), "CompletionOutput: missing a required argument: 'token"),
    ],
)
def test_an_attribute_says_what_to_write(ask: Callable[[], object], said: str) -> None:
    """Each was an error of Python's own, or named something else."""
    with pytest.raises(HeadstartError, match=re.escape(said)):
        ask()


LORA, FORM = LoRARequest("a", 1, "/a"), StructuredOutputsParams(regex="a")


def test_an_output_is_made_as_in_vllm() -> None:
    """Programs' tests make their own, without what has a default there."""
    one = CompletionOutput(index=0, text="a", token_ids=[5], cumulative_logprob=None, logprobs=None)
    made = RequestOutput("id", "b", [6], None, [one], finished=True)
    assert (made.num_cached_tokens, made.metrics.total, one.finished()) == (0, None, False)


def test_arguments_of_an_engine_that_vllm_s_programs_give() -> None:
    args = EngineArgs("headstart-tiny", num_blocks=64)
    engine = LLMEngine.from_engine_args(args, usage_context="ENGINE", stat_loggers=None)
    engine.close()
    assert read_options("headstart-tiny", {"device": "auto"}).config == {}
    with pytest.raises(ConfigError, match="start_engine_loop is False; allowed: None, True; the"):
        AsyncLLM.from_engine_args(args, start_engine_loop=False)
