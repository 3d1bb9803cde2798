"""CPU flags, and the dtype that `auto` chooses for them."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headstart import machine
from headstart.machine import cpu_flags, multiplies_bfloat16, no_bfloat16_reason
from headstart.models import dtypes
from headstart.models.dtypes import fast_dtype
from headstart.models.loader import load_model
from headstart.native import avx2_library
from tests.tiny_models import TINY

CPU = torch.device("cpu")
CORE = "processor\t: {}\nflags\t\t: fpu avx2 fma {}\nbugs\t\t: spectre_v1\n\n"


def test_flags_are_those_that_all_cores_have(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(CORE.format(0, "avx512_bf16 amx_bf16") + CORE.format(1, "avx512_bf16"))
    assert cpu_flags(file) == {"fpu", "avx2", "fma", "avx512_bf16"}
    file = tmp_path / "arm"
    file.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd4f\n")
    assert cpu_flags(file) == {"fp", "asimd", "bf16"}
    assert cpu_flags(tmp_path / "nothing") == frozenset()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that simulates another CPU."""

    def become(flags: str, architecture: str = "x86_64", capped: str = "") -> None:
        monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr("platform.machine", lambda: architecture)
        monkeypatch.setenv("HEADSTART_CPU", capped)

    return become


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("x86_64", "avx2 fma", False),
        ("x86_64", "avx512f avx512bw avx512vl avx512_vnni", False),  # AVX-512 alone is not enough
        ("x86_64", "avx512f avx512_bf16", True),
        ("x86_64", "amx_tile amx_bf16", True),
        ("x86_64", "amx_tile amx_int8", False),
        ("x86_64", "", None),
        ("aarch64", "asimd bf16", True),
        ("aarch64", "asimd", False),
    ],
)
def test_products_of_bfloat16(
    architecture: str, flags: str, expected: bool | None, pretend: Callable[..., None]
) -> None:
    for capped in ("", "avx512"):  # without AMX; AVX-512 has bfloat16 products too
        pretend(flags, architecture, capped)
        assert multiplies_bfloat16() is expected


def test_a_limited_cpu_has_no_products_of_bfloat16(pretend: Callable[..., None]) -> None:
    """Regression: only kernels were limited, and models ran in bfloat16 on torch's AVX-512."""
    pretend("avx512_bf16 amx_bf16")
    assert no_bfloat16_reason() == "no AVX512-BF16, no AMX-BF16"
    pretend("avx512_bf16 amx_bf16", capped="avx2")
    assert multiplies_bfloat16() is False
    assert no_bfloat16_reason() == "HEADSTART_CPU=avx2 disables its bfloat16 instructions"
    pretend("avx2", capped="avx2")
    assert no_bfloat16_reason() == "no AVX512-BF16, no AMX-BF16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY["llama"]().to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def old_x86(pretend: Callable[..., None]) -> None:
    """Simulate a CPU without products of bfloat16."""
    pretend("avx2 fma")


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of free bytes."""
    return lambda nbytes: monkeypatch.setattr(dtypes, "available_memory", lambda: nbytes)


@pytest.mark.usefixtures("old_x86")
def test_auto_is_float32_with_a_note_if_bfloat16_is_slow(
    folder: Path, logged: list[logging.LogRecord], use_kernels: Callable[..., None]
) -> None:
    use_kernels("0")
    assert load_model(folder).dtype == torch.float32
    [record] = logged
    assert record.levelno == logging.WARNING
    assert record.getMessage().count("\n") == 0
    assert (
        "slow in bfloat16 (no AVX512-BF16, no AMX-BF16), so dtype=auto computes in float32"
        in record.getMessage()
    )


@pytest.mark.usefixtures("old_x86")
def test_auto_is_float32_over_bfloat16_weights_with_kernels(
    folder: Path, logged: list[logging.LogRecord], free_memory: Callable[[int], None]
) -> None:
    """It needs no more memory, so there is no message, and free memory does not matter."""
    if avx2_library() is None:
        pytest.skip("no compiled kernels for AVX2 here")
    free_memory(0)
    assert load_model(folder).dtype == torch.float32
    assert not logged


@pytest.mark.usefixtures("old_x86")
def test_an_explicit_dtype_is_used(folder: Path, logged: list[logging.LogRecord]) -> None:
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert fast_dtype("auto", folder, torch.device("meta")) == "auto"
    assert not logged


@pytest.mark.usefixtures("old_x86")
def test_auto_keeps_the_dtype_if_memory_is_short(
    folder: Path, logged: list[logging.LogRecord], free_memory: Callable[[int], None]
) -> None:
    wide = 2 * (folder / "model.safetensors").stat().st_size
    free_memory(2 * wide)
    assert fast_dtype("auto", folder, CPU) == torch.float32
    logged.clear()
    free_memory(2 * wide - 1)
    assert fast_dtype("auto", folder, CPU) == "auto"
    [record] = logged
    assert "too few for float32" in record.getMessage()


@pytest.mark.parametrize("flags", ["avx512f avx512_bf16", ""])
def test_auto_is_the_checkpoints_if_bfloat16_is_fast_or_unknown(
    folder: Path, flags: str, pretend: Callable[..., None]
) -> None:
    pretend(flags)
    assert fast_dtype("auto", folder, CPU) == "auto"
    assert load_model(folder).dtype == torch.bfloat16


@pytest.mark.usefixtures("old_x86")
def test_auto_leaves_other_checkpoints_alone(folder: Path, tmp_path: Path) -> None:
    config = (folder / "config.json").read_text()
    for text in (
        config.replace('"bfloat16"', '"float32"'),
        config.replace('"dtype": "bfloat16",', ""),
        config.replace('"dtype"', '"quantization_config": {"quant_method": "x"}, "dtype"'),
    ):
        assert text != config
        (folder / "config.json").write_text(text)
        assert fast_dtype("auto", folder, CPU) == "auto"
