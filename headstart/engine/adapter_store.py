"""The LoRA adapters of an engine: their names, and which of them are in memory.

    named      `load` has read it, checked it and knows its digest; requests may ask for it
    resident   its matrices are in memory: at most `max_loras`, least recently used out
    running    a running request needs it: it stays resident, named or not

A request takes the adapter that its name stands for when it is prepared, and keeps it: unloading
the name, or loading another adapter under it, changes nothing for that request. An adapter that
is not resident when a request is to run is read from disk again, and refused if it is no longer
what it was; those that run go on meanwhile. K/V are found by the digest, so no name can ever mix
the blocks of two adapters.

Only the engine's thread changes anything, and the table of names is replaced, never changed: other
threads look into it without a lock. The engine's thread could wait for ever for a lock whose
holder collects garbage, closes a stream and waits for the engine.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from headstart.engine.adapter_names import Adapter, AdapterNames, InEngine, adapter_folder
from headstart.engine.config import EngineConfig
from headstart.engine.request import Request, RequestGroup
from headstart.engine.tenant_queue import TenantQueue
from headstart.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    DamagedAdapterError,
)
from headstart.models.decoder import DecoderModel
from headstart.models.lora_files import read_weights
from headstart.models.lora_layers import AdapterRun, LoraLayers, ResidentAdapter
from headstart.validation import check_name


class _Reading(NamedTuple):
    """An adapter that is being read again, or has been."""

    adapter: Adapter
    found: "Future[ResidentAdapter]"


class AdapterStore(AdapterNames):
    """Loads adapters by name and keeps a bounded number in memory.

    `named`, `load`, `find` and `require` are for any thread; the rest is the engine's.
    """

    def __init__(self, model: DecoderModel, config: EngineConfig) -> None:
        super().__init__()
        self._model = model
        self._config = config
        self._layers = LoraLayers(model)
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._failed: Mapping[str, AdapterError] = {}  # by digest: the last one, for one scheduling
        self._refused: dict[str, AdapterError] = {}  # by group's id
        self._reader = TenantQueue("headstart-adapters", 1)
        self._reading: _Reading | None = None
        self._running: dict[Request, str] = {}  # that have an adapter, to its digest
        self.has_unnamed = False
        """True if an adapter in memory may have no name any more."""

    # Names

    @property
    def resident(self) -> list[str]:
        """Digests of the adapters in memory, least recently used first."""
        return list(self._resident)

    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        """As `AdapterNames.load`."""
        if not self._config.enable_lora:
            raise ConfigError("enable_lora is False: this engine takes no adapters")
        check_name("an adapter's name", name, ConfigError, required=True)
        folder = adapter_folder(path)
        found = self._read(folder)
        return in_engine(lambda: self._add(Adapter(name, folder, found.digest), found))

    def _add(self, adapter: Adapter, found: ResidentAdapter) -> Adapter:
        self.has_unnamed |= adapter.name in self._named
        self._named = {**self._named, adapter.name: adapter}
        if len(self._resident) < self._config.max_loras:
            self._resident.setdefault(found.digest, found)
        return adapter

    def unload(self, name: str) -> None:
        """As `AdapterNames.unload`."""
        super().unload(name)
        self.has_unnamed = True

    def name_miss(self, request: Request) -> None:
        """Replace the digest in a miss by the name of the adapter that the prefix is cached for."""
        missed = request.missed
        if missed is not None and missed.adapter is not None:
            names = [a.name for a in self.named if a.digest == missed.adapter]
            name = names[0] if names else "one without a name by now"
            request.missed = replace(missed, adapter=name)

    # Memory

    def applies(self, request: Request) -> bool:
        """A request with an adapter is limited."""
        return request.group.adapter is not None

    def reach(self, request: Request, start: int, stop: int) -> int:
        """All, if the request's adapter is in memory, else nothing: it is then read again.

        Nothing, too, while running requests need all the places, and when the adapter could not
        be read or has changed: `take_refused` then has the reason.
        """
        adapter, name = request.group.adapter, request.group.request_id
        if adapter is None or request in self._running:
            return stop
        if name in self._refused:
            return start
        if adapter.digest in self._resident:
            self._resident.move_to_end(adapter.digest)
            return stop
        if adapter.digest in self._failed:
            self._refused[name] = self._failed[adapter.digest]
        elif self._reading is None and self._has_place():
            found = self._reader.submit(self._read_again, adapter)
            self._reading = _Reading(adapter, found)
        return start

    def enter(self, request: Request, start: int, stop: int) -> None:
        """The request's adapter stays in memory until it leaves."""
        if request.group.adapter is not None:
            self._running[request] = request.group.adapter.digest

    def leave(self, request: Request) -> None:
        """The request's adapter may go."""
        self._running.pop(request, None)

    def take_in(self) -> None:
        """Take in the adapter that has been read again, if there is one and it has a place.

        Before each scheduling, and only then: an adapter stays at least until all requests were
        asked once, so it cannot make room for the next one before its own request could run.
        """
        self._failed = {}
        if self._reading is None or not self._reading.found.done() or not self._has_place():
            return
        (adapter, found), self._reading = self._reading, None
        try:
            read = found.result()
        except AdapterError as error:
            self._failed = {adapter.digest: error}
            return
        self._drop(set(self._running.values()), self._config.max_loras - 1)
        self._resident[adapter.digest] = read
        self.has_unnamed = True  # its name may be gone by now

    def wait_for_reading(self) -> object | None:
        """Wait until the adapter that is being read is read; the reading, None if there is none."""
        if self._reading is not None:
            futures.wait([self._reading.found])
        return self._reading

    def take_refused(self) -> dict[str, AdapterError]:
        """The groups, by id, that can never run, each told once."""
        refused, self._refused = self._refused, {}
        return refused

    def _has_place(self) -> bool:
        """True if running requests do not need all places."""
        return len(set(self._running.values())) < self._config.max_loras

    def _read_again(self, adapter: Adapter) -> ResidentAdapter:
        try:
            found = self._read(adapter.path)
        except AdapterError:
            raise
        except Exception as error:  # it ends the requests of this adapter, and no others
            raise AdapterError(
                f"adapter {adapter.name!r} cannot be read again from {adapter.path}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if found.digest != adapter.digest:
            raise DamagedAdapterError(
                f"the files in {adapter.path} have changed since adapter {adapter.name!r} was "
                "loaded from them; load it again"
            )
        return found

    def forget_unnamed(self, groups: Iterable[RequestGroup]) -> None:
        """Let go of adapters in memory that have no name, but for those of unfinished groups."""
        needed = _digests(groups)
        named = {adapter.digest for adapter in self._named.values()}
        unnamed = [digest for digest in self._resident if digest not in named]
        for digest in unnamed:
            if digest not in needed:
                self._forget(digest)
        self.has_unnamed = not needed.isdisjoint(unnamed)

    def _drop(self, running: set[str], limit: int) -> None:
        """Make room: least recently used first, never what a running request needs."""
        for digest in list(self._resident):
            if len(self._resident) > limit and digest not in running:
                self._forget(digest)

    def _forget(self, digest: str) -> None:
        self._layers.forget(self._resident[digest])
        del self._resident[digest]

    def _read(self, folder: Path) -> ResidentAdapter:
        try:
            return ResidentAdapter(read_weights(folder, self._model, self._config.max_lora_rank))
        except OSError as error:  # a name too long for the file system, a folder of another user
            raise AdapterNotFoundError(f"{folder} cannot be read: {error}") from error

    # Steps

    def begin_step(self, runs: Iterable[tuple[str | None, int, int]]) -> None:
        """Begin a pass with these rows: (digest or None, rows, rows with logits); none if empty."""
        resident = self._resident
        self._layers.begin_step(
            [
                AdapterRun(resident[digest] if digest is not None else None, rows, logits)
                for digest, rows, logits in runs
            ]
        )

    def end_step(self) -> None:
        """The pass is over."""
        self._layers.end_step()

    def restore(self) -> None:
        """Forget what a step refused and set up, wherever it was."""
        self._failed, self._refused = {}, {}
        self.has_unnamed = True  # perhaps: `forget_unnamed` looks
        self._layers.reset()

    def close(self) -> None:
        """End the thread that reads adapters, and let go of those in memory. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._layers.reset()
        for digest in list(self._resident):
            self._forget(digest)


def _digests(groups: Iterable[RequestGroup]) -> set[str]:
    return {group.adapter.digest for group in groups if group.adapter is not None}
