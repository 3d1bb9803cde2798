"""Several stages give the same text, codes and waveform, with any caching and chunking."""

from functools import cache
from typing import Any

import pytest
import torch

from headstart.cache import MultiModalItem
from headstart.engine.params import SamplingParams
from headstart.engine.request import PlacedRows, PrecomputedEmbeddings, PreparedPrompt, PromptExtras
from headstart.errors import ConfigError, EngineError, RequestError
from headstart.omni.engine_stage import TalkerFeed
from headstart.omni.output_cache import OutputCache
from headstart.omni.pipeline import Pipeline
from headstart.omni.stage import TOKENS, Chunk, Input, OutputEvent, StageStarted
from tests.omni.pipelines import WIDTH, Speech, collected, oracle, request, result_of, start, vocode

CONTEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
PROMPTS = {
    "first": [*CONTEXT, 20, 21],
    "other question": [*CONTEXT, 30, 31, 32, 33, 34],
    "same again": [*CONTEXT, 20, 21],
    "whole blocks": CONTEXT,
    "something else": [50, 51, 52],
}


@cache
def wanted(
    name: str, *, think: int = 6, talk: int = 11
) -> tuple[list[int], list[int], list[float]]:
    text, codes = oracle(PROMPTS[name], think=think, talk=talk)
    audio = vocode(request("x", []), torch.tensor(codes), 0)
    return text, codes, audio.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"caching": False},
        {"max_num_batched_tokens": 5},
        {"num_blocks": 11},
        {"num_blocks": 11, "talker_options": {"num_blocks": 13}},
        {"max_bytes": 0},
        {"max_bytes": 12_000},
        {"deterministic": True},
        {"undeclared": True},
        {"talker_options": {"block_size": 8}},
        {"deduplicate": False},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [False, True])
def test_results_do_not_depend_on_options(options: dict[str, Any], batched: bool) -> None:
    params = {
        "thinker": SamplingParams(temperature=0, max_tokens=4),
        "talker": SamplingParams(temperature=0, max_tokens=9),  # two of the vocoder's blocks, and 1
    }
    with Speech(**options) as speech:
        for round_ in range(2):
            requests = [
                request(f"{name} {round_}", PROMPTS[name], params=params) for name in PROMPTS
            ]
            rounds = [requests] if batched else [[r] for r in requests]
            done = [progress for some in rounds for progress in speech.run(*some)]
            for name, progress in zip(PROMPTS, done, strict=True):
                assert result_of(progress) == wanted(name, think=4, talk=9), name
        preemptions = speech.thinker.engine.num_preemptions + speech.talker.engine.num_preemptions
        assert (preemptions > 0) == (batched and "num_blocks" in options)


def test_a_cached_prefix_is_skipped_in_every_stage_with_identical_rows() -> None:
    with Speech() as speech:
        speech.pipeline = Pipeline(
            list(speech.pipeline.stages.values()),
            [Input("thinker", "hidden"), Input("thinker", "feature"), Input("talker", TOKENS)],
        )
        [cold] = speech.run(request("cold", PROMPTS["first"]))
        [warm] = speech.run(request("warm", PROMPTS["first"]))
        for output in ("hidden", "feature"):
            first, second = (collected(p, "thinker", output) for p in (cold, warm))
            assert torch.equal(first[:12], second[:12])
            assert torch.allclose(first, second, atol=1e-5)
        metrics = warm.metrics
        assert metrics["thinker"].cached_tokens == 12
        assert metrics["thinker"].hit_rows == {"hidden": 12, "feature": 12}
        assert metrics["talker"].cached_tokens == 12
        assert metrics["vocoder"].hit_rows == {"audio": 8}
        assert metrics["vocoder"].cached_tokens == 8


def test_each_stage_starts_before_the_previous_one_finishes() -> None:
    with Speech() as speech:
        more = {"thinker": SamplingParams(temperature=0, max_tokens=20)}
        [progress] = speech.run(request("r", PROMPTS["first"], params=more))
        metrics = progress.metrics
        assert metrics["talker"].first_output < metrics["thinker"].total
        assert metrics["vocoder"].first_output < metrics["talker"].total


def test_another_voice_shares_the_thinker_and_no_talker_block() -> None:
    with Speech() as speech:
        hits = []
        for i, voice in enumerate(["Ada", "Ada", "Bob"]):
            options = {"talker": {"voice": voice}}
            [progress] = speech.run(request(f"{i}", PROMPTS["first"], options=options))
            assert result_of(progress) == wanted("first")
            hits.append([progress.metrics[s].cached_tokens for s in ("thinker", "talker")])
        assert hits == [[0, 0], [12, 12], [12, 0]]


def test_prompts_of_equal_length_share_only_their_common_prefix() -> None:
    """All talker prompts of one length have the same mask ids, but different rows."""
    with Speech() as speech:
        hits = []
        for i, prompt in enumerate([[7] * 13, [8] * 13, [7] * 8 + [9] * 5]):
            [progress] = speech.run(request(f"{i}", prompt))
            assert result_of(progress)[:2] == oracle(prompt)
            hits.append(progress.metrics["talker"].cached_tokens)
        assert hits == [0, 0, 8]


