"""`headstart demo --omni`: what it shows is what happened."""

import re
import wave
from pathlib import Path

import pytest
from click.testing import CliRunner

from headstart.cli import main
from headstart.cli_omni import CONTEXT
from headstart.models.demo_omni import OmniSizes


def test_the_omni_demo_speaks_and_says_what_each_stage_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.models.demo_omni.DEMO_OMNI", OmniSizes(64, 2, 48, 2, 4))
    monkeypatch.setattr("headstart.cli_omni.SECONDS", 3)
    monkeypatch.setattr("headstart.cli_omni.SPEECH_TOKENS", 16)
    monkeypatch.setattr("headstart.cli_omni.CONTEXT", CONTEXT[:500])
    result = CliRunner().invoke(main, ["demo", "--omni", str(tmp_path)])
    assert result.exit_code == 0, result.output
    first, second = result.output.split("╭─ 2")
    assert re.search(r"thinker +\S+ +0 ", first)
    for stage in ("thinker", "talker"):
        found = re.search(rf"{stage} +(\S+) +(\S+)", second)
        assert found is not None
        computed, cached = (int(number.replace(",", "")) for number in found.groups())
        assert cached > 500 and computed < 120
    for number in (1, 2):
        with wave.open(str(tmp_path / f"answer-{number}.wav")) as file:
            assert file.getframerate() == 24_000 and file.getnframes() == 16 * 2 * 480
