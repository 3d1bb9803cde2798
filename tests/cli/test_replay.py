"""`headstart replay`: its table, JSON and SVG, and errors."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from headstart.cli.main import main
from headstart.cluster import POLICIES

SMALL = ["chats", "--requests", "30", "--replicas", "3", "--kv-tokens", "40000"]


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["replay", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_routers_are_compared_in_a_table_and_a_picture(tmp_path: Path) -> None:
    svg = tmp_path / "replay.svg"
    result = call(*SMALL, "--router", "all", "--plot", str(svg))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("chats: 30 requests in ")
    assert lines[1] == "3 replicas, 40,000 tokens of KV memory each, blocks of 16"
    assert [line.split()[0] for line in lines[3:-2]] == list(POLICIES)
    assert lines[-2].startswith("one engine, all memory")
    assert max(map(len, lines)) <= 80, "a row does not fit into a terminal"
    texts = [element.text or "" for element in ElementTree.parse(svg).iter()]
    words = [text.replace("\N{NO-BREAK SPACE}", " ").strip() for text in texts]
    assert {*POLICIES, "chats", "token hit rate, %"} <= set(words)


def test_one_replica_is_in_the_singular() -> None:
    lines = call("chats", "--requests", "1").stdout.splitlines()
    assert lines[0].startswith("chats: 1 request in ")
    assert lines[1].startswith("1 replica, 2,000,000 tokens of KV memory each")


def test_json_is_one_line_with_every_number() -> None:
    result = call(*SMALL, "--router", "expected", "--router", "prefix", "--json")
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert [router["router"] for router in report["routers"]] == ["expected", "prefix"]
    assert report["fleet"]["replicas"] == 3 and report["requests"] == 30
    for router in report["routers"]:
        assert 0 < router["hit_rate"] <= report["one_engine"]["unlimited"]
        assert router["ttft_p99"] >= router["ttft_p50"] > 0


def test_a_file_is_replayed_with_more_users(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"time": time, "tokens": list(range(40)), "output": 3} for time in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    report = json.loads(call(str(path), "--copies", "2", "--speed", "2", "--json").stdout)
    assert report["requests"] == 10
    assert report["fleet"]["block_size"] == 16
    assert report["routers"][0]["hit_rate"] == pytest.approx(4 * 39 / (5 * 40), abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.jsonl"], "nothing.jsonl is not a file; allowed: a trace, or shared-prompt"),
        (["docments"], "shared-prompt, documents, chats, agents; did you mean documents?"),
        ([*SMALL, "--replicas", "0"], "replicas is 0; allowed: at least 1"),
        ([*SMALL, "--requests", "0"], "--requests is 0; allowed: at least 1"),
        ([*SMALL, "--copies", "0"], "copies is 0"),
        ([*SMALL, "--speed", "-1"], "speed is -1.0; allowed: above 0"),
        ([*SMALL, "--block-size", "24"], "block_size is 24; allowed: a multiple of 16"),
        ([*SMALL, "--kv-tokens", "100"], "of KV memory, and a replica has 96"),
        ([*SMALL, "--eviction", "x"], "eviction is 'x'"),
        ([*SMALL, "--prefill-rate", "0"], "prefill_rate is 0.0"),
        ([*SMALL, "--router", "x"], "'x' is not one of"),
        ([*SMALL, "--plot", "no/such/folder.svg"], "no/such is not a folder"),
        ([*SMALL, "--plot", "bars.png"], "bars.png; allowed: a file whose name ends in .svg"),
    ],
)
def test_an_invalid_option_is_one_sentence(arguments: list[str], says: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr.splitlines()[-1]
    assert not result.stdout
