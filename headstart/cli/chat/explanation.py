"""What `/explain` says: how much of a prompt was cached, and why not more, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from headstart.cache import MissExplanation, MissReason
from headstart.cli.reply_metrics import count

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

__all__ = ["explain_turn"]

_REASONS: Mapping[MissReason, str] = MappingProxyType(
    {
        MissReason.NONE: "must be computed for the reply to begin",
        MissReason.DISABLED: "is not looked up, since prefix caching is off",
        MissReason.NOT_READ: "was not looked up, as it was asked for",
        MissReason.UNSEEN: "is new",
        MissReason.EVICTED: "was cached once, until its memory was needed for something else",
        MissReason.TOKEN: "differs from every prompt in the cache",
        MissReason.SALT: "is cached under another salt",
        MissReason.ITEM: "begins with an image or a sound that is not in the cache",
        MissReason.SHORT: "is shorter than a block (only full blocks are cached)",
        MissReason.IN_PROGRESS: "was just being computed by another request",
        MissReason.OUTPUTS: "is cached without what the next stage needs of it",
    }
)
"""What is true of the part of a prompt that was not cached."""


def explain_turn(output: RequestOutput, changed: str = "") -> str:
    """A sentence about the last turn; with the tiers that some was loaded from.

    changed: the command that has changed the conversation since.
    """
    total, cached = len(output.prompt_token_ids), output.num_cached_tokens
    whose = "the prompt's" if changed else "the last prompt's"
    if cached == 1:
        told = f"the first of {whose} {count(total, 'token')} was cached"
    elif cached:
        told = f"the first {cached:,} of {whose} {count(total, 'token')} were cached"
    else:
        told = f"none of {whose} {count(total, 'token')} was cached"
    if output.loaded_tokens:
        tiers = (f"{loaded:,} of them from {tier}" for tier, loaded in output.loaded_tokens.items())
        told += f" ({', '.join(tiers)})"
    if changed:
        told = f"before {changed}, {told}"
    why = output.why_missed
    if why is None:
        return told
    return f"{told}, and the rest {_reason(why)}" if cached else f"{told}: it {_reason(why)}"


def _reason(why: MissExplanation) -> str:
    if why.reason is not MissReason.ADAPTER:
        return _REASONS[why.reason]
    where = "without an adapter" if why.adapter is None else f"for the adapter {why.adapter}"
    return f"is cached {where}"
