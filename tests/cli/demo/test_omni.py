"""`headstart demo --omni`: what it shows is what happened."""

import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from headstart.cli.demo.omni import CONTEXT
from headstart.cli.main import main
from headstart.engine.params import SamplingParams
from headstart.models.demo.omni import OmniSizes, write_omni
from headstart.models.demo.voice import NOTES, frequency
from headstart.omni.models.qwen2_5 import Qwen25Omni
from headstart.omni.omni import Omni
from headstart.omni.params import OmniParams


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo with a tiny model and a short recording."""
    monkeypatch.setenv("HEADSTART_DEMO_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.models.demo.omni.DEMO_OMNI", OmniSizes(64, 2, 48, 2, 4))
    monkeypatch.setattr("headstart.cli.demo.omni.SECONDS", 3)
    monkeypatch.setattr("headstart.cli.demo.omni.SPEECH_TOKENS", 16)
    monkeypatch.setattr("headstart.cli.demo.omni.CONTEXT", CONTEXT[:500])


def test_the_omni_demo_speaks_and_says_what_each_stage_skipped(small: None, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--omni", "--wav", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    first, second = result.output.split("╭─ 2")
    assert re.search(r"thinker +\S+ +0 ", first)
    for stage in ("thinker", "talker"):
        found = re.search(rf"{stage} +(\S+) +(\S+)", second)
        assert found is not None
        computed, cached = (int(number.replace(",", "")) for number in found.groups())
        assert cached > 500 and computed < 120
    sounds = []
    for number in (1, 2):
        with wave.open(str(tmp_path / "new" / f"answer-{number}.wav")) as file:
            assert file.getframerate() == 24_000 and file.getnframes() == 16 * 2 * 480
            sounds.append(np.frombuffer(file.readframes(16 * 2 * 480), "<i2").astype(int))
    assert all(3_000 < abs(sound).max() < 30_000 for sound in sounds)
    assert abs(sounds[0] - sounds[1]).max() > 3_000


def test_the_omni_demo_writes_nothing_unasked(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It wrote its answers into the current folder."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo", "--omni"], env={"COLUMNS": "60"})
    assert result.exit_code == 0, result.output
    # Units were cut off in narrow terminals.
    rows = re.findall(r"^│ \w+(?: +[\d,–]+){3}(?: +[\d.]+ m?s){2} *│$", result.output, re.M)
    assert len(rows) == 6
    assert "--wav FOLDER" in result.output
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["demo", "--omni", "--wav", str(tmp_path / "file")])
    assert result.exit_code == 2 and "file" in result.output
    result = CliRunner().invoke(main, ["demo", "--wav", str(tmp_path)])
    assert result.exit_code == 2 and "--omni" in result.output


def test_what_the_demo_model_says_is_heard_as_the_notes_of_its_codes(tmp_path: Path) -> None:
    """Every sample of its waves was 0 in 16 bits."""
    write_omni(tmp_path, OmniSizes(64, 2, 48, 2, 4))
    omni = Omni(tmp_path, options={"num_blocks": 64})
    greedy = SamplingParams(temperature=0, max_tokens=20)
    params = OmniParams(text=greedy, speech=greedy)
    first, again, other = (
        omni.generate(text, params)[0] for text in ("Who?", "Who?", "Something else")
    )
    omni.close()
    assert torch.equal(first.audio, again.audio)
    assert (first.audio - other.audio).abs().max() > 0.1
    for output in (first, other):
        wave_of_codes = output.audio.numpy().reshape(-1, 960)
        assert 0.1 < abs(wave_of_codes).max() < 0.9
        assert len(wave_of_codes) == len(output.codes) > 10
        spectra = abs(np.fft.rfft(wave_of_codes * np.hanning(960), 24_000))
        pitches = [frequency(code) for code in output.codes.tolist()]
        assert abs(spectra.argmax(1) - pitches).max() < 10


def test_code_0_is_a_rest_and_each_note_is_a_tone_of_its_own(tmp_path: Path) -> None:
    write_omni(tmp_path, OmniSizes(64, 2, 48, 2, 4))
    model = Qwen25Omni(tmp_path)
    codes = torch.tensor([*[0] * 4, *torch.arange(1, NOTES + 1).repeat_interleave(4)])
    for voice in model.voices.values():
        sound = model.make_wave(codes, voice, seed=5).numpy().reshape(-1, 4 * 960)
        rest, notes = sound[0, :-480], sound[1:, 480:-480]
        assert abs(rest).max() < 1e-3
        spectra = abs(np.fft.rfft(notes * np.hanning(notes.shape[1]), 24_000)) ** 2
        pitches = [frequency(code) for code in range(1, NOTES + 1)]
        assert abs(spectra.argmax(1) - pitches).max() < 10
        for spectrum in spectra:  # nearly all of a note is near its pitch
            near = slice(spectrum.argmax() - 60, spectrum.argmax() + 60)
            assert spectrum[near].sum() > 0.95 * spectrum.sum()
