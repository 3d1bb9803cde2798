"""Options of the rendering by a chat template, as those of vLLM's `LLM.chat`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.errors import RequestError
from headstart.validation import OneOf, check_fields, describe, option

__all__ = ["TemplateOptions"]

_TAKEN = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Raises RequestError for a value that is none.

    chat_template: None takes the model's. chat_template_content_format: messages are texts
    ("string") or lists of parts ("openai"). continue_final_message: the answer goes on where the
    last message ends. chat_template_kwargs: what else the template reads.
    """

    chat_template: str | None = option(None)
    chat_template_content_format: str = option("auto", allowed=OneOf(("auto", "string", "openai")))
    add_generation_prompt: bool = option(True)
    continue_final_message: bool = option(False)
    tools: Sequence[Mapping[str, Any]] | None = option(None)
    chat_template_kwargs: Mapping[str, Any] | None = option(None)

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both True; allowed: one"
            )
        tools: object = self.tools
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise RequestError(f"tools are {describe(tools)}; allowed: a list of dicts")
        more: object = self.chat_template_kwargs
        if more is not None and not isinstance(more, Mapping):
            raise RequestError(f"chat_template_kwargs is {describe(more)}; allowed: a dict")
        if more is not None and _TAKEN & set(more):
            name = min(_TAKEN & set(more))
            raise RequestError(f"chat_template_kwargs has {name!r}, an argument of its own")

    def arguments(self) -> dict[str, Any]:
        """For `apply_chat_template`."""
        return {
            **(self.chat_template_kwargs or {}),
            "chat_template": self.chat_template,
            "tools": list(self.tools) if self.tools else None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
