"""Loads that wait for space: others overtake them, and each gets all of its blocks in the end."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from headstart import LLM, SamplingParams
from headstart.engine.request import RequestGroup
from headstart.tiers.transfers import Loader, LoadJob
from tests.engine.internals import loader_of
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.tiers.stores import MODEL, names, payload
from tests.tiers.test_threads import FOREVER, Store, arrived, everything, loading

SIZE = MODEL.block_bytes
BOUND = 4 * SIZE
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def small_chunks(limits: Callable[..., None]) -> None:
    limits(chunk_bytes=SIZE)


def settle(loader: Loader, *jobs: LoadJob) -> None:
    """Wait until no more blocks arrive before any is taken."""
    before = -1
    while (now := sum(job.num_loaded for job in jobs)) != before or not any(
        job.count or job.done for job in jobs
    ):
        before = now
        for _ in range(3):
            loader.wait(FOREVER / 10_000)


def taken(loader: Loader, job: LoadJob, most: int = 99) -> list[bytes]:
    return [bytes(block.payload) for block in loader.take(job, most)]


def test_a_load_that_is_not_taken_does_not_block_others() -> None:
    with loading(Store(), BOUND) as loader:
        first = loader.start(names(range(20)), everything)
        second = loader.start(names(range(20, 60)), everything)
        settle(loader, first, second)
        assert len(first.arrived) == 2 and not second.arrived, "half is for the preferred one"
        assert arrived(loader, second) == 40, "the preferred one waits for no other"
        assert loader.queued_bytes == SIZE * len(first.arrived) <= BOUND
        assert arrived(loader, first) == 20
        assert loader.queued_bytes == 0


def test_a_load_that_lost_its_preference_continues() -> None:
    with loading(Store(), BOUND) as loader:
        first = loader.start(names(range(12)), everything)
        second = loader.start(names(range(20, 26)), everything)
        loader.prefer(first)
        settle(loader, first)
        payloads = taken(loader, first, 1)
        assert arrived(loader, second) == 6
        loader.prefer(first)
        while not (first.done and not first.arrived):
            payloads += taken(loader, first)
            loader.wait(FOREVER / 1000)
        assert payloads == [payload(number) for number in range(12)]


def test_hundreds_of_loads_in_any_order_get_their_blocks() -> None:
    chance = random.Random(5)
    with loading(Store(), BOUND) as loader:
        jobs: dict[LoadJob, range] = {}
        payloads: dict[LoadJob, list[bytes]] = {}
        num_ended = Counter[str]()
        while num_ended["whole"] < 300:
            if len(jobs) < 8:
                first = chance.randint(0, 100)
                numbers = range(first, first + chance.randint(1, 12))
                job = loader.start(names(numbers), everything)
                jobs[job], payloads[job] = numbers, []
            job = chance.choice([*jobs])
            if chance.random() < 0.05:
                loader.cancel(job)
                num_ended["cancelled"] += 1
                del jobs[job]
                continue
            loader.prefer(job)
            for _ in range(chance.randint(1, 9)):
                loader.wait(FOREVER / 20_000)
                done = job.done
                payloads[job] += taken(loader, job, chance.randint(1, 5))
                if done and not job.arrived:
                    break
            assert loader.queued_bytes <= BOUND + 8 * SIZE, "a chunk of each at most beyond it"
            assert payloads[job] == [payload(number) for number in jobs[job]][: len(payloads[job])]
            if done and not job.arrived:
                assert len(payloads[job]) == len(jobs[job])
                num_ended["whole"] += 1
                del jobs[job]
    assert num_ended["cancelled"] > 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


LARGE = [[3 + (at * 7 + turn * 31) % 140 for at in range(220)] for turn in range(2)]
SMALL = [3 + at * 11 % 140 for at in range(40)]


def submit(llm: LLM, tokens: list[int], params: SamplingParams = PARAMS) -> RequestGroup:
    group = llm.frontend.prepare({"prompt_token_ids": tokens}, params)
    llm.engine.submit(group)
    return group


def run_until(llm: LLM, *groups: RequestGroup) -> None:
    """Step until these requests have ended, with arrived loads only; check the pool each time."""
    tiers = llm.engine.tiers
    assert tiers is not None
    for _ in range(3000):
        if all(group.finished for group in groups):
            return
        if tiers.loads.are_under_way:
            settle(loader_of(tiers), *(load.job for load in tiers.loads.waiting.values()))
        llm.engine.step()
        llm.engine.manager.check()
    raise AssertionError("requests wait for ever")


def answer(group: RequestGroup) -> list[int]:
    return list(group.output().outputs[0].token_ids)


@pytest.fixture
def stored(
    model: Path, tmp_path: Path, loads_always: None, limits: Callable[..., None]
) -> tuple[Path, list[list[int]]]:
    """Return a folder that has three prompts, their answers, and space for four loading blocks."""
    limits(chunk_bytes=1)
    with closing(make_llm(model, cache_dir=str(tmp_path), num_blocks=60)) as llm:
        groups = [submit(llm, tokens) for tokens in (*LARGE, SMALL)]
        run_until(llm, *groups)
        assert llm.engine.tiers is not None and llm.engine.tiers.flush(FOREVER)
        nbytes = llm.engine.kv_cache_bytes // 60
    limits(queued_bytes=4 * nbytes)
    return tmp_path, [answer(group) for group in groups]


def test_a_load_without_space_in_the_pool_is_overtaken(
    model: Path, stored: tuple[Path, list[list[int]]]
) -> None:
    """Regression: the first request filled the waiting list, and no other load continued."""
    folder, answers = stored
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    with closing(make_llm(model, cache_dir=str(folder), num_blocks=20, debug=True)) as llm:
        running = submit(llm, list(range(3, 103)), long)
        llm.engine.step()
        large, small = submit(llm, LARGE[0]), submit(llm, SMALL)
        run_until(llm, small)
        assert not running.finished and not large.finished, "it has no space yet"
        assert small.output().num_loaded_tokens == 32
        run_until(llm, running, large)
        assert large.output().num_loaded_tokens == 208
        assert [answer(large), answer(small)] == [answers[0], answers[2]]
        assert llm.engine.manager.num_free_blocks == 20


def test_loads_that_wait_for_one_another_all_end(
    model: Path, stored: tuple[Path, list[list[int]]]
) -> None:
    """No request runs, the pool has space for one of them, and each has blocks that wait."""
    folder, answers = stored
    with closing(make_llm(model, cache_dir=str(folder), num_blocks=16, debug=True)) as llm:
        groups = [submit(llm, tokens) for tokens in (*LARGE, SMALL)]
        run_until(llm, *groups)
        assert [group.output().num_loaded_tokens for group in groups] == [208, 208, 32]
        assert [answer(group) for group in groups] == answers
        assert llm.engine.manager.num_free_blocks == 16
        assert llm.engine.tiers is not None and loader_of(llm.engine.tiers).queued_bytes == 0
