"""The bodies of requests to `/cache`."""

from typing import Any

from headstart.frontend.vllm_api.rows import accepted, refused
from headstart.server.bodies import Body, CacheFields, Flag, Many, Whole
from headstart.server.openai.schema import ChatCompletionRequest, CompletionRequest, TemplateFields

__all__ = ["CachePromptRequest", "CacheResetRequest"]

_OF_REQUESTS = [*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields]


class CachePromptRequest(CacheFields, TemplateFields):
    """A prompt: a text, token ids or messages.

    The body of a completion or a chat is accepted as it is; its fields for the answer have no
    effect. `add_generation_prompt` adds the beginning of the model's reply to messages. By default
    `explain` adds it, as a chat does, and `prewarm` does not.
    """

    rows = accepted({"no answer is made": _OF_REQUESTS}) | refused(
        {"give a chat's `messages`": dict.fromkeys(("input", "instructions", "system"), ())}
    )
    model: str | None = None
    prompt: str | Many[Whole] | None = None
    messages: Many[dict[str, Any]] | None = None


class CacheResetRequest(Body):
    """reset_running_requests: have those that run wait, and be computed anew.

    reset_tiers: forget what the model has on disk or another machine, too.
    """

    reset_running_requests: Flag = False
    reset_tiers: Flag = False
