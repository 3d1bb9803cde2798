"""The command line: `headstart run`, `chat`, `serve`, `cache`, `keys`, `models`, `replay`, ...

Each error that headstart raises on purpose is one line on stderr, with exit status 2. A wrong
command or option has this status too. After Ctrl-C the status is 130. If the reader of a pipe
closes it, the command ends quietly with status 0. Replies go to stdout, the metrics of `run` and
`chat` to stderr, so that a reply can be piped.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from headstart.cli.cache import cache, make_prefix_folder
from headstart.cli.demo import demo
from headstart.cli.doctor import doctor
from headstart.cli.messages import Conversation, names_model, read_questions
from headstart.cli.models import models
from headstart.cli.opening import announce_and_open, folder_for_text, read_adapter, read_adapters
from headstart.cli.options import (
    CHAT_SAMPLING,
    RUN_SAMPLING,
    SAMPLING,
    GroupedCommand,
    GroupedOption,
    ServeCommand,
    chat_sampling,
    check_engine,
    flags,
    model_option,
    sort_options,
    take_options,
)
from headstart.cli.replay import replay
from headstart.cli.reply import print_reply
from headstart.cli.server import keys, run_server
from headstart.cli.terminal import decode_argument, note, prepare_streams, show_error
from headstart.cluster.options import ReplicaConfig
from headstart.engine.config import EngineConfig, make_config
from headstart.engine.params import SamplingParams
from headstart.errors import HeadstartError
from headstart.imports import load_module
from headstart.server.options import ServerOptions
from headstart.version import __version__

_OTHER_NAMES = {"pull": "models pull", "list": "models", "ls": "models", "rm": "models rm"}
"""Names of commands in similar programs, and the names in headstart."""


class _Commands(click.Group):
    """A group of commands that shows each of headstart's errors as one line."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. For a similar program's command, fail with headstart's name for it."""
        if cmd_name in _OTHER_NAMES:
            ctx.fail(f"no such command {cmd_name!r}; use headstart {_OTHER_NAMES[cmd_name]}")
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.filename is not None:  # not an error of stdout or stderr
                raise
            show_error(f"cannot write the output: {error.strerror}")
            _drop_output()
            sys.exit(1)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _exiting_on_broken_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _exiting_on_broken_pipe():
                return super().invoke(ctx)
        except HeadstartError as error:
            show_error(error)
            ctx.exit(2)
        except click.exceptions.NoArgsIsHelpError:
            raise  # click shows the help
        except click.UsageError as error:
            show_error(_in_one_line(error, ctx))
            ctx.exit(2)
        except KeyboardInterrupt:
            show_error("interrupted")
            ctx.exit(128 + signal.SIGINT)


@contextmanager
def _exiting_on_broken_pipe() -> Iterator[None]:
    """End the program quietly if the reader of its output, such as `head`, closes the pipe."""
    try:
        yield
    except BrokenPipeError:
        _drop_output()
        raise click.exceptions.Exit(0) from None


