"""The encoder cache: image embeddings by salt and digest, within a budget of rows.

    state      users   rows present        counted   may be evicted
    pending    > 0     not yet encoded     yes       no
    held       > 0     yes                 yes       no
    cached     0       yes                 yes       oldest first, of the owner with most rows

An entry is removed with its last user if all its users had `is_stored=False`.

All prompts with the same salt and image share one entry, at any position. An entry of one salt is
never found under another salt. So the time to the first token does not reveal the images of another
tenant. If tenants share the cache, images of the tenant with the most rows per weight, including
the rows to be added, are evicted first. So a flood of images evicts only images of its own tenant.

A request that contains an image twice counts as two users. A user leaves when the sequence is
computed beyond the image, when the request is preempted, and when it ends. A step computes tokens
only up to the first image without an entry.

Two requests cannot wait for each other's rows forever. A request holds its images in the order of
the prompt and releases them one by one. So it can always compute the tokens of the images that it
holds. In deterministic mode, a request needs all images of a block at once. If two requests then
wait for each other, the scheduler preempts one.

Source: vLLM's `EncoderCacheManager`.
"""

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.cache import MultiModalItem, Shares
from headstart.engine.request import PlacedRows, PromptExtras, Request
from headstart.errors import EngineError, RequestError, engine_error
from headstart.models.decoder import ProcessedImage, VisionModel
from headstart.tiers.transfers import ObjectStore
from headstart.tiers.worker import Job, Worker

_MAX_LOOKUPS = 16  # lookups at a time; further images are loaded within a step
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class EncoderKey(NamedTuple):
    """The key of an entry: the tenant's salt, and the digest of the embeddings."""

    salt: str | None
    digest: bytes


def _name(key: EncoderKey) -> bytes:
    return b"image rows " + json.dumps([key.salt, key.digest.hex()]).encode()


@dataclass(eq=False, kw_only=True)
class _ImageJob(Job):
    """A lookup of an image, and its rows if the store has them."""

    key: EncoderKey
    rows: Tensor | None = None


