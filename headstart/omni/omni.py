"""`Omni` and `AsyncOmni`: models with text, audio and image input and spoken answers."""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headstart.engine.driver import LocalDriver
from headstart.engine.outputs import RequestOutput
from headstart.errors import ConfigError, EngineError, RequestError, UnsupportedModelError
from headstart.frontend.frontend import InputProcessor
from headstart.frontend.llm import as_list
from headstart.frontend.streams import AsyncOutputStream, OutputStream, run_all
from headstart.frontend.text import TextLimit
from headstart.models.files import OMNI_TYPES, find_folder, read_json
from headstart.omni.engine_stage import EngineStage
from headstart.omni.family import OmniModel
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import OmniOutput, OmniParams, OmniPrompt
from headstart.omni.pipeline import Progress, check_options, read_graph
from headstart.omni.qwen2_5 import Qwen25Omni
from headstart.omni.qwen3 import Qwen3Omni
from headstart.omni.stage import TOKENS, Chunk, Input, OmniRequest
from headstart.validation import check_fields, describe

Answer = TypeVar("Answer")

DEFAULT_CACHE_BYTES = 1 << 30
"""Default size limit of the stage-output store, in bytes of host memory."""
_MEDIA = ("audio", "images", "features")
_TEXT = ("prompt", "prompt_token_ids")


