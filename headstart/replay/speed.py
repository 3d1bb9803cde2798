"""The speed model: how long a replica's step takes."""

from dataclasses import dataclass

from headstart.errors import ConfigError
from headstart.validation import Number, check_fields, option


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    """A step that computes p tokens of prompts while n requests decode takes, in seconds,

        step_time + p / prefill_rate + n * decode_time

    and gives each decoding request a token. The defaults are those of a 70B model on four
    accelerators, roughly: 15,000 tokens of prompts or 50 steps of decoding a second. Attention
    over a long context costs what over a short one.

    chunk: tokens of prompts in a step at the most. max_running: requests that run at once.
    transfer_rate: of each replica that computes prompts for others; 13 GB/s for 128 KB a token.
    Raises ConfigError.
    """

    prefill_rate: float = option(15_000.0, "tokens of prompts a second", Number(float, 1))
    step_time: float = option(0.02, "seconds of a step without any prompt", Number(float, 0))
    decode_time: float = option(0.0001, "seconds a decoding request adds", Number(float, 0))
    chunk: int = option(2048, "tokens of prompts in a step", Number(int, 1))
    max_running: int = option(128, "requests that run at once", Number(int, 1))
    transfer_rate: float = option(
        100_000.0, "tokens a second whose K/V a prefill replica sends on", Number(float, 1)
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not self.step_time + self.decode_time:
            raise ConfigError("step_time and decode_time are 0; allowed: one of them above 0")

    def seconds(self, num_tokens: int, num_decoding: int) -> float:
        """How long one step takes."""
        return self.step_time + num_tokens / self.prefill_rate + num_decoding * self.decode_time
