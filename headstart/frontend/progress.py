"""The bar that `LLM` shows of several prompts. Imported for the first one: rich takes 60 ms."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headstart.engine.outputs import RequestOutput

__all__ = ["show_progress"]


@contextmanager
def show_progress(prompts: int) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar on stderr: prompts answered, tokens generated for them, time left.

    Call what it gives with each output.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens generated"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=prompts, tokens=0)

        def tell(output: RequestOutput) -> None:
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            tokens += progress.tasks[task].fields["tokens"]
            progress.update(task, advance=1, tokens=tokens)

        yield tell
