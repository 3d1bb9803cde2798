"""Internal parts of an engine that tests read; only this file knows where they are."""

from headstart import LLM
from headstart.attention import PagedKVMemory
from headstart.engine.engine import EngineCore
from headstart.engine.image_cache import EncoderCache
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Scheduler
from headstart.engine.tiering.tiers import Tiers
from headstart.tiers.transfers import Loader
from headstart.tiers.worker import GuardedStore


def runner_of(engine: EngineCore) -> Runner:
    return engine._runner


def kv_memory(engine: EngineCore) -> PagedKVMemory:
    return runner_of(engine)._memory


def scheduler_of(engine: EngineCore) -> Scheduler:
    return engine._scheduler


def loader_of(tiers: Tiers) -> Loader:
    return tiers._loader


def first_tier(tiers: Tiers) -> GuardedStore:
    return tiers._tiers[0]


def encoder_users(cache: EncoderCache) -> list[object]:
    """Return the requests that hold rows of images."""
    return [user for entry in cache._entries.values() for user in entry.users]


def remembered_chats(llm: LLM) -> int:
    return len(llm.chats._memory)


def preempt_last(engine: EngineCore) -> None:
    """Preempt the request that was admitted last."""
    scheduler = scheduler_of(engine)
    scheduler._preempt(scheduler.running.pop())
