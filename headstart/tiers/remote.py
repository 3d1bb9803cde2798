"""The remote tier: blocks in a Valkey or Redis server, shared by engines on many machines.

A block is stored as a record with checksums, as on disk. The key contains the model's fingerprint
and the block's name. The server's settings limit its memory and choose the blocks to evict
(`maxmemory`, `allkeys-lru`). When a server is down or slow, it is not called for a while (`Pause`),
and all lookups miss. If a server is full or a read-only replica, it refuses blocks. Then saves
pause, and lookups continue.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from headstart.cache import BlockHash
from headstart.errors import ConfigError
from headstart.imports import install
from headstart.tiers.store import (
    VERSION,
    Faults,
    LoadedBlock,
    ModelRecord,
    Pause,
    StoredBlock,
    make_header,
    payload_of,
    read_header,
)

_TIMEOUT = 2.0  # seconds to wait for a connection, and for an answer
_FIRST = 8  # names in the first query of a lookup, which is the only query for most new prompts
_BATCH_BYTES = 8 << 20  # maximum bytes in a query
_FIRST_BYTES = 256 << 10  # bytes in a query before the rate is known
_QUERY_SECONDS = 1.0  # intended maximum duration of a query
_UNLINK_BATCH = 1000  # keys that are listed and deleted per call

Answer = TypeVar("Answer")


class RemoteStore:
    """The blocks of one model in a server; a `BlockStore`.

    url: redis://host:port/db, rediss:// with TLS, or unix:///path. Raises ConfigError for any
    other url, or if the client's library is not installed. An unreachable server does not raise.
    """

    tier = "remote"
    num_stored = 0  # unknown: counting would list all keys of the server

    def __init__(self, url: str, model: ModelRecord) -> None:
        self.model = model
        self.block_seconds = 0.0  # seconds to compute the last loaded block
        self.faults = Faults(f"remote cache {_without_password(url)}")
        try:
            import redis
        except ImportError as error:
            raise ConfigError(
                f"a remote cache needs the client of Valkey and Redis: {install('remote')}"
            ) from error
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT, protocol=2
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"remote_cache is {_without_password(url)!r}: {error}; allowed: "
                "redis://host:port/db, rediss://..., unix:///path"
            ) from error
        self._prefix = b"headstart:%d:%s:" % (VERSION, model.fingerprint[:32].encode())
        self._max_blocks = max(1, _BATCH_BYTES // model.block_bytes)  # in a query
        self._rate: float | None = None  # bytes per second of the last answer
        self._pause = Pause(self.faults)
        self._refusal = Pause(self.faults)  # a pause of saves only

    def find(self, names: Sequence[BlockHash]) -> int:
        count = 0
        for batch in (names[:_FIRST], names[_FIRST:]):
            stored = self._call([], self._exist, batch)
            count += next((i for i, is_stored in enumerate(stored) if not is_stored), len(stored))
            if count < _FIRST:
                break
        return count

    def first(self, names: Sequence[BlockHash]) -> int:
        stored = self._call([], self._exist, names)
        return next((i for i, is_stored in enumerate(stored) if is_stored), len(names))

    def _exist(self, names: Sequence[BlockHash]) -> list[int]:
        queries = self._client.pipeline(transaction=False)
        for name in names:
            queries.exists(self._prefix + name)
        return list(queries.execute())

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        start = 0
        while batch := names[start : start + self._batch_size()]:
            start += len(batch)
            values = self._call([], self._get, batch)
            header = read_header(values[0]) if values and values[0] is not None else None
            if header is not None and header.seconds:
                self.block_seconds = header.seconds
            for name, value in zip(batch, values, strict=False):
                if value is None:
                    return
                payload = payload_of(memoryview(value), name)
                if payload is None or payload.nbytes != self.model.block_bytes:
                    self.faults.note("a block is damaged", name.hex())
                    self._call(0, self._client.unlink, self._prefix + name)
                    return
                yield LoadedBlock(self.tier, payload)
            if len(values) < len(batch):
                return

    def _batch_size(self) -> int:
        """Return the number of blocks in a query, fewer for a slow connection.

        Blocks can be used only when the whole answer has arrived.
        """
        nbytes = _FIRST_BYTES if self._rate is None else int(self._rate * _QUERY_SECONDS)
        return max(1, min(self._max_blocks, nbytes // self.model.block_bytes))

    def _get(self, names: Sequence[BlockHash]) -> list[bytes | None]:
        began = time.monotonic()
        values: list[bytes | None] = self._client.mget([self._prefix + name for name in names])
        if nbytes := sum(len(value) for value in values if value is not None):
            self._rate = nbytes / max(time.monotonic() - began, 1e-9)
        return values

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        saved = 0
        for start in range(0, len(blocks), self._max_blocks):
            batch = blocks[start : start + self._max_blocks]
            answers = None if self._refusal.is_on else self._call(None, self._set, batch)
            if answers is None:
                self.faults.num_unsaved += len(batch)
            else:
                saved += sum(map(bool, answers))
        return saved

    def _set(self, blocks: Sequence[StoredBlock]) -> list[Any]:
        stored = self._exist([block.name for block in blocks])
        commands = self._client.pipeline(transaction=False)
        for block, is_stored in zip(blocks, stored, strict=True):
            if not is_stored:
                value = b"".join((make_header(block), block.payload))
                commands.set(self._prefix + block.name, value, nx=True)
        answers = commands.execute(raise_on_error=False)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        self.faults.num_unsaved += len(refused)
        if refused:  # the server is full, a replica, or read-only for this user
            self._refusal.failed("the server refuses new blocks", refused[0])
        elif answers:
            self._refusal.answered()
        return [answer for answer in answers if not isinstance(answer, Exception)]

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Do nothing: the server records each read."""

    def clear(self) -> bool:
        return bool(self._call(False, self._unlink_all))

    def _unlink_all(self) -> bool:
        keys = self._client.scan_iter(match=self._prefix + b"*", count=_UNLINK_BATCH)
        while batch := list(islice(keys, _UNLINK_BATCH)):
            self._client.unlink(*batch)
        return True

    def close(self) -> None:
        self._client.close()

    def _call(self, default: Any, query: Callable[..., Answer], *args: Any) -> Answer | Any:
        """Return the result of `query`; `default` during a pause, or if the call fails."""
        if self._pause.is_on:
            return default
        try:
            answer = query(*args)
        except Exception as error:  # the client raises exceptions of many types
            self._pause.failed("the server does not answer", error)
            return default
        self._pause.answered()
        return answer


def _without_password(url: str) -> str:
    """Return the url without its user and password, for logs."""
    head, separator, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if separator else url
