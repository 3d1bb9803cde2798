"""Pipelines that are described in TOML."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.errors import ConfigError
from headstart.omni.function_stage import StageCall, WholeStage
from headstart.omni.output_cache import OutputCache, content_digest
from headstart.omni.pipeline import StageNode, read_graph
from headstart.omni.stage import Alignment, Input, Kind, OmniRequest, Output, Stage, StageSpec
from tests.omni.pipelines import start

TEXT = """
collects = ["second.doubled"]

[stages.second]
kind = "double"
autoregressive = false
takes = ["first.numbers"]
gives = { doubled = { alignment = "request", dtype = "float32", required = true } }
options = { times = 3 }

[stages.first]
autoregressive = false
gives = { numbers = "request" }
enable_prefix_caching = false
"""


class Calls:
    """Two stage factories with a count of computed results."""

    def __init__(self) -> None:
        self.cache = OutputCache(1 << 16)
        self.made = 0
        self.pipeline = read_graph(TEXT).build({"first": self.first, "double": self.double})

    def first(self, node: StageNode) -> Stage:
        return WholeStage(node.spec, lambda job: {"numbers": torch.tensor(job.request.prompt)})

    def double(self, node: StageNode) -> Stage:
        def times(job: StageCall) -> dict[str, torch.Tensor]:
            self.made += 1
            return {"doubled": job.inputs[Input("first", "numbers")] * float(node.options["times"])}

        return WholeStage(
            node.spec, times, lambda job: content_digest(*job.inputs.values()), self.cache
        )

    def run(self, prompt: list[float], salt: str | None = None) -> list[float]:
        progress = start(self.pipeline, OmniRequest(request_id="r", prompt=prompt, salt=salt))
        while self.pipeline.has_unfinished:
            self.pipeline.step()
        assert progress.error is None
        [chunk] = progress.chunks[Input("second", "doubled")]
        values: list[float] = chunk.rows.tolist()
        return values


def test_a_graph_is_written_and_read() -> None:
    second, first = read_graph(TEXT).nodes
    assert second.spec == StageSpec(
        name="second",
        takes=(Input("first", "numbers"),),
        gives=(Output("doubled", Alignment(Kind.REQUEST), "float32", True),),
        autoregressive=False,
    )
    assert (second.kind, second.options) == ("double", {"times": 3})
    assert first.kind == "first" and not first.spec.enable_prefix_caching


def test_an_engine_stage_is_built_without_unused_rows() -> None:
    """Its blocks are stored on disk only with their rows, which would never be computed."""
    text = """
    collects = ["user.out"]
    [stages.model]
    gives = { taken = "token", untaken = "token", once = "request" }
    [stages.user]
    autoregressive = false
    takes = ["model.taken"]
    gives = { out = "token" }
    """
    outputs: dict[str, list[str]] = {}

    def make(node: StageNode) -> Stage:
        outputs[node.spec.name] = [output.name for output in node.spec.gives]
        return WholeStage(replace(node.spec, autoregressive=False), lambda job: {})

    read_graph(text).build({"model": make, "user": make})
    assert outputs == {"model": ["taken", "once"], "user": ["out"]}


def test_a_result_is_cached_by_content_and_tenant() -> None:
    calls = Calls()
    assert calls.run([1.0, 2.0]) == [3.0, 6.0]
    assert calls.run([1.0, 2.0]) == [3.0, 6.0]
    assert calls.made == 1
    assert calls.run([2.0, 1.0]) == [6.0, 3.0]
    assert calls.run([1.0, 2.0], salt="another tenant") == [3.0, 6.0]
    assert calls.made == 3


def test_a_digest_depends_on_dtype_shape_and_boundaries() -> None:
    tensors = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(4, dtype=torch.int32),
    ]
    assert len({content_digest(tensor) for tensor in tensors}) == 4
    assert content_digest("ab", "c") != content_digest("a", "bc")
    assert content_digest(torch.zeros(4)) == content_digest(torch.zeros(4))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stages = 1", "a table"),
        ("[stages.a]\nfoo = 1", "stage 'a' has the key 'foo'"),
        ("[stages.a]\ntakes = ['b']", "allowed: stage.output"),
        ("[stages.a]\nenable_prefix_caching = 1", r"a\.enable_prefix_caching is 1.* True or False"),
        ("[stages.a]\ngives = { x = { required = 1 } }", r"x\.required is 1"),
        ("[stages.a]\ngives = { x = 'rows' }", "alignment is 'rows'"),
        ("[stages.a]\ngives = { x = { kind = 'token' } }", "output 'x' has the key 'kind'"),
        ("other = 1\n[stages.a]", "a pipeline has the key 'other'"),
        ("[stages.a", "not TOML"),
        ('[stages.""]', "a stage's name is '', a str; allowed: a string of at least one character"),
        ("[stages.a]\ngives = { '' = 'token' }", "an output's name is '', a str; allowed:"),
    ],
)
def test_an_invalid_graph_is_reported(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_graph(text)


def test_a_failed_build_is_reported_and_closes_its_stages() -> None:
    calls = Calls()
    with pytest.raises(ConfigError, match=r"the stage kind is 'double'; allowed: \['first'\]"):
        read_graph(TEXT).build({"first": calls.first})
    ring = "\n".join(
        f"[stages.{a}]\nkind = 'first'\nautoregressive = false\n"
        f"takes = ['{b}.numbers']\ngives = {{ numbers = 'request' }}"
        for a, b in ("ab", "ba")
    )
    with pytest.raises(ConfigError, match="depend on one another"):
        read_graph(ring).build({"first": calls.first})


def test_a_function_cannot_be_declared_autoregressive() -> None:
    with pytest.raises(ConfigError, match="'a' is a function"):
        WholeStage(StageSpec(name="a"), lambda job: {})


@pytest.mark.parametrize("name", ["", None, 3, "\ud800"])
@pytest.mark.parametrize("make", [lambda name: StageSpec(name=name), Output])
def test_a_name_that_cannot_be_a_key_of_the_store_is_refused(
    make: Callable[[Any], object], name: Any
) -> None:
    """The rows of a stage named "" would collide with the branches of the prefix tree."""
    with pytest.raises(ConfigError, match=r"^an? \w+'s name .*; allowed: "):
        make(name)
