"""`--adapter` of `headstart run` and `chat`, with an adapter saved by PEFT."""

from pathlib import Path

import pytest

from headstart import LLM, SamplingParams
from tests.cli.test_chat_terminal import READY, Terminal, no_child_is_left
from tests.cli.test_main import call
from tests.small_demos import save_unloadable
from tests.tiny_adapters import make_adapter

__all__ = ["no_child_is_left"]

MESSAGE = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def adapter(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "sea"
    return make_adapter(demo_model, folder, lora_alpha=64)


@pytest.fixture(scope="module")
def replies(demo_model: Path, adapter: Path) -> tuple[str, str]:
    """Return the replies of the model and of the adapter through the library."""
    llm = LLM(demo_model, num_blocks=64)
    llm.load_adapter("sea", adapter)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = [
        llm.chat(MESSAGE, params, adapter=name)[0].outputs[0].text.strip() for name in (None, "sea")
    ]
    llm.close()
    assert texts[0] != texts[1]
    return texts[0], texts[1]


def test_run_answers_with_the_adapter(
    demo_model: Path, adapter: Path, replies: tuple[str, str]
) -> None:
    flags = [
        "run",
        "Tell me of the sea.",
        "--max-tokens",
        "6",
        "--ignore-eos",
        "--cache-dir",
        "off",
    ]
    flags += ["--model", str(demo_model), "--num-blocks", "64"]
    assert call(*flags).stdout.strip() == replies[0]
    assert call(*flags, "--adapter", str(adapter)).stdout.strip() == replies[1]


def test_chat_answers_with_the_adapter(demo_model: Path, adapter: Path, tmp_path: Path) -> None:
    model = ["--model", str(demo_model), "--temperature", "0", "--max-tokens", "4"]
    terminal = Terminal(tmp_path, *model, "--adapter", str(adapter))
    first, cached = terminal.ask("Tell me of the sea.")
    assert cached == 0
    second, cached = terminal.ask("And of the land.")
    assert first <= cached < second
    terminal.send("/explain\r")
    terminal.wait(READY)
    terminal.end()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sea"], "adapter is 'sea'; allowed: NAME=PATH, each name once"),
        (["=x"], "adapter is '=x'; allowed: NAME=PATH, each name once"),
        (["sea={}", "sea={}"], "allowed: NAME=PATH, each name once"),
        (["sea=/no/such"], "/no/such"),
        (["sea={}", "--served-model-name", "sea"], "adapter is 'sea', which is the model's name"),
    ],
)
def test_serve_refuses_invalid_adapters_before_loading(
    arguments: list[str], message: str, adapter: Path
) -> None:
    more = next(
        (i for i, argument in enumerate(arguments) if argument.startswith("--")), len(arguments)
    )
    flags = [
        part for argument in arguments[:more] for part in ("--adapter", argument.format(adapter))
    ]
    result = call("serve", "--model", "/no/such/model", *flags, *arguments[more:])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_unloadable(tmp_path_factory.mktemp("broken") / "model")
    assert "is for another model" not in call("run", "Hi", "--model", str(folder)).stderr
    return str(folder)


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_an_adapter_for_another_model_is_refused_before_loading(
    command: str, adapter: Path, broken: str
) -> None:
    more = {"run": ["Hi"], "serve": ["--port", "0"]}.get(command, [])
    path = f"sea={adapter}" if command == "serve" else str(adapter)
    result = call(command, *more, "--model", broken, "--adapter", path)
    assert result.exit_code == 2
    error = " ".join(result.stderr.split())
    assert "is for another model: " in error and "inputs in the adapter and" in error


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_folder_that_is_not_an_adapter_is_refused_before_loading(
    command: str, tmp_path: Path
) -> None:
    message = "is not an adapter, as it has no adapter_config.json"
    prompts = ["Hi"] if command == "run" else []
    result = call(command, *prompts, "--model", "/no/such/model", "--adapter", str(tmp_path))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
