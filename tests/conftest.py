"""Settings for every test: few threads, no network, reproducible examples."""

import os

# Before torch is first imported, here or in a child process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `import headstart` sets it too, but here it may follow torch. Models load with a thread for every
# core, and the tests keep every core busy.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Servers set it too. Otherwise a late task of Ray Serve waits forever for the Ray of a finished
# test, and blocks all later calls.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ["HEADSTART_CACHE_DIR"] = "off"  # or commands would hit prompts of earlier tests

import gc
import logging
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# On two noisy cores, a slow example does not indicate slow code.
settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30
)
# `--hypothesis-profile deep` runs for minutes or hours, unless a test sets its number of examples.
settings.register_profile("deep", settings.get_profile("house"), max_examples=1000)
settings.load_profile("house")

# Imported modules and collected tests are never garbage, but the collector spent 4 % of the time on
# them. Tests that depend on a collection call `gc.collect`.
gc.disable()


class KeptRecords(logging.Handler):
    """Log records of the running test, from warnings up."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)  # which fails the test if a line cannot be formatted
        self.records.append(record)


# It replaces pytest's plugin, which visits thousands of loggers six times per test: 1.5 % of the
# time.
KEPT = KeptRecords()
logging.getLogger().addHandler(KEPT)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    KEPT.records.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and KEPT.records:
        report.sections.append(("Captured log", "\n".join(map(KEPT.format, KEPT.records))))
    return report


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collect log records of a test, from warnings up, even from loggers that do not propagate."""
    named = logging.root.manager.loggerDict.values()
    alone = [entry for entry in named if isinstance(entry, logging.Logger) and not entry.propagate]
    for logger in alone:
        logger.addHandler(KEPT)
    yield KEPT.records
    for logger in alone:
        logger.removeHandler(KEPT)


@pytest.fixture(scope="module", params=[True, False], ids=["amx", "avx512"])
def bf16_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run kernels with and without AMX for bfloat16, if the CPU has it; None is the default."""
    from headstart import native

    library, has_amx = native.library(), native.level() >= native.AMX
    if request.param and not has_amx:
        pytest.skip("no AMX here")
    if library is None or request.param is None:
        yield
        return
    library.headstart_native_use_amx(request.param)
    yield
    library.headstart_native_use_amx(has_amx)


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the switches of the compiled kernels in the environment."""

    def set_switches(native: str | None = None, cpu: str | None = None) -> None:
        for name, value in (("HEADSTART_NATIVE", native), ("HEADSTART_CPU", cpu)):
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_switches


@pytest.fixture
def amx_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose products as on a CPU with AMX while compiled kernels can be used."""
    from headstart.native import AMX, level, library
    from headstart.weights import products

    monkeypatch.setattr(products, "level", lambda: AMX if library() is not None else level())


@pytest.fixture
def own_byte_product() -> Iterator[None]:
    """Restore this CPU's product of bytes in kernels after the test."""
    from headstart import native

    yield
    if (library := native.avx2_library()) is not None:
        library.headstart_native_use_vnni(native.vnni())


# The limits that `limits` sets, by the name of its parameter.
TIER_LIMITS = {
    "deadline": "tiers.worker.DEADLINE",
    "changing": "tiers.worker.CHANGE_DEADLINE",
    "chunk_bytes": "tiers.worker.CHUNK_BYTES",
    "trial": "tiers.transfers._TRIAL",
    "least_wait": "tiers.transfers._MIN_WAIT",
    "drain_bytes": "tiers.transfers._DRAIN_BYTES",
    "remote_patience": "tiers.remote._TIMEOUT",
    "last_saves": "engine.tiering.tiers._LAST_SAVES",
    "queued_bytes": "engine.tiering.tiers._MAX_QUEUED_BYTES",
    "most_lookups": "engine.image_cache._MAX_LOOKUPS",
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set limits of the tiers, so that a test need not wait for seconds or move megabytes."""

    def set_limits(**values: float) -> None:
        for name, value in values.items():
            monkeypatch.setattr(f"headstart.{TIER_LIMITS[name]}", value)

    return set_limits


@pytest.fixture
def disk_loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Pass the store and the blocks of every load from a disk through a generator function."""
    from headstart.tiers.disk import DiskStore

    load = DiskStore.load

    def wrap(through: Callable[..., Any]) -> None:
        monkeypatch.setattr(
            DiskStore, "load", lambda store, names: through(store, load(store, names))
        )

    return wrap


@pytest.fixture
def loads_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load every stored prefix, even if a small model would compute it faster."""
    monkeypatch.setattr("headstart.engine.tiering.tiers.is_worth_loading", lambda *_: True)


def pytest_collection_finish() -> None:
    if "transformers" in sys.modules:  # not in the process that only distributes the tests
        from transformers import PreTrainedConfig

        # It formats each configuration for a log line that is never written:
        # 1.5 % of the time.
        PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use a folder of this run for demo models, in place of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("headstart-cache")
        patch.setenv("HEADSTART_DEMO_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def demo_model(demo_folder: Path) -> Path:
    """Make the demo model, with small layers."""
    from tests.small_demos import make_small_demo

    return make_small_demo("llama", demo_folder)


@pytest.fixture(scope="session")
def demo_vision(demo_folder: Path) -> Path:
    """Make the demo vision model, with small layers."""
    from tests.small_demos import make_small_demo

    return make_small_demo("vision", demo_folder)