class ImageLoads:
    """Lookups of image rows `[rows, hidden]` in a store, ahead of the step that needs them.

    A request with an image is scheduled once the tiers have answered; other requests run
    meanwhile. A lookup is dropped when its request leaves; another request that waits for the same
    image then starts a new lookup. `load` and `save` are thread-safe; one thread must call the
    other methods. worker: the thread of lookups. lookups: lookups that `load` has not taken.
    """

    def __init__(self, objects: ObjectStore, worker: Worker) -> None:
        self.lookups: dict[EncoderKey, _ImageJob] = {}
        self._objects = objects
        self._worker = worker

    @property
    def are_under_way(self) -> bool:
        """True while an image is looked up."""
        return not all(job.done for job in self.lookups.values())

    def is_coming(self, key: EncoderKey) -> bool:
        """Return True while an image is looked up; the first call starts the lookup."""
        job = self.lookups.get(key)
        if job is None:
            if len(self.lookups) >= _MAX_LOOKUPS:
                return False
            job = self.lookups[key] = self._start(key)
        return not job.done

    def _start(self, key: EncoderKey) -> _ImageJob:
        job = _ImageJob(self._load, key=key)
        self._worker.submit(job)
        return job

    def load(self, key: EncoderKey) -> Tensor | None:
        """Return the rows as they were saved, on the CPU; None if the store does not have them.

        Without an earlier lookup, this waits for the store.
        """
        job = self.lookups.pop(key, None) or self._start(key)
        self._worker.wait_for(lambda: job.done)
        return job.rows

    def _load(self, job: _ImageJob) -> bool:
        data = self._objects.load(_name(job.key), job)
        if data is not None:
            head, _, values = bytes(data).partition(b"\n")
            dtype, shape = json.loads(head)
            rows = torch.from_numpy(np.frombuffer(values, dtype=np.uint8).copy())
            job.rows = rows.view(_DTYPES[dtype]).view(shape)
        return False

    def save(self, key: EncoderKey, rows: Tensor, seconds: float) -> None:
        """Save rows that took `seconds` to compute, unless a value is not finite."""
        if str(rows.dtype) in _DTYPES and bool(torch.isfinite(rows).all()):
            head = json.dumps([str(rows.dtype), list(rows.shape)]).encode()
            flat = rows.detach().cpu().contiguous().view(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            self._objects.save(_name(key), head + b"\n" + data, seconds)

    def forget(self, key: EncoderKey) -> None:
        if (job := self.lookups.pop(key, None)) is not None:
            job.done = True

    def forget_all(self, timeout: float) -> bool:
        """Drop all lookups, and wait for running loads; return False after `timeout` seconds."""
        for key in list(self.lookups):
            self.forget(key)
        return self._worker.wait_for(lambda: not self._worker.jobs, timeout)

    def wait(self, timeout: float) -> None:
        """Wait until no image is looked up."""
        self._worker.wait_for(lambda: not self.are_under_way, timeout)

    def close(self, timeout: float) -> None:
        """Accept no more lookups. Idempotent."""
        self._worker.close(timeout)


User = tuple[object, int]
"""A request, and the index of an image in its prompt."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image and its position in a prompt.

    item: its identity and its range, from the first placeholder to the last. positions: positions
    of its placeholders, int64 `[rows]`, which need not be adjacent. salt: the tenant's salt.
    """

    item: MultiModalItem
    image: ProcessedImage
    positions: Tensor
    salt: str | None = None

    @property
    def key(self) -> EncoderKey:
        return EncoderKey(self.salt, self.item.digest)

    @property
    def start(self) -> int:
        return self.item.offset

    @property
    def stop(self) -> int:
        return self.item.offset + self.item.length


@dataclass(eq=False)
class _Entry:
    """One image's rows, and their users. is_stored: the entry stays when it has no users.

    image: None once it is encoded.
    """

    key: EncoderKey
    image: ProcessedImage | None
    num_rows: int
    rows: Tensor | None = None
    is_stored: bool = False
    users: set[User] = field(default_factory=set)


class EncoderCache:
    """Embeddings of images, at most `capacity` rows.

    store: a store to load rows from and save them to, if any. shares: the tenants and their
    weights. Not thread-safe.
    """

    def __init__(
        self,
        encoder: VisionModel,
        capacity: int,
        store: ImageLoads | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.capacity = capacity
        self.num_encoded = 0
        self.num_loaded = 0
        self.num_hits = 0
        self._store = store
        self._shares = shares or Shares()
        self._encoder = encoder
        # Entries without users are in the order in which they lost their last user.
        self._entries: OrderedDict[EncoderKey, _Entry] = OrderedDict()
        self._pending: list[_Entry] = []
        self._awaiting: set[User] = set()  # users that wait for a lookup in the store

    @property
    def num_rows(self) -> int:
        """Rows of all entries, including images that are not encoded yet."""
        return sum(entry.num_rows for entry in self._entries.values())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def rows(self, key: EncoderKey) -> Tensor:
        """Return the embeddings `[rows, hidden]` of an image that has users."""
        rows = self._entries[key].rows
        assert rows is not None, "an image's rows are read before it is encoded"
        return rows

    def fits(self, images: Iterable[PromptImage]) -> bool:
        """Return True if all of these images fit now. Changes nothing."""
        num_rows = {image.key: image.image.num_rows for image in images}
        held = sum(e.num_rows for e in self._entries.values() if e.users and e.key not in num_rows)
        return held + sum(num_rows.values()) <= self.capacity

    def is_coming(self, user: User, image: PromptImage) -> bool:
        """Return True while the store looks the image up; the first call starts the lookup."""
        if self._store is None or image.key in self._entries:
            return False
        if not self._store.is_coming(image.key):
            return False
        self._awaiting.add(user)
        return True

    def hold(self, user: User, image: PromptImage, *, is_stored: bool = True) -> None:
        """Add a user of an image; `fits` must have returned True. Idempotent.

        is_stored: the rows may stay for other requests.
        """
        key, rows = image.key, image.image.num_rows
        entry = self._entries.get(key)
        if entry is None:
            self._evict(rows, self._shares.owner(image.salt))
            entry = self._entries[key] = _Entry(key, image.image, rows)
            self._pending.append(entry)
        elif user not in entry.users:
            self.num_hits += 1
        entry.is_stored |= is_stored
        entry.users.add(user)

    def _evict(self, rows: int, new_owner: str | None) -> None:
        """Evict images until `rows` rows fit: the oldest of the owner with most rows per weight.

        new_owner: the owner of the rows to be added, which count too.
        """
        owner, weight = self._shares.owner, self._shares.weight
        while self.num_rows + rows > self.capacity:
            oldest: dict[str | None, EncoderKey] = {}
            used = Counter({new_owner: rows})
            for key, entry in self._entries.items():
                used[owner(key.salt)] += entry.num_rows
                if not entry.users:
                    oldest.setdefault(owner(key.salt), key)
            del self._entries[oldest[max(oldest, key=lambda name: used[name] / weight(name))]]

    def leave(self, user: User, image: PromptImage) -> None:
        """Remove a user; encoded rows without users stay until space is needed. Idempotent."""
        if self._store is not None and user in self._awaiting:
            self._awaiting.discard(user)
            self._store.forget(image.key)
        entry = self._entries.get(image.key)
        if entry is None or user not in entry.users:
            return
        entry.users.remove(user)
        if entry.users:
            return
        if entry.is_stored and entry.rows is not None:
            self._entries.move_to_end(image.key)
        else:
            del self._entries[image.key]
            self._pending = [e for e in self._pending if e is not entry]

    def encode_pending(self) -> dict[object, EngineError]:
        """Encode the images that have users and no rows yet.

        Return the requests whose images cannot be encoded, with the reason. If there are such
        requests, the current step must not run.
        """
        failed: dict[object, EngineError] = {}
        for entry in self._pending:
            try:
                if entry.rows is None:
                    self._encode(entry)
            except Exception as error:  # the vision tower failed; it must end only these requests
                reason = engine_error("an image cannot be encoded", error)
                failed |= {request: reason for request, _ in entry.users}
        self._pending = [entry for entry in self._pending if entry.rows is None]
        return failed

    def _encode(self, entry: _Entry) -> None:
        assert entry.image is not None
        rows = self._store.load(entry.key) if self._store is not None else None
        if rows is not None and len(rows) == entry.num_rows:
            entry.rows, entry.image = rows, None
            self.num_loaded += 1
            return
        start = time.perf_counter()
        rows = self._encoder.encode(entry.image)
        if len(rows) != entry.num_rows:
            raise ValueError(
                f"the vision tower gave {len(rows)} embeddings for {entry.num_rows} placeholders"
            )
        entry.rows, entry.image = rows, None
        self.num_encoded += 1
        if self._store is not None and entry.is_stored:
            self._store.save(entry.key, rows, time.perf_counter() - start)

    def clear(self) -> None:
        """Forget every image without users."""
        for entry in [entry for entry in self._entries.values() if not entry.users]:
            del self._entries[entry.key]

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        assert self.num_rows <= self.capacity
        assert self._pending == [entry for entry in self._entries.values() if entry.rows is None]
        for entry in self._entries.values():
            assert entry.users or entry.rows is not None, "unused, and never encoded"


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, as an `EmbeddingSource` whose rows come from the cache."""

    images: tuple[PromptImage, ...]
    cache: EncoderCache

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        for image in self.images:
            if image.start >= stop or start >= image.stop:
                continue
            first, last = torch.searchsorted(image.positions, torch.tensor([start, stop])).tolist()
            rows = self.cache.rows(image.key)
            numbered = enumerate(image.positions[first:last].tolist(), first)
            for _, run in groupby(numbered, lambda pair: pair[1] - pair[0]):  # adjacent positions
                indices, positions = zip(*run, strict=True)
                yield PlacedRows(positions[0], rows[indices[0] : indices[-1] + 1])


class EncoderBudget:
    """The `Limit` of the encoder cache: a step computes tokens up to the first image without space.

    block_size: None except in deterministic mode, where steps compute whole blocks again, so all
    images of a block are needed until the block is full.
    """

    def __init__(self, cache: EncoderCache, block_size: int | None) -> None:
        self.cache = cache
        self._block_size = block_size

    def check(self, images: tuple[PromptImage, ...]) -> None:
        """Raise RequestError if images that are needed at once exceed the cache."""
        for image in images:
            first = self._first(image.start)
            together = [i for i in images if i.start <= image.start and first < i.stop]
            rows = sum({i.key: i.image.num_rows for i in together}.values())
            if rows > self.cache.capacity:
                raise RequestError(
                    f"the prompt needs {rows} image embeddings at once, and the encoder cache "
                    f"holds {self.cache.capacity} (encoder_cache_rows)"
                )

    def applies(self, request: Request) -> bool:
        return bool(_images(request.group.extras))

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return the start of the first image that does not fit, or else `stop`.

        Return None while the store looks an image up.
        """
        waits = False
        needed: list[PromptImage] = []
        for index, image in enumerate(_images(request.group.extras)):
            if image.start >= stop:
                break
            if image.stop > self._first(start):
                needed.append(image)
                if not self.cache.fits(needed):
                    return None if waits else max(start, image.start)
                waits |= self.cache.is_coming((request, index), image)
        return None if waits else stop

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Hold the images of tokens `start` to `stop - 1`, and leave earlier images."""
        first = self._first(start)
        held: list[tuple[int, PromptImage]] = []
        for index, image in enumerate(_images(request.group.extras)):
            if image.stop <= first:
                self.cache.leave((request, index), image)
            elif image.start < stop:
                held.append((index, image))
        # Hold cached images first, so that they are not evicted for images that are not cached.
        for index, image in sorted(held, key=lambda pair: pair[1].key not in self.cache):
            self.cache.hold((request, index), image, is_stored=request.group.params.is_stored)

    def leave(self, request: Request) -> None:
        for index, image in enumerate(_images(request.group.extras)):
            self.cache.leave((request, index), image)

    def _first(self, start: int) -> int:
        """Return the first position that must be computed together with `start`."""
        return start if self._block_size is None else start // self._block_size * self._block_size


def _images(extras: PromptExtras | None) -> tuple[PromptImage, ...]:
    if extras is None or not isinstance(extras.embeddings, PromptImages):
        return ()
    return extras.embeddings.images


# Images that one process reads and another process encodes. The reading process sends the digest,
# the placeholders and the pixels of an image. The other process runs the image processor, whose
# result is larger than the pixels: by a factor of 8 for Qwen2-VL, and 53 MB per icon for SmolVLM.


class SentImage(NamedTuple):
    """An image in a prompt.

    digest: identifies its embeddings. positions: positions of its placeholders, int64 `[rows]`.
    pixels: RGB values, uint8 `[height, width, 3]`.
    """

    digest: bytes
    positions: NDArray[np.int64]
    pixels: NDArray[np.uint8]


class SentImages(NamedTuple):
    """A prompt's images in order, and the vision model's fingerprint, which their digests cover."""

    fingerprint: bytes
    images: tuple[SentImage, ...]


def send_images(fingerprint: bytes, extras: PromptExtras | None) -> SentImages | None:
    """Return the images of a prompt that this process prepared; None without images."""
    images = [
        SentImage(image.item.digest, image.positions.numpy(), np.asarray(image.image.pixels))
        for image in _images(extras)
    ]
    return SentImages(fingerprint, tuple(images)) if images else None
