"""Prefixes outlive the process: the next one hits them, and answers the same."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headstart import LLM, SamplingParams
from headstart.attention import PagedKVMemory
from headstart.engine.metrics import Counter
from headstart.engine.outputs import RequestOutput
from headstart.models.dense.decoder import DenseDecoder
from headstart.tiers.disk import DiskStore
from headstart.tiers.store import LoadedBlock
from tests.engine.tiny_llm import make_llm, save_smallest

pytestmark = pytest.mark.usefixtures("loads_always")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
TEXT = list(range(3, 83))
PROMPTS = [TEXT + [90 + at] * 20 for at in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest(tmp_path_factory.mktemp("model"))


@contextmanager
def opened(model: Path, folder: Path | None, **options: Any) -> Iterator[LLM]:
    llm = make_llm(model, debug=True, cache_dir=folder and str(folder), **options)
    try:
        yield llm
    finally:
        llm.close()


def generate(llm: LLM, tokens: list[int], **options: Any) -> RequestOutput:
    [output] = llm.generate({"prompt_token_ids": tokens}, GREEDY, **options)
    return output


def content_of(output: RequestOutput) -> tuple[Any, Any]:
    """Return the tokens, and their log-probabilities to the last bit."""
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_a_second_process_hits_blocks_of_the_first(model: Path, tmp_path: Path) -> None:
    with opened(model, None) as llm:
        alone = [generate(llm, tokens) for tokens in PROMPTS]
    with opened(model, tmp_path) as llm:
        assert [generate(llm, tokens).num_cached_tokens for tokens in PROMPTS] == [0, 80, 80]
    with opened(model, tmp_path) as llm:
        again = [generate(llm, tokens) for tokens in PROMPTS]
        assert [output.num_cached_tokens for output in again] == [96, 96, 96]
        assert [output.num_loaded_tokens for output in again] == [96, 16, 16]
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.stats.loaded_tokens == {"disk": 96 + 16 + 16}
        assert llm.engine.tiers.stats.saved_blocks == 0, "all blocks are cached"
        counts = {(m.name, *m.labels.values()): m for m in llm.get_metrics()}
        loaded = counts["headstart:loaded_tokens", "disk"]
        assert isinstance(loaded, Counter) and loaded.value == 128
        stats = llm.engine.manager.stats
        assert stats.requests == 3 and stats.queried_tokens == 300, "a load is no request"
    assert [out.outputs[0].token_ids for out in again] == [
        out.outputs[0].token_ids for out in alone
    ]


def test_a_folder_that_cannot_be_written_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, tmp_path) as llm:
        generate(llm, PROMPTS[0])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    with opened(model, tmp_path) as llm:
        assert generate(llm, PROMPTS[0]).num_loaded_tokens == 96
        assert generate(llm, TEXT[::-1]).num_loaded_tokens == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_generated_tokens_are_stored_too(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        [first] = llm.generate({"prompt_token_ids": TEXT}, long)
    spoken = TEXT + list(first.outputs[0].token_ids) + [5, 6]
    with opened(model, tmp_path) as llm:
        assert generate(llm, spoken).num_cached_tokens == 112


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_deterministic_answers_are_the_same_bit_for_bit(
    model: Path, tmp_path: Path, kv: str
) -> None:
    with opened(model, None, deterministic=True, kv_cache_dtype=kv) as llm:
        alone = generate(llm, PROMPTS[0])
    for expected in (0, 96):
        with opened(model, tmp_path, deterministic=True, kv_cache_dtype=kv) as llm:
            output = generate(llm, PROMPTS[0])
            assert output.num_cached_tokens == expected
            assert content_of(output) == content_of(alone)
    with opened(model, tmp_path) as llm:
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 0, (
            "other rounding is another identity"
        )


def test_other_weights_under_the_same_path_hit_nothing(tmp_path: Path) -> None:
    model, cache_dir = save_smallest(tmp_path / "model"), tmp_path / "kept"
    with opened(model, cache_dir) as llm:
        generate(llm, PROMPTS[0])
    save_smallest(model, poison=140)  # one row of one matrix differs
    with opened(model, cache_dir) as llm:
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 0
    save_smallest(model)
    with opened(model, cache_dir) as llm:
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 96


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"block_size": 8}, {"kv_cache_dtype": "int8"}]
)
def test_blocks_of_other_options_have_another_identity(
    model: Path, tmp_path: Path, other: Any
) -> None:
    with opened(model, tmp_path) as llm:
        generate(llm, PROMPTS[0])
    with opened(model, tmp_path, **other) as llm:
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 0


def test_salts_do_not_share_stored_blocks(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        generate(llm, PROMPTS[0], cache_salt="a")
    with opened(model, tmp_path) as llm:
        for salt, hit in (("b", 0), (None, 0), ("a", 96)):
            assert generate(llm, PROMPTS[0], cache_salt=salt).num_cached_tokens == hit


def test_a_small_pool_hits_like_a_large_one(model: Path, tmp_path: Path) -> None:
    texts = [
        [3 + (at * 7 + position * position) % 140 for position in range(200)] for at in range(5)
    ]
    prompts = [texts[at % 5] + [at % 150] * 8 for at in range(50)]
    with opened(model, None, num_blocks=400) as llm:
        large = [generate(llm, tokens) for tokens in prompts]
    with opened(model, tmp_path, num_blocks=16) as llm:
        small = []
        for tokens in prompts:
            small.append(generate(llm, tokens))
            assert llm.engine.tiers is not None and llm.engine.tiers.flush(10)
        assert llm.engine.manager.num_free_blocks == 16
    assert [content_of(out)[0] for out in small] == [content_of(out)[0] for out in large]
    rates = [sum(out.num_cached_tokens for out in outputs) for outputs in (small, large)]
    whole = sum(out.num_cached_tokens // 16 * 16 for out in large)
    assert rates[0] >= whole, rates


def test_requests_that_begin_alike_share_a_load(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        generate(llm, PROMPTS[0])
    with opened(model, tmp_path) as llm:
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], GREEDY)
        assert [output.num_cached_tokens for output in outputs] == [96, 80, 80]
        assert llm.engine.tiers is not None
        assert llm.engine.tiers.stats.loaded_tokens == {"disk": 96}


def test_a_request_waits_for_the_rest_of_its_prefix(
    model: Path, tmp_path: Path, limits: Callable[..., None], disk_loads: Callable[..., None]
) -> None:
    """A part of it is loaded; a cold prompt makes no other request wait."""
    limits(chunk_bytes=1)
    with opened(model, tmp_path) as llm:
        alone = [generate(llm, tokens) for tokens in PROMPTS]
    with opened(model, None) as llm:
        cold = generate(llm, TEXT[::-1])
    rest = Event()

    def load_slowly(_: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        for position, block in enumerate(blocks):
            if position == 2:
                assert rest.wait(60)
            yield block

    disk_loads(load_slowly)
    with opened(model, tmp_path) as llm:
        engine = llm.engine
        groups = [llm.frontend.prepare({"prompt_token_ids": tokens}, GREEDY) for tokens in PROMPTS]
        for group in groups:
            engine.submit(group)
        while engine.manager.num_free_blocks > 22:
            assert engine.step() == []
        assert engine.step() == [], "nothing runs, and nothing is wrong"
        group = llm.frontend.prepare({"prompt_token_ids": TEXT[::-1]}, GREEDY)
        engine.submit(group)
        while not group.finished:
            engine.step()
        assert group.output().outputs[0].token_ids == content_of(cold)[0]
        assert engine.has_unfinished
        rest.set()
        while engine.has_unfinished:
            engine.step()
        assert [group.output().num_cached_tokens for group in groups] == [96, 80, 80]
        answers = [group.output().outputs[0].token_ids for group in groups]
        assert answers == [content_of(output)[0] for output in alone]


def test_an_abort_of_the_last_request_saves_and_releases_all_blocks(
    model: Path, tmp_path: Path, limits: Callable[..., None], disk_loads: Callable[..., None]
) -> None:
    """Regression: computed blocks and those of a cancelled load stayed until the next request."""
    limits(chunk_bytes=1)
    with opened(model, tmp_path) as llm:
        engine = llm.engine
        engine.submit(group := llm.frontend.prepare({"prompt_token_ids": TEXT}, GREEDY))
        engine.step()
        engine.abort(group.request_id)
        assert engine.tiers is not None
        assert engine.tiers.flush(10) and engine.tiers.stats.saved_blocks == 5
    rest = Event()

    def load_in_part(_: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        yield next(blocks)
        assert rest.wait(60)

    disk_loads(load_in_part)
    with opened(model, tmp_path) as llm:
        engine = llm.engine
        engine.submit(group := llm.frontend.prepare({"prompt_token_ids": TEXT}, GREEDY))
        while engine.manager.num_free_blocks == 24:
            engine.step()
        engine.abort(group.request_id)
        assert engine.manager.num_free_blocks == 24
        assert llm.reset_prefix_cache()
        rest.set()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_an_abort_without_memory_to_copy_blocks_ends_the_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(memory: PagedKVMemory, block_ids: list[int]) -> Any:
        raise error("no memory")

    with opened(model, tmp_path) as llm:
        engine = llm.engine
        engine.submit(group := llm.frontend.prepare({"prompt_token_ids": TEXT}, GREEDY))
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(PagedKVMemory, "read_blocks", fail)
            engine.abort(group.request_id)
        assert not engine.has_unfinished and group.requests[0].finish_reason == "abort"
    with opened(model, tmp_path) as llm:
        assert generate(llm, TEXT).num_loaded_tokens == 64, "they were saved later"


def test_a_loading_request_is_bypassed_no_more_than_others(model: Path, tmp_path: Path) -> None:
    """Regression: it waited for space after its load, and small requests overtook it for ever."""
    large = [3 + at * 7 % 140 for at in range(220)]
    with opened(model, tmp_path) as llm:
        generate(llm, large)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with opened(model, tmp_path, num_blocks=20) as llm:
        engine, sent = llm.engine, 0

        def submit_small() -> None:
            nonlocal sent
            tokens = [3 + (sent + at * (sent + 1)) % 140 for at in range(40)]
            engine.submit(llm.frontend.prepare({"prompt_token_ids": tokens}, params))
            sent += 1

        for _ in range(3):  # one after the other, so that they do not end together
            submit_small()
            for _ in range(13):
                engine.step()
        group = llm.frontend.prepare({"prompt_token_ids": large}, GREEDY)
        engine.submit(group)
        assert engine.tiers is not None
        load = engine.tiers.loads.waiting[group.requests[0]]
        while not load.job.done:
            engine.tiers.wait()
        for _ in range(2000):
            while sum(map(len, engine.requests)) < 6:
                submit_small()
            engine.step()
            if group.finished:
                break
        assert group.requests[0].times_bypassed <= engine.config.max_bypassed
        assert group.output().num_loaded_tokens == 208


def test_a_request_that_skips_the_cache_loads_nothing(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        generate(llm, PROMPTS[0])
    with opened(model, tmp_path) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, skip_reading_prefix_cache=True)
        [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)
        assert output.num_cached_tokens == 0
        assert llm.engine.tiers is not None and not llm.engine.tiers.stats.loaded_tokens


def test_a_damaged_store_costs_only_time(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        first = generate(llm, PROMPTS[0])
    for damage in (lambda data: data[: len(data) // 2], lambda data: bytes(len(data))):
        for file in [*tmp_path.glob("*.kv"), *tmp_path.glob("index*")]:
            file.write_bytes(damage(file.read_bytes()))
        with opened(model, tmp_path) as llm:
            output = generate(llm, PROMPTS[0])
            assert content_of(output)[0] == content_of(first)[0] and output.num_cached_tokens < 96
        with opened(model, tmp_path) as llm:
            assert generate(llm, PROMPTS[0]).num_cached_tokens == 96, (
                "it was computed and stored again"
            )


def test_a_reset_may_forget_the_disk_too(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as llm:
        assert [generate(llm, tokens).num_cached_tokens for tokens in PROMPTS] == [0, 80, 80]
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS[0]).num_loaded_tokens == 96
        assert llm.reset_prefix_cache(reset_connector=True)
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 0
        assert llm.reset_prefix_cache(reset_connector=True)
    with opened(model, tmp_path) as llm:
        assert generate(llm, PROMPTS[0]).num_cached_tokens == 0


def test_memory_is_prefaulted_for_the_blocks_of_the_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first blocks of the pool: as many as are stored, or as the longest prompt has."""
    counts: list[int] = []
    monkeypatch.setattr(PagedKVMemory, "prefault", lambda self, count: counts.append(count))
    with opened(model, None):
        assert counts == [], "no block is stored"
    for blocks in (0, 6):
        with opened(model, tmp_path) as llm:
            assert counts.pop() == blocks
            generate(llm, PROMPTS[0])
    with opened(model, tmp_path, max_model_len=40):
        assert counts == [3]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_running_load_does_not_prevent_a_reset(
    model: Path,
    tmp_path: Path,
    is_aborted: bool,
    limits: Callable[..., None],
    disk_loads: Callable[..., None],
) -> None:
    """Regression: its blocks were held until the next step without a request."""
    limits(chunk_bytes=1)
    with opened(model, tmp_path) as llm:
        alone = generate(llm, PROMPTS[0])
    rest = Event()

    def load_slowly(_: DiskStore, blocks: Iterator[LoadedBlock]) -> Iterator[LoadedBlock]:
        for position, block in enumerate(blocks):
            assert position < 2 or rest.wait(60)
            yield block

    disk_loads(load_slowly)
    with opened(model, tmp_path) as llm:
        engine = llm.engine
        groups = [llm.frontend.prepare({"prompt_token_ids": PROMPTS[0]}, GREEDY) for _ in range(2)]
        for group in groups:
            engine.submit(group)
        while engine.manager.num_free_blocks > 22:
            assert engine.step() == []
        if is_aborted:
            engine.abort(groups[0].request_id)
            assert engine.manager.num_free_blocks == 22, "another request waits for it"
            assert not engine.reset_prefix_cache()
            engine.abort(groups[1].request_id)
        assert engine.reset_prefix_cache(reset_running_requests=not is_aborted)
        assert engine.manager.num_free_blocks == 24
        engine.manager.check()
        rest.set()
        while engine.has_unfinished:
            engine.step()
        assert generate(llm, PROMPTS[0]).outputs[0].token_ids == content_of(alone)[0]
        if not is_aborted:
            assert [group.output().num_loaded_tokens for group in groups] == [0, 0]
            assert groups[0].output().outputs[0].token_ids == content_of(alone)[0]


def test_angles_of_loaded_positions_are_computed_before_the_first_request(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(DenseDecoder, "prepare", lambda self, count: counts.append(count))
    with opened(model, tmp_path) as llm:
        generate(llm, PROMPTS[0])
        assert counts == [0]
    with opened(model, tmp_path):
        assert counts == [0, 96]
    with opened(model, tmp_path, max_model_len=40):
        assert counts == [0, 96, 48]
    monkeypatch.setattr("headstart.engine.parts._MAX_PREPARED", 32)
    with opened(model, tmp_path):
        assert counts == [0, 96, 48, 32], "a large folder delays no start"
