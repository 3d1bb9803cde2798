"""Imports in vLLM's names: they work, or say what to do instead."""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest

import headstart
from headstart import HeadstartError
from headstart.frontend.vllm_api.modules import HOMES, MODULES, names_in
from headstart.frontend.vllm_api.rows import Verdict
from headstart.utils import random_uuid
from tests.house.source import PACKAGE, ROOT, read_modules

SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))
WORKING = [name for name, row in MODULES.rows.items() if row.verdict is Verdict.WORKS]
REFUSED = [name for name, row in MODULES.rows.items() if row.verdict is Verdict.REFUSED]


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("from headstart.entrypoints.llm import LLM as it", "LLM"),
        ("from headstart.entrypoints import llm; it = llm.LLM", "LLM"),
        ("from headstart.engine.async_llm_engine import AsyncLLMEngine as it", "AsyncLLMEngine"),
        ("from headstart.engine.llm_engine import LLMEngine as it", "LLMEngine"),
        ("from headstart.engine.llm_engine import *; it = LLMEngine", "LLMEngine"),
        ("import headstart.engine.llm_engine as m; it = m.LLMEngine", "LLMEngine"),
    ],
)
def test_modules_without_a_file(line: str, same: str) -> None:
    found: dict[str, object] = {}
    exec(line, found)
    assert found["it"] is getattr(headstart, same)


@pytest.mark.parametrize("name", WORKING)
def test_a_module_that_works_has_its_names(name: str) -> None:
    module = importlib.import_module(f"headstart.{name}")
    for one in module.__all__:
        assert getattr(module, one) is not None
    assert module.__doc__


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_is_not_here_says_what_to_do(name: str) -> None:
    package, _, last = f"headstart.{name}".rpartition(".")
    assert f"{package}.{last}" not in read_modules(PACKAGE)
    lines = [f"import headstart.{name}.deep", f"from {package} import {last}"]
    for line in lines[: 1 if package == "headstart.assets" else 2]:  # which is a folder of data
        with pytest.raises(HeadstartError) as caught:
            exec(line)
        assert isinstance(caught.value, ModuleNotFoundError)
        assert str(caught.value) == f"no module named 'headstart.{name}': {MODULES.rows[name].note}"


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("sampling_params", "GuidedDecodingParams", ": `StructuredOutputsParams` has its fields"),
        ("sampling_params", "SamplingParms", "; the nearest is SamplingParams"),
        ("inputs", "EmbedsPrompt", ": prompts are texts, token ids and images, no embeddings"),
        ("outputs", "PoolingRequestOutput", ": models here generate; for embeddings or scores"),
        ("outputs", "RequestOutputs", "; the nearest is RequestOutput"),
        ("lora.request", "Unheard", "; it has LoRARequest"),
        ("engine.arg_utils", "EngineArg", "; the nearest is EngineArgs"),
        ("utils", "Counter", "; it has FlexibleArgumentParser, random_uuid"),
        ("utils.argparse_utils", "ArgParser", "; it has FlexibleArgumentParser"),
        ("v1.engine.async_llm", "AsyncLM", "; the nearest is AsyncLLM"),
        ("v1.engine.llm_engine", "Engine", "; the nearest is LLMEngine"),
        ("entrypoints.llm", "LLm", "; the nearest is LLM"),
        ("entrypoints.llm", "PoolingParams", ": models here generate"),
        ("logprobs", "PromptLogprobs", ": a dict of token ids to `Logprob` for each token"),
        ("v1.metrics.reader", "get_metrics_snapshot", ": `LLM.get_metrics` reads them"),
    ],
)
def test_a_name_that_is_not_there(module: str, name: str, reason: str) -> None:
    with pytest.raises(HeadstartError) as caught:
        exec(f"from headstart.{module} import {name}")
    assert isinstance(caught.value, ImportError)
    assert str(caught.value).startswith(
        f"cannot import name {name!r} from 'headstart.{module}'{reason}"
    )
    loaded = importlib.import_module(f"headstart.{module}")
    assert not hasattr(loaded, name)
    with pytest.raises(AttributeError):
        getattr(loaded, name)


