"""K/V on their way from the replicas that compute prompts to those that decode."""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from headstart.replay.replica import Job, Replica
from headstart.replay.speed import SpeedModel


class Arrival(NamedTuple):
    """A prompt's K/V are where the request decodes: at that one of the receivers."""

    time: float
    receiver: int
    job: Job


class Transfers:
    """A link for each sender, which sends one prompt after another. All of a prompt is sent.

    Who decodes is chosen when the prompt is computed: the receiver with the fewest requests, the
    ones on their way to it included.
    """

    def __init__(self, receivers: Sequence[Replica], senders: int, speed: SpeedModel) -> None:
        self._receivers = receivers
        self._rate = speed.transfer_rate
        self._free_at = [0.0] * senders  # when the last prompt is sent
        self._coming = [0] * len(receivers)
        self._arrivals: list[tuple[float, int, Arrival]] = []  # a heap by time and ticket
        self._ticket = 0

    def next_time(self) -> float:
        """When the next prompt arrives; never, if none is on its way."""
        return self._arrivals[0][0] if self._arrivals else math.inf

    def send(self, job: Job, sender: int, now: float) -> None:
        """Choose who decodes, and send the prompt there."""
        loads = [
            (replica.num_active + coming, at)
            for at, (replica, coming) in enumerate(zip(self._receivers, self._coming, strict=True))
        ]
        receiver = min(loads)[1]
        self._coming[receiver] += 1
        end = max(now, self._free_at[sender]) + job.num_tokens / self._rate
        self._free_at[sender] = end
        self._ticket += 1
        heappush(self._arrivals, (end, self._ticket, Arrival(end, receiver, job)))

    def take(self) -> Arrival:
        """The next prompt that arrives."""
        arrival = heappop(self._arrivals)[2]
        self._coming[arrival.receiver] -= 1
        return arrival
