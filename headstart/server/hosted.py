"""Tools that OpenAI or Anthropic run, such as a web search: nothing runs them here.

A request that also has tools of the client is answered without them, and a header names them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from headstart.server.errors import ApiError
from headstart.validation import describe, shorten

__all__ = ["HostedTool", "leave_out_hosted", "tag_tool"]

_TYPES = re.compile(
    r"(web_search|web_fetch|code_execution|code_interpreter|tool_search|file_search"
    r"|image_generation)(_[a-z0-9_]{1,64})?"
)


class HostedTool(BaseModel):
    """A tool that does not run here; its other fields are not read."""

    model_config = ConfigDict(extra="allow")
    type: str


def tag_tool(given: Any) -> str:
    """Return "HostedTool" for a tool that only OpenAI or Anthropic run, and "OwnTool" for others.

    Tags are like names of classes, which errors leave out of the names of fields.
    """
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "HostedTool" if isinstance(kind, str) and _TYPES.fullmatch(kind) else "OwnTool"


def leave_out_hosted(tools: Sequence[Any] | None, request: Request, own: str) -> None:
    """Have the header `x-headstart-ignored` of the answer name the hosted tools.

    own: the type of the client's tools. Raises ApiError if there are none of these.
    """
    hosted = {i: tool.type for i, tool in enumerate(tools or ()) if isinstance(tool, HostedTool)}
    if hosted and len(hosted) == len(tools or ()):
        place, kind = next(iter(hosted.items()))
        told = f"{describe(kind)} does not run here; allowed: {own!r}, a tool of yours"
        raise ApiError(400, f"tools[{place}].type: {told}", param=f"tools[{place}].type")
    if hosted:
        names = ", ".join(f"tools[{place}] {kind}" for place, kind in hosted.items())
        request.state.ignored = shorten(names)
