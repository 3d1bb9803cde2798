"""The encoder cache: which images it may evict, and which requests use them."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart.cache import MultiModalItem, Shares
from headstart.engine.image_cache import (
    EncoderCache,
    EncoderKey,
    PromptImage,
    PromptImages,
)
from headstart.engine.params import SamplingParams
from headstart.engine.request import PromptExtras
from headstart.models.decoder import ProcessedImage


@dataclass
class Encoder:
    """Encode an image as rows with its number."""

    done: list[int] = field(default_factory=list)

    def encode(self, image: ProcessedImage) -> Tensor:
        self.done.append(image.shape[0])
        return torch.full((image.num_rows, 2), float(image.shape[0]))


def image(number: int, rows: int = 10, offset: int = 0) -> PromptImage:
    item = MultiModalItem(b"%d" % number, offset, rows)
    processed = ProcessedImage({}, (number,), rows)
    return PromptImage(item, processed, torch.arange(offset, offset + rows))


def test_an_image_is_encoded_once_and_stays_without_a_user() -> None:
    encoder = Encoder()
    cache = EncoderCache(encoder, 30)
    for user in range(3):
        assert cache.fits([image(1)])
        cache.hold((user, 0), image(1))
        cache.encode_pending()
        cache.leave((user, 0), image(1))
    assert encoder.done == [1] and image(1).key in cache and cache.num_hits == 2
    cache.check()


def test_the_oldest_image_without_a_user_is_evicted_first() -> None:
    cache = EncoderCache(Encoder(), 30)
    for number in (1, 2, 3):
        cache.hold((0, number), image(number))
    cache.encode_pending()
    for number in (2, 1):
        cache.leave((0, number), image(number))
    cache.hold((0, 4), image(4))
    assert [number for number in range(1, 5) if image(number).key in cache] == [1, 3, 4]
    cache.encode_pending()
    cache.check()


def shown(cache: EncoderCache, salt: str | None, *numbers: int) -> None:
    """Let requests use images one after another and release each."""
    for number in numbers:
        one = replace(image(number), salt=salt)
        assert cache.fits([one])
        cache.hold((salt, number), one)
        cache.encode_pending()
        cache.leave((salt, number), one)
        cache.check()


def cached_images(cache: EncoderCache, salt: str | None) -> list[int]:
    return [n for n in range(100) if replace(image(n), salt=salt).key in cache]


def test_a_flood_of_one_tenant_leaves_another_its_share() -> None:
    shares = Shares()
    shares.set("a", 1.0)
    shares.set("b", 1.0)
    cache = EncoderCache(Encoder(), 100, shares=shares)
    shown(cache, "a", *range(10))
    assert cached_images(cache, "a") == list(range(10)), "a tenant may use all unused space"
    shown(cache, "b", *range(50))
    assert cached_images(cache, "a") == [5, 6, 7, 8, 9]
    assert cached_images(cache, "b") == [45, 46, 47, 48, 49]
    shown(cache, "a/x", *range(20, 23))
    assert (cached_images(cache, "a"), cached_images(cache, "a/x")) == ([8, 9], [20, 21, 22]), (
        "an owner's images are evicted"
    )


def test_a_tenant_of_more_weight_has_more_images() -> None:
    shares = Shares()
    shares.set("a", 4.0)
    shares.set("b", 1.0)
    cache = EncoderCache(Encoder(), 100, shares=shares)
    for at in range(50):
        shown(cache, "b", at)
        shown(cache, "a", at)
    assert (len(cached_images(cache, "a")), len(cached_images(cache, "b"))) == (8, 2)


def test_without_owners_the_oldest_image_is_evicted_first() -> None:
    cache = EncoderCache(Encoder(), 30)
    shown(cache, "a", 1)
    shown(cache, "b", 1, 2, 3)
    assert (cached_images(cache, "a"), cached_images(cache, "b")) == ([], [1, 2, 3])


def test_users_are_uses_and_not_requests() -> None:
    """An image that occurs twice in a prompt stays until the second use has ended."""
    cache = EncoderCache(Encoder(), 10)
    first, second = image(1), image(1, offset=50)
    cache.hold(("request", 0), first)
    cache.hold(("request", 1), second)
    cache.encode_pending()
    cache.leave(("request", 0), first)
    assert not cache.fits([image(2)])
    cache.leave(("request", 1), second)
    assert cache.fits([image(2)])


def test_images_that_a_failed_step_did_not_encode_are_forgotten() -> None:
    cache = EncoderCache(Encoder(), 30)
    cache.hold((0, 0), image(1))
    cache.leave((0, 0), image(1))
    assert image(1).key not in cache and cache.num_rows == 0
    cache.check()


def test_rows_from_the_middle_of_an_image() -> None:
    """Only the requested rows are returned, also from the middle of an image."""
    encoder = Encoder()
    cache = EncoderCache(encoder, 30)
    shown = image(1, rows=6, offset=3)  # t0 t1 t2 Im0 | Im1 Im2 Im3 Im4 | Im5 t9 ...
    cache.hold((0, 0), shown)
    cache.encode_pending()
    cache._entries[shown.key].rows = torch.arange(6).view(6, 1)
    [part] = PromptImages((shown,), cache).between(7, 12)
    assert part.position == 7
    assert part.rows.flatten().tolist() == [4, 5]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_rows_of_any_span(gaps: list[int], start: int, stop: int) -> None:
    """With other tokens between placeholders, each gets its row, and only the requested ones do."""
    positions = torch.tensor(np.cumsum(gaps) + 2)
    item = MultiModalItem(b"1", int(positions[0]), int(positions[-1] - positions[0]) + 1)
    processed = ProcessedImage({}, (1,), len(positions))
    cache = EncoderCache(Encoder(), 100)
    cache.hold((0, 0), PromptImage(item, processed, positions))
    cache.encode_pending()
    cache._entries[EncoderKey(None, b"1")].rows = positions.view(-1, 1)  # each row has its position
    source = PromptImages((PromptImage(item, processed, positions),), cache)
    rows = {
        position + at: int(row)
        for position, chunk in source.between(start, stop)
        for at, row in enumerate(chunk)
    }
    assert rows == {p: p for p in positions.tolist() if start <= p < stop}


def test_rows_of_one_salt_are_never_hit_under_another() -> None:
    encoder = Encoder()
    cache = EncoderCache(encoder, 30)
    for salt in (None, "a", "b", ""):
        shown = replace(image(1, rows=5), salt=salt)
        assert shown.key not in cache
        cache.hold((salt, 0), shown)
        assert cache.encode_pending() == {}
        cache.leave((salt, 0), shown)
    assert encoder.done == [1] * 4 and cache.num_hits == 0 and cache.num_rows == 20
    cache.check()


class Shows:
    """A stand-in for a request that shows images, as far as the gate reads it."""

    def __init__(self, cache: EncoderCache, *images: PromptImage, is_stored: bool = True) -> None:
        self.group = self
        self.params = SamplingParams(skip_storing_prefix_cache=not is_stored)
        self.extras = PromptExtras(embeddings=PromptImages(images, cache))


def test_rows_of_a_request_that_is_not_stored_are_removed_with_it() -> None:
    """Unless another request uses them, or has let them stay."""
    cache = EncoderCache(Encoder(), 100)
    for others, stays in ((), False), (("other",), True):
        shown = image(7)
        cache.hold(("secret", 0), shown, is_stored=False)
        cache.encode_pending()
        for other in others:
            cache.hold((other, 0), shown)
        cache.leave(("secret", 0), shown)
        cache.check()
        for other in others:
            cache.leave((other, 0), shown)
        assert (shown.key in cache) is stays
        cache.check()
