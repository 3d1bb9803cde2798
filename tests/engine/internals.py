"""Parts of an engine that tests look into: the one place that knows where they are."""

from headstart.attention import PagedKVMemory
from headstart.engine.engine import EngineCore
from headstart.engine.runner import Runner
from headstart.engine.scheduler import Scheduler


def runner_of(engine: EngineCore) -> Runner:
    return engine._runner


def kv_memory(engine: EngineCore) -> PagedKVMemory:
    return runner_of(engine)._memory


def scheduler_of(engine: EngineCore) -> Scheduler:
    return engine._scheduler


def preempt_last(engine: EngineCore) -> None:
    """Preempt the request that was admitted last."""
    scheduler = scheduler_of(engine)
    scheduler._preempt(scheduler.running.pop())
