"""`headstart replay`: what prefix caching and routing would do for a trace of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from headstart.cli.options import SPEED, GroupedCommand, GroupedOption
from headstart.cli.progress import count, progress_bar
from headstart.cli.streams import as_typed
from headstart.cluster.policies import DEFAULT_POLICY, POLICIES
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
from headstart.replay.plot import draw_bars

__all__ = ["replay"]

_HEADINGS = (
    *("hit %", "ttft s", "p50 s", "p99 s", "token ms", "p99 ms"),
    *("imbalance", "load", "evicted"),
)
_LEAST_BLOCK = 16
_WORKLOAD_REQUESTS = 2000
_option = partial(click.option, cls=GroupedOption)


def _speed_options(command: Any) -> Any:
    """A flag for each field of the speed model."""
    for field in reversed(fields(SpeedModel)):
        command = _option(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            show_default=True,
            help=field.metadata["help"],
            group=SPEED,
        )(command)
    return command


@click.command(cls=GroupedCommand, short_help="Simulate many engines on a trace.")
@click.argument("trace")
@_option("--replicas", default=1, show_default=True, help="Engines with a cache each.")
@_option(
    "--router",
    "routers",
    type=click.Choice([*POLICIES, "all"]),
    multiple=True,
    default=[DEFAULT_POLICY],
    show_default=True,
    help="Who gets a request; may be given several times, all compares them.",
)
@_option(
    "--prefill-replicas",
    default=0,
    show_default=True,
    help="So many of them compute prompts alone, and the others decode.",
)
@_option("--kv-tokens", default=2_000_000, show_default=True, help="KV memory of each, in tokens.")
@_option("--block-size", type=int, help="Tokens in a block; default: those of the trace, or 16.")
@_option("--requests", type=int, help="Take so many requests of the trace.")
@_option("--copies", default=1, show_default=True, help="So many times the users.")
@_option("--speed", default=1.0, show_default=True, help="Sessions begin so many times as often.")
@_option("--seed", default=0, show_default=True, help="Another synthetic workload.")
@_option("--eviction", default="adaptive-lru", show_default=True, help="As in the engine.")
@_option("--json", "as_json", is_flag=True, help="Print JSON, one line.")
@_option("--plot", type=click.Path(path_type=Path), help="Draw the table into this SVG.")
@_speed_options
def replay(trace: str, **options: Any) -> None:
    """Replay TRACE through real cache managers and the real router, in simulated time.

    TRACE is a file (Mooncake's JSON lines, headstart's, or an npz of sessions) or the name of a
    synthetic workload: shared-prompt, documents, chats, agents. No model runs.
    """
    plot: Path | None = options["plot"]
    if plot is not None:
        _check_plot(plot)
    speed = SpeedModel(**{field.name: options[field.name] for field in fields(SpeedModel)})
    found = _open(as_typed(trace), options)
    fleet = Fleet(
        options["replicas"],
        options["kv_tokens"],
        options["block_size"] or max(found.grain, _LEAST_BLOCK),
        options["eviction"],
        options["prefill_replicas"],
    )
    routers = options["routers"]
    if "all" in routers:
        routers = list(POLICIES)
    results = []
    for router in routers:
        with progress_bar(router) as advance:
            results.append(run_replay(found, fleet, router, speed, advance))
    with progress_bar("one engine") as advance:
        optimum = best_hit_rate(found, fleet, advance)
    if options["as_json"]:
        click.echo(json.dumps(_as_json(found, fleet, results, optimum)))
    else:
        _print(found, fleet, results, optimum)
    if plot is not None:
        _draw(plot, found, results, optimum)


def _check_plot(plot: Path) -> None:
    """Raise ConfigError for what cannot be drawn, before minutes of a replay."""
    if plot.suffix.lower() != ".svg":
        raise ConfigError(f"--plot is {plot}; allowed: a file whose name ends in .svg")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot is {plot}, and {plot.parent} is no folder")


def _open(name: str, options: Mapping[str, Any]) -> Trace:
    requests: int | None = options["requests"]
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests is {requests}; allowed: at least 1")
    if name in WORKLOADS:
        trace = make_workload(name, requests or _WORKLOAD_REQUESTS, options["seed"])
    elif Path(name).is_file():
        trace = read_trace(Path(name))
    else:
        near = next(iter(get_close_matches(name, WORKLOADS, 1, 0.7)), None)
        meant = f"; did you mean {near}?" if near is not None else ""
        told = f"{name} is no file; allowed: a trace, or {', '.join(WORKLOADS)}"
        raise ConfigError(told + meant)
    trace = trace.copied(options["copies"])
    if options["speed"] != 1:
        trace = trace.faster(options["speed"])
    return trace if requests is None else trace.head(requests)


def _as_json(
    trace: Trace, fleet: Fleet, results: list[ReplayResult], optimum: Optimum
) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "fleet": asdict(fleet),
        "routers": [asdict(result) for result in results],
        "one_engine": asdict(optimum),
    }


def _print(trace: Trace, fleet: Fleet, results: list[ReplayResult], optimum: Optimum) -> None:
    mean = trace.num_tokens / len(trace.requests)
    click.echo(
        f"{trace.name}: {count(len(trace.requests), 'request')} in {trace.seconds:,.0f} s, "
        f"{mean:,.0f} prompt tokens each"
    )
    parts = f" ({fleet.prefill_replicas} for prompts)" if fleet.prefill_replicas else ""
    replicas = "1 replica" if fleet.replicas == 1 else f"{fleet.replicas} replicas"
    click.echo(
        f"{replicas}{parts}, {fleet.kv_tokens:,} tokens of KV memory each, "
        f"blocks of {fleet.block_size}"
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
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a row stays a row where another program reads it
    console.print(table)
    click.echo(f"one engine, all memory: {100 * optimum.same_memory:.1f} % hit")
    click.echo(f"one engine, no limit: {100 * optimum.unlimited:.1f} % hit")


def _seconds(value: float) -> str:
    """Three digits.

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
    try:
        path.write_text(draw_bars(trace.name, panels), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot is {path}: {error.strerror}") from error
