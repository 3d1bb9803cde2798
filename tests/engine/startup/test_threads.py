"""One thread for each physical core, within the quota."""

from pathlib import Path

import pytest

from headstart.engine.config import EngineConfig, cores_of, count_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return root


def siblings(pairs: dict[int, str]) -> dict[str, str]:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {topology.format(cpu): text for cpu, text in pairs.items()}


FOUR_ON_TWO = siblings({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    root = write(tmp_path, FOUR_ON_TWO)
    assert cores_of({0, 1, 2, 3}, root) == 2
    assert cores_of({0, 2}, root) == 1
    assert cores_of({1, 2}, root) == 2


def test_without_a_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert cores_of({0, 1, 5}, tmp_path) == 3


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("300000 100000", 3), ("250000 100000", 2), ("1 10", 1)]
)
def test_a_quota_limits_the_group_and_its_children(tmp_path: Path, limit: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container",
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
        "sys/fs/cgroup/pod/cpu.max": limit,
    }
    assert cores_of(range(8), write(tmp_path, files)) == cores


def test_a_quota_of_cgroups_v1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "50000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert cores_of(range(8), write(tmp_path, files)) == 3


def test_explicit_numbers_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert EngineConfig().threads == count_cores() >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert EngineConfig().threads == 3
    assert EngineConfig(num_threads=5).threads == 5


@pytest.mark.parametrize("value", ["0", "-2", "two", "\N{SUPERSCRIPT TWO}", "2000", "9" * 5000])
def test_invalid_environment_values_are_ignored(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert EngineConfig().threads == count_cores()
