"""Load a prefix, or compute it: by what each has taken on this machine of late."""

__all__ = ["ComputeRate", "is_worth_loading"]

_LEAST_TOKENS = 32  # of a step that tells how fast prompts are computed
_WEIGHT = 0.3  # of the last step
_OVERHEAD = 0.002  # seconds that a load takes besides its bytes


class ComputeRate:
    """Tokens of prompts that are computed in a second: a moving average."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens; steps that mostly decode do not count."""
        if tokens < _LEAST_TOKENS:
            return
        rate = tokens / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + _WEIGHT * (rate - self.value)

    def seconds(self, tokens: int) -> float:
        """Seconds to compute so many tokens; 0 before anything was computed."""
        return tokens / self.value if self.value else 0.0


def is_worth_loading(tokens: int, nbytes: int, compute: float | None, load: float | None) -> bool:
    """True if so many bytes come sooner than so many tokens are computed.

    compute: tokens a second, load: bytes a second. What was never measured is tried.
    """
    if compute is None or load is None:
        return True
    return _OVERHEAD + nbytes / load < tokens / compute
