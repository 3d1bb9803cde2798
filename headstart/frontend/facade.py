"""The base class of `LLM`, `AsyncLLM` and `LLMEngine`: their constructor and shared methods."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from headstart.engine.adapter_names import LoRARequest, choose_adapters
from headstart.engine.config import make_config
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, RequestError
from headstart.frontend.vllm_compat import (
    CacheView,
    EngineArgs,
    ModelView,
    ParallelView,
    SchedulerView,
    SpeculativeView,
    VllmView,
    read_options,
    view_config,
)
from headstart.imports import load_module
from headstart.models.prefetch import read_ahead
from headstart.validation import check_absent, check_flag

# These modules import torch. `start_engine` imports them once it has checked the model's name.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.cache import KVCacheManager
    from headstart.engine.adapter_names import Adapter
    from headstart.engine.config import EngineConfig
    from headstart.engine.driver import Driver
    from headstart.engine.engine import EngineCore
    from headstart.engine.request import Request
    from headstart.engine.tiering.tiers import Tiers
    from headstart.frontend.chat.requests import ChatRequests
    from headstart.frontend.frontend import Frontend


class Started(NamedTuple):
    """A loaded engine with its driver and its frontend.

    sampling: default parameters of calls. engine: None if it is in other processes.
    """

    frontend: Frontend
    chats: ChatRequests
    driver: Driver
    sampling: SamplingParams
    engine: EngineCore | None = None


def start_engine(
    model: str | Path, options: dict[str, Any], *, is_observed: bool = False
) -> Started:
    """Load a model by path or hub name with the options of `LLM(...)`.

    Options and files are checked before the import of torch, which takes seconds. Memory for the
    weights is allocated during this import. is_observed: see `make_engine_parts`. Raises
    ConfigError, ModelError or OutOfMemoryError.
    """
    parsed = read_options(model, options)
    config = make_config(parsed.config)
    memory = read_ahead(model, config.dtype, config.device, config.weights)
    engine, tokenizer = load_module("headstart.engine.engine").load_engine(
        model,
        tokenizer_folder=parsed.tokenizer,
        ready_memory=memory,
        is_observed=is_observed,
        **parsed.config,
    )
    frontend = load_module("headstart.frontend.frontend").make_frontend(engine, tokenizer)
    chat_requests = load_module("headstart.frontend.chat.requests")
    chats = chat_requests.ChatRequests(frontend, parsed.chat_template)
    driver = load_module("headstart.engine.driver").LocalDriver(engine)
    return Started(frontend, chats, driver, parsed.sampling, engine)


# Parameters of vLLM's methods that must be None or empty.
_ABSENT = (
    *("tokenization_kwargs", "mm_processor_kwargs", "prompt_text", "data_parallel_rank"),
    *("kv_hints", "reasoning_ended", "reasoning_parser_kwargs"),
)


def check_call(arguments: Mapping[str, Any]) -> None:
    """Raise RequestError if an unsupported parameter of vLLM is set."""
    check_absent({name: arguments[name] or None for name in _ABSENT if name in arguments})


def _delegate(path: str) -> Any:
    """Return a property that reads a dotted path of attributes."""
    return property(attrgetter(path))


class Facade:
    """The base of `LLM`, `AsyncLLM` and `LLMEngine`: an engine, its driver and its frontend."""

    frontend: Frontend
    engine: EngineCore
    driver: Driver

    config: EngineConfig = _delegate("frontend.config")
    """The options of the engine."""
    max_model_len: int = _delegate("frontend.facts.max_model_len")
    """Maximum number of tokens of a prompt and its answer together."""
    block_size: int = _delegate("config.block_size")
    """Tokens in a KV block."""
    num_blocks: int = _delegate("frontend.facts.num_blocks")
    """Number of KV blocks, of all replicas together."""
    kv_cache_bytes: int = _delegate("frontend.facts.kv_cache_bytes")
    """Bytes of the KV blocks."""
    chat_template: str | None = _delegate("chats.chat_template")
    """The default chat template; None for the tokenizer's."""
    adapters: list[Adapter] = _delegate("frontend.adapters.named")
    """The LoRA adapters that requests may name."""

    # These properties exist only for an engine in this process.
    manager: KVCacheManager = _delegate("engine.manager")
    """The cache manager, which only the engine's thread may use."""
    requests: tuple[Sequence[Request], Sequence[Request]] = _delegate("engine.requests")
    """Running and waiting requests, which must be read in the engine's thread."""
    num_preemptions: int = _delegate("engine.num_preemptions")
    """Number of preemptions of running requests."""
    tiers: Tiers | None = _delegate("engine.tiers")
    """The stores of evicted blocks on disk or another machine; None if there are none."""
    vllm_config: VllmView = _delegate("_view")
    """The configuration, named as in vLLM."""
    model_config: ModelView = _delegate("_view.model_config")
    cache_config: CacheView = _delegate("_view.cache_config")
    scheduler_config: SchedulerView = _delegate("_view.scheduler_config")
    parallel_config: ParallelView = _delegate("_view.parallel_config")
    speculative_config: SpeculativeView | None = _delegate("_view.speculative_config")

    # Parts of vLLM's configuration that headstart does not have.
    quant_config = kv_transfer_config = kv_events_config = ec_transfer_config = None

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        chat_template: str | Path | None = None,
        dtype: Any = "auto",
        weights: str = "auto",
        device: str = "cpu",
        max_model_len: int | str | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        max_bypassed: int = 8,
        speculation: int | str = "auto",
        speculative_config: Mapping[str, Any] | None = None,
        scheduling_policy: str = "fcfs",
        block_size: int = 16,
        num_blocks: int | None = None,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_fraction: float = 0.4,
        num_states: int | None = None,
        num_window_blocks: int | None = None,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool = True,
        deduplicate: bool = True,
        partial_hits: bool = True,
        eviction: str = "adaptive-lru",
        share_attention: bool = True,
        deterministic: bool = False,
        limit_mm_per_prompt: Mapping[str, Any] | None = None,
        max_images: int = 16,
        max_image_pixels: int = 2**25,
        encoder_cache_rows: int = 8192,
        enable_lora: bool = True,
        max_loras: int = 8,
        max_lora_rank: int = 64,
        cache_dir: str | None = None,
        cache_dir_bytes: int = 10 * 2**30,
        cache_words: bool = False,
        remote_cache: str | None = None,
        num_threads: int | None = None,
        seed: int = 0,
        debug: bool = False,
        **ignored: Any,
    ) -> None:
        """Load a model by path or hub name; `EngineConfig` and docs/vllm.md explain the options.

        Raises ConfigError, ModelError or OutOfMemoryError.
        """
        options = dict(locals())
        for name in ("self", "model", "ignored"):
            del options[name]
        self._attach(start_engine(model, options | ignored))

    def _attach(self, started: Started) -> None:
        self.frontend, self.chats, self.driver, self._sampling, engine = started
        if engine is not None:
            self.engine, self._view = engine, view_config(engine, self.frontend.tokenizer)
        weakref.finalize(self, self.driver.close)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        usage_context: object = None,
        start_engine_loop: bool = True,
        stat_loggers: object = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Load the model of vLLM's `EngineArgs`; `usage_context` has no effect."""
        absent = {
            "start_engine_loop": None if start_engine_loop in (None, True) else "False",
            "stat_loggers": stat_loggers,
            "enable_multiprocessing": enable_multiprocessing,
        }
        check_absent(absent, ConfigError)
        return cls(engine_args.model, **engine_args.options)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; None if it has none."""
        self.frontend.require_open()
        return self.frontend.tokenizer

    @property
    def takes_images(self) -> bool:
        """True if the model accepts images."""
        return self.frontend.images is not None

    def check_length(self, name: str, text: str) -> None:
        """Raise RequestError if text has more bytes than `max_model_len` tokens can have.

        name: the name of the text in the error.
        """
        self.frontend.text_limit.check(name, text)

    def set_share(self, owner: str, weight: float) -> None:
        """Add an owner of cached blocks, or change its weight in the division of the cache.

        The owner has the blocks of the salt `owner` and of salts that begin with `owner/`.
        """
        self.frontend.facts.shares.set(owner, weight)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the default sampling parameters; see `generation_config`."""
        return self._sampling.clone()

    def _reset_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        options = {
            "reset_running_requests": check_flag("reset_running_requests", reset_running_requests),
            "reset_tiers": check_flag("reset_connector", reset_connector),
        }
        return self.driver.call(lambda: self.engine.reset_prefix_cache(**options))

    def _broadcast(
        self,
        count: int,
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
    ) -> list[tuple[SamplingParams, str | LoRARequest | None, int]]:
        """Return the parameters, adapter and priority of each prompt. Raises RequestError.

        An argument that is not a list applies to all prompts.
        """
        params = self._sampling if params is None else params
        several = params if isinstance(params, Sequence) else [params] * count
        priorities = priority if isinstance(priority, list | tuple) else [priority or 0] * count
        for name, values in (("sampling parameters", several), ("priorities", priorities)):
            if len(values) != count:
                raise RequestError(
                    f"there are {len(values)} {name} for {count} prompts; allowed: one, or one for "
                    "each prompt"
                )
        adapters = choose_adapters(adapter, lora_request, count)
        return list(zip(several, adapters, priorities, strict=True))
