"""What Ray raises, as errors of ours: the one place that tells Ray's errors apart."""

from __future__ import annotations

from typing import Any

from headstart.errors import EngineError, HeadstartError, ReplicaLostError

try:
    from ray.exceptions import (
        ActorDiedError,
        NodeDiedError,
        ObjectLostError,
        RayActorError,
        RayTaskError,
    )

    # A large part of an answer lies on its replica's machine, and may be lost with it.
    _LOST: tuple[Any, ...] = (RayActorError, NodeDiedError, ObjectLostError)
except ModuleNotFoundError:  # without Ray nothing raises these
    ActorDiedError = RayTaskError = ()
    _LOST = ()

__all__ = ["has_died", "read_error"]


def has_died(error: Exception) -> bool:
    """True for a replica that is gone, with all that it held; one out of reach may be back."""
    return isinstance(error, ActorDiedError)


def read_error(error: Exception) -> HeadstartError:
    """What a call of a replica raised, as if it had been raised here.

    ReplicaLostError: the replica died, or cannot be reached and may still be there.
    """
    if isinstance(error, _LOST):
        return ReplicaLostError(str(error).partition("\n")[0])
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, HeadstartError):
            return cause
        return EngineError(f"a replica failed: {type(cause).__name__}: {cause}")
    if isinstance(error, HeadstartError):
        return error
    # Ray's own, such as an application that was deleted meanwhile.
    return EngineError(f"the replicas cannot be asked: {type(error).__name__}: {error}")
