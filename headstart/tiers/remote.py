"""The remote tier: blocks in a Valkey or Redis server, shared by engines on many machines.

A block is one value under its model's and its own name: a record with checksums, as on disk. How
much is kept and what goes first is the server's to decide (`maxmemory`, `allkeys-lru`). A server
that is down or slow is left alone for a while, and all is a miss meanwhile. One that takes no
blocks, such as a full one or a replica, is offered none for a while, and asked as before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

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

_PATIENCE = 2.0  # seconds for an answer, and for a connection
_FIRST = 8  # names in the first question of a lookup: most prompts that are new miss there
_AT_ONCE_BYTES = 8 << 20
_FIRST_BYTES = 256 << 10  # that are asked for at once, before anything has come
_QUESTION = 1.0  # seconds that an answer should take at the most: whoever is silent is left alone
_UNLINKED = 1000  # keys that are looked for, and forgotten, at once


class RemoteStore:
    """The blocks of one model in a server; a `BlockStore`.

    url: redis://host:port/db, rediss:// with TLS, or unix:///path. Raises ConfigError for a url
    that is none, or without the client's library; not for a server that does not answer.
    """

    tier = "remote"
    num_kept = 0  # counting asks the server for all that it has

    def __init__(self, url: str, model: ModelRecord) -> None:
        self.model = model  # whose blocks they are
        self.block_seconds = 0.0  # of the last one that came
        self.faults = Faults(f"remote cache {_without_password(url)}")
        self._client = _connect(url)
        self._prefix = b"headstart:%d:%s:" % (VERSION, model.fingerprint[:32].encode())
        self._most = max(1, _AT_ONCE_BYTES // model.block_bytes)  # blocks in a question
        self._rate: float | None = None  # bytes a second of the last answer
        self._pause = Pause(self.faults)
        self._refusal = Pause(self.faults)  # of blocks alone: such a server still gives what it has

    def find(self, names: Sequence[BlockHash]) -> int:
        count = 0
        for some in (names[:_FIRST], names[_FIRST:]):
            held: list[int] = self._ask([], self._exist, some)
            count += next((at for at, one in enumerate(held) if not one), len(held))
            if count < _FIRST:
                break
        return count

    def _exist(self, names: Sequence[BlockHash]) -> list[int]:
        questions = self._client.pipeline(transaction=False)
        for name in names:
            questions.exists(self._prefix + name)
        return list(questions.execute())

    def load(self, names: Sequence[BlockHash]) -> Iterator[LoadedBlock]:
        at = 0
        while some := names[at : at + self._at_once()]:
            at += len(some)
            values = self._ask([], self._get, some)
            self._note_seconds(values)
            for name, value in zip(some, values, strict=False):
                if value is None:
                    return
                payload = payload_of(memoryview(value), name)
                if payload is None or payload.nbytes != self.model.block_bytes:
                    self.faults.note("a block is damaged", name.hex())
                    self._ask(0, self._client.unlink, self._prefix + name)
                    return
                yield LoadedBlock(self.tier, payload)
            if len(values) < len(some):
                return

    def _note_seconds(self, values: Sequence[bytes | None]) -> None:
        header = read_header(values[0]) if values and values[0] is not None else None
        if header is not None and header.seconds:
            self.block_seconds = header.seconds

    def _at_once(self) -> int:
        """Blocks that are asked for together: as many as come in a moment, however slow the link.

        Nothing can be told from an answer before all of it is there.
        """
        nbytes = _FIRST_BYTES if self._rate is None else int(self._rate * _QUESTION)
        return max(1, min(self._most, nbytes // self.model.block_bytes))

    def _get(self, names: Sequence[BlockHash]) -> list[bytes | None]:
        began = time.monotonic()
        values: list[bytes | None] = self._client.mget([self._prefix + name for name in names])
        if nbytes := sum(len(value) for value in values if value is not None):
            self._rate = nbytes / max(time.monotonic() - began, 1e-9)
        return values

    def save(self, blocks: Sequence[StoredBlock]) -> int:
        saved = 0
        for at in range(0, len(blocks), self._most):
            some = blocks[at : at + self._most]
            answers = None if self._refusal.is_on else self._ask(None, self._set, some)
            if answers is None:
                self.faults.num_unsaved += len(some)
            else:
                saved += sum(map(bool, answers))
        return saved

    def _set(self, blocks: Sequence[StoredBlock]) -> list[Any]:
        known = self._exist([block.name for block in blocks])
        orders = self._client.pipeline(transaction=False)
        for block, is_known in zip(blocks, known, strict=True):
            if not is_known:
                value = b"".join((make_header(block), block.payload))
                orders.set(self._prefix + block.name, value, nx=True)
        answers = orders.execute(raise_on_error=False)
        refused = [one for one in answers if isinstance(one, Exception)]
        self.faults.num_unsaved += len(refused)
        if refused:  # it is full, a replica, or ours to read alone
            self._refusal.failed("the server gives blocks and takes none", refused[0])
        elif answers:
            self._refusal.answered()
        return [one for one in answers if not isinstance(one, Exception)]

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Nothing: the server has seen what was read."""

    def clear(self) -> bool:
        return bool(self._ask(False, self._unlink_all))

    def _unlink_all(self) -> bool:
        keys = self._client.scan_iter(match=self._prefix + b"*", count=_UNLINKED)
        while some := list(islice(keys, _UNLINKED)):
            self._client.unlink(*some)
        return True

    def close(self) -> None:
        self._client.close()

    def _ask(self, otherwise: Any, question: Callable[..., Any], *about: Any) -> Any:
        """The server's answer; `otherwise` while it does not give any."""
        if self._pause.is_on:
            return otherwise
        try:
            answer = question(*about)
        except Exception as error:  # of the client's many kinds, and the network's
            self._pause.failed("the server does not answer", error)
            return otherwise
        self._pause.answered()
        return answer


def _connect(url: str) -> Any:
    try:
        import redis
    except ImportError as error:
        raise ConfigError(
            f"a remote cache needs the client of Valkey and Redis: {install('remote')}"
        ) from error
    try:
        return redis.Redis.from_url(
            url, socket_timeout=_PATIENCE, socket_connect_timeout=_PATIENCE, protocol=2
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"remote_cache is {_without_password(url)!r}: {error}; allowed: redis://host:port/db, "
            "rediss://..., unix:///path"
        ) from error


def _without_password(url: str) -> str:
    """The url as it may stand in a log."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else url