class Omni:
    """A pipeline of a thinker, a talker and a vocoder, in which each stage caches its work.

    May be called from several threads and while streams are open: a driver's thread runs the steps
    of all requests. After `close` every call raises EngineError.

    pipeline: a graph in TOML that replaces the model's graph; the `options` of a stage are fields
    of `EngineConfig`. cache_bytes: size limit of the stage-output store. options: default options
    of all engines. `enable_prefix_caching=False` disables the caches of all stages. `num_threads`
    applies to the process. With `cache_dir`, later processes reuse the K/V and outputs of this
    process. Options without effect in a pipeline are refused.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        pipeline: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model from its folder or hub name. Raises ConfigError or ModelError."""
        if not (options is None or isinstance(options, Mapping)):
            raise ConfigError(f"options is {describe(options)}; allowed: a dict or None")
        settings = dict(options or {})
        check_options(settings)
        graph = None if pipeline is None else read_graph(pipeline)
        threads = settings.pop("num_threads", None)
        if threads is not None:
            torch.set_num_threads(threads)
        self.cache = OutputCache(cache_bytes)
        self._model = _load(model, dtype, device, self.cache)
        self.graph = pipeline or self._model.graph
        """The pipeline's graph."""
        graph = graph or read_graph(self.graph)
        self.pipeline = graph.with_options(settings).build(self._model.factories)
        thinker = self.pipeline.stages["thinker"]
        assert isinstance(thinker, EngineStage)
        self._thinker = thinker
        self.voices = tuple(self._model.voices)
        """The names of the voices."""
        self.text_params = self._model.text_params
        """Default sampling parameters of the text."""
        self.speech_params = self._model.speech_params
        """Default sampling parameters of speech."""
        self.placeholder_texts = self._model.placeholder_texts
        """Placeholder texts of a prompt, by the kind of item: "audio" or "image"."""
        self.tokenizer = self._model.tokenizer
        """The model's tokenizer; None if the model has none."""
        self.max_model_len = thinker.engine.max_model_len
        """Maximum number of tokens of a prompt and its text answer."""
        self.max_num_seqs = thinker.engine.config.max_num_seqs
        """Maximum number of requests in a step of the thinker."""
        self._inputs = InputProcessor(
            self.tokenizer,
            self._model.vocab_size,
            TextLimit(self.tokenizer, self.max_model_len),
        )
        self._request_numbers = itertools.count()
        self._driver = LocalDriver(self.pipeline)
        weakref.finalize(self, self._driver.close)

    @property
    def sound_rate(self) -> int:
        """Samples per second of sounds in prompts. Raises ModelError for a model without audio."""
        return self._model.media.sound_rate

    def generate(
        self,
        prompts: OmniPrompt | Sequence[OmniPrompt],
        params: OmniParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[OmniOutput]:
        """Answer one or many prompts together; return the outputs in the order of the prompts.

        cache_salt: prompts with different salts share nothing. Raises RequestError before any work
        if a prompt is invalid. Raises EngineError if a stage fails.
        """
        self.pipeline.require_open()
        groups = self._driver.call(
            lambda: [self.prepare(prompt, params, cache_salt) for prompt in as_list(prompts)]
        )
        return run_all(self._driver, groups)

    def stream(
        self, prompt: OmniPrompt, params: OmniParams | None = None, *, cache_salt: str | None = None
    ) -> OutputStream[OmniOutput]:
        """Return a stream of outputs for one prompt; each output has the whole answer so far.

        Closing the stream aborts the request, as does its garbage collection. Raises the errors of
        `generate`.
        """
        self.pipeline.require_open()
        progress = self._driver.call(lambda: self.prepare(prompt, params, cache_salt))
        return OutputStream(self._driver, progress, owner=self)

    def reset_cache(self) -> bool:
        """Drop everything cached in memory; do nothing and return False while a request runs.

        The contents of `cache_dir` stay.
        """

        def reset() -> bool:
            if not self.pipeline.reset_cache():
                return False
            self.cache.clear()
            return True

        return self._driver.call(reset)

    def close(self) -> None:
        """End all requests with an EngineError and free the memory. Idempotent."""
        self._driver.close()

    def prepare(self, prompt: OmniPrompt, params: OmniParams | None, salt: str | None) -> Progress:
        """Return a request for the pipeline, with sounds and images encoded. Raises RequestError.

        Call only in the driver's thread.
        """
        params = OmniParams() if params is None else params
        if not isinstance(params, OmniParams):
            raise RequestError(f"the parameters are {describe(params)}; allowed: an OmniParams")
        check_fields(params, RequestError)
        media: dict[str, Any] = {}
        if isinstance(prompt, Mapping):
            if set(prompt) - {*_TEXT, *_MEDIA} or not set(prompt) & set(_TEXT):
                raise RequestError(
                    f"the prompt has the keys {describe(list(prompt))}; allowed: 'prompt' or "
                    "'prompt_token_ids', and optionally 'audio' and 'images', or 'features'"
                )
            media = {key: prompt[key] for key in _MEDIA if prompt.get(key) is not None}
            prompt = {key: prompt[key] for key in _TEXT if key in prompt}
        spoken_prompt = self._model.prepare(self._inputs.process(prompt), media, salt)
        sampling = {"thinker": params.text or self.text_params, "talker": params.speech}
        if any(each is not None and each.n != 1 for each in sampling.values()):
            raise RequestError("n is above 1; allowed: 1 for a spoken answer")
        voice = {} if params.voice is None else {"voice": params.voice}
        request = OmniRequest(
            request_id=f"omni-{next(self._request_numbers)}",
            prompt=spoken_prompt,
            params={name: each for name, each in sampling.items() if each is not None},
            options={"talker": voice, self._model.audio.stage: {"seed": params.seed}},
            stages=None if params.audio else frozenset(["thinker"]),
            salt=salt,
        )
        return self.pipeline.prepare(request, self._output)

    def _output(self, progress: Progress) -> OmniOutput:
        text, reason = "", progress.finish_reason
        result = progress.results.get("thinker") or self._thinker.peek(progress.request_id)
        if isinstance(result, RequestOutput):
            text = result.outputs[0].text
            if reason == "done":
                reason = result.outputs[0].finish_reason
        chunks = progress.chunks
        return OmniOutput(
            request_id=progress.request_id,
            text=text,
            token_ids=_joined(chunks.get(Input("thinker", TOKENS), [])).tolist(),
            codes=_joined(chunks.get(self._model.codes, [])),
            audio_chunks=tuple(chunk.rows for chunk in chunks.get(self._model.audio, [])),
            sample_rate=self._model.sample_rate,
            finished=progress.finished,
            finish_reason=reason,
            metrics=dict(progress.metrics),
            prompt_token_ids=progress.request.prompt.prepared.token_ids,
        )


class AsyncOmni:
    """An `Omni` with asynchronous methods, for any number of tasks and event loops."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a model with the arguments of `Omni`. Raises ConfigError or ModelError."""
        self.omni = Omni(model, **options)
        self._driver = self.omni._driver

    @property
    def is_running(self) -> bool:
        """True until `close`."""
        return not self.omni.pipeline.is_closed

    async def start(
        self, prompt: OmniPrompt, params: OmniParams | None = None, *, cache_salt: str | None = None
    ) -> AsyncOutputStream[OmniOutput]:
        """Check a request, and return the stream of its outputs.

        Each output has the whole answer so far. The request begins when the first output is read.
        Closing the stream aborts the request, as does its garbage collection. Raises the errors of
        `Omni.generate`.
        """
        prepare = partial(self.omni.prepare, prompt, params, cache_salt)
        progress = await self._driver.call_async(prepare)

        async def prepared() -> Progress:
            return progress

        return AsyncOutputStream(self._driver, prepared, owner=self)

    async def generate(
        self, prompt: OmniPrompt, params: OmniParams | None = None, *, cache_salt: str | None = None
    ) -> OmniOutput:
        """Return the whole answer to one prompt. Raises the errors of `Omni.generate`."""
        async for output in await self.start(prompt, params, cache_salt=cache_salt):
            if output.finished:
                return output
        raise EngineError("the pipeline ended a request without an answer")

    async def call(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` in the pipeline's thread; return its result or raise its exception.

        Raises EngineError after `close`.
        """
        return await self._driver.call_async(function)

    def close(self) -> None:
        """End every request with an EngineError and free the memory. Idempotent."""
        self._driver.close()


def _joined(chunks: Sequence[Chunk]) -> Tensor:
    rows = [chunk.rows for chunk in chunks]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def _load(model: str | Path, dtype: str, device: str, cache: OutputCache) -> OmniModel:
    folder = find_folder(model)
    match read_json(folder / "config.json").get("model_type"):
        case "qwen2_5_omni":
            return Qwen25Omni(folder, dtype, device, cache)
        case "qwen3_omni_moe":
            return Qwen3Omni(folder, dtype, device, cache)
        case kind:
            raise UnsupportedModelError(
                f"model_type {kind!r} is not an omni model; allowed: {' and '.join(OMNI_TYPES)}"
            )
