"""Options of a server with replicas; command line flags are made from these fields."""

from dataclasses import dataclass, fields

from headstart.cluster.router import DEFAULT_POLICY, POLICIES
from headstart.errors import ConfigError
from headstart.validation import Number, OneOf, check_fields, option

_COUNTS = Number(int, 1, 4096)


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """The number of engines and the resources of each. Raises ConfigError."""

    replicas: int | None = option(
        None, "engines behind this server, on Ray Serve; default: one, in this process", _COUNTS
    )
    max_replicas: int | None = option(
        None, "maximum number of replicas; Ray starts more as requests queue up", _COUNTS
    )
    requests_per_replica: int = option(
        32, "target for Ray's scaling: unfinished requests per replica", Number(int, 1)
    )
    replica_cpus: float | None = option(
        None,
        "CPUs that Ray reserves for a replica; default: an equal share of this machine's CPUs, or "
        "1 with RAY_ADDRESS",
        Number(float, 0, above_low=True),
    )
    replica_gpus: float | None = option(
        None, "GPUs that Ray reserves for a replica; default: 1 with device cuda", Number(float, 0)
    )
    routing: str = option(
        DEFAULT_POLICY, "how a replica is chosen for a request", OneOf(tuple(POLICIES))
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for field in fields(self):
            value = getattr(self, field.name)
            if not self.is_wanted and value != field.default:
                raise ConfigError(
                    f"{field.name} is {value!r}; allowed: only with replicas or max_replicas"
                )
        if self.most < self.least:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; allowed: at least {self.least} "
                "(the value of replicas)"
            )

    @property
    def is_wanted(self) -> bool:
        """True if replicas are used."""
        return self.replicas is not None or self.max_replicas is not None

    @property
    def least(self) -> int:
        """The minimum number of replicas."""
        return self.replicas or 1

    @property
    def most(self) -> int:
        """The maximum number of replicas."""
        return self.max_replicas or self.least
