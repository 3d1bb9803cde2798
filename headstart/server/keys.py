"""API keys: who may ask, in a file that this user alone may read.

The file holds SHA-256 of each key. A key is 32 random bytes, so nobody finds it by trying words,
and a hash that is slow on purpose, as passwords need, would only cost time in every request.
Beside it lies the server's secret, from which the tenants' cache salts are made: it stays the
same over restarts and never leaves the folder.

Both are replaced as a whole, never written in place: who reads sees the old file or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart.errors import ConfigError
from headstart.machine import data_folder
from headstart.validation import Number, check_fields, describe, option

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where two commands at once are not kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["ApiKey", "KeyFolder", "KeyRing", "operator_key"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """What is known of a key: whose it is, and its hash. Raises ConfigError.

    Keys of one group are one tenant: they share what is cached, and their weights add up. A key
    without a group is a tenant of its own. admin: it may also manage the server.
    """

    name: str
    digest: str
    group: str | None = None
    weight: float = option(1.0, "", Number(float, 0, 1000, above_low=True))
    admin: bool = False
    created: int = option(0, "", Number(int, 0))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not _DIGEST.fullmatch(self.digest):
            raise ConfigError(f"digest is {describe(self.digest)}; allowed: 64 hex digits")
        for what, name in (("name", self.name), ("group", self.group)):
            if name is not None and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{what} is {describe(name)}; allowed: 1 to 64 letters, digits, . _ - @"
                )

    @property
    def tenant(self) -> tuple[str, str]:
        """Kind and name of the tenant whose key it is."""
        return ("key", self.name) if self.group is None else ("group", self.group)


class _OperatorKey(ApiKey):
    """A key of the command line: its tenant is of a kind that no key of a folder has."""

    @property
    def tenant(self) -> tuple[str, str]:
        return ("operator", self.name)


class KeyFolder:
    """The keys on disk. Every method raises ConfigError when the folder cannot be used."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """`folder` is a data folder of this user if it is None."""
        try:
            self.folder = (
                Path(folder).expanduser() if folder is not None else data_folder() / "server"
            )
        except RuntimeError as error:
            raise ConfigError(f"the folder of API keys must be given: {error}") from error
        self.file = self.folder / "keys.json"

    def read(self) -> list[ApiKey]:
        """All keys, in the order in which they were added; none if there is no file."""
        with _as_config_error(self.file):
            try:
                content = json.loads(self.file.read_text(encoding="utf-8"))
            except FileNotFoundError:
                return []
            return [ApiKey(**entry) for entry in content["keys"]]

    def add(
        self, name: str, *, group: str | None = None, weight: float = 1.0, admin: bool = False
    ) -> str:
        """A new key, which is nowhere but in what is returned. Raises ConfigError for a name."""
        key = f"hs-{secrets.token_urlsafe(_SECRET_BYTES)}"
        entry = ApiKey(
            name=name,
            digest=_digest(key.encode()),
            group=group,
            weight=weight,
            admin=admin,
            created=int(time.time()),
        )
        with self._locked():
            keys = self.read()
            if name in {one.name for one in keys}:
                raise ConfigError(f"there is a key {name!r} already; remove it first")
            self._write(self.file, _spell([*keys, entry]))
        self.secret()
        return key

    def remove(self, name: str) -> None:
        """Remove a key. Raises ConfigError for a name that there is not."""
        with self._locked():
            keys = self.read()
            rest = [key for key in keys if key.name != name]
            if len(rest) == len(keys):
                names = ", ".join(key.name for key in keys) or "none, as there are no keys"
                raise ConfigError(f"there is no key {describe(name)}; allowed: {names}")
            self._write(self.file, _spell(rest))

    def secret(self) -> bytes:
        """The secret behind the cache salts; made when it is first asked for."""
        file = self.folder / "salt-secret"
        with self._locked(), _as_config_error(file):
            with contextlib.suppress(FileNotFoundError):
                found = bytes.fromhex(file.read_text(encoding="ascii"))
                if len(found) != _SECRET_BYTES:
                    raise ValueError(f"it has {len(found)} bytes and not {_SECRET_BYTES}")
                return found
            made = secrets.token_bytes(_SECRET_BYTES)
            self._write(file, made.hex())
            return made

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep two commands from overwriting each other's change."""
        with contextlib.ExitStack() as stack:
            with _as_config_error(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_CREAT | os.O_RDWR
                lock = stack.enter_context(os.fdopen(os.open(self.folder / "lock", flags, 0o600)))
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, file: Path, text: str) -> None:
        with _as_config_error(file):
            handle, name = tempfile.mkstemp(dir=self.folder)  # which this user alone may read
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as written:
                    written.write(text)
                    written.flush()
                    os.fsync(handle)
                os.replace(name, file)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise


class KeyRing:
    """The keys as a server sees them: those that the folder has now, also after a change."""

    def __init__(
        self,
        folder: KeyFolder,
        broken: Callable[[ConfigError], object],
        more: Sequence[ApiKey] = (),
    ) -> None:
        """`broken` is told when a changed file cannot be read: then none but `more` are good.

        Raises ConfigError if it cannot be read now.
        """
        self._folder = folder
        self._broken = broken
        self._more = more
        self._seen = self._look()
        self._keys = folder.read()

    @property
    def keys(self) -> Sequence[ApiKey]:
        """The keys of this moment. Costs a look at the file's time."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._keys = self._folder.read()
            except ConfigError as error:
                self._keys = []
                self._broken(error)
        return [*self._keys, *self._more]

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of a key. Its time says nothing of how much of the key is right."""
        digest = _digest(key)
        found = [one for one in self.keys if hmac.compare_digest(one.digest, digest)]
        return found[0] if found else None

    def _look(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._folder.file)
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_ino, status.st_size)


def operator_key(key: str) -> ApiKey:
    """The entry of a key that was given on the command line: all such are one administrator."""
    return _OperatorKey(
        name="api-key",
        digest=_digest(key.encode("utf-8", "surrogateescape")),
        admin=True,
    )


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _spell(keys: Sequence[ApiKey]) -> str:
    return json.dumps({"keys": [asdict(key) for key in keys]}, indent=1) + "\n"


@contextlib.contextmanager
def _as_config_error(file: Path) -> Iterator[Any]:
    """Tell what went wrong with a file; also one whose content is not ours."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{file} cannot be used: {reason}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
