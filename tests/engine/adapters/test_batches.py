"""Requests with different adapters, and with none, in one batch answer as with PEFT."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, LoRARequest, SamplingParams
from headstart.cache import MissReason
from headstart.engine.engine import EngineCore
from headstart.errors import ConfigError, DamagedAdapterError, EngineError, RequestError
from headstart.models.lora_layers import ResidentAdapter
from tests.engine.tiny_llm import draft_always
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import save_tiny

TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

# Of different rank, scale and targets, as many ways to say so as PEFT has.
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "everything": {"target_modules": "all-linear", "r": 16, "use_rslora": True},
    "with the head": {"target_modules": ["k_proj", "lm_head"], "r": 3},
    "one layer": {
        "target_modules": r".*\.1\..*(o_proj|up_proj|down_proj)",
        "r": 8,
        "rank_pattern": {"up_proj": 5},
        "alpha_pattern": {"layers.1.mlp.down_proj": 40},
    },
}
NAMES = ["attention", None, "everything", "with the head", "one layer", "attention", None]


class World:
    """A tiny model, its adapters on disk, prompts that begin alike, and PEFT's answers."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self.model = save_tiny(architecture, folder / "model")
        self.adapters = {
            name: make_adapter(self.model, folder / name, seed, **options)
            for seed, (name, options) in enumerate(ADAPTERS.items())
        }
        generator = torch.Generator().manual_seed(1)
        common = torch.randint(3, 131, (21,), generator=generator).tolist()
        self.prompts = [
            common + torch.randint(3, 131, (count,), generator=generator).tolist()
            for count in (5, 9, 40, 3, 12, 1, 2)
        ]
        self.plain = Oracle(self.model, None)
        oracles = {name: Oracle(self.model, path) for name, path in self.adapters.items()}
        self.expected = [
            (oracles[name] if name else self.plain).greedy(prompt, TOKENS)
            for name, prompt in zip(NAMES, self.prompts, strict=True)
        ]

    def open(self, **options: Any) -> LLM:
        llm = LLM(self.model, **({"num_blocks": 64, "block_size": 8, "debug": True} | options))
        for name, path in self.adapters.items():
            llm.load_adapter(name, path)
        return llm


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def world(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def llm(llama: World) -> Iterator[LLM]:
    llm = llama.open()
    yield llm
    llm.close()


def answers(llm: LLM, prompts: list[list[int]], names: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, adapter=names, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_adapters_matter(world: World) -> None:
    """Otherwise the comparisons below would prove nothing."""
    for name, prompt, expected in zip(NAMES, world.prompts, world.expected, strict=True):
        assert (world.plain.greedy(prompt, TOKENS) == expected) == (name is None)


def test_drafts_do_not_change_answers(llama: World) -> None:
    llm = draft_always(llama.open(speculation=15))
    for _ in range(2):  # the second time all tokens are drafted
        assert answers(llm, llama.prompts, NAMES) == llama.expected
    assert llm.engine.drafting is not None
    assert llm.engine.drafting.num_accepted >= len(NAMES) * (TOKENS - 2)
    llm.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 12},
        {"max_loras": 2},
        {"max_num_seqs": 1},
        {"deterministic": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_one_batch_answers_as_peft_does(world: World, options: dict[str, Any]) -> None:
    """Prompts are cached or not, chunked, preempted, and have fewer places than adapters."""
    llm = world.open(**options)
    for _ in range(2):
        assert answers(llm, world.prompts, NAMES) == world.expected
    assert (llm.engine.num_preemptions > 0) == ("num_blocks" in options)
    assert len(llm.engine.adapters.resident) <= llm.engine.config.max_loras
    llm.engine.manager.check()
    llm.close()


def test_an_adapter_alone_and_then_none(llm: LLM, llama: World) -> None:
    """Hooks of one step's adapters are removed from the model before the next step."""
    before = answers(llm, [llama.prompts[1]], None)
    for name, prompt, expected in zip(NAMES, llama.prompts, llama.expected, strict=True):
        assert answers(llm, [prompt], name) == [expected]
    llm.reset_prefix_cache()
    assert answers(llm, [llama.prompts[1]], None) == before == [llama.expected[1]]
    model = llm.engine.model
    assert not any(model.layer(name)._forward_hooks for name in model.linear_widths())


def test_the_same_adapter_under_two_names_shares_blocks(llm: LLM, llama: World) -> None:
    twin = llm.load_adapter("twin", llama.adapters["everything"])
    assert twin.digest == llm.engine.adapters.find("everything").digest
    [first] = llm.generate(llama.prompts[2], GREEDY, adapter="everything")
    [second] = llm.generate(llama.prompts[2], GREEDY, adapter="twin")
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(llama.prompts[2]) - 1
    assert len(llm.engine.adapters.resident) == len(ADAPTERS)


def test_another_adapter_under_an_old_name_shares_none(llm: LLM, llama: World) -> None:
    [first] = llm.generate(llama.prompts[0], GREEDY, adapter="attention")
    llm.load_adapter("attention", llama.adapters["one layer"])
    [second] = llm.generate(llama.prompts[0], GREEDY, adapter="attention")
    assert second.num_cached_tokens == 0
    assert second.why_missed is not None
    assert second.why_missed.reason is MissReason.ADAPTER
    oracle = Oracle(llama.model, llama.adapters["one layer"])
    assert second.outputs[0].token_ids == oracle.greedy(llama.prompts[0], TOKENS)
    assert first.outputs[0].token_ids == llama.expected[0]


def test_a_miss_names_the_adapter_that_has_the_prefix(llm: LLM, llama: World) -> None:
    prompt = llama.prompts[4]
    [_] = llm.generate(prompt, GREEDY, adapter="one layer")
    [output] = llm.generate(prompt, GREEDY, adapter="attention")
    assert str(output.why_missed) == "from token 0 on: cached for another adapter, one layer"
    llm.reset_prefix_cache()
    [_] = llm.generate(prompt, GREEDY)
    [output] = llm.generate(prompt, GREEDY, adapter="attention")
    assert str(output.why_missed) == "from token 0 on: cached without an adapter"


def drain(engine: EngineCore) -> None:
    while engine.has_unfinished:
        engine.step()


def test_unloading_lets_running_and_waiting_requests_finish(llama: World, tmp_path: Path) -> None:
    llm = llama.open(max_num_seqs=1)
    engine = llm.engine
    groups = [llm.frontend.prepare(llama.prompts[0], GREEDY, adapter="attention") for _ in range(2)]
    for group in groups:
        engine.submit(group)
    engine.step()
    llm.unload_adapter("attention")
    with pytest.raises(RequestError, match="no adapter 'attention'; loaded: 'everything'"):
        llm.generate(llama.prompts[0], GREEDY, adapter="attention")
    drain(engine)
    for group in groups:
        assert group.output().outputs[0].token_ids == llama.expected[0]
    digest = groups[0].namespace.adapter
    engine.submit(llm.frontend.prepare(llama.prompts[1], GREEDY))
    drain(engine)
    assert digest not in engine.adapters.resident  # its memory is released
    with pytest.raises(RequestError, match="no adapter 'attention'"):
        llm.unload_adapter("attention")
    llm.close()


def test_the_least_recently_used_adapter_is_evicted_and_read_again(llama: World) -> None:
    llm = llama.open(max_loras=2)
    store = llm.engine.adapters
    order = ["attention", "everything", "one layer", "everything", "attention"]
    for name in order:
        at = NAMES.index(name)
        assert answers(llm, [llama.prompts[at]], name) == [llama.expected[at]]
    assert store.resident == [store.find(name).digest for name in ("everything", "attention")]
    llm.close()


@pytest.mark.parametrize("end", ["answered", "aborted", "aborted and gone"])
def test_other_requests_continue_while_an_adapter_is_read_again(
    llama: World, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the engine's thread read it, so all requests stopped.

    Here reading waits for their tokens. A request that was aborted in the meantime affects no other
    request.
    """
    llm = llama.open(max_loras=1)
    engine, read = llm.engine, llm.engine.adapters._read
    go = threading.Event()

    def slow(folder: Path) -> ResidentAdapter:
        assert go.wait(10), "no call released the gate"
        if end == "aborted and gone" and folder == llama.adapters["one layer"]:
            raise DamagedAdapterError("gone")
        return read(folder)

    monkeypatch.setattr(engine.adapters, "_read", slow)
    running = llm.frontend.prepare(llama.prompts[1], GREEDY)
    waiting = llm.frontend.prepare(llama.prompts[4], GREEDY, adapter="one layer")
    for group in (running, waiting):
        engine.submit(group)
    for _ in range(TOKENS - 2):
        assert [result.group for result in engine.step()] == [running]
    if end != "answered":
        engine.abort(waiting.request_id)
        waiting = llm.frontend.prepare(llama.prompts[2], GREEDY, adapter="everything")
        engine.submit(waiting)
        assert [result.group for result in engine.step()] == [running]
    go.set()
    drain(engine)
    assert running.output().outputs[0].token_ids == llama.expected[1]
    expected = llama.expected[4 if end == "answered" else 2]
    assert waiting.output().outputs[0].token_ids == expected
    llm.close()


def test_an_adapter_that_lost_its_name_while_unloaded_is_released(llama: World) -> None:
    llm = llama.open(max_loras=1)
    engine = llm.engine
    group = llm.frontend.prepare(llama.prompts[2], GREEDY, adapter="everything")
    engine.submit(group)
    llm.unload_adapter("everything")
    drain(engine)
    assert group.output().outputs[0].token_ids == llama.expected[2]
    assert answers(llm, [llama.prompts[1]], None) == [llama.expected[1]]
    assert engine.adapters.resident == []
    llm.close()


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_files_that_changed_are_never_mixed_in(llama: World, tmp_path: Path, damage: str) -> None:
    llm = llama.open(max_loras=1)
    path = make_adapter(llama.model, tmp_path / "mine", 11)
    llm.load_adapter("mine", path)
    expected = answers(llm, [llama.prompts[0]], "mine")
    answers(llm, [llama.prompts[0]], "everything")  # which takes the only place
    if damage == "changed":
        make_adapter(llama.model, path, 12)
        reason = "have changed since adapter 'mine' was loaded"
    else:
        (path / "adapter_config.json").unlink()
        reason = "is not an adapter"
    with pytest.raises(EngineError, match=reason):
        llm.generate([llama.prompts[0]] * 2, GREEDY, adapter="mine", use_tqdm=False)
    llm.engine.manager.check()
    assert llm.engine.manager.num_free_blocks == 64
    assert answers(llm, [llama.prompts[2]], "everything") == [llama.expected[2]]
    if damage == "changed":
        llm.load_adapter("mine", path)
        [output] = llm.generate(llama.prompts[0], GREEDY, adapter="mine")
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids != expected[0]
    llm.close()


def test_the_options_have_vllms_names(llama: World) -> None:
    llm = LLM(llama.model, num_blocks=64, enable_lora=True, max_loras=4, max_lora_rank=16)
    requests = [n and LoRARequest(n, at, str(llama.adapters[n])) for at, n in enumerate(NAMES, 1)]
    outputs = llm.generate(llama.prompts, GREEDY, lora_request=requests, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == llama.expected
    moved = LoRARequest("attention", 1, llama.adapters["one layer"])
    [output] = llm.generate(llama.prompts[4], GREEDY, lora_request=moved)
    assert output.outputs[0].token_ids == llama.expected[4]
    with pytest.raises(RequestError, match="are both set"):
        llm.generate(llama.prompts[0], GREEDY, adapter="attention", lora_request=requests[0])
    with pytest.raises(RequestError, match="2 adapters for 1 prompts"):
        llm.generate([llama.prompts[0]], GREEDY, adapter=["attention", None])
    llm.close()


def test_a_failed_load_leaves_the_name_as_it_was(llm: LLM, llama: World, tmp_path: Path) -> None:
    with pytest.raises(DamagedAdapterError):
        bad = make_adapter(llama.model, tmp_path / "bad")
        (bad / "adapter_model.safetensors").write_bytes(b"no")
        llm.load_adapter("attention", bad)
    assert answers(llm, [llama.prompts[0]], "attention") == [llama.expected[0]]
    for name, shown_name in (("", "''"), (None, "None"), (3, "3, a int"), ("\ud800", "lone")):
        with pytest.raises(ConfigError, match=f"an adapter's name .*{shown_name}"):
            llm.load_adapter(name, llama.adapters["attention"])  # type: ignore[arg-type]


def test_adapters_can_be_disabled(llama: World) -> None:
    llm = LLM(llama.model, num_blocks=8, enable_lora=False)
    with pytest.raises(ConfigError, match="enable_lora is False"):
        llm.load_adapter("attention", llama.adapters["attention"])
    llm.close()


def test_closing_ends_the_thread_that_reads_adapters(llama: World) -> None:
    """Regression: it stayed until the interpreter's end, one for each engine."""
    before = set(threading.enumerate())
    llm = llama.open(max_loras=1)
    assert answers(llm, [llama.prompts[2]], "everything") == [llama.expected[2]]
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"headstart-adapters_0", "headstart-engine"}
    for _ in range(2):
        llm.close()
        for thread in started:  # `close` does not wait for an adapter that is being read
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert llm.engine.adapters.resident == []