def _drop_output() -> None:
    """Discard buffered output. Otherwise, Python would write it at exit and fail again."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _in_one_line(error: click.UsageError, ctx: click.Context) -> str:
    """Return a usage error as one line; click would show four lines."""
    text = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        flags = [flag for parameter in error.ctx.command.params for flag in parameter.opts]
        matches = get_close_matches(error.option_name, flags, 1, 0.8)  # stricter than click's hints
        text = f"No such option {error.option_name!r}"
        text += f". Did you mean {matches[0]!r}?" if matches else ""
    command = f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()
    if error.ctx is not None:
        command = error.ctx.command_path
        names = {parameter.name for parameter in error.ctx.command.params}
        needs_flag = "model" in names and "model_tag" not in names
        if needs_flag and "unexpected extra argument" in text:
            text += "; --model names a model"
    text = text if text.endswith("?") else f"{text}."
    return f"{text[:1].lower()}{text[1:]} See {command} --help"


_option = partial(click.option, cls=GroupedOption)
_path: dict[str, Any] = {"metavar": "PATH", "type": click.Path()}
_adapter_option = _option(
    "--adapter", **_path, help="Answer with the LoRA adapter in this folder, in PEFT's format."
)
_plain_option = _option("--plain", is_flag=True, help="Show replies as text, not as Markdown.")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headstart")
def main() -> None:
    """Run language models with a KV cache that never computes the same prefix twice."""


@main.command(cls=GroupedCommand)
@click.argument("prompts", nargs=-1)
@_option(
    "--file",
    "files",
    multiple=True,
    **_path,
    help="A file whose text precedes every prompt; may be given several times.",
)
@_option(
    "--image",
    "images",
    multiple=True,
    **_path,
    help="An image for every prompt; may be given several times.",
)
@_option("--system", metavar="TEXT", help="The system message.")
@_option("--raw", is_flag=True, help="Complete the prompts without a chat template.")
@_option("--json", **_path, help="Answer in JSON that follows the JSON schema in this file.")
@_plain_option
@model_option
@_adapter_option
@flags(SamplingParams, RUN_SAMPLING)
@flags(EngineConfig)
def run(prompts: tuple[str, ...], model: str, plain: bool, **options: Any) -> None:
    """Answer prompts, or questions about files.

    Each prompt follows the text of --file and is answered separately. Without PROMPTS, the files
    are the prompt. Without both, standard input is the prompt. As a prompt or a file, - stands for
    standard input. Without --temperature, the likeliest tokens are generated.
    """
    if prompts and names_model(prompts[0]):
        note(f"{decode_argument(prompts[0])} is used as a prompt; --model selects a model")
    questions, adapter = read_questions(prompts, options), read_adapter(options)
    sorted_options = sort_options(options)
    folder = folder_for_text(model, adapter)
    questions.check_model(folder, make_config(sorted_options.engine))
    prefixes = make_prefix_folder(sorted_options.engine)
    with closing(announce_and_open(model, prefixes.options)) as llm:
        name = llm.load_adapter(adapter.name or "adapter", adapter).name if adapter else None
        streams = questions.streams(llm, sorted_options.sampling, name)
        prefixes.note()
        is_text = questions.form is None
        answers = [print_reply(stream, plain=plain, is_text=is_text) for stream in streams]
    questions.check(answers)


@main.command(cls=GroupedCommand, short_help="Talk with a model.")
@_option("--system", metavar="TEXT", help="The system message of the chat.")
@_option(
    "--resume", metavar="FILE", type=click.Path(), help="Continue a conversation that /save wrote."
)
@_plain_option
@model_option
@_adapter_option
@flags(SamplingParams, CHAT_SAMPLING)
@flags(EngineConfig)
def chat(system: str | None, resume: str | None, plain: bool, model: str, **options: Any) -> None:
    """Talk with a model; each turn computes only its new tokens.

    /help shows the commands. The defaults of sampling are those of the model's
    generation_config.json. Without this file, the defaults below apply.
    """
    conversation = (
        Conversation() if resume is None else Conversation.load(Path(decode_argument(resume)))
    )
    if system is not None:
        conversation.system = decode_argument(system)
    adapter = read_adapter(options)
    sorted_options = sort_options(options, CHAT_SAMPLING)
    folder = folder_for_text(model, adapter)
    prefixes = make_prefix_folder(sorted_options.engine)
    with closing(announce_and_open(model, prefixes.options)) as llm:
        params = chat_sampling(sorted_options.user_sampling, folder)
        # Line editing needs prompt_toolkit, which takes half a second to import.
        terminal = load_module("headstart.cli.chat")
        name = llm.load_adapter(adapter.name or "adapter", adapter).name if adapter else None
        prefixes.note()
        chat = terminal.Chat(llm, model, params, conversation, plain=plain, adapter=name)
        if resume is not None:
            chat.show_resumed(decode_argument(resume))
        terminal.run_chat(chat)


@main.command(cls=ServeCommand, short_help="Serve a model over the OpenAI and Anthropic APIs.")
@click.argument("model_tag", metavar="[MODEL]", required=False)
@model_option
@_option(
    "--adapter",
    "--lora-modules",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="LoRA adapter, in PEFT's format, that requests may name as their model; may be given "
    "several times.",
)
@_option(
    "--chat-template",
    metavar="TEXT",
    type=click.Path(),
    group=SAMPLING,
    help="Chat template, or a file with one; default: the model's own.",
)
@_option(
    "--generation-config",
    **_path,
    group=SAMPLING,
    help="Default sampling of requests: auto (the model's own), vllm (vLLM's defaults), or a "
    "folder with a generation_config.json.",
)
@flags(ServerOptions)
@flags(ReplicaConfig)
@flags(EngineConfig)
def serve(model: str, **options: Any) -> None:
    """Answer OpenAI's and Anthropic's clients over HTTP.

    MODEL is the same as --model.
    """
    adapters = read_adapters(options)
    server, replicas = take_options(options, ServerOptions), take_options(options, ReplicaConfig)
    run_server(model, check_engine(options), server, replicas, adapters)


for _command in (demo, models, keys, cache, replay, doctor):
    main.add_command(_command)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands in a shell.

    \b
    bash, in ~/.bashrc:        eval "$(headstart completion bash)"
    zsh, in ~/.zshrc:          eval "$(headstart completion zsh)"
    fish, in its config.fish:  headstart completion fish | source
    """  # noqa: D301 (click looks for the character that backslash-b stands for)
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "headstart", "_HEADSTART_COMPLETE").source())
