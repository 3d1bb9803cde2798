"""Peak memory while a model is loaded, relative to the final memory, by kind of weights.

    python bench/weights/memory.py [build/bench/qwen2.5-0.5b]      bench/shapes.py makes this folder

Each kind is loaded in a separate process, which then answers one prompt, because some weights are
packed at their first use. The figure is the resident memory of the process, including Python's
libraries and pages of the checkpoint's file. Linux only. The limit of the peak is 1.15 times the
final memory. The weights alone are counted too: all tensors of the model, each once, in megabytes.
Prints a table, and one JSON line.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shapes import model_folder

KINDS = ("auto", "int8", "int5", "int4")
LIMIT = 1.15
LOAD = """
import sys
from headstart import LLM, SamplingParams

def mebibytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

before = mebibytes("VmRSS")
llm = LLM(sys.argv[1], weights=sys.argv[2], num_blocks=64, num_threads=1)
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": list(range(3, 40))}], params, use_tqdm=False)
weights = {}
for part in llm.engine.model.module.modules():
    held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    held += part.matrix.tensors if hasattr(part, "matrix") else []
    weights |= {tensor.data_ptr(): tensor.nbytes for tensor in held}
print("figures", before, mebibytes("VmHWM"), mebibytes("VmRSS"), sum(weights.values()) / 1e6)
"""


def measure(folder: str, kind: str) -> dict[str, float]:
    """Return MiB before loading, at the peak and at the end, and MB of the weights."""
    command = [sys.executable, "-c", LOAD, folder, kind]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in said.splitlines() if line.startswith("figures"))
    before, most, stays, weights = map(float, line.split()[1:])
    sizes = {"weights": weights, "before": before, "most": most, "stays": stays}
    return {**sizes, "ratio": most / stays}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder; default: a generated model")
    folder = parser.parse_args().model or str(model_folder("qwen2.5-0.5b"))
    sizes = ("weights MB", "before MiB", "peak MiB", "final MiB")
    table = Table("kind", *sizes, f"peak / final (<= {LIMIT})")
    figures = {}
    for kind in KINDS:
        figures[kind] = measure(folder, kind)
        table.add_row(
            kind,
            *(f"{figures[kind][name]:.0f}" for name in ("weights", "before", "most", "stays")),
            f"{figures[kind]['ratio']:.2f}",
        )
        print(f"{kind} is measured", file=sys.stderr)
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
