"""The LoRA adapters of an engine, which have three states.

    named      `load` has read and checked the adapter; requests may use it
    resident   the matrices are in memory; at most `max_loras` adapters, evicted in LRU order
    running    a running request uses the adapter; it is not evicted, even after `unload`

A name is resolved when a request is prepared, so later changes of the name do not affect the
request. If the adapter is not resident when its request could run, it is read from disk again while
other requests run. If its files have changed, the request is refused. K/V are looked up by the
adapter's digest, so the blocks of two adapters are never confused, even if both had the same name.

Only the engine's thread changes the table of names, and it replaces the table as a whole, so other
threads read it without a lock. A lock could deadlock: the garbage collector may run in the thread
that holds it, close a stream, and wait for the engine.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from headstart.engine.adapter_names import Adapter, AdapterNames, InEngine, adapter_folder
from headstart.engine.config import EngineConfig
from headstart.engine.request import Request, RequestGroup
from headstart.engine.tenant_queue import TenantQueue
from headstart.errors import AdapterError, AdapterNotFoundError, ConfigError, DamagedAdapterError
from headstart.models.decoder import DecoderModel
from headstart.models.lora_files import read_weights
from headstart.models.lora_layers import AdapterRun, LoraLayers, ResidentAdapter
from headstart.validation import check_name


class AdapterStore(AdapterNames):
    """Adapters by name, with at most `max_loras` in memory. A `Limit` of the scheduler.

    `named`, `load`, `find` and `require` may be called from any thread, all other methods only from
    the engine's. has_unloaded: an adapter in memory may have lost its name.
    """

    def __init__(self, model: DecoderModel, config: EngineConfig) -> None:
        super().__init__()
        self.has_unloaded = False
        self._model = model
        self._config = config
        self._layers = LoraLayers(model)
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._failed: Mapping[str, AdapterError] = {}  # the error of the last reading, by digest
        self._refused: dict[str, AdapterError] = {}  # errors by request id
        self._reader = TenantQueue("headstart-adapters", 1)
        self._reading: tuple[Adapter, Future[ResidentAdapter]] | None = None
        self._running: dict[Request, str] = {}  # digests of adapters, by running request

    # Names

    @property
    def resident(self) -> list[str]:
        """Digests of the adapters in memory, least recently used first."""
        return list(self._resident)

    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        if not self._config.enable_lora:
            raise ConfigError("enable_lora is False; allowed: True for an engine with adapters")
        check_name("an adapter's name", name, ConfigError, required=True)
        folder = adapter_folder(path)
        weights = self._read(folder)

        def add() -> Adapter:
            adapter = Adapter(name, folder, weights.digest)
            self.has_unloaded |= name in self._named
            self._named = {**self._named, name: adapter}
            if len(self._resident) < self._config.max_loras:
                self._resident.setdefault(weights.digest, weights)
            return adapter

        return in_engine(add)

    def unload(self, name: str) -> None:
        super().unload(name)
        self.has_unloaded = True

    def add_adapter_name(self, request: Request) -> None:
        """Replace the adapter's digest in the request's miss explanation with its name."""
        missed = request.missed
        if missed is not None and missed.adapter is not None:
            names = [a.name for a in self.named if a.digest == missed.adapter]
            name = names[0] if names else "an adapter that was unloaded"
            request.missed = replace(missed, adapter=name)

    # As a limit

    def applies(self, request: Request) -> bool:
        return request.group.adapter is not None

    def reach(self, request: Request, start: int, stop: int) -> int:
        """Return `stop` if the adapter is in memory, else `start`.

        Begin to read an adapter that is not in memory, unless running requests use `max_loras`
        adapters. If it cannot be read or has changed, `take_refused` returns the error.
        """
        adapter, request_id = request.group.adapter, request.group.request_id
        if adapter is None or request in self._running:
            return stop
        if request_id in self._refused:
            return start
        if adapter.digest in self._resident:
            self._resident.move_to_end(adapter.digest)
            return stop
        if adapter.digest in self._failed:
            self._refused[request_id] = self._failed[adapter.digest]
        elif self._reading is None and self._can_add():
            self._reading = adapter, self._reader.submit(self._read_again, adapter)
        return start

    def enter(self, request: Request, start: int, stop: int) -> None:
        if request.group.adapter is not None:
            self._running[request] = request.group.adapter.digest

    def leave(self, request: Request) -> None:
        self._running.pop(request, None)

    # Memory

    def poll(self) -> None:
        """Make the newly read adapter resident, if fewer than `max_loras` adapters are in use.

        Call only before the scheduler runs. Then the scheduler can admit the adapter's request
        before the adapter is evicted again.
        """
        self._failed = {}
        if self._reading is None or not self._reading[1].done() or not self._can_add():
            return
        (adapter, reading), self._reading = self._reading, None
        try:
            weights = reading.result()
        except AdapterError as error:
            self._failed = {adapter.digest: error}
            return
        running = set(self._running.values())
        for digest in list(self._resident):  # least recently used first
            if len(self._resident) >= self._config.max_loras and digest not in running:
                self._forget(digest)
        self._resident[adapter.digest] = weights
        self.has_unloaded = True  # its name may have been removed meanwhile

    def wait_for_reading(self) -> object | None:
        """Wait for the adapter that is being read; return None if there is no such adapter.

        Otherwise, return an object that identifies this read.
        """
        if self._reading is not None:
            futures.wait([self._reading[1]])
        return self._reading

    def take_refused(self) -> dict[str, AdapterError]:
        """Return the errors of requests that cannot run, by request id; each error only once."""
        refused, self._refused = self._refused, {}
        return refused

    def _can_add(self) -> bool:
        """Return True if running requests use fewer than `max_loras` adapters."""
        return len(set(self._running.values())) < self._config.max_loras

    def _read_again(self, adapter: Adapter) -> ResidentAdapter:
        try:
            weights = self._read(adapter.path)
        except AdapterError:
            raise
        except Exception as error:  # must end only the requests of this adapter
            name = type(error).__name__
            raise AdapterError(
                f"adapter {adapter.name!r} cannot be read from {adapter.path}: {name}: {error}"
            ) from error
        if weights.digest != adapter.digest:
            raise DamagedAdapterError(
                f"the files in {adapter.path} have changed since adapter {adapter.name!r} was "
                "loaded from them; load it again"
            )
        return weights

    def _read(self, folder: Path) -> ResidentAdapter:
        try:
            return ResidentAdapter(read_weights(folder, self._model, self._config.max_lora_rank))
        except OSError as error:  # such as a name that is too long, or a missing permission
            raise AdapterNotFoundError(f"{folder} cannot be read: {error}") from error

    def release_unloaded(self, groups: Iterable[RequestGroup]) -> None:
        """Release adapters that lost their name, except those that unfinished groups use."""
        used = {group.adapter.digest for group in groups if group.adapter is not None}
        named = {adapter.digest for adapter in self._named.values()}
        unnamed = [digest for digest in self._resident if digest not in named]
        for digest in unnamed:
            if digest not in used:
                self._forget(digest)
        self.has_unloaded = not used.isdisjoint(unnamed)

    def _forget(self, digest: str) -> None:
        self._layers.forget(self._resident.pop(digest))

    # Steps

    def begin_step(self, runs: Sequence[tuple[str | None, int, int]]) -> None:
        """Begin a pass. runs: each run's digest or None, and numbers of rows and of logits."""
        self._layers.begin_step(
            [
                AdapterRun(self._resident[digest] if digest is not None else None, rows, logits)
                for digest, rows, logits in runs
            ]
        )

    def end_step(self) -> None:
        self._layers.end_step()

    def restore(self) -> None:
        """Clear the state of a failed step."""
        self._failed, self._refused = {}, {}
        self.has_unloaded = True  # until `release_unloaded` computes it again
        self._layers.reset()

    def close(self) -> None:
        """End the reading thread, and release all adapters. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._layers.reset()
        for digest in list(self._resident):
            self._forget(digest)
