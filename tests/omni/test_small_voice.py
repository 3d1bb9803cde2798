"""The generated speech model of the examples, whose codes sound as notes."""

from pathlib import Path

import numpy as np
import torch

from examples.small_models.omni import OmniSizes, write_omni
from examples.small_models.voice import NOTES, frequency
from headstart.engine.params import SamplingParams
from headstart.omni.omni import Omni
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import OmniParams
from headstart.omni.qwen2_5 import Qwen25Omni


def test_answers_of_the_demo_model_sound_as_the_notes_of_their_codes(tmp_path: Path) -> None:
    """Regression: every sample of its waveforms was 0 in 16 bits."""
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


def test_code_0_is_a_rest_and_each_note_is_a_separate_tone(tmp_path: Path) -> None:
    write_omni(tmp_path, OmniSizes(64, 2, 48, 2, 4))
    model = Qwen25Omni(tmp_path, "auto", "cpu", OutputCache(0))
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
