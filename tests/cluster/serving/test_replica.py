"""One replica, called as Ray Serve would. Without Ray."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from headstart import SamplingParams
from headstart.cache import TokenSequence
from headstart.cluster.serving.messages import AnswerRequest
from headstart.cluster.serving.replica import EngineReplica
from headstart.errors import EngineError, ModelError

ASKED = AnswerRequest(
    request_id="a",
    prompt_token_ids=[5, 6, 7],
    params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    salt=None,
    owner=None,
    priority=0,
    marks=(),
    follower=None,
)


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    made = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
    yield made
    made._llm.close()


class _BrokenGauges:
    async def update(self) -> None:
        raise KeyError("headstart:new_metric")


def test_metrics_that_cannot_be_told_do_not_make_a_replica_ill(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(replica, "_gauges", _BrokenGauges())
    asyncio.run(replica.check_health())
    told = "the metrics of this replica cannot be told to Ray"
    assert any(told in record.getMessage() for record in logged)


def test_an_attempt_may_come_where_the_one_before_still_runs(replica: EngineReplica) -> None:
    """A replica that could not be reached for a moment may be asked again for the same request."""

    async def ask_twice() -> None:
        async with (
            aclosing(replica.answer(ASKED)) as first,
            aclosing(replica.answer(replace(ASKED, attempt=1))) as second,
        ):
            parts = [await anext(first), await anext(second)]
        assert parts[0].answers == parts[1].answers

    asyncio.run(ask_twice())


def test_tenants_share_what_a_request_says_is_public_and_nothing_after_it() -> None:
    """Replicas took no public prefixes. One that was started anew learns them by the requests."""
    prompt = list(range(3, 3 + 70))  # four blocks and a part of one

    async def ask(replica: EngineReplica, salt: str, num_public: int) -> int:
        asked = replace(
            ASKED, request_id=salt, prompt_token_ids=prompt, salt=salt, num_public=num_public
        )
        async with aclosing(replica.answer(asked)) as parts:
            heads = [part.head async for part in parts]
        assert heads[0] is not None
        return heads[0].num_cached_tokens

    async def ask_all() -> None:
        made = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
        names = made._llm.engine.manager.names
        assert await ask(made, "a", 2) == 0
        assert await ask(made, "b", 2) == 2 * names.block_size
        sequence = TokenSequence("asked", prompt, salt="c", public=names.public)
        sequence.cut(names.block_size)
        assert sequence.num_public == 2
        made._llm.close()

    asyncio.run(ask_all())


def test_a_replica_that_did_not_start_goes_without_a_word() -> None:
    made = EngineReplica.__new__(EngineReplica)
    with pytest.raises(ModelError):
        made.__init__("/nowhere", {})  # type: ignore[misc]
    made.__del__()


def test_a_closed_engine_is_ill() -> None:
    made = EngineReplica("headstart-tiny", {"num_blocks": 64, "dtype": "float32"})
    made.__del__()
    with pytest.raises(EngineError):
        asyncio.run(made.check_health())
