"""Scripted answers, in place of a model's, from a running server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headstart.engine.outputs import CompletionOutput, RequestOutput
from headstart.engine.params import RequestOutputKind
from tests.server.running import Running

__all__ = ["scripted"]


@contextmanager
def scripted(server: Running, pieces: Sequence[str | Exception]) -> Iterator[None]:
    """Replace every answer by these pieces, one token each; raise those that are exceptions."""

    async def run(request: Any) -> AsyncGenerator[RequestOutput]:
        streams = request.params.output_kind is RequestOutputKind.DELTA
        text = ""
        for place, piece in enumerate(pieces, 1):
            if isinstance(piece, Exception):
                raise piece
            text = piece if streams else text + piece
            reason = "stop" if place == len(pieces) else None
            if streams or reason is not None:
                ids = [1] if streams else [1] * len(pieces)
                answer = CompletionOutput(0, text, ids, None, None, reason)
                name, prompt = request.request_id, request.prompt_token_ids
                yield RequestOutput(name, None, prompt, None, [answer], reason is not None)

    server.service.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del server.service.run
