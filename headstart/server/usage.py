"""Counts of tokens, as each API reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

__all__ = ["Usage"]


@dataclass(slots=True)
class Usage:
    """Tokens of one call, which may have several prompts, counted as its outputs arrive."""

    completion: int = 0
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens of each prompt, and those of them that were cached, by the id of its request."""

    @property
    def prompt(self) -> int:
        """Return the tokens of all prompts."""
        return sum(count for count, _ in self.prompts.values())

    @property
    def cached(self) -> int:
        """Return the tokens of prompts that were not computed."""
        return sum(cached for _, cached in self.prompts.values())

    def add(self, output: RequestOutput) -> None:
        """Count a request's next output."""
        counts = len(output.prompt_token_ids), output.num_cached_tokens
        self.prompts[output.request_id] = counts
        self.completion += sum(len(answer.token_ids) for answer in output.outputs)

    def for_completions(self) -> dict[str, Any]:
        """Return the usage of a completion or a chat."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def for_responses(self, written: int, reasoning: int) -> dict[str, Any]:
        """Return the usage of a response, with tokens newly cached and tokens of reasoning."""
        details = {"cached_tokens": self.cached, "cache_write_tokens": written}
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": details,
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, self.completion)},
            "total_tokens": self.prompt + self.completion,
        }

    def for_messages(self, created: Mapping[str, int]) -> dict[str, Any]:
        """Return the usage of a message; `created`: tokens newly cached, by time to live.

        Every full block of a prompt is cached; a client learns of those that it marked, as from
        Anthropic. `input_tokens` are the others that were computed.
        """
        total = sum(created.values())
        return {
            "input_tokens": self.prompt - self.cached - total,
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": total,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created["5m"],
                "ephemeral_1h_input_tokens": created["1h"],
            },
            "output_tokens": self.completion,
            "service_tier": "standard",
        }
