"""API keys, in a file that only this user may read.

The file has the SHA-256 of each key. A key is 32 random bytes, which cannot be guessed, so a slow
hash as for passwords is not needed. The same folder holds the secret from which the tenants' cache
salts are derived, so that salts survive a restart. Both files are replaced atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headstart.errors import ConfigError
from headstart.machine import data_folder
from headstart.validation import Number, check_fields, describe, option

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """The entry of a key: its owner and its hash. Raises ConfigError.

    Keys of one group are one tenant: they share cached blocks, and their weights add up. A key
    without a group is a separate tenant. admin: the key may also manage the server.
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
        for field, name in (("name", self.name), ("group", self.group)):
            if name is not None and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{field} is {describe(name)}; allowed: 1 to 64 letters, digits, . _ - @"
                )

    @property
    def tenant(self) -> tuple[str, str]:
        """Kind and name of the key's tenant."""
        return ("key", self.name) if self.group is None else ("group", self.group)


class _OperatorKey(ApiKey):
    """A key from the command line. Stored keys and groups of the same name are other tenants."""

    @property
    def tenant(self) -> tuple[str, str]:
        return ("operator", self.name)


class KeyFolder:
    """The keys on disk. Every method raises ConfigError if the folder cannot be used."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """Open a folder of keys; the default is in this user's data folder."""
        try:
            self.folder = Path(folder).expanduser() if folder else data_folder() / "server"
        except RuntimeError as error:
            raise ConfigError(f"the folder of API keys is not known: {error}") from error
        self.file = self.folder / "keys.json"

    def read(self) -> list[ApiKey]:
        """Return all keys, in the order in which they were added."""
        with _as_config_error(self.file), contextlib.suppress(FileNotFoundError):
            content = json.loads(self.file.read_text(encoding="utf-8"))
            return [ApiKey(**entry) for entry in content["keys"]]
        return []

    def add(
        self, name: str, *, group: str | None = None, weight: float = 1.0, admin: bool = False
    ) -> str:
        """Add a key and return it; only its hash is stored. Raises ConfigError for a bad name."""
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
            if name in {key.name for key in keys}:
                raise ConfigError(f"there is a key {name!r} already; remove it first")
            self._write_keys([*keys, entry])
        self.secret()
        return key

    def remove(self, name: str) -> None:
        """Remove a key. Raises ConfigError if no key has this name."""
        with self._locked():
            keys = self.read()
            rest = [key for key in keys if key.name != name]
            if len(rest) == len(keys):
                names = ", ".join(key.name for key in keys) or "none, as there are no keys"
                raise ConfigError(f"there is no key {describe(name)}; allowed: {names}")
            self._write_keys(rest)

    def secret(self) -> bytes:
        """Return the secret behind the cache salts; the first call creates it."""
        file = self.folder / "salt-secret"
        with self._locked(), _as_config_error(file):
            if not file.exists():
                self._write(file, secrets.token_hex(_SECRET_BYTES))
            secret = bytes.fromhex(file.read_text(encoding="ascii"))
            if len(secret) != _SECRET_BYTES:
                raise ValueError(f"it has {len(secret)} bytes instead of {_SECRET_BYTES}")
            return secret

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that prevents two commands from overwriting each other's change."""
        with _as_config_error(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.fdopen(os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600))
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write_keys(self, keys: Sequence[ApiKey]) -> None:
        entries = {"keys": [asdict(key) for key in keys]}
        self._write(self.file, json.dumps(entries, indent=1) + "\n")

    def _write(self, file: Path, text: str) -> None:
        part = file.with_suffix(".part")
        with _as_config_error(file):
            try:
                handle = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.write(text)
                    stream.flush()
                    os.fsync(handle)
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)


class KeyRing:
    """The keys of a running server: the folder's current keys, and further fixed keys."""

    def __init__(
        self,
        folder: KeyFolder,
        report: Callable[[ConfigError], object],
        more: Sequence[ApiKey] = (),
    ) -> None:
        """Read the keys of `folder`; `more` are further keys. Raises ConfigError.

        report: called when a changed file cannot be read; only the keys of `more` are then valid.
        """
        self._folder = folder
        self._report = report
        self._more = more
        self._version = self._read_version()
        self._keys = folder.read()

    @property
    def keys(self) -> Sequence[ApiKey]:
        """The current keys. Reads the file again if it has changed."""
        version = self._read_version()
        if version != self._version:
            self._version = version
            try:
                self._keys = self._folder.read()
            except ConfigError as error:
                self._keys = []
                self._report(error)
        return [*self._keys, *self._more]

    def find(self, key: bytes) -> ApiKey | None:
        """Return the entry of a key, in a time that does not depend on how much of it matches."""
        digest = _digest(key)
        matches = [entry for entry in self.keys if hmac.compare_digest(entry.digest, digest)]
        return matches[0] if matches else None

    def _read_version(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._folder.file)
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_ino, status.st_size)


def operator_key(key: str) -> ApiKey:
    """Return the entry of a key of the command line. All such keys are one admin tenant."""
    digest = _digest(key.encode("utf-8", "surrogateescape"))
    return _OperatorKey(name="api-key", digest=digest, admin=True)


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


@contextlib.contextmanager
def _as_config_error(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{file} cannot be used: {reason}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
