"""`headstart doctor` on this machine, and on simulated machines."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headstart import native
from headstart.cli import doctor
from headstart.cli.main import main
from tests.house.source import ROOT


def lines() -> dict[str, str]:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.stderr
    return {line[:9].strip(): line[10:] for line in done.stdout.splitlines()}


def test_this_machine() -> None:
    report = lines()
    assert {"headstart", "CPU", "kernels", "memory", "GPUs", "dtype"} <= report.keys()
    assert "torch" in report["headstart"] and "cores" in report["CPU"]
    assert report["memory"].endswith(" free")


def test_lines_without_torch_are_shown_before_its_import(tmp_path: Path) -> None:
    """Regression: nothing was shown during the import, which takes seconds."""
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "from headstart.cli.main import main; main()", "doctor"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["headstart", "CPU", "kernels", "memory"]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that simulates a machine with other instruction sets and kernels."""

    def become(flags: set[str], level: int, *, built: bool = True, vnni: int = 0) -> None:
        values = {"is_built": built, "vnni": vnni}
        values["avx2_library"] = object() if level >= 1 else None
        values["library"] = object() if level >= 2 else None
        for name, value in values.items():
            monkeypatch.setattr(native, name, lambda value=value: value)
        monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset(flags))
        monkeypatch.setattr("platform.machine", lambda: "x86_64")

    return become


AVX2 = {"avx2", "fma", "f16c"}


@pytest.mark.parametrize(
    ("flags", "level", "more", "kernels", "faster"),
    [
        (AVX2, 1, {}, "4 to 16 bits, and whole layers in steps of few tokens, all in", "int8"),
        (AVX2, 1, {"vnni": 1}, r"4 to 16 bits \(4 to 8 bits with VNNI\), and whole", "int8"),
        (AVX2, 0, {"built": False}, "not built", "install g++"),
        ({"avx2", "fma"}, 0, {}, "none is for this CPU", None),
        ({*AVX2, *native.NEEDED}, 2, {}, "all: whole layers", "int8"),
        (set(), 0, {}, "none is for this CPU", None),
        (AVX2, 1, {"HEADSTART_NATIVE": "0"}, "switched off by HEADSTART_NATIVE=0", None),
        (AVX2, 1, {"HEADSTART_CPU": "avx2"}, ".*; limited by HEADSTART_CPU=avx2$", "int8"),
    ],
)
def test_other_machines(
    flags: set[str],
    level: int,
    more: dict[str, Any],
    kernels: str,
    faster: str | None,
    pretend: Callable[..., None],
) -> None:
    env = {name: more.pop(name, None) for name in ("HEADSTART_NATIVE", "HEADSTART_CPU")}
    pretend(flags, level, **more)
    output = CliRunner().invoke(main, ["doctor"], env=env).stdout
    assert re.search(rf"^kernels +.*{kernels}", output, re.M)
    hints = re.findall(r"^faster +(.*)", output, re.M)
    ours = [hint for hint in hints if hint != "--device cuda"]
    assert bool(ours) == (faster is not None)
    assert faster is None or any(faster in hint for hint in ours)


def test_extras_match_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"]
    listed = {name: {*packages} for name, (_, packages) in doctor.EXTRAS.items()}
    # uvloop is not for every system, and the server runs without it.
    needed = {
        name: {
            re.split(r"[^\w-]", requirement)[0]
            for requirement in packages
            if ";" not in requirement
        }
        for name, packages in wanted.items()
    }
    needed["cluster"] = needed["cluster"] - {"headstart"} | needed["serve"]
    needed.pop("dev")
    assert listed == needed


def test_missing_extras_are_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: missing extras were reported only when a command failed."""

    def of_package(name: str) -> str:
        if name in missing:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", of_package)
    missing = {"gguf", "ray", "opentelemetry-sdk"}
    report = lines()
    assert report["extras"].startswith(
        "serve (the server), vision (images in prompts), structured ("
    )
    assert report["missing"] == (
        "gguf (GGUF files), cluster (replicas), otel (traces of requests): "
        'pip install ".[gguf,cluster,otel]" in the folder of the clone'
    )
    missing = set()
    assert "missing" not in lines() and "otel (traces" in lines()["extras"]
    missing = {package for _, packages in doctor.EXTRAS.values() for package in packages}
    assert lines()["extras"] == "none"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("HEADSTART_WIEGHTS", "HEADSTART_WEIGHTS"),  # of run, chat, serve
        ("HEADSTART_ROUTR", "HEADSTART_ROUTER"),  # of replay
        ("HEADSTART_NATIV", "HEADSTART_NATIVE"),  # of no flag
    ],
)
def test_typos_in_variables_of_every_command_are_reported(variable: str, meant: str) -> None:
    """Regression: `doctor` did not report environment variables that no command reads."""
    output = CliRunner().invoke(main, ["doctor"], env={variable: "0"}).stderr
    assert output == f"{variable} in the environment is not an option; did you mean {meant}?\n"
