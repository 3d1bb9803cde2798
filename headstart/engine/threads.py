"""How many threads compute: one for each physical core that this process may use.

Two threads on one core share its multipliers, and gain nothing in a product; a thread more than
the control group's quota only gets all of them stopped sooner.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def count_cores() -> int:
    """Physical cores of this process's affinity, not more than its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        return cores_of(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_of(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Physical cores behind these CPUs, at least one; `root` is where /proc and /sys are.

    Where Linux does not say which CPUs share a core, each counts as one.
    """
    topology = root / "sys/devices/system/cpu"
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus}
    return max(1, int(min([float(len(cores)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that this process's control group and those around it may use."""
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's, while what is mounted begins further down.
        group = Path(place.lstrip("/"))
        for part in (group, *group.parents):
            if controllers:
                folder = mount / "cpu" / part
                quota, period = (
                    _read(folder / "cpu.cfs_quota_us"),
                    _read(folder / "cpu.cfs_period_us"),
                )
            else:
                quota, _, period = (_read(mount / part / "cpu.max") or "").partition(" ")
            if quota and period and quota.isdigit():  # neither "max" nor -1
                yield int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
