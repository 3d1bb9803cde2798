"""Wrong values for every parameter: a call works, or ends in an error of our own."""

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart import (
    LLM,
    AsyncLLM,
    EngineArgs,
    HeadstartError,
    LLMEngine,
    LoRARequest,
    Omni,
    OmniParams,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from headstart.engine.config import EngineConfig, make_config
from headstart.frontend.vllm_api import calls, sampling
from headstart.frontend.vllm_api.options import ENGINE, read_options
from headstart.frontend.vllm_api.rows import Names, Verdict
from headstart.sampling_params import BeamSearchParams
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.omni.tiny_omni import save_qwen25
from tests.tiny_tokenizers import TINY_TOKENIZERS

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "a"}]
FEW = SamplingParams(temperature=0, max_tokens=2)
WRITTEN = OmniParams(text=FEW, audio=False)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=2)


class Text(str):
    """A text that is not of the type str itself."""


class Hostile:
    """An object that may neither be shown, nor compared, nor asked whether it is true."""

    def __repr__(self) -> str:
        raise RuntimeError("shown")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked")

    __hash__ = None  # type: ignore[assignment]


VALUES: Mapping[str, Any] = {
    "None": None,
    "empty": "",
    "minus one": -1,
    "huge": 10**400,
    "nan": math.nan,
    "infinity": math.inf,
    "bytes": b"x",
    "list": [],
    "object": object(),
    "half character": "\ud800",
    "other text": Text("x"),
    "hostile": Hostile(),
    "array": np.array([1, 2]),
    "dict": {1: "\ud800"},
    "nested": [[None]],
}


def finish(answer: object) -> None:
    """Run what a call returned to its end."""

    async def run() -> None:
        if isinstance(answer, AsyncIterator):
            async for _ in answer:
                pass
        elif isinstance(answer, Awaitable):
            await answer

    if isinstance(answer, AsyncIterator | Awaitable):
        asyncio.run(run())
    elif isinstance(answer, Iterator):
        list(answer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("m"), tokenizer=TINY_TOKENIZERS["byte_level"]())


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = make_llm(folder, chat_template=TEMPLATE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def async_llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, dtype="float32", num_blocks=24, chat_template=TEMPLATE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    made = Omni(save_qwen25(tmp_path_factory.mktemp("omni")), options={"num_blocks": 24})
    yield made
    made.close()


def refuse_nothing_else(attempts: Mapping[str, Callable[[Any], object]]) -> None:
    """Each attempt with each value works, or raises HeadstartError, whose text can be shown."""
    wrong = []
    for name, attempt in attempts.items():
        for shown, value in VALUES.items():
            try:
                finish(attempt(value))
            except HeadstartError as error:
                assert str(error).encode(), (name, shown)
            except Exception as error:
                wrong.append(f"{name} {shown}: {type(error).__name__}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("kind", "table", "given"),
    [
        (SamplingParams, sampling.SAMPLING, {}),
        (StructuredOutputsParams, sampling.STRUCTURED, {}),
        (BeamSearchParams, sampling.BEAM_SEARCH, {"beam_width": 2, "max_tokens": 2}),
        (LoRARequest, calls.LORA, {"lora_name": "a", "lora_int_id": 1, "lora_path": "b"}),
        (OmniParams, None, {}),
    ],
)
def test_parameters(kind: Any, table: Names | None, given: dict[str, Any]) -> None:
    names = {*(table.rows if table else ()), *kind.__dataclass_fields__}
    attempts: dict[str, Callable[[Any], object]] = {
        name: lambda value, name=name: kind(**{**given, name: value}) for name in names
    }
    attempts["positional"] = kind
    attempts["many"] = lambda value: kind(*[value] * 20)
    attempts["unknown"] = lambda value: kind(**given, nonsense=value)
    attempts["nothing"] = lambda value: kind()
    refuse_nothing_else(attempts)


@pytest.mark.parametrize("names", [[*ENGINE.rows], [*EngineConfig.__dataclass_fields__]])
def test_options_of_an_engine(names: list[str]) -> None:
    def make(name: str, value: object) -> None:
        EngineArgs("headstart-tiny", **{name: value})
        make_config(read_options("headstart-tiny", {name: value}).config)

    refuse_nothing_else(
        {name: lambda value, name=name: make(name, value) for name in names if name != "model"}
    )


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, LLMEngine, EngineArgs, Omni])
def test_models(kind: Any) -> None:
    attempts = {
        "model": kind,
        "nothing": lambda value: kind(),
        "positional": lambda value: kind("headstart-tiny", value),
        "unknown": lambda value: kind("headstart-tiny", nonsense=value),
    }
    if hasattr(kind, "from_engine_args"):
        attempts["from_engine_args"] = kind.from_engine_args
    if kind is Omni:
        for name in ("dtype", "device", "cache_bytes", "pipeline", "options"):
            attempts[name] = lambda value, name=name: Omni("headstart-tiny", **{name: value})
    refuse_nothing_else(attempts)


