"""What one reply cost, in one line, and replies printed as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput


def duration(seconds: float | None) -> str:
    """Three digits and a unit; a dash for what was not measured.

    >>> duration(2.314), duration(0.3141), duration(0.03141), duration(None)
    ('2.31 s', '314 ms', '31.4 ms', '–')
    """
    if seconds is None:
        return "–"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.09995 else f"{seconds * 1000:.1f} ms"


def cached_share(output: RequestOutput) -> str:
    """Cached prompt tokens and what part of the prompt they are, rounded down."""
    percent = 100 * output.num_cached_tokens // len(output.prompt_token_ids)
    return f"{output.num_cached_tokens:,} ({percent}%)"


def figures(output: RequestOutput) -> str:
    """The line below a reply: tokens in, tokens cached, time to first token, time per token."""
    metrics, answer = output.metrics, output.outputs[0]
    return (
        f"[prompt {len(output.prompt_token_ids):,} tokens, cached {cached_share(output)} · "
        f"first token {duration(metrics.time_to_first_token)}, "
        f"then {duration(metrics.time_per_token)} each · {answer.finish_reason or 'interrupted'}]"
    )


def print_reply(replies: Iterator[RequestOutput]) -> RequestOutput:
    """Print a reply as it grows, then its figures; returns the finished output."""
    printed = 0
    for output in replies:
        text = output.outputs[0].text
        click.echo(text[printed:], nl=False)
        printed = len(text)
    click.echo()
    click.secho(figures(output), dim=True, err=True)
    return output
