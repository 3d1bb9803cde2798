"""Counts of tokens, which every API tells in its own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

__all__ = ["TokenCount"]


class TokenCount:
    """Tokens of answers whose outputs tell what is new, or everything at once."""

    def __init__(self) -> None:
        self.completion = 0
        self.prompt = 0
        self.cached = 0

    def add(self, output: RequestOutput) -> None:
        """Count a request's next output."""
        self.prompt = len(output.prompt_token_ids)
        self.cached = output.num_cached_tokens
        for answer in output.outputs:
            self.completion += len(answer.token_ids)