def test_conditions_without_an_identity_are_never_shared() -> None:
    with Speech(talker_options={"num_blocks": 13}) as speech:
        for i in range(2):
            options = {"talker": {"anonymous": True}}
            [progress] = speech.run(request(f"{i}", PROMPTS["first"], options=options))
            assert result_of(progress) == wanted("first")
            assert progress.metrics["talker"].cached_tokens == 0


def test_pipelines_with_different_weights_can_share_a_store() -> None:
    store, hidden = OutputCache(1 << 24), Input("thinker", "hidden")
    with Speech(store=store) as first, Speech(store=store, text_seed=9) as second:
        for speech, seed in ((first, 1), (second, 9)):
            [cold] = speech.run(request("cold", PROMPTS["first"]))
            assert result_of(cold)[:2] == oracle(PROMPTS["first"], text_seed=seed)
        rows = {}
        for speech in (first, second):
            speech.pipeline = Pipeline(list(speech.pipeline.stages.values()), [hidden])
            [warm] = speech.run(request("warm", PROMPTS["first"]))
            assert warm.metrics["thinker"].hit_rows["hidden"] == 12
            [fresh] = speech.run(request("fresh", PROMPTS["first"], salt="another's"))
            rows[speech] = [collected(progress, *hidden) for progress in (warm, fresh)]
        assert all(torch.allclose(*pair, atol=1e-5) for pair in rows.values())


def test_without_caching_nothing_is_stored_looked_up_or_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("caching is off")

    for method in ("reserve_name", "find", "count", "touch", "put"):
        monkeypatch.setattr(OutputCache, method, never)
    monkeypatch.setattr("headstart.omni.engine_stage._rows_digest", never)
    monkeypatch.setattr("headstart.omni.function_stage.content_bytes", never)
    with Speech(caching=False) as speech:
        monkeypatch.setattr(speech.thinker.engine.manager, "block_hashes", never)
        done = speech.run(*(request(name, PROMPTS[name]) for name in PROMPTS))
        assert [result_of(progress) for progress in done] == [wanted(name) for name in PROMPTS]


def with_image(seed: int) -> PreparedPrompt:
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
    items = (MultiModalItem(b"image %d" % seed, 2, 6),)
    extras = PromptExtras(items, PrecomputedEmbeddings([PlacedRows(2, rows)]))
    return PreparedPrompt([5, 6, *[90] * 6, 7, 8, 9, 10], extras=extras)


def test_another_image_of_the_same_shape_is_another_prefix_in_every_stage() -> None:
    outcomes = {}
    for caching in (False, True):
        with Speech(caching=caching) as speech:
            done = [
                speech.run(request(f"{n}", with_image(seed)))[0] for n, seed in enumerate([1, 2, 1])
            ]
            outcomes[caching] = [result_of(progress) for progress in done]
    assert outcomes[True] == outcomes[False]
    assert outcomes[True][0] == outcomes[True][2] != outcomes[True][1]
    hits = [[p.metrics[s].cached_tokens for s in ("thinker", "talker")] for p in done]
    assert hits == [[0, 0], [0, 0], [11, 12]]


def test_eviction_of_only_rows_or_only_kv() -> None:
    with Speech(num_blocks=9, talker_options={"num_blocks": 40}) as speech:
        speech.run(request("1", PROMPTS["first"]))
        speech.cache.clear()
        [no_rows] = speech.run(request("2", PROMPTS["first"]))
        assert result_of(no_rows) == wanted("first")
        assert no_rows.metrics["thinker"].cached_tokens == 0
        assert no_rows.metrics["talker"].cached_tokens == 15
        speech.run(request("3", [60] * 28))
        [no_kv] = speech.run(request("4", PROMPTS["first"]))
        assert result_of(no_kv) == wanted("first")
        assert no_kv.metrics["thinker"].cached_tokens == 0
        [both] = speech.run(request("5", PROMPTS["first"]))
        assert both.metrics["thinker"].cached_tokens == 12


@pytest.mark.parametrize("steps", [1, 2, 4, 6, 9])
def test_an_abort_reaches_every_stage_of_only_its_request(steps: int) -> None:
    with Speech() as speech:
        aborted = start(speech.pipeline, request("aborted", PROMPTS["first"]))
        other = start(speech.pipeline, request("other", PROMPTS["other question"]))
        for _ in range(steps):
            speech.pipeline.step()
        assert speech.pipeline.abort("aborted") is aborted
        assert aborted.finish_reason == "abort"
        assert speech.pipeline.abort("aborted") is None
        speech.run()
        assert result_of(other) == wanted("other question")
        [again] = speech.run(request("aborted", PROMPTS["first"]))
        assert result_of(again) == wanted("first")


