"""Conversations as clients send them, over all three APIs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.running import Running

LINE = "x-anthropic-billing-header: cc_version=2.1.40.0d9; cc_entrypoint=cli; cch=fa690;\n"
SYSTEM = "Be brief. " * 20
QUESTION = {"role": "user", "content": "Hi"}


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    "system",
    [
        LINE + SYSTEM,
        [text(LINE + SYSTEM)],
        [text(LINE), text(SYSTEM)],
        [text(LINE + "\n" + SYSTEM)],
    ],
)
def test_only_the_billing_line_is_removed(server: Running, system: Any) -> None:
    """A block that began with the line was dropped whole, and chats had the line in the prompt."""
    path = "/v1/messages/count_tokens"
    plain = post(server, path, system=SYSTEM, messages=[QUESTION])
    assert post(server, path, system=system, messages=[QUESTION]) == plain
    for role in ("system", "developer"):
        message = {"role": role, "content": system}
        prompt = post(server, "/tokenize", messages=[message, QUESTION])
        assert prompt["count"] == plain["input_tokens"]
    if isinstance(system, str):
        answer = post(server, "/v1/responses", instructions=system, input="Hi", max_output_tokens=1)
        assert answer["usage"]["input_tokens"] == plain["input_tokens"]


def test_a_system_text_of_the_billing_line_alone_is_none(server: Running) -> None:
    plain = post(server, "/tokenize", messages=[QUESTION])
    system = {"role": "system", "content": LINE}
    assert post(server, "/tokenize", messages=[system, QUESTION]) == plain
