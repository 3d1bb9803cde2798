"""Checkpoints that are written in 4 bits: their readers, and errors for bad input."""

import json
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from headstart import LLM, SamplingParams
from headstart.cli.main import main
from headstart.errors import ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError
from headstart.models import gptq
from headstart.models.gptq import plan_quantization, quantize
from headstart.models.loader import load_model
from headstart.weights import reader
from tests.models.gptq.small import TEXT, save_small
from tests.models.paged import Paged
from tests.tiny_tokenizers import TINY_TOKENIZERS
from tests.weights.stored import quantized_matrices

pytest.importorskip("compressed_tensors")

TOKENS = torch.tensor(TINY_TOKENIZERS["byte_level"]().encode(TEXT)[:60])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """Return headstart's logits of all tokens."""
    model = load_model(folder, "float32", **options)
    assert model.fallback_reason is None
    kinds = [matrix.kind for matrix in quantized_matrices(model.module).values()]
    assert set(kinds) - {"int8"} == {"int4"}  # the head's
    paged = Paged(model)
    sequence = paged.add(TOKENS.tolist())
    paged.step([(sequence, len(TOKENS))])
    return torch.stack(sequence.logits)


def loaded_by_transformers(folder: Path) -> Any:
    """Load in floats: in 4 bits the library expects other zero points than it writes."""
    floats = CompressedTensorsConfig(dequantize=True)
    options: Any = {"quantization_config": floats, "dtype": torch.float32}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of two configurations
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        # Their layers have other names or other products; those of the other families do not.
        *((name, torch.bfloat16) for name in ("qwen2", "gemma3_text", "phi3", "olmo2", "granite")),
    ],
)
@torch.no_grad()
def test_transformers_and_headstart_read_the_same_model(
    name: str,
    dtype: torch.dtype,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = save_small(tmp_path / "float", name, dtype)
    quantize(plan_quantization(tmp_path / "float", tmp_path / "small", text))
    theirs = loaded_by_transformers(tmp_path / "small")
    expected = theirs(TOKENS[None]).logits[0]
    assert apart(logits(tmp_path / "small"), expected) < 0.03  # rows are rounded to 8 bits
    by_float = original(TOKENS[None]).logits[0]
    # Without text, and no layer in more bits.
    monkeypatch.setattr(reader, "kind_of_layer", lambda name, kind, *sizes: kind)
    plain = logits(tmp_path / "float", weights="int4")
    assert 0.01 < apart(expected, by_float) < 0.9 * apart(plain, by_float)


def test_an_llm_answers_from_one_file_per_layer(text: Path, tmp_path: Path) -> None:
    save_small(tmp_path / "float")
    finished_layers: list[int] = []
    quantize(
        plan_quantization(tmp_path / "float", tmp_path / "small", text), finished_layers.append
    )
    assert finished_layers == [1, 2]
    shards = sorted(path.name for path in (tmp_path / "small").glob("*.safetensors"))
    assert shards == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    with torch.no_grad():
        expected = loaded_by_transformers(tmp_path / "small")(TOKENS[None]).logits[0]
    llm = LLM(tmp_path / "small", dtype="float32", num_blocks=24, block_size=8, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    [answer] = llm.generate({"prompt_token_ids": TOKENS.tolist()}, params, use_tqdm=False)
    [chosen] = answer.outputs[0].token_ids
    assert expected[-1, chosen] >= expected[-1].max() - 0.1 * expected[-1].std()
    llm.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_leaves_no_files(
    error: type[BaseException], text: Path, tmp_path: Path
) -> None:
    save_small(tmp_path / "float")
    before = sorted(tmp_path.iterdir())
    plan = plan_quantization(tmp_path / "float", tmp_path / "small", text)

    def interrupt(layers: int) -> None:
        assert sorted(tmp_path.iterdir()) != before
        raise error

    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ModelError):
        quantize(plan, interrupt)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_no_files(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `systemctl stop`, or closing a terminal, left a hidden folder of gigabytes."""
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    save_small(tmp_path / "float")
    before, seen = sorted(tmp_path.iterdir()), []

    def end(*_: object) -> None:
        seen.append(sorted(tmp_path.iterdir()))
        assert signal.getsignal(number) is not signal.SIG_DFL  # which ends these tests
        os.kill(os.getpid(), number)

    monkeypatch.setattr(gptq, "save_file", end)
    called = [str(tmp_path / "float"), str(tmp_path / "small"), "--text", str(text)]
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        result = CliRunner().invoke(main, ["models", "quantize", *called])
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, handler)
    assert result.exit_code == 128 + number, result.stderr
    assert seen and seen[0] != before == sorted(tmp_path.iterdir())


def test_an_ignored_signal_stays_ignored(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nohup` ignores it."""
    save_small(tmp_path / "float")
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    set_anew: list[int] = []
    handle = signal.signal

    def note(number: int, handler: Any) -> Any:
        set_anew.append(number)
        return handle(number, handler)

    monkeypatch.setattr(signal, "signal", note)
    called = [str(tmp_path / "float"), str(tmp_path / "small"), "--text", str(text)]
    assert CliRunner().invoke(main, ["models", "quantize", *called]).exit_code == 0
    assert set(set_anew) <= {signal.SIGINT}


def test_the_command_prints_the_written_folder_and_its_use(text: Path, tmp_path: Path) -> None:
    save_small(tmp_path / "float")
    target = tmp_path / "small"
    called = ["models", "quantize", str(tmp_path / "float"), str(target), "--text", str(text)]
    result = CliRunner().invoke(main, called)
    assert result.exit_code == 0, result.stderr
    output = " ".join(result.stderr.split())
    assert f"headstart run --model {target}" in output and f"tokens of {text}" in output
    again = CliRunner().invoke(main, called)
    assert again.exit_code == 2 and "exists already" in again.stderr


def test_progress_is_logged(text: Path, tmp_path: Path) -> None:
    """Regression: without a terminal it was silent for the minutes that it takes."""
    save_small(tmp_path / "float", num_hidden_layers=3)
    called = ["models", "quantize", str(tmp_path / "float"), str(tmp_path / "small")]
    result = CliRunner().invoke(main, [*called, "--text", str(text)])
    assert result.exit_code == 0, result.stderr
    lines = re.findall(r"quantized \d of \d layers", result.stderr)
    assert lines == [f"quantized {number} of 3 layers" for number in range(4)]


def test_bad_input_is_refused_before_any_work(text: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "float", tmp_path / "small"
    save_small(source)
    with pytest.raises(ModelNotFoundError):
        plan_quantization(tmp_path / "nowhere", target, text)
    with pytest.raises(ConfigError, match="exists already"):
        plan_quantization(source, source, text)
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        plan_quantization(source, tmp_path / "nowhere" / "small", text)
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_quantization(source, target, tmp_path / "nothing.txt")
    short = tmp_path / "short.txt"
    for content in (b"", b"a few words"):
        short.write_bytes(content)
        with pytest.raises(ConfigError, match=r"short.txt has \d+ tokens; allowed: at least 2,048"):
            plan_quantization(source, target, short)
    short.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        plan_quantization(source, target, short)
    quantize(plan_quantization(source, target, text))
    with pytest.raises(UnsupportedModelError, match="is already quantized"):
        plan_quantization(target, tmp_path / "smaller", text)


def test_a_gguf_file_is_refused_before_it_is_read(text: Path, tmp_path: Path) -> None:
    """Regression: its tokenizer was converted first, for minutes.

    A file in bfloat16 was refused as "already quantized".
    """
    (tmp_path / "some.gguf").write_bytes(b"not even GGUF")
    with pytest.raises(
        UnsupportedModelError, match=r"some\.gguf is a GGUF file; allowed: a floating-point check"
    ):
        plan_quantization(tmp_path / "some.gguf", tmp_path / "small", text)
    with pytest.raises(ModelNotFoundError, match=r"there is no file .*other\.gguf"):
        plan_quantization(tmp_path / "other.gguf", tmp_path / "small", text)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "opt"}, "model_type 'opt' is not one of llama"),
        ({"intermediate_size": 128}, "has the shape"),
        ({"hidden_act": "relu"}, "its activation is relu"),
    ],
)
def test_other_models_are_refused(
    changes: dict[str, Any], reason: str, text: Path, tmp_path: Path
) -> None:
    save_small(tmp_path / "float")
    file = tmp_path / "float" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=reason):
        plan_quantization(tmp_path / "float", tmp_path / "small", text)


def test_layers_that_no_groups_fit_are_refused(text: Path, tmp_path: Path) -> None:
    save_small(tmp_path / "float", intermediate_size=80)
    with pytest.raises(
        UnsupportedModelError, match="layers of 80 inputs; allowed: multiples of 32"
    ):
        plan_quantization(tmp_path / "float", tmp_path / "small", text)


def test_a_model_without_a_tokenizer_is_refused(text: Path, tmp_path: Path) -> None:
    save_small(tmp_path / "float")
    for file in (tmp_path / "float").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        plan_quantization(tmp_path / "float", tmp_path / "small", text)


def test_the_default_text_is_part_of_python(tmp_path: Path) -> None:
    save_small(tmp_path / "float")
    plan = plan_quantization(tmp_path / "float", tmp_path / "small")
    assert plan.text == "Python's help topics" and plan.tokens.numel() >= 16_000