@pytest.mark.parametrize("broken", [1, 3, 5])
def test_an_error_in_one_stage_ends_the_request_in_all(broken: int) -> None:
    with Speech() as speech:
        speech.break_pass = broken
        [failed] = speech.run(request("bad", PROMPTS["first"]))
        assert failed.finish_reason == "error"
        assert isinstance(failed.error, EngineError)
        assert str(failed.error) == (
            "stage 'thinker': the step failed: ValueError: broken on purpose"
        )
        speech.check_idle()
        [progress] = speech.run(request("good", PROMPTS["first"]))
        assert result_of(progress) == wanted("first")


def test_a_failed_function_ends_only_its_request() -> None:
    with Speech() as speech:
        plan = speech.vocoder._plan
        speech.vocoder._plan = type(plan)(
            function=fail_once_of(plan.function), block=plan.block, context=plan.context
        )
        bad, good = speech.run(
            request("bad", PROMPTS["first"]), request("good", PROMPTS["something else"])
        )
        assert str(bad.error) == "stage 'vocoder': RuntimeError: no sound"
        assert result_of(good) == wanted("something else")


def fail_once_of(function: Any) -> Any:
    calls = iter(range(1000))

    def wrapper(*args: Any) -> torch.Tensor:
        if next(calls) == 0:
            raise RuntimeError("no sound")
        return function(*args)

    return wrapper


def test_invalid_requests_are_refused_before_any_work() -> None:
    with Speech() as speech:
        with pytest.raises(RequestError, match="at least one token"):
            start(speech.pipeline, request("r", []))
        with pytest.raises(RequestError, match="no stage 'singer'"):
            start(speech.pipeline, request("r", [1], options={"singer": {}}))
        start(speech.pipeline, request("r", [1]))
        with pytest.raises(RequestError, match="'r' is in use"):
            start(speech.pipeline, request("r", [1]))
        speech.run()


def test_a_text_of_one_token_is_spoken() -> None:
    with Speech() as speech:
        short = {"thinker": SamplingParams(temperature=0, max_tokens=1)}
        [progress] = speech.run(request("r", PROMPTS["first"], params=short))
        text, codes, _ = result_of(progress)
        assert (text, codes) == oracle(PROMPTS["first"], think=1)


def test_an_invalid_pipeline_is_refused() -> None:
    with Speech() as speech:
        stages = list(speech.pipeline.stages.values())
        with pytest.raises(ConfigError, match="'hum' of 'talker', which has no such output"):
            Pipeline(stages, [Input("talker", "hum")])
        with pytest.raises(ConfigError, match="two stages have the same name"):
            Pipeline([*stages, stages[0]])
        with pytest.raises(ConfigError, match="takes 'hidden' of 'thinker'"):
            Pipeline([speech.talker])


def test_in_deterministic_mode_cached_rows_have_the_same_bits() -> None:
    collects = [Input("thinker", "hidden"), Input("thinker", "feature")]
    rows = {}
    for caching in (False, True):
        with Speech(caching=caching, deterministic=True) as speech:
            speech.pipeline = Pipeline(list(speech.pipeline.stages.values()), collects)
            speech.run(request("before", PROMPTS["other question"]))
            [progress] = speech.run(request("r", PROMPTS["first"]))
            assert (progress.metrics["thinker"].cached_tokens > 0) == caching
            rows[caching] = [collected(progress, *source) for source in collects]
    assert all(map(torch.equal, rows[False], rows[True]))


def test_a_request_that_waits_for_rows_can_be_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_ready = TalkerFeed.is_ready
    waits = iter(range(40))

    def late(feed: TalkerFeed, num_tokens: int) -> bool:
        held_up = num_tokens == 18 and feed.request.request_id == "first" and next(waits, None)
        return is_ready(feed, num_tokens) and not held_up

    monkeypatch.setattr(TalkerFeed, "is_ready", late)
    with Speech(talker_options={"num_blocks": 8}) as speech:
        first, second = speech.run(
            request("first", PROMPTS["first"]), request("second", PROMPTS["other question"])
        )
        assert result_of(first) == wanted("first")
        assert result_of(second) == wanted("other question")
        assert next(waits, None) is None


def test_a_talker_without_all_rows_fails() -> None:
    with Speech() as speech:
        feed = speech._talk(request("r", PROMPTS["first"]))
        feed.take("thinker", StageStarted("r", 14, 4, []))
        feed.take("thinker", OutputEvent("r", Chunk("hidden", 0, torch.zeros(9, WIDTH))))
        assert feed.prompt() is None
        with pytest.raises(EngineError, match="ended with 9 rows of 'hidden' for a prompt of 14"):
            feed.end("thinker")


def test_a_feed_that_raises_any_error_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(source: str, event: object) -> None:
        raise ValueError("rows of another width")

    with Speech() as speech:
        bad, good = (
            start(speech.pipeline, request(name, prompt))
            for name, prompt in zip(("bad", "good"), PROMPTS.values(), strict=False)
        )
        monkeypatch.setattr(speech.talker._states["bad"].feed, "take", take)
        while not (bad.finish_reason and good.finish_reason):
            speech.pipeline.step()
        assert good.finish_reason == "done"
        assert isinstance(bad.error, EngineError)
        assert "its feed failed: ValueError: rows of another width" in str(bad.error)
