"""What a replay gave, in numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean as mean
from typing import Any

from headstart.replay.replica import Job, Replica


@dataclass(slots=True)
class ReplayResult:
    """The numbers of one trace, router and fleet.

    hit_rate: tokens of prompts that were hit, of all. ttft_*: seconds from a request's arrival
    to its first token. tpot_*: seconds a token after the first, of requests with more than one.
    imbalance: tokens of prompts that the busiest replica computed, over the mean. load: tokens of
    prompts computed, over what the replicas could compute in that time if they did nothing else.
    evictions: cached blocks whose memory was reused. seconds: from the first request to the last
    token. events_per_second: requests and steps simulated in a second of this machine.
    """

    router: str
    replicas: int
    requests: int
    prompt_tokens: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    imbalance: float
    load: float
    evictions: int
    seconds: float
    events_per_second: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)


def summarise(
    router: str, jobs: Sequence[Job], replicas: Sequence[Replica], computing: int, seconds: float
) -> ReplayResult:
    """The result of finished jobs; there is at least one. The first replicas compute prompts."""
    waits = sorted(job.first_token - job.arrived for job in jobs)
    paces = sorted(
        (job.finished - job.first_token) / (job.num_output - 1)
        for job in jobs
        if job.num_output > 1
    ) or [0.0]
    work = [replica.computed_tokens for replica in replicas[:computing]]
    asked = sum(job.num_tokens for job in jobs)
    return ReplayResult(
        router=router,
        replicas=len(replicas),
        requests=len(jobs),
        prompt_tokens=asked,
        hit_rate=sum(job.hit_tokens for job in jobs) / asked,
        ttft_mean=mean(waits),
        ttft_p50=_percentile(waits, 0.5),
        ttft_p99=_percentile(waits, 0.99),
        tpot_mean=mean(paces),
        tpot_p99=_percentile(paces, 0.99),
        imbalance=max(work) / mean(work),
        load=mean(work) / replicas[0].speed.prefill_rate / seconds,
        evictions=sum(replica.manager.num_evictions for replica in replicas),
        seconds=seconds,
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of them lies, between the two nearest by their distance.

    >>> _percentile([1.0, 2.0, 4.0], 0.5), _percentile([1.0, 2.0, 4.0], 0.75)
    (2.0, 3.0)
    """
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
