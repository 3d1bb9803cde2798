"""Closed or full streams and endless files lead to one line, without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli.messages import names_model
from tests.forked import run_headstart

COMMAND = f"{sys.executable} -m headstart "
FULL = Path("/dev/full")


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run headstart by a shell, which can redirect and close streams."""
    outside = os.environ | {"HEADSTART_CACHE_DIR": "off"}
    return subprocess.run(
        COMMAND + line, shell=True, capture_output=True, text=True, env=outside, check=False
    )


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
@pytest.mark.parametrize("call", ["models", "--help", "completion bash"])
def test_a_full_device_is_reported(call: str) -> None:
    done = shell(f"{call} >{FULL}")
    assert done.returncode == 1
    assert done.stderr == "headstart: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    "call", ["models", "--help", "completion bash", "run Hello", "replay chats --requests 20"]
)
def test_a_closed_pipe_ends_quietly(call: str) -> None:
    """Regression: `headstart replay ... | head` exited with 1, which fails under `pipefail`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            [*COMMAND.split(), *call.split()],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HEADSTART_CACHE_DIR": "off"},
            check=False,
        )
    assert done.returncode == 0
    assert "Error" not in done.stderr and "Broken pipe" not in done.stderr


def test_closed_streams_are_treated_as_empty() -> None:
    done = shell("run - <&-")
    assert done.returncode == 2
    assert done.stderr == "headstart: standard input is empty; allowed: text\n"
    done = shell("models 2>&-")
    assert done.returncode == 0 and done.stdout.startswith("headstart-tiny ")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no such device")
def test_an_endless_file_is_refused() -> None:
    done = shell("run --file /dev/zero What?")
    assert done.returncode == 2
    assert done.stderr == (
        "headstart: cannot read /dev/zero: it is a device; allowed: a file or a pipe\n"
    )


def test_a_model_without_its_flag_gets_a_hint() -> None:
    """Users of `ollama run NAME` type it. `serve NAME` is accepted, as in vLLM."""
    done = run_headstart("chat", "headstart-tiny")
    assert done.returncode == 2
    assert done.stderr == (
        "headstart: got unexpected extra argument (headstart-tiny); --model names a model. "
        "See headstart chat --help\n"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("pull a/b", "no such command 'pull'; use headstart models pull. See headstart --help"),
        ("ls", "no such command 'ls'; use headstart models. See headstart --help"),
        ("models lst", "no such command 'lst'. Did you mean 'list'? See headstart models --help"),
        ("cache list", "no such command 'list'. Did you mean 'ls'? See headstart cache --help"),
        ("keys ls", "no such command 'ls'. Did you mean 'list'? See headstart keys --help"),
        ("chta", "no such command 'chta'. Did you mean 'chat'? See headstart --help"),
        (
            "run --temprature 1 Hello",
            "no such option '--temprature'. Did you mean '--temperature'? See headstart run --help",
        ),
    ],
)
def test_errors_of_misspelled_names_are_full_sentences(call: str, message: str) -> None:
    """Regression: the error was "did you mean 'chat'?; see headstart --help"."""
    assert run_headstart(*call.split()).stderr == f"headstart: {message}\n"


@pytest.mark.parametrize("more", [(), ("Hello",)])
def test_a_models_name_as_a_prompt_gets_a_hint(more: tuple[str, ...]) -> None:
    """Regression: a model's name, as in `ollama run NAME`, was silently used as a prompt."""
    for name in ("headstart-tiny", "qwen2.5:0.5b"):
        done = run_headstart("run", "--max-tokens", "2", name, *more)
        assert done.returncode == 0
        assert f"{name} is used as a prompt; --model selects a model" in done.stderr
    done = run_headstart("run", "--max-tokens", "2", "Hello", "There")
    assert done.returncode == 0
    assert "as a prompt" not in done.stderr


def test_texts_that_look_like_names_of_models() -> None:
    names = ["headstart-tiny", "owner/name", "some.gguf", "qwen2.5:0.5b", "llama3:latest"]
    prompts = ["Hello", "10:30", "and/or?", "Name: Ben", "note:this", "Qwen:7b?", "a:b/c", ""]
    assert [text for text in names + prompts if names_model(text)] == names


@pytest.mark.parametrize("call", ["cache", "keys"])
def test_a_group_without_a_command_shows_its_help(call: str) -> None:
    done = run_headstart(call)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: headstart {call} ")
    assert "see headstart" not in done.stderr
