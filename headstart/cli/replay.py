"""`headstart replay`, which simulates prefix caching and routing on a trace of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.bar import Bar
from rich.console import RenderableType
from rich.table import Table

from headstart.cli.options import GroupedCommand, GroupedOption, flags, take_options
from headstart.cli.terminal import OutputConsole, count, decode_argument, draw_svg, progress_bar
from headstart.cluster.router import DEFAULT_POLICY, POLICIES
from headstart.errors import ConfigError
from headstart.replay import (
    WORKLOADS,
    Fleet,
    Optimum,
    ReplayResult,
    SpeedModel,
    Trace,
    best_hit_rate,
    make_workload,
    read_trace,
)
from headstart.replay import replay as run_replay

_BAR = 40  # columns of the longest bar
_HEADINGS = (
    *("hit %", "ttft s", "p50 s", "p99 s", "token ms", "p99 ms"),
    *("imbalance", "load", "evicted"),
)
_MIN_BLOCK = 16
_WORKLOAD_REQUESTS = 2000
_option = partial(click.option, cls=GroupedOption)


@click.command(cls=GroupedCommand, short_help="Simulate many replicas on a trace.")
@click.argument("trace")
@_option("--replicas", default=1, show_default=True, help="Number of replicas.")
@_option(
    "--router",
    "routers",
    type=click.Choice([*POLICIES, "all"]),
    multiple=True,
    default=[DEFAULT_POLICY],
    show_default=True,
    help="Routing policy, or all to compare them; may be given several times.",
)
@_option(
    "--prefill-replicas",
    default=0,
    show_default=True,
    help="Number of replicas that only compute prompts; other replicas only decode.",
)
@_option("--kv-tokens", default=2_000_000, show_default=True, help="KV cache per replica (tokens).")
@_option("--block-size", type=int, help="Tokens in a block; default: as in the trace, at least 16.")
@_option("--requests", type=int, help="Number of requests to replay.")
@_option("--copies", default=1, show_default=True, help="Multiply the number of users by this.")
@_option("--speed", default=1.0, show_default=True, help="Multiply the rate of sessions by this.")
@_option("--seed", default=0, show_default=True, help="Seed of a synthetic workload.")
@_option(
    "--eviction",
    default="adaptive-lru",
    show_default=True,
    help="Eviction policy, as in the engine.",
)
@_option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@_option("--plot", type=click.Path(path_type=Path), help="Draw the results into this SVG file.")
@flags(SpeedModel)
def replay(trace: str, **options: Any) -> None:
    """Replay TRACE through real cache managers and the real router, in simulated time.

    TRACE is a file (JSON lines of Mooncake or headstart, or an npz file of sessions) or the name of
    a synthetic workload: shared-prompt, documents, chats, agents. No model runs.
    """
    plot: Path | None = options["plot"]
    if plot is not None:  # checked before the replay, which may take minutes
        if plot.suffix.lower() != ".svg":
            raise ConfigError(f"--plot is {plot}; allowed: a file whose name ends in .svg")
        if not plot.parent.is_dir():
            raise ConfigError(f"--plot is {plot}, and {plot.parent} is not a folder")
    speed = take_options(options, SpeedModel)
    workload = _open(decode_argument(trace), options)
    fleet = Fleet(
        options["replicas"],
        options["kv_tokens"],
        options["block_size"] or max(workload.grain, _MIN_BLOCK),
        options["eviction"],
        options["prefill_replicas"],
    )
    results = []
    for router in list(POLICIES) if "all" in options["routers"] else options["routers"]:
        with progress_bar(router) as advance:
            results.append(run_replay(workload, fleet, router, speed, advance))
    with progress_bar("one engine") as advance:
        optimum = best_hit_rate(workload, fleet, advance)
    if options["as_json"]:
        figures = {
            "trace": workload.name,
            "requests": len(workload.requests),
            "fleet": asdict(fleet),
            "routers": [asdict(result) for result in results],
            "one_engine": asdict(optimum),
        }
        click.echo(json.dumps(figures))
    else:
        _print(workload, fleet, results, optimum)
    if plot is not None:
        _draw(plot, workload, results, optimum)


def _open(name: str, options: Mapping[str, Any]) -> Trace:
    requests: int | None = options["requests"]
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests is {requests}; allowed: at least 1")
    if name in WORKLOADS:
        trace = make_workload(name, requests or _WORKLOAD_REQUESTS, options["seed"])
    elif Path(name).is_file():
        trace = read_trace(Path(name))
    else:
        matches = get_close_matches(name, WORKLOADS, 1, 0.7)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise ConfigError(
            f"{name} is not a file; allowed: a trace, or {', '.join(WORKLOADS)}{hint}"
        )
    trace = trace.copied(options["copies"])
    if options["speed"] != 1:
        trace = trace.speed_up(options["speed"])
    return trace if requests is None else trace.head(requests)


def _print(trace: Trace, fleet: Fleet, results: list[ReplayResult], optimum: Optimum) -> None:
    prefill = f" ({fleet.prefill_replicas} for prompts)" if fleet.prefill_replicas else ""
    click.echo(
        f"{trace.name}: {count(len(trace.requests), 'request')} in {trace.seconds:,.0f} s, "
        f"{trace.num_tokens / len(trace.requests):,.0f} prompt tokens each\n"
        f"{count(fleet.replicas, 'replica')}{prefill}, {fleet.kv_tokens:,} tokens of KV memory "
        f"each, blocks of {fleet.block_size}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    table.add_column("router")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.router,
            f"{100 * result.hit_rate:.1f}",
            *(_seconds(t) for t in (result.ttft_mean, result.ttft_p50, result.ttft_p99)),
            *(f"{1000 * t:.0f}" for t in (result.tpot_mean, result.tpot_p99)),
            f"{result.imbalance:.2f}",
            f"{result.load:.2f}",
            f"{result.evictions:,}",
        )
    console = OutputConsole(highlight=False)
    console.width = max(console.width, 120)  # never break rows, which other programs may read
    console.print(table)
    click.echo(f"one engine, all memory: {100 * optimum.same_memory:.1f} % hit")
    click.echo(f"one engine, no limit: {100 * optimum.unlimited:.1f} % hit")


def _seconds(value: float) -> str:
    """Format seconds with at least three digits.

    >>> _seconds(0.1234), _seconds(12.345), _seconds(1234.5)
    ('0.123', '12.3', '1,234')
    """
    digits = 2 if value < 1e-3 else max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{min(digits, 3)}f}"


def _draw(path: Path, trace: Trace, results: list[ReplayResult], optimum: Optimum) -> None:
    rates = {result.router: 100 * result.hit_rate for result in results}
    rates["one engine, all memory"] = 100 * optimum.same_memory
    panels = {
        "token hit rate, %": rates,
        "time to first token, mean, s": {r.router: r.ttft_mean for r in results},
        "time to first token, p99, s": {r.router: r.ttft_p99 for r in results},
    }
    parts: list[RenderableType] = []
    for heading, values in panels.items():
        bars = Table(box=None, show_header=False, title=f"\n{heading}", title_justify="left")
        largest = max(values.values()) or 1
        for name, value in values.items():
            bars.add_row(name, Bar(largest, 0, value, width=_BAR), f"{value:,.4g}")
        parts.append(bars)
    try:
        path.write_text(draw_svg(parts, trace.name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot is {path}: {error.strerror}") from error