def attempts_of(
    call: Callable[..., object], prompt: Any, params: Any, table: Names
) -> dict[str, Callable[[Any], object]]:
    attempts = {
        "prompt": lambda value: call(value, params),
        "prompts": lambda value: call([prompt, value], params),
        "params": lambda value: call(prompt, value),
        "list of params": lambda value: call(prompt, [value]),
        "positional": lambda value: call(prompt, params, value, value, value),
        "nothing": lambda value: call(),
    }
    rows = [name for name, row in table.rows.items() if row.verdict is not Verdict.ACCEPTED]
    for name in {*rows, "adapter", "cache_salt", "nonsense"} - {"prompt", "prompts", "messages"}:
        attempts[name] = lambda value, name=name: call(prompt, params, **{name: value})
        attempts[f"list of {name}"] = lambda value, name=name: call(
            prompt, params, **{name: [value]}
        )
    if prompt is CHAT:
        for key in ("role", "content", "tool_calls"):
            attempts[f"message's {key}"] = lambda value, key=key: call(
                [{**CHAT[0], key: value}], params
            )
        for key in ("type", "text", "image_url"):
            part = {"type": "text" if key == "text" else "image_url"}
            attempts[f"part's {key}"] = lambda value, part=part, key=key: call(
                [{"role": "user", "content": [{**part, key: value}]}], params
            )
    else:
        for key in calls.PROMPT.rows:
            attempts[f"prompt's {key}"] = lambda value, key=key: call(
                {"prompt_token_ids": [5, 6], key: value}, params
            )
    return attempts


@pytest.mark.parametrize(
    ("name", "prompt", "params", "table"),
    [
        ("generate", [5, 6], FEW, calls.GENERATE),
        ("chat", CHAT, FEW, calls.CHAT),
        ("beam_search", [5, 6], BEAMS, calls.BEAM_SEARCH_CALL),
        ("stream", [5, 6], FEW, calls.STREAM),
        ("stream_chat", CHAT, FEW, calls.STREAM_CHAT),
    ],
)
def test_calls(llm: LLM, name: str, prompt: Any, params: Any, table: Names) -> None:
    refuse_nothing_else(attempts_of(getattr(llm, name), prompt, params, table))


@pytest.mark.parametrize(
    ("name", "prompt", "table"),
    [("generate", [5, 6], calls.ASYNC_GENERATE), ("chat", CHAT, calls.ASYNC_CHAT)],
)
def test_asynchronous_calls(async_llm: AsyncLLM, name: str, prompt: Any, table: Names) -> None:
    refuse_nothing_else(attempts_of(getattr(async_llm, name), prompt, FEW, table))


def test_calls_of_an_engine_that_is_stepped(folder: Path) -> None:
    engine = LLMEngine(folder, dtype="float32", num_blocks=24)

    def add(*args: Any, **options: Any) -> None:
        engine.add_request("a", *args, **options)
        engine.abort_request("a")

    attempts = attempts_of(add, [5, 6], FEW, calls.ADD_REQUEST)
    attempts["request_id"] = lambda value: engine.add_request(value, [5, 6], FEW)
    attempts |= {"abort": engine.abort_request, "add_lora": engine.add_lora}
    attempts["flags"] = lambda value: engine.reset_prefix_cache(value, value)
    refuse_nothing_else(attempts)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()


