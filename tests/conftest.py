"""What holds for every test: few threads, no network, reproducible examples."""

import os

# Before torch is first imported, here or in a child process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `import headstart` does, which may come after torch here: models load with a thread for every
# core, and the tests keep every core busy.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HEADSTART_CACHE_DIR"] = "off"  # or commands would hit what earlier tests asked

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On two noisy cores a slow example says nothing about the code.
settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
# `--hypothesis-profile deep`: where a test names no number of its own, for minutes and hours.
settings.register_profile("deep", settings.get_profile("house"), max_examples=1000)
settings.load_profile("house")

# What is imported stays for good, and so do the tests: 4 % of the time went by looking through
# them for garbage. A test that rests on what is collected collects it itself.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model, written to a folder of this test run and not to the user's cache."""
    from headstart.models.demo.llama import demo_model_path

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_DEMO_DIR", str(tmp_path_factory.mktemp("headstart-cache")))
        yield demo_model_path()
