"""Memory that is prefaulted for weights: its size, its content, and the models that get it."""

import json
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headstart.errors import DamagedModelError, ModelNotFoundError
from headstart.machine import multiplies_bfloat16
from headstart.models import prefetch
from headstart.models.loader import load_model
from headstart.models.prefetch import read_ahead
from headstart.native import avx2_library, library
from headstart.native.pages import ReadyMemory
from headstart.weights.bf16 import Bf16Weight, PackedWeight, packed_bytes
from headstart.weights.format import Linear
from headstart.weights.memory import Arena
from tests.models.paged import Paged
from tests.tiny_models import TINY

needs_kernels = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

MEGABYTE = 1 << 20


def touching() -> list[threading.Thread]:
    """Return the threads that touch memory."""
    return [thread for thread in threading.enumerate() if thread.name == "headstart-memory"]


def record_take(memory: ReadyMemory) -> list[mmap.mmap | None]:
    """Return a list of the results of `memory.take` from now on."""
    take, results = memory.take, list[mmap.mmap | None]()

    def record(size: int) -> mmap.mmap | None:
        results.append(take(size))
        return results[-1]

    memory.take = record  # type: ignore[method-assign]
    return results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY["llama"]().to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_memory_is_all_zeros_whenever_it_is_taken() -> None:
    for size in (1, 4096, 5 * MEGABYTE, 70 * MEGABYTE):
        memory = ReadyMemory(size, [])
        taken = memory.take(size)
        assert taken is not None and len(taken) >= size
        assert not touching(), "no thread writes to it any more"
        assert not torch.frombuffer(taken, dtype=torch.uint8).any()


def test_memory_is_taken_once_and_only_if_it_suffices() -> None:
    memory = ReadyMemory(MEGABYTE, [])
    assert memory.take(3 * MEGABYTE) is None
    assert memory.take(MEGABYTE) is not None
    assert memory.take(1) is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux has this file")
def test_unneeded_memory_is_released() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    memory = ReadyMemory(200 * MEGABYTE, [])
    for thread in touching():
        thread.join()
    before = resident()
    taken = memory.take(20 * MEGABYTE)
    assert taken is not None and before - resident() > 150 * MEGABYTE


def test_a_removed_file_is_left_to_the_loader(tmp_path: Path) -> None:
    memory = ReadyMemory(MEGABYTE, [tmp_path / "gone.safetensors"])
    assert memory.take(MEGABYTE) is not None


@needs_kernels
def test_packed_weights_use_it() -> None:
    weight = torch.randn(64, 32).to(torch.bfloat16)
    memory = ReadyMemory(MEGABYTE, [])
    results = record_take(memory)
    packed = PackedWeight(weight, arena=Arena([packed_bytes(*weight.shape)], memory))
    [taken] = results
    start = torch.frombuffer(taken, dtype=torch.uint8).data_ptr()
    assert start <= packed.panels.data_ptr() < start + MEGABYTE
    assert torch.equal(packed.unpack(), weight)


@needs_kernels
def test_it_does_not_change_a_model(folder: Path) -> None:
    memory = read_ahead(folder, "auto", "cpu")
    assert memory is not None
    one, other = load_model(folder), load_model(folder, ready_memory=memory)
    assert memory.take(1) is None, "it was taken"
    logits = []
    for model in (one, other):
        paged = Paged(model)
        sequence = paged.add(list(range(6)))
        paged.step([(sequence, 6)])
        logits.append(torch.stack(sequence.logits))
    assert torch.equal(*logits)


@pytest.fixture
def without_bfloat16(use_kernels: Callable[..., None]) -> None:
    """Pretend that the CPU has AVX2 but no products of bfloat16."""
    if avx2_library() is None:
        pytest.skip("no compiled kernels for AVX2 here")
    use_kernels(cpu="avx2")
    assert multiplies_bfloat16() is False


@pytest.mark.usefixtures("without_bfloat16")
def test_weights_that_stay_in_bfloat16_under_float32_use_it(folder: Path) -> None:
    """Regression: they were copied to memory that the system cleared page by page meanwhile."""
    memory = read_ahead(folder, "auto", "cpu")
    assert memory is not None
    assert memory.size == (folder / "model.safetensors").stat().st_size
    results = record_take(memory)
    one, other = load_model(folder), load_model(folder, ready_memory=memory)
    [taken] = results
    assert taken is not None
    start = torch.frombuffer(taken, dtype=torch.uint8).data_ptr()
    for name, module in other.module.named_modules():
        if isinstance(module, Linear):
            assert isinstance(module.matrix, Bf16Weight)
            assert start <= module.matrix.weight.data_ptr() < start + len(taken)
            expected = one.weight(name)
            assert expected is not None and torch.equal(module.matrix.unpack(), expected)
    assert isinstance(other.layer("lm_head"), Linear)


@pytest.mark.usefixtures("without_bfloat16")
@pytest.mark.parametrize("model_type", ["gpt_neox", "llama"])
def test_none_is_prefaulted_for_weights_that_become_float32(folder: Path, model_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    dtype = "auto" if model_type == "gpt_neox" else "float32"
    memory = read_ahead(folder, dtype, "cpu")
    assert memory is not None and memory.size == 0


@needs_kernels
def test_memory_is_for_weights_that_will_be_packed(
    folder: Path, use_kernels: Callable[..., None]
) -> None:
    def size(dtype: str = "auto", device: str = "cpu") -> int:
        memory = read_ahead(folder, dtype, device)
        assert memory is not None
        return memory.size

    assert size() == size("bfloat16") == (folder / "model.safetensors").stat().st_size
    assert size("float32") == size(device="cuda") == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert size() == 0
    use_kernels("0")
    assert size("bfloat16") == 0


@pytest.mark.parametrize("is_gguf", [True, False])
def test_no_memory_is_prefaulted_for_quantized_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_gguf: bool
) -> None:
    """Regression: memory of the file's size was touched, and held until all weights were read."""
    monkeypatch.setattr(prefetch, "is_usable", lambda: True)
    memory = read_ahead(folder, "auto", "cpu")
    assert memory is not None and memory.size > 0
    if is_gguf:
        (folder / "model.safetensors").rename(folder / "model.gguf")
    else:
        config = json.loads((folder / "config.json").read_text())
        config |= {"quantization_config": {"quant_method": "awq"}}
        (folder / "config.json").write_text(json.dumps(config))
    memory = read_ahead(folder, "auto", "cpu")
    assert memory is not None and memory.size == 0


def test_none_is_prefaulted_for_a_large_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 64)
    assert read_ahead(folder, "auto", "cpu") is None


def test_errors_of_the_files_are_reported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_ahead(tmp_path / "nothing", "auto", "cpu")
    with (folder / "model.safetensors").open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(DamagedModelError, match="truncated"):
        read_ahead(folder, "auto", "cpu")
