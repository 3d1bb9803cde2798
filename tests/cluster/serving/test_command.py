"""`headstart serve --replicas` refuses wrong flags in one sentence, before anything starts."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from headstart.cli.main import main
from headstart.errors import ConfigError

QUIET = ["serve", "--port", "0", "--no-api-keys"]


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Make imports of a package fail, and re-import headstart's modules that need it."""

    def uninstall(package: str, ours: str) -> None:
        for name in [name for name in sys.modules if name.startswith(ours)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return uninstall


def test_without_ray_the_extra_to_install_is_named(uninstall: Callable[[str, str], None]) -> None:
    uninstall("ray", "headstart.cluster.serving.")
    done = CliRunner().invoke(main, [*QUIET, "--replicas", "2"])
    assert done.exit_code == 2
    assert (
        'the server needs ray: pip install ".[cluster]" in the folder of the clone' in done.stderr
    )


def test_without_any_extra_one_command_to_install_is_named(
    uninstall: Callable[[str, str], None],
) -> None:
    """Regression: it named the extras one after the other."""
    uninstall("fastapi", "headstart.server.")
    for args, extra in (["--replicas", "2"], "cluster"), ([], "serve"):
        done = CliRunner().invoke(main, [*QUIET, *args])
        assert (done.exit_code, f'needs fastapi: pip install ".[{extra}]"' in done.stderr) == (
            2,
            True,
        ), done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--routing", "prefix"],
            "routing is 'prefix'; allowed: only with replicas or max_replicas",
        ),
        (["--replicas", "0"], "replicas is 0; allowed: a whole number from 1 to 4096"),
        (
            ["--replicas", "3", "--max-replicas", "2"],
            "max_replicas is 2; allowed: at least 3 (the value of replicas)",
        ),
        (["--replicas", "2", "--model", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(main, [*QUIET, *arguments])
    assert (done.exit_code, text in done.stderr) == (2, True), done.stderr


@pytest.mark.filterwarnings("ignore")  # warnings of Ray and its dependencies
@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "RAY_ADDRESS is '127.0.0.1:1', and nothing listens at that address"),
        ("ray://127.0.0.1:10001", "Ray's client, for URLs such as ray://, does not"),
    ],
)
def test_a_wrong_address_of_ray_is_refused_at_once(address: str, text: str) -> None:
    pytest.importorskip("ray", reason="replicas need Ray")
    env = {"RAY_ADDRESS": address}
    done = CliRunner().invoke(main, [*QUIET, "--replicas", "2"], env=env)
    assert (done.exit_code, text in done.stderr) == (2, True), done.stderr


def test_relative_model_paths_become_absolute_for_replicas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replicas run in separate working directories."""
    paths: list[object] = []

    def make(model: str, engine: dict[str, object], *rest: object) -> object:
        paths.extend([model, engine["chat_template"]])
        raise ConfigError("no more is needed")

    cluster = ModuleType("headstart.cluster.serving.cluster")
    cluster.ReplicaCluster = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cluster.__name__, cluster)
    template = ["--chat-template", "a.jinja"]
    (tmp_path / "model").mkdir()
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    with chdir(tmp_path):
        done = CliRunner().invoke(main, [*QUIET, "--replicas", "2", "--model", "model", *template])
    assert "no more is needed" in done.stderr
    assert paths == [str(tmp_path / "model"), str(tmp_path / "a.jinja")]


def test_a_late_call_does_not_restart_ray() -> None:
    """Regression: a thread of Ray Serve called Ray after its shutdown, and Ray started again.

    A server whose Ray was stopped with it (SIGTERM to all of a service) was then connected to
    the Ray of another program on the machine.
    """
    pytest.importorskip("ray", reason="replicas need Ray")
    late = """
import headstart.cluster.serving.cluster, ray
try:
    ray.put(1)
except ray.exceptions.RaySystemError:
    pass
print(ray.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", late], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False"], done.stderr
