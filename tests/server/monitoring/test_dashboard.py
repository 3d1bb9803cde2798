"""The Grafana dashboard queries metrics that the server has, and shows all of them."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import Running, running
from tests.tiny_models import save_chatting

FILE = Path(__file__).parents[3] / "docs" / "grafana" / "headstart.json"
_METRIC = re.compile(r"\b(?:vllm|headstart):\w+")
_LABELS = re.compile(r"by \(([\w, ]+)\)")


def read_board() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return board


def queries(board: dict[str, Any]) -> list[str]:
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def served(server: Running) -> dict[str, set[str]]:
    """Return the names of the server's samples, each with its labels."""
    text = httpx.get(f"{server.url}/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_queried_and_served_metrics_match(tmp_path: Path) -> None:
    with running(cache_dir=str(tmp_path)) as server:  # with the metrics of a tier
        tiers = server.llm.engine.tiers
        assert tiers is not None
        tiers.stats.loaded_tokens["disk"] += 0  # a tier is reported once it has loaded tokens
        tiers._faults.note("a load failed", "on purpose")  # and faults once one has occurred
        labels = served(server)
    for name in ("lfm2", "gemma3"):  # with states of recurrent layers, and with window blocks
        with running(save_chatting(name, tmp_path / name), num_blocks=256) as server:
            labels |= served(server)
    board = read_board()
    queried = {name for query in queries(board) for name in _METRIC.findall(query)}
    assert queried - labels.keys() == set()
    names = [name for name in labels if not name.endswith("_created")]
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in queried}
    ours = {name for name in families if _METRIC.match(name)}
    assert ours - shown == set(), "metrics that no panel shows"
    for query in queries(board):
        for label in _LABELS.findall(query):
            for name in _METRIC.findall(query):
                assert set(label.split(", ")) <= labels[name], query


def test_panels_do_not_overlap() -> None:
    panels = read_board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert position["x"] + position["w"] <= 24
        assert not cells & occupied, panel["title"]
        occupied |= cells


def panels_with_data(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_grafana_11_imports_it() -> None:
    """Any Grafana imports it: no panel names a data source or plugin of one machine.

    39 is the schema version of Grafana 11.0. Older schemas are migrated; newer ones may have
    unknown fields. Grafana 11 has no Angular panels (graph, singlestat, table-old).
    """
    board = read_board()
    assert 36 <= board["schemaVersion"] <= 39
    assert board["title"] and len(board["uid"]) <= 40 and board.get("id") is None
    assert {panel["type"] for panel in board["panels"]} <= {"row", "stat", "timeseries"}
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    source = variables["datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["model"]["type"] == "query" and variables["model"]["datasource"] == chosen
    for panel in panels_with_data(board):
        assert panel["datasource"] == chosen, panel["title"]
        names = [target["refId"] for target in panel["targets"]]
        assert names and len(set(names)) == len(names), panel["title"]
        assert all(target["datasource"] == chosen for target in panel["targets"]), panel["title"]
    known_names = variables.keys() | {"__rate_interval"}
    for query in queries(board):
        assert 'model_name=~"$model"' in query
        assert set(re.findall(r"\$\{?(\w+)", query)) <= known_names, query


def test_every_panel_has_the_unit_of_its_metrics() -> None:
    for panel in panels_with_data(read_board()):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        expressions = [target["expr"] for target in panel["targets"]]
        in_seconds = all(re.search(r"_seconds(_bucket|_sum)\b", query) for query in expressions)
        is_share = all(")) / sum(" in query or "_perc{" in query for query in expressions)
        expected = "s" if in_seconds else "percentunit" if is_share else "short"
        assert unit == expected, panel["title"]
