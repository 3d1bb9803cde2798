"""The command line: `headstart demo`, `headstart run`, `headstart chat`.

Everything that headstart raises on purpose ends as one line on stderr and exit status 2; usage
errors do so too. Replies go to stdout, the figures of `run` and `chat` to stderr, so that a
reply can be piped.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from headstart.cli.chat import Chat
from headstart.cli.demo.adapters import show_adapters
from headstart.cli.demo.images import show_images
from headstart.cli.demo.omni import show_omni_demo
from headstart.cli.demo.table import show_demo
from headstart.cli.options import (
    DEFAULT_MODEL,
    Options,
    engine_options,
    note_on,
    open_model,
    sampling_options,
    sort_options,
)
from headstart.cli.reply_metrics import print_reply
from headstart.cli.streams import as_typed, prepare_streams, reading_stdin
from headstart.errors import HeadstartError, RequestError
from headstart.version import __version__

if TYPE_CHECKING:
    from headstart.engine.llm import LLM

Command = TypeVar("Command", bound=Callable[..., Any])


class _Commands(click.Group):
    """A group whose commands end in one clear line where headstart raises an error."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_streams()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadstartError as error:
            click.echo(f"headstart: {error}", err=True)
            ctx.exit(2)


def _model_option(command: Command) -> Command:
    return click.option(
        "--model",
        default=DEFAULT_MODEL,
        show_default=True,
        help="Folder of a Hugging Face model, or its name on the hub; "
        "demo is a larger one with random weights, for times alone.",
    )(command)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headstart")
def main() -> None:
    """An LLM inference engine whose KV cache never computes the same prefix twice."""


@main.command()
@click.option("--svg", type=click.Path(path_type=Path), help="Save what is shown in this file.")
@click.option("--adapters", is_flag=True, help="Ask with several LoRA adapters: who shares what.")
@click.option("--images", is_flag=True, help="Ask about pictures: what is encoded, what is found.")
@click.option("--omni", is_flag=True, help="Ask a model that hears and speaks.")
@click.option(
    "--wav",
    "wav_folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --omni: write each answer into this folder, as a WAV file.",
)
@_model_option
@engine_options
def demo(svg: Path | None, wav_folder: Path | None, model: str, **options: Any) -> None:
    """Ask three questions about one table, which is computed once."""
    kinds = [name for name in ("adapters", "images", "omni") if options.pop(name)]
    if len(kinds) > 1:
        raise click.UsageError("--adapters, --images and --omni are three demos: choose one")
    if wav_folder is not None and kinds != ["omni"]:
        raise click.UsageError("--wav is for the answers of --omni")
    chosen = sort_options(options).engine
    if kinds == ["omni"]:
        show_omni_demo(chosen, wav_folder)
        return
    shows = {"adapters": show_adapters, "images": show_images}
    show = shows[kinds[0]] if kinds else show_demo
    show(model, chosen, svg)


@main.command()
@click.argument("prompts", nargs=-1)
@click.option(
    "--file",
    "document",
    type=click.File(encoding="utf-8"),
    help="Text that every prompt begins with.",
)
@click.option("--as-chat", is_flag=True, help="Wrap each prompt in the model's chat template.")
@_model_option
@sampling_options
@engine_options
def run(
    prompts: tuple[str, ...],
    document: IO[str] | None,
    as_chat: bool,
    model: str,
    **options: Any,
) -> None:
    """Answer prompts, or questions about a file.

    With --file, each of PROMPTS is put behind that text. Without PROMPTS the file is the prompt,
    and without a file what stdin holds.
    """
    texts = _whole_prompts(prompts, document)
    chosen = sort_options(options)
    with closing(_announce_and_open(model, chosen)) as llm:
        for text in texts:
            if as_chat:
                replies = llm.stream_chat([{"role": "user", "content": text}], chosen.sampling)
            else:
                replies = llm.stream(text, chosen.sampling)
            print_reply(replies)


def _whole_prompts(prompts: Sequence[str], document: IO[str] | None) -> list[str]:
    try:
        beginning = document.read() if document else ""
    except UnicodeDecodeError as error:
        raise RequestError(f"--file is not UTF-8 text: {error}") from error
    if prompts:
        return [beginning + as_typed(prompt) for prompt in prompts]
    if document is None and not sys.stdin.isatty():
        with reading_stdin():
            beginning = sys.stdin.read()
    if not beginning:
        raise RequestError("no prompt: give one or more, or --file, or text on stdin")
    return [beginning]


@main.command()
@click.option("--system", help="The system message that the chat begins with.")
@_model_option
@sampling_options
@engine_options
def chat(system: str | None, model: str, **options: Any) -> None:
    """Talk with a model; each turn computes what is new.

    /reset begins anew, /pool draws the block pool, /quit ends.
    """
    chosen: Options = sort_options(options)
    with closing(_announce_and_open(model, chosen)) as llm:
        Chat(llm, chosen.sampling, system and as_typed(system)).talk()


def _announce_and_open(model: str, options: Options) -> "LLM":
    if note := note_on(model):
        columns = min(80, shutil.get_terminal_size().columns)
        click.secho(click.wrap_text(note, columns), dim=True, err=True)
    return open_model(model, options.engine)