def test_other_methods(llm: LLM, async_llm: AsyncLLM) -> None:
    attempts: dict[str, Callable[[Any], object]] = {}
    for one in (llm, async_llm):
        for name in ("load_adapter", "unload_adapter", "reset_prefix_cache", "get_tokenizer"):
            method = getattr(one, name)
            attempts[f"{name} of {type(one).__name__}"] = method
            attempts[f"{name} of {type(one).__name__} with more"] = lambda value, method=method: (
                method(value, value)
            )
    attempts |= {"abort": async_llm.abort, "add_lora": async_llm.add_lora}
    attempts |= {"metrics": llm.get_metrics, "world": llm.get_world_size, "close": llm.close}
    attempts["clone"] = FEW.clone
    attempts["from_optional"] = lambda value: SamplingParams.from_optional(n=value, stop=value)
    refuse_nothing_else(attempts)
    assert llm.generate([5, 6], FEW)[0].finished


GIVEN = {
    "prompts": [5, 6],
    "prompt": [5, 6],
    "messages": CHAT,
    "sampling_params": FEW,
    "params": BEAMS,
    "name": "a",
    "path": "no/where",
    "reply_token_ids": {},
}


def test_every_parameter_of_every_method(llm: LLM, async_llm: AsyncLLM, folder: Path) -> None:
    """`outputs(None)`, `call(None)`, `publish(5)` and `recall_chat(x, None)` ended in TypeError."""
    stepped = LLMEngine(folder, dtype="float32", num_blocks=24)
    attempts: dict[str, Callable[[Any], object]] = {}
    for one in (llm, async_llm, stepped):
        for name, method in inspect.getmembers(one, inspect.ismethod):
            if name.startswith("_") or name in ("close", "shutdown"):
                continue
            parameters = inspect.signature(method).parameters
            given = {name: GIVEN[name] for name in parameters.keys() & GIVEN.keys()}
            if isinstance(one, LLMEngine):
                given["params"] = FEW
            for parameter in parameters.keys() - {"options"}:
                attempts[f"{type(one).__name__}.{name}({parameter})"] = (
                    lambda value, method=method, given=given, parameter=parameter: method(
                        **{**given, parameter: value}
                    )
                )
    refuse_nothing_else(attempts)
    replies = ({"a": [1]}, {9: [1]}, {0: 5}, {0: ["a"]}, {0: [-1]}, {True: [1]}, {0: {1: 2}})
    for wrong in replies:
        with pytest.raises(RequestError, match=r"^reply_token_ids"):
            llm.recall_chat(CHAT, wrong)  # type: ignore[arg-type]
    stepped.close()


def test_omni(omni: Omni) -> None:
    attempts: dict[str, Callable[[Any], object]] = {}
    for name in ("generate", "stream"):
        call = getattr(omni, name)
        attempts |= {
            f"{name} prompt": lambda value, call=call: call(value, WRITTEN),
            f"{name} params": lambda value, call=call: call(
                [5, 6], WRITTEN if value is None else value
            ),
            f"{name} salt": lambda value, call=call: call([5, 6], WRITTEN, cache_salt=value),
            f"{name} nothing": lambda value, call=call: call(),
            f"{name} voice": lambda value, call=call: call(
                [5, 6], OmniParams(voice=value, text=FEW, audio=False)
            ),
        }
        for key in ("prompt", "prompt_token_ids", "audio", "images", "features"):
            attempts[f"{name} {key}"] = lambda value, call=call, key=key: call(
                {"prompt_token_ids": [5, 6], key: value}, WRITTEN
            )
    refuse_nothing_else(attempts)


def test_arguments_become_options_again(folder: Path) -> None:
    """As vLLM's examples write it."""
    arguments = EngineArgs(model=str(folder), num_blocks=24, dtype="float32")
    assert asdict(arguments) == {"model": str(folder), "num_blocks": 24, "dtype": "float32"}
    made = LLM(**asdict(arguments) | {"seed": 3})
    made.close()