def test_no_name_is_both_there_and_refused() -> None:
    for name in [*HOMES, "sampling_params", "inputs", "outputs"]:
        module = importlib.import_module(f"headstart.{name}")
        rows = names_in(module.__name__, module.__all__).rows
        assert [one for one in rows if rows[one].verdict is Verdict.WORKS] == module.__all__


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("utils.async_utils", "write what it does in the program"),
        ("attention.layer", "`LLM.engine` is the engine here; its parts are not vLLM's"),
        ("models.inkling", "every decoder that transformers has is tried"),
        ("lora.peft_helper", "`LLM.engine` is the engine here; its parts are not vLLM's"),
        ("v1.engine.core", "`LLM.engine` is the engine here; its parts are not vLLM's"),
    ],
)
def test_other_modules_of_vllm_s_packages_say_what_to_do(name: str, note: str) -> None:
    with pytest.raises(HeadstartError) as caught:
        importlib.import_module(f"headstart.{name}")
    assert str(caught.value) == f"no module named 'headstart.{name}': {note}"


@pytest.mark.parametrize("name", SURFACE["modules"])
def test_every_module_of_vllm_s_works_or_says_what_to_do(name: str) -> None:
    """`headstart.parser` and 60 more were Python's own error."""
    is_ours = name in ("assets", "models", "version")  # where there is more than vLLM's names
    lines = [f"import headstart.{name}", f"from headstart.{name} import unheard_of"]
    for line in lines[: 1 if is_ours else 2]:
        try:
            exec(line)
        except HeadstartError as error:
            assert isinstance(error, ImportError)
            assert str(error).startswith(("no module named 'headstart.", "cannot import name"))


@pytest.mark.parametrize("name", ["config", "parser", "utils.async_utils", "inputs.engine"])
def test_what_looks_for_a_module_finds_none(name: str) -> None:
    """It raised, where programs ask whether there is such a module."""
    assert importlib.util.find_spec(f"headstart.{name}") is None


@pytest.mark.parametrize("name", ["entrypoints.llm", "inputs.llm", "logprobs", "inputs"])
def test_what_looks_for_a_module_finds_those_that_work(name: str) -> None:
    assert importlib.util.find_spec(f"headstart.{name}") is not None


@pytest.mark.parametrize("name", SURFACE["inputs"])
def test_every_kind_of_input_works_or_says_what_to_do(name: str) -> None:
    try:
        exec(f"from headstart.inputs import {name}")
    except HeadstartError as error:
        assert isinstance(error, ImportError)
        assert "'headstart.inputs': " in str(error)


def test_prompts_can_be_imported_from_where_older_programs_look() -> None:
    for name in ("data", "llm"):
        module = importlib.import_module(f"headstart.inputs.{name}")
        assert module.TokensPrompt is headstart.TokensPrompt


def test_ids_of_requests_differ() -> None:
    made = {random_uuid() for _ in range(100)}
    assert len(made) == 100
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in made)


def test_metrics_can_be_told_apart_by_all_of_vllm_s_kinds() -> None:
    reader = importlib.import_module("headstart.v1.metrics.reader")
    assert issubclass(reader.Vector, reader.Metric)
    assert reader.Vector("a", {}, [1, 2]).values == [1, 2]


def test_an_adapter_s_request_has_vllm_s_short_names() -> None:
    request = headstart.LoRARequest("sql", 3, "folder")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "folder")


def test_a_module_of_nobody_s_is_python_s_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'headstart\.unheard_of'$"):
        importlib.import_module("headstart.unheard_of")


def test_what_is_missing_loads_no_torch() -> None:
    program = """
import sys
for line in ("from headstart import PoolingParams", "import headstart.multimodal"):
    try:
        exec(line)
    except ImportError:
        pass
import headstart.engine.async_llm_engine, headstart.engine.llm_engine, headstart.entrypoints.llm
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
