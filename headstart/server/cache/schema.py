"""The bodies of requests to `/cache`."""

from typing import Any

from headstart.server.bodies import Body, CacheFields, Flag, Whole
from headstart.server.openai.schema import FunctionTool

__all__ = ["PromptBody", "ResetBody"]


class PromptBody(CacheFields):
    """A prompt as text or token ids, or as messages; what it is for is the path's to say.

    add_generation_prompt: whether what begins the model's reply belongs to it; unless said, in
    `explain`, as for a chat, and not in `prewarm`, whose prompts go on.
    """

    model: str | None = None
    prompt: str | list[Whole] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None


class ResetBody(Body):
    """reset_running_requests: have those that run wait, and be computed anew.

    reset_tiers: forget what the model has on disk or another machine, too.
    """

    reset_running_requests: Flag = False
    reset_tiers: Flag = False
