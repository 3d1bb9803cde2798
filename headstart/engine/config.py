"""The engine's options; command line flags are made from these fields."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headstart.cache.config import CacheOptions
from headstart.engine.params import SEEDS
from headstart.errors import ConfigError
from headstart.validation import Either, Number, OneOf, check_fields, option

MAX_DRAFT = 15  # tokens
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

_COUNTS = Number(int, 1)
_THREADS = Number(int, 1, 1024)  # the process aborts if it cannot start all threads
_SHARES = Number(float, 0, 1, above_low=True)
_DTYPES = OneOf(("auto", "float32", "bfloat16", "float16"))
_WEIGHTS = OneOf(("auto", "int8", "int5", "int4"))
_KV_DTYPES = OneOf(("auto", "int8"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CacheOptions):
    """The options of an engine. Raises ConfigError for a value outside its range."""

    dtype: str = option("auto", "auto: the checkpoint's, or float32 if that is faster", _DTYPES)
    weights: str = option("auto", "format of linear layers; auto: the checkpoint's", _WEIGHTS)
    device: str = option("cpu", "device of the model: cpu, cuda, cuda:1, ...")
    # The attention kernels support only these sizes; the cache supports any size.
    block_size: int = option(16, "tokens in a KV block", OneOf(BLOCK_SIZES))
    num_blocks: int | None = option(
        None, "KV blocks; default: as many as the memory holds", _COUNTS
    )
    kv_cache_memory: int | None = option(
        None, "bytes for K/V; default: a share of the free memory", _COUNTS
    )
    kv_cache_dtype: str = option("auto", "data type of K/V; auto: the model's", _KV_DTYPES)
    kv_cache_fraction: float = option(0.4, "share of free memory that K/V may take", _SHARES)
    num_states: int | None = option(
        None, "slots for states of recurrent layers; default: a share of the K/V memory", _COUNTS
    )
    num_window_blocks: int | None = option(
        None, "KV blocks of sliding-window layers; default: at least a tenth of num_blocks", _COUNTS
    )
    max_model_len: int | None = option(None, "maximum tokens in prompt and answer", _COUNTS)
    max_num_batched_tokens: int = option(2048, "maximum tokens computed in a step", _COUNTS)
    max_num_seqs: int = option(256, "maximum number of running requests", _COUNTS)
    max_bypassed: int = option(
        8, "maximum number of times that requests with better hits bypass a request", Number(int, 0)
    )
    speculation: int | str = option(
        "auto",
        "maximum tokens drafted for a request in a step; auto: as many as save time",
        Either(OneOf(("auto", "off")), Number(int, 0, MAX_DRAFT)),
    )
    share_attention: bool = option(True, "attend once to prefixes that running requests share")
    deterministic: bool = option(False, "bitwise equal logits for any cache hits and any batch")
    encoder_cache_rows: int = option(8192, "maximum rows of cached image embeddings", _COUNTS)
    max_images: int = option(16, "maximum images in a prompt", _COUNTS)
    max_image_pixels: int = option(2**25, "maximum width times height of an image", _COUNTS)
    num_threads: int | None = option(None, "torch threads; default: this process's cores", _THREADS)
    enable_lora: bool = option(True, "allow LoRA adapters")
    max_loras: int = option(8, "maximum LoRA adapters in memory, and so in a step", _COUNTS)
    max_lora_rank: int = option(64, "maximum rank of a LoRA adapter", _COUNTS)
    cache_dir: str | None = option(None, "folder for K/V that outlive the process; off: no folder")
    cache_dir_bytes: int = option(10 * 2**30, "maximum bytes of the folder for all models", _COUNTS)
    cache_words: bool = option(
        False, "store the texts of blocks for headstart cache ls, except blocks with a cache salt"
    )
    remote_cache: str | None = option(
        None, "Valkey or Redis server for K/V that machines share, redis://host:port/db"
    )
    seed: int = option(0, "requests that set no seed get this seed, seed + 1, ...", SEEDS)
    debug: bool = option(False, "check every invariant of the cache after every step")

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    @property
    def max_draft(self) -> int:
        """Maximum number of tokens drafted for a request in a step; 0 if `speculation` is off."""
        if isinstance(self.speculation, int):
            return self.speculation
        return MAX_DRAFT if self.speculation == "auto" else 0

    @property
    def disk_folder(self) -> Path | None:
        """The folder of the disk tier; None without a disk tier."""
        return None if self.cache_dir in (None, "", "off") else Path(self.cache_dir).expanduser()

    @property
    def threads(self) -> int:
        """Torch threads: `num_threads`, else OMP_NUM_THREADS, else one for each core."""
        variable = os.environ.get("OMP_NUM_THREADS", "")
        number = int(variable) if variable.isdecimal() and len(variable) < 9 else 0
        return self.num_threads or (number if number in _THREADS else count_cores())


def make_config(options: dict[str, Any]) -> EngineConfig:
    """Return the configuration of these options. Raises ConfigError, also for an unknown option."""
    allowed = {field.name for field in fields(EngineConfig)}
    unknown = sorted(map(str, options.keys() - allowed))
    if unknown:
        raise ConfigError(
            f"unknown option {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}"
        )
    return EngineConfig(**options)


def count_cores() -> int:
    """Return the number of physical cores that CPU affinity and control group allow.

    A second thread on a core does not make a matrix product faster, since the two share the core's
    multipliers. If more threads run than the quota allows, the system pauses all of them.
    """
    if hasattr(os, "sched_getaffinity"):
        return cores_of(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_of(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Return the number of physical cores of these logical CPUs, at least one, within the quota.

    root: the folder that contains `proc` and `sys`. If Linux does not report the topology, each CPU
    counts as a core.
    """
    topology = root / "sys/devices/system/cpu"
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus}
    return max(1, int(min([float(len(cores)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control group and its parents, in CPUs."""
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group_path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container, `group_path` may be a path of the host that does not exist below the
        # mount. Then only the last parent, the mount itself, has a quota: that of the container.
        group = Path(group_path.lstrip("/"))
        for part in (group, *group.parents):
            if controllers:
                folder = mount / "cpu" / part
                quota = _read(folder / "cpu.cfs_quota_us")
                period = _read(folder / "cpu.cfs_period_us")
            else:
                quota, _, period = (_read(mount / part / "cpu.max") or "").partition(" ")
            if quota and period and quota.isdigit():  # neither "max" nor -1
                yield int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
