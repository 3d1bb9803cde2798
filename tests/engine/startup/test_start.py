"""Wrong options and models are reported before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

import headstart

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import headstart
try:
    {call}
except headstart.HeadstartError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("'no/such/folder'", headstart.ModelNotFoundError),
        ("'headstart-tiny', blocks=4", headstart.ConfigError),
        ("'headstart-tiny', block_size=7", headstart.ConfigError),
        ("{damaged!r}", headstart.DamagedModelError),
    ],
)
def test_errors_are_reported_without_torch(
    name: str, arguments: str, error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{")
    call = f"headstart.{name}({arguments.format(damaged=str(tmp_path))})"
    program = WITHOUT_TORCH.format(call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [error.__name__], done.stderr
