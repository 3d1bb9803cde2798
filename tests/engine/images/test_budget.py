"""Schedules with images, without a model: rows exist when needed, and no request waits for ever."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstart import RequestError
from headstart.cache import MultiModalItem, TokenSequence
from headstart.engine.image_cache import (
    EncoderBudget,
    EncoderCache,
    PromptImage,
    PromptImages,
)
from headstart.engine.request import PromptExtras, Request
from headstart.engine.step import Batch
from headstart.models.decoder import ProcessedImage
from tests.engine.internals import encoder_users
from tests.engine.test_scheduler import BLOCK, Bench

Shown = tuple[int, int, int]  # tokens before the image, which image, its rows: 1 to 3 times 3


class Rows:
    """Encodes image n as rows that say n."""

    def encode(self, image: ProcessedImage) -> Tensor:
        return torch.full((image.num_rows, 1), float(image.shape[0]))


class ImageBench(Bench):
    """Check at each step that the rows of all scheduled placeholders are there, and right."""

    def __init__(self, capacity: int, *, whole_blocks: bool, **options: int) -> None:
        self.cache = EncoderCache(Rows(), capacity)
        self.whole_blocks = whole_blocks
        self.budget = EncoderBudget(self.cache, BLOCK if whole_blocks else None)
        super().__init__(self.budget, **options)

    def add_shown(self, name: int, shown: list[Shown], max_tokens: int = 4) -> Request:
        tokens: list[int] = []
        images: list[PromptImage] = []
        for gap, number, rows in shown:
            tokens += range(1000 * name + len(tokens), 1000 * name + len(tokens) + gap)
            item = MultiModalItem(b"%d of %d" % (number, rows), len(tokens), rows)
            positions = torch.arange(len(tokens), len(tokens) + rows)
            images.append(PromptImage(item, ProcessedImage({}, (number,), rows), positions))
            tokens += [5] * rows
        tokens.append(1000 * name)
        self.budget.check(tuple(images))
        request = self.make(tokens, max_tokens)
        source = PromptImages(tuple(images), self.cache)
        items = tuple(image.item for image in images)
        request.group.extras = PromptExtras(items, source)
        request.sequence = TokenSequence(request.sequence.request_id, tokens, items=items)
        self.scheduler.add(request)
        return request

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.cache.encode_pending()
        for part in batch.scheduled:
            self.check_rows(part.request, part.start, part.stop)
        self.manager.commit_step()
        for part in batch.scheduled:
            if part.samples:
                self.sample(part.request)
        self.manager.check()
        self.cache.check()
        return batch

    def check_rows(self, request: Request, start: int, stop: int) -> None:
        first = start // BLOCK * BLOCK if self.whole_blocks else start
        extras: Any = request.group.extras
        rows = {
            position + at: float(row)
            for position, chunk in extras.embeddings.between(first, stop)
            for at, row in enumerate(chunk)
        }
        assert rows == {
            place: float(image.image.shape[0])
            for image in extras.embeddings.images
            for place in image.positions.tolist()
            if first <= place < stop
        }


PROMPTS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.sampled_from([2, 3, 9])),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)


@given(
    prompts=PROMPTS,
    capacity=st.integers(9, 20),
    tokens=st.integers(1, 30),
    blocks=st.integers(16, 40),  # the longest prompt has 61 tokens, and 3 of its answer are read
    whole_blocks=st.booleans(),
)
def test_all_end_and_rows_are_there(
    prompts: list[list[Shown]], capacity: int, tokens: int, blocks: int, whole_blocks: bool
) -> None:
    bench = ImageBench(capacity, whole_blocks=whole_blocks, blocks=blocks, tokens=tokens)
    added = []
    for name, shown in enumerate(prompts):
        try:
            added.append(bench.add_shown(name % 3, shown))
        except RequestError:
            assert whole_blocks  # several images of one block, which do not fit
    bench.run()
    assert all(request.finish_reason == "length" for request in added)
    assert not encoder_users(bench.cache)


def test_two_requests_that_block_each_other_both_end() -> None:
    """In whole blocks, each holds the first image of its block.

    There is no space for both second ones, so the request admitted last gives way.
    """
    bench = ImageBench(6, whole_blocks=True, tokens=3)
    one = bench.add_shown(1, [(0, 1, 2), (0, 2, 2)])
    two = bench.add_shown(2, [(0, 3, 2), (0, 4, 2)])
    bench.run()
    assert one.finish_reason == two.finish_reason == "length"


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_a_request_that_ends_early_releases_its_images(end: str) -> None:
    bench = ImageBench(9, whole_blocks=False, tokens=4)
    request = bench.add_shown(1, [(2, 1, 9)])
    bench.scheduler.schedule()
    assert not bench.cache.fits([_other(9)])
    if end == "abort":
        bench.cache.encode_pending()
        bench.manager.commit_step()
        bench.scheduler.remove(request)
    else:
        bench.manager.fail_step()
        bench.scheduler.restart()
        assert bench.cache.num_rows == 0
    assert bench.cache.fits([_other(9)])
    bench.cache.check()


def _other(rows: int) -> PromptImage:
    item = MultiModalItem(b"another", 0, rows)
    return PromptImage(item, ProcessedImage({}, (9,), rows), torch.arange(rows))
