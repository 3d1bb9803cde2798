"""What one reply cost, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput


def duration(seconds: float | None) -> str:
    """About three digits and a unit; a dash for what was not measured.

    >>> duration(2.314), duration(0.3141), duration(0.03141), duration(None), duration(1593.84)
    ('2.31 s', '314 ms', '31.4 ms', '–', '26.6 min')
    """
    if seconds is None:
        return "–"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.09995 else f"{seconds * 1000:.1f} ms"


def count(number: int, what: str) -> str:
    """A number of things.

    >>> count(1, "turn"), count(1200, "turn")
    ('1 turn', '1,200 turns')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def cached_share(output: RequestOutput) -> str:
    """Cached prompt tokens and what part of the prompt they are, rounded down."""
    percent = 100 * output.num_cached_tokens // len(output.prompt_token_ids)
    return f"{output.num_cached_tokens:,} ({percent}%)"


def figures(output: RequestOutput) -> str:
    """The line below a reply: tokens in, tokens cached, time to first token, time per token."""
    metrics, reason = output.metrics, output.outputs[0].finish_reason
    end = "interrupted" if reason == "abort" else reason
    if not output.outputs[0].text.strip():
        end = f"empty reply, {end}"
    loaded = "".join(f", {number:,} from {tier}" for tier, number in output.loaded_tokens.items())
    each = metrics.time_per_token  # None of a reply of one token
    rest = "" if each is None else f", then {duration(each)} each"
    return (
        f"[prompt {len(output.prompt_token_ids):,} tokens, cached {cached_share(output)}{loaded} · "
        f"first token {duration(metrics.time_to_first_token)}{rest} · {end}]"
    )
