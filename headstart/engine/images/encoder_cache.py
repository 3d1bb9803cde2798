"""The encoder cache: image embeddings by salt and digest, within a budget of rows.

    state      users   rows there          counted   may go
    wanted     > 0     not yet encoded     yes       no
    held       > 0     yes                 yes       no
    kept       0       yes                 yes       oldest first, of whom has most

Rows that only requests used which leave nothing behind go with the last of these.

An image is encoded once for each salt, however many prompts of that salt show it and wherever in
them it stands, as long as its entry is there. An entry of one salt is never found under another,
so the time to the first token does not tell whether another tenant has shown the image.

Where tenants share the cache, an image goes of the tenant that has most rows for its weight, held
and kept ones together, the asker's own included: so a flood of images only pushes its own away.

Users are uses: a request that shows an image twice is two users, each of which leaves when the
sequence has computed past its own place, when it is preempted, and at its end. A span of tokens
is scheduled only as far as all images in it have entries.

Two requests cannot wait for each other's rows for ever: images are held in the order of the
prompt and let go one by one, so whoever holds some can always compute up to where they end; the
one exception, several images in one block in deterministic mode, is resolved by preemption.

`_entries` and their users say everything; the other fields are derived from them. So whatever an
exception cuts off, Ctrl-C included, is repaired when the step's requests leave and `drop_wanted`
is called, in any order and as often as need be.

Source: vLLM's `EncoderCacheManager`.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headstart.cache import MultiModalItem, Shares
from headstart.engine.prompt import PlacedRows
from headstart.errors import EngineError
from headstart.models.image_encoder import ProcessedImage

__all__ = [
    "AskedStore",
    "EmbeddingStore",
    "EncoderCache",
    "EncoderKey",
    "ImageEncoder",
    "PromptImage",
    "PromptImages",
]


class ImageEncoder(Protocol):
    """Makes embeddings of images."""

    def encode(self, image: ProcessedImage) -> Tensor:
        """Embeddings `[rows, hidden]`."""


class EmbeddingStore(Protocol):
    """Where embeddings outlive the cache."""

    def load(self, key: "EncoderKey") -> Tensor | None:
        """Embeddings `[rows, hidden]` that were saved under this key, None if there are none."""

    def save(self, key: "EncoderKey", rows: Tensor, seconds: float) -> None:
        """Keep embeddings that took so long to compute."""


class AskedStore(EmbeddingStore, Protocol):
    """A store that is asked ahead, so that no step waits for it."""

    def is_coming(self, key: "EncoderKey") -> bool:
        """True while it is not known what the store has; asks at the first call."""

    def forget(self, key: "EncoderKey") -> None:
        """A request that asked for these embeddings has left."""


class EncoderKey(NamedTuple):
    """The key of an entry: the tenant's salt, and the digest that names the embeddings."""

    salt: str | None
    digest: bytes


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image at its place in a prompt.

    `item` says what and where it is, from its first placeholder to its last; `places` int64
    `[rows]` are the placeholders' positions, between which other tokens may stand. `salt` is the
    tenant's.
    """

    item: MultiModalItem
    image: ProcessedImage
    places: Tensor
    salt: str | None = None

    @property
    def key(self) -> EncoderKey:
        """The key of its embeddings."""
        return EncoderKey(self.salt, self.item.digest)

    @property
    def start(self) -> int:
        """Position of its first placeholder."""
        return self.item.offset

    @property
    def stop(self) -> int:
        """Position behind its last placeholder."""
        return self.item.offset + self.item.length


@dataclass(eq=False)
class _Entry:
    """One image's rows, and who needs them: (request, index of the image in its prompt).

    `image` is let go when it is encoded. is_stored: the rows stay when nobody needs them.
    """

    key: EncoderKey
    image: ProcessedImage | None
    num_rows: int
    rows: Tensor | None = None
    is_stored: bool = False
    users: set["tuple[object, int]"] = field(default_factory=set)


class EncoderCache:
    """Embeddings of images, `capacity` rows of them at the most.

    store: asked before an image is encoded, and given what is encoded; None for none. shares: the
    tenants and their weights. Not thread-safe: one engine calls it.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        capacity: int,
        store: AskedStore | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.capacity = capacity
        self.num_encoded = 0
        self.num_loaded = 0
        self._store = store
        self._shares = shares or Shares()
        self.num_hits = 0
        self._encoder = encoder
        self._entries: dict[EncoderKey, _Entry] = {}
        self._kept: OrderedDict[EncoderKey, None] = OrderedDict()  # without users, oldest first
        self._wanted: list[_Entry] = []
        self._askers: set[tuple[object, int]] = set()  # users that the store was asked for
        self._used = 0

    @property
    def num_rows(self) -> int:
        """Rows of all entries, those about to be encoded included."""
        return self._used

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def rows(self, key: EncoderKey) -> Tensor:
        """The embeddings `[rows, hidden]` of an image that the step holds."""
        rows = self._entries[key].rows
        assert rows is not None, "an image's rows are read before it is encoded"
        return rows

    def fits(self, images: Iterable[PromptImage]) -> bool:
        """True if there is room for all of these now. Changes nothing."""
        wanted = {image.key: image.image.num_rows for image in images}
        kept = sum(self._entries[key].num_rows for key in self._kept if key not in wanted)
        new = sum(rows for key, rows in wanted.items() if key not in self._entries)
        return self._used - kept + new <= self.capacity

    def is_coming(self, user: tuple[object, int], image: PromptImage) -> bool:
        """True while the image is looked for in the store; asks at the first call."""
        if self._store is None or image.key in self._entries:
            return False
        if not self._store.is_coming(image.key):
            return False
        self._askers.add(user)
        return True

    def hold(self, user: tuple[object, int], image: PromptImage, *, is_stored: bool = True) -> None:
        """One more use of an image; `fits` said that there is room. Twice is once.

        is_stored: the user lets the rows stay for others.
        """
        key = image.key
        entry = self._entries.get(key)
        if entry is None:
            self._make_room(image.image.num_rows, self._shares.owner(image.salt))
            entry = self._entries[key] = _Entry(key, image.image, image.image.num_rows)
            self._wanted.append(entry)
            self._used += image.image.num_rows
        elif user not in entry.users:
            self.num_hits += 1
        self._kept.pop(key, None)
        entry.is_stored |= is_stored
        entry.users.add(user)

    def _make_room(self, rows: int, taker: str | None) -> None:
        while self._used + rows > self.capacity:
            key = self._next_to_go(rows, taker)
            del self._kept[key]
            self._used -= self._entries.pop(key).num_rows

    def _next_to_go(self, rows: int, taker: str | None) -> EncoderKey:
        """The oldest kept image of the owner that has most rows for its weight."""
        owner, weight = self._shares.owner, self._shares.weight
        oldest: dict[str | None, EncoderKey] = {}
        for key in self._kept:
            oldest.setdefault(owner(key.salt), key)
        used = Counter({taker: rows})
        for entry in self._entries.values():
            used[owner(entry.key.salt)] += entry.num_rows
        return oldest[max(oldest, key=lambda one: used[one] / weight(one))]

    def leave(self, user: tuple[object, int], image: PromptImage) -> None:
        """This use is over; an entry without users is kept until room is needed. Twice is once."""
        if self._store is not None and user in self._askers:
            self._askers.discard(user)  # once: whoever decodes leaves with each token
            self._store.forget(image.key)
        entry = self._entries.get(image.key)
        if entry is None:
            return
        entry.users.discard(user)
        if entry.users or image.key in self._kept:
            return
        if entry.is_stored:
            self._kept[image.key] = None
        else:
            del self._entries[image.key]
            self._derive()

    def encode_wanted(self) -> dict[object, EngineError]:
        """Encode the images that are held and have no rows yet.

        The requests of which an image cannot be encoded, each with the reason; such an image has
        no rows afterwards, and the step that needs them must not run.
        """
        failed: dict[object, EngineError] = {}
        for entry in self._wanted:
            try:
                if entry.rows is None:
                    self._encode(entry)
            except Exception as error:  # whatever a vision tower raises ends its requests alone
                reason = EngineError(f"an image cannot be encoded: {type(error).__name__}: {error}")
                reason.__cause__ = error
                failed |= {request: reason for request, _ in entry.users}
        self._wanted.clear()
        return failed

    def _encode(self, entry: _Entry) -> None:
        assert entry.image is not None
        kept = self._store.load(entry.key) if self._store is not None else None
        if kept is not None and len(kept) == entry.num_rows:
            entry.rows, entry.image = kept, None
            self.num_loaded += 1
            return
        begun = time.perf_counter()
        rows = self._encoder.encode(entry.image)
        if len(rows) != entry.num_rows:
            raise ValueError(
                f"the vision tower gave {len(rows)} embeddings for {entry.num_rows} placeholders"
            )
        entry.rows, entry.image = rows, None
        self.num_encoded += 1
        if self._store is not None and entry.is_stored:
            self._store.save(entry.key, rows, time.perf_counter() - begun)

    def drop_wanted(self) -> None:
        """The step is off, and its requests have left: forget what it did not encode.

        Repairs whatever an exception cut off.
        """
        entries = self._entries.items()
        self._entries = {key: one for key, one in entries if one.users or one.rows is not None}
        self._derive()

    def clear(self) -> None:
        """Forget every image that nobody uses."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry.users}
        self._derive()

    def _derive(self) -> None:
        """Work out the fields that follow from the entries; the order of those kept stays."""
        unused = [key for key, entry in self._entries.items() if not entry.users]
        ordered = [key for key in self._kept if key in self._entries]
        kept = OrderedDict.fromkeys([*ordered, *unused])
        for key in [key for key in kept if self._entries[key].users]:
            del kept[key]
        self._kept = kept
        self._used = sum(entry.num_rows for entry in self._entries.values())
        self._wanted = [entry for entry in self._entries.values() if entry.rows is None]

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        assert self._used == sum(entry.num_rows for entry in self._entries.values())
        assert self._used <= self.capacity
        assert set(self._kept) == {key for key, entry in self._entries.items() if not entry.users}
        for key in self._kept:
            assert self._entries[key].rows is not None, "kept, and never encoded"


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, as an `EmbeddingSource` whose rows come from the cache."""

    images: tuple[PromptImage, ...]
    cache: EncoderCache

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        for image in self.overlapping(start, stop):
            first, last = torch.searchsorted(image.places, torch.tensor([start, stop])).tolist()
            rows = self.cache.rows(image.key)
            while first < last:  # runs of placeholders with nothing between them
                run = first + 1
                at = int(image.places[first])
                while run < last and int(image.places[run]) == at + run - first:
                    run += 1
                yield PlacedRows(at, rows[first:run])
                first = run

    def overlapping(self, start: int, stop: int) -> list[PromptImage]:
        """The images with a placeholder in positions `start` to `stop - 1`."""
        return [image for image in self.images if image.start < stop and start < image.stop]
