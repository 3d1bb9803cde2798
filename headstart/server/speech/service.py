"""The service of a speaking model: requests and metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request

from headstart.errors import EngineError
from headstart.server.errors import ApiError
from headstart.server.monitoring.logs import note_answer, note_error
from headstart.server.options import ServerOptions
from headstart.server.service import BaseService
from headstart.server.stores import Transcripts
from headstart.server.tenants import Tenants

if TYPE_CHECKING:
    from headstart.frontend.streams import AsyncOutputStream
    from headstart.omni.omni import AsyncOmni
    from headstart.omni.params import OmniOutput, OmniParams, OmniPrompt

__all__ = ["SpeechService", "speech_service_of"]


class SpeechService(BaseService):
    """One speaking model behind the server, and the calls under way."""

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

    def read_metrics(self) -> bytes:
        """The text of `/metrics`."""
        return self.metrics.read(len(self._read))

    async def start(
        self, prompt: OmniPrompt, params: OmniParams, salt: str | None
    ) -> AsyncOutputStream[OmniOutput]:
        """Begin an answer. Raises RequestError, and ApiError (504) when the time is over."""
        self.check_ready()
        self.calls.count_prompt()
        return await self.omni.start(prompt, params, cache_salt=salt)

    async def run(self, stream: AsyncOutputStream[OmniOutput]) -> AsyncGenerator[OmniOutput]:
        """Yield the outputs of an answer. Raises ApiError (504) when its time is over."""
        end = "abort"
        try:
            async with aclosing(stream):
                with self.reading(stream):
                    async for output in stream:
                        if output.finished:
                            end = output.finish_reason or "stop"
                            self._note(output)
                        yield output
        except (ApiError, EngineError) as error:
            note_error(error)
            end = "error" if isinstance(error, EngineError) else end
            raise
        finally:
            self.metrics.end(end)

    def _note(self, output: OmniOutput) -> None:
        thinker = output.metrics["thinker"]
        note_answer(
            prompt=len(output.prompt_token_ids),
            cached=thinker.cached_tokens,
            generated=len(output.token_ids) + len(output.codes),
            first=thinker.first_output,
        )
        self.metrics.add(output)


class SpeechMetrics:
    """Counts of the stages' work for Prometheus, with the model's name as a label."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._registry = told = CollectorRegistry()
        labels, by_stage = ["model_name"], ["model_name", "stage"]
        self._requests = Counter(
            "vllm:request_success",
            "Requests that ended.",
            [*labels, "finished_reason"],
            registry=told,
        )
        self._under_way = Gauge(
            "headstart:requests_in_pipeline",
            "Requests that the pipeline has taken, computed or waiting there.",
            labels,
            registry=told,
        )
        self._tokens = Counter(
            "headstart:stage_tokens", "Tokens of prompts and answers.", by_stage, registry=told
        )
        self._cached = Counter(
            "headstart:stage_cached_tokens", "Tokens not computed.", by_stage, registry=told
        )
        self._loaded = Counter(
            "headstart:stage_loaded_tokens",
            "Those of them from disk or another machine.",
            by_stage,
            registry=told,
        )
        self._seconds = Counter(
            "headstart:stage_seconds", "Time of a stage's steps.", by_stage, registry=told
        )
        self._spoken = Counter(
            "headstart:speech_seconds", "Seconds of speech that were made.", labels, registry=told
        )
        self._first = Histogram(
            "vllm:time_to_first_token_seconds", "Until a text's first token.", labels, registry=told
        )

    def end(self, reason: str) -> None:
        """Count a request that ended."""
        self._requests.labels(self._name, reason).inc()

    def add(self, output: OmniOutput) -> None:
        """Count a finished answer."""
        for stage, metrics in output.metrics.items():
            self._tokens.labels(self._name, stage).inc(metrics.tokens)
            self._cached.labels(self._name, stage).inc(metrics.cached_tokens)
            self._loaded.labels(self._name, stage).inc(metrics.loaded_tokens)
            self._seconds.labels(self._name, stage).inc(metrics.seconds)
        self._spoken.labels(self._name).inc(output.seconds)
        first = output.metrics["thinker"].first_output
        if first is not None:
            self._first.labels(self._name).observe(first)

    def read(self, under_way: int) -> bytes:
        """Return the text of `/metrics`, with this many requests in the pipeline."""
        self._under_way.labels(self._name).set(under_way)
        return generate_latest(self._registry)


def speech_service_of(request: Request) -> SpeechService:
    """Return the service of a request's app."""
    service: SpeechService = request.app.state.service
    return service
