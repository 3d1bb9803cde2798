"""The service of a speaking model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.server.monitoring.logs import current_line
from headstart.server.monitoring.metrics import SpeechMetrics
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService
from headstart.server.stores import Transcripts
from headstart.server.tenants import Tenants

if TYPE_CHECKING:
    from headstart.frontend.streams import AsyncOutputStream
    from headstart.omni.omni import AsyncOmni
    from headstart.omni.params import OmniOutput, OmniParams, OmniPrompt

__all__ = ["SpeechService"]


class SpeechService(BaseService["AsyncOutputStream[OmniOutput]", "OmniOutput"]):
    """A speaking model behind the server."""

    def __init__(
        self, omni: AsyncOmni, name: str, options: ServerOptions, tenants: Tenants
    ) -> None:
        super().__init__(name, options, tenants, omni.omni.max_num_seqs)
        self.omni = omni
        self.transcripts = Transcripts()
        self.metrics = SpeechMetrics(self.name)

    @property
    def is_running(self) -> bool:
        return self.omni.is_running

    @property
    def max_model_len(self) -> int:
        return self.omni.omni.max_model_len

    async def read_metrics(self) -> bytes:
        return self.metrics.read(len(self._read))

    async def start(
        self, prompt: OmniPrompt, params: OmniParams, salt: str | None
    ) -> AsyncOutputStream[OmniOutput]:
        """Begin an answer. Raises RequestError."""
        self.check_ready()
        self.calls.count_prompt()
        return await self.omni.start(prompt, params, cache_salt=salt)

    def _open(self, work: AsyncOutputStream[OmniOutput]) -> AsyncOutputStream[OmniOutput]:
        return work

    async def _finish(self, work: AsyncOutputStream[OmniOutput], output: OmniOutput) -> None:
        thinker = output.metrics["thinker"]
        current_line().add_answer(
            prompt=len(output.prompt_token_ids),
            cached=thinker.cached_tokens,
            generated=len(output.token_ids) + len(output.codes),
            first=thinker.first_output,
        )
        self.metrics.add(output)
        self.metrics.end(output.finish_reason or "stop")

    def _end(self, work: AsyncOutputStream[OmniOutput], reason: str) -> None:
        if reason != "answered":
            self.metrics.end(reason)
