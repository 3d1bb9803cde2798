"""Adapters in deterministic mode, in chats, and for many callers at once."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headstart import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from headstart.engine.runner import StepLogits
from headstart.engine.step import Batch
from headstart.errors import AdapterNotFoundError, RequestError
from tests.engine.internals import runner_of
from tests.frontend.chat.test_requests import save_model
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import save_tiny
from tests.tiny_tokenizers import TINY_TOKENIZERS

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NAMES = ["one", None, "two", "one"]


class Files:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.adapters = {
            "one": make_adapter(self.model, folder / "one", 1, target_modules=["q_proj"], r=3),
            "two": make_adapter(self.model, folder / "two", 2, target_modules="all-linear", r=6),
        }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("llama")
    return Files(save_tiny("llama", folder / "model"), folder)


def record(llm: LLM) -> dict[tuple[str | None, tuple[int, ...]], Tensor]:
    """Record the logits of every sampled token from now on, by adapter and prefix."""
    seen: dict[tuple[str | None, tuple[int, ...]], Tensor] = {}
    run = runner_of(llm.engine).run

    def recording(batch: Batch) -> StepLogits:
        logits = run(batch)
        rows = iter(logits.values.split(logits.counts))
        for part, values in zip(batch.scheduled, rows, strict=True):
            if part.samples:
                sequence = part.request.sequence
                key = (sequence.namespace.adapter, tuple(sequence.token_ids))
                seen[key] = values[-1].clone()
        return logits

    runner_of(llm.engine).run = recording  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "bfloat16"), ("qwen3_moe", "float32")]
)
def test_deterministic_logits_are_bitwise_equal(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Cached or not, alone or in a mixed batch, preempted, and with too few places."""
    files = Files(save_tiny(architecture, tmp_path / "model"), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(3, 131, (21,), generator=generator).tolist()
    prompts = [[*common, *range(7, 7 + 4 * n)] for n in range(4)]
    recordings = []
    for options in ({}, {"enable_prefix_caching": False}, {"num_blocks": 8}, {"max_loras": 1}):
        settings = {
            "num_blocks": 64,
            "block_size": 8,
            "deterministic": True,
            "dtype": dtype,
        } | options
        llm = LLM(files.model, debug=True, speculation="off", **settings)
        for name, path in files.adapters.items():
            llm.load_adapter(name, path)
        recordings.append(record(llm))
        if not options:  # one by one, the second round from the cache
            for prompt, name in [*zip(prompts, NAMES, strict=True)] * 2:
                llm.generate(prompt, params, adapter=name)
        llm.generate(prompts, params, adapter=NAMES, use_tqdm=False)
        llm.close()
    for other in recordings[1:]:
        assert recordings[0].keys() == other.keys()
        assert all(torch.equal(recordings[0][key], logits) for key, logits in other.items())


def test_a_chat_continues_with_its_adapter(tmp_path: Path) -> None:
    """The second turn hits the first turn's tokens; with another adapter it hits none."""
    save_model(tmp_path / "model", TINY_TOKENIZERS["byte_level"]())
    files = Files(tmp_path / "model", tmp_path)
    llm = LLM(files.model, num_blocks=64)
    for name, path in files.adapters.items():
        llm.load_adapter(name, path)
    messages = [{"role": "user", "content": "a"}]
    [first] = llm.chat(messages, PARAMS, adapter="one")
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "b"},
    ]
    [second] = llm.chat(messages, PARAMS, adapter="one")
    assert second.num_cached_tokens >= len(first.prompt_token_ids) + 15
    [other] = llm.chat(messages, PARAMS, adapter="two")
    assert other.num_cached_tokens == 0
    llm.close()


def test_many_callers_with_different_adapters(llama: Files) -> None:
    prompts = [[5, 9, 14, 20 + at, *range(30, 60)] for at in range(4)]

    async def last(llm: AsyncLLM, prompt: list[int], name: str | None) -> list[int]:
        request = LoRARequest(name, 1, llama.adapters[name]) if name else None
        stream = llm.generate(prompt, PARAMS, lora_request=request)
        return [output async for output in stream][-1].outputs[0].token_ids

    async def all_at_once() -> list[list[int]]:
        llm = AsyncLLM(llama.model, num_blocks=64, max_loras=1, debug=True)
        calls = [last(llm, prompt, name) for prompt, name in zip(prompts, NAMES, strict=True)]
        answers = await asyncio.gather(*calls)
        llm.close()
        return answers

    for prompt, name, answer in zip(prompts, NAMES, asyncio.run(all_at_once()), strict=True):
        path = llama.adapters[name] if name else None
        assert answer == Oracle(llama.model, path).greedy(prompt, 16)


def test_loading_and_unloading_while_others_stream(llama: Files, tmp_path: Path) -> None:
    prompt = [5, 9, 14, *range(30, 60)]

    async def talk() -> list[RequestOutput]:
        llm = AsyncLLM(llama.model, num_blocks=64, debug=True)
        await llm.load_adapter("one", llama.adapters["one"])
        stream = llm.generate(prompt, PARAMS, adapter="one")
        outputs = [await anext(stream)]
        unused = await llm.load_adapter("unused", llama.adapters["two"])
        await llm.unload_adapter("unused")
        assert unused.digest not in llm.engine.adapters.resident  # at once, as from an LLM
        await llm.load_adapter("two", llama.adapters["two"])
        await llm.unload_adapter("one")
        with pytest.raises(RequestError, match="no adapter 'one'; loaded: 'two'"):
            await anext(llm.generate(prompt, PARAMS, adapter="one"))
        with pytest.raises(AdapterNotFoundError):
            await llm.load_adapter("three", tmp_path / "nowhere")
        outputs += [output async for output in stream]
        outputs += [output async for output in llm.generate(prompt, PARAMS, adapter="two")]
        llm.close()
        return outputs

    outputs = [output for output in asyncio.run(talk()) if output.finished]
    for output, name in zip(outputs, ("one", "two"), strict=True):
        expected = Oracle(llama.model, llama.adapters[name]).greedy(prompt, 16)
        assert output.outputs[0].token_ids == expected
