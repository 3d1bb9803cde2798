"""A voice for the demo's Qwen2.5-Omni: weights that turn codes into notes.

Every module of `token2wav` runs, with weights that are constructed instead of trained:

    code          its embedding selects one of 16 notes; code 0 is a pause
    diffusion     moves every mel bin to a low level, and the note's bin to a higher level, which
                  depends on the voice; the initial noise makes the note tremble
    vocoder       turns bins into amplitudes; the first transposed convolution makes a wave from the
                  amplitude of a note, and each later one upsamples the wave to the next rate

The two channels of a note are the cosine and the sine of its wave, which a kernel multiplies as a
complex number. The kernel is a wave of the note's frequency times a triangle two strides wide.
Neighboring triangles add up to 1. All frequencies are multiples of the mel frame rate, so the waves
of neighboring frames are in phase, and a held note is a pure tone.
"""

from typing import Any

import torch
from torch import Tensor

NOTES = 16
RATES = (8, 5, 4, 3)
"""The vocoder's upsampling factors, from 50 mel frames a second to 24,000 samples a second."""
CHANNELS = 4 * NOTES
"""Channels of the vocoder's first layer. The next stage has half of them, two for each note."""

_FRAME_RATE = 50
_FLOOR = -20.0  # level of bins without a note, far below the vocoder's threshold of -10.9
_LOUD = -2.0  # level of the note's bin, within the vocoder's range
_GUIDANCE = 0.5  # of transformers' sampler
_LOUDNESS = 0.7


def frequency(code: int) -> int:
    """Return the pitch of a code in Hz: 200 and the following multiples of 50; 0 for a pause."""
    return (4 + (code - 1) % NOTES) * _FRAME_RATE if code else 0


def give_voice(token2wav: Any) -> None:
    """Set the weights of transformers' `Qwen2_5OmniToken2WavModel`, in place."""
    _teach_diffusion(token2wav.code2wav_dit_model)
    _teach_vocoder(token2wav.code2wav_bigvgan_model)


def _teach_diffusion(model: Any) -> None:
    """Set the velocity of each bin: towards `_FLOOR`, except for the bin of the code's note.

    A hidden row has each note twice, with opposite signs, and a constant pattern that no bin reads.
    Without the pattern, the norm would amplify the small values of rows without a note.
    """
    codes = model.text_embed.codec_embed.weight
    codes.zero_()
    for code in range(1, len(codes)):
        codes[code, (code - 1) % NOTES] = 4
    project = model.input_embed.proj
    mel, embedding = model.mel_dim, codes.shape[1]
    first = project.in_features - embedding - model.config.enc_emb_dim
    project.weight[:, :mel] = 0
    project.weight[:, first : first + embedding] = torch.eye(NOTES).repeat(2, 1) * _up_and_down()
    project.bias.copy_(torch.tensor([1.0, -1.0]).repeat(NOTES))
    model.norm_out.linear.weight.zero_()
    model.norm_out.linear.bias.zero_()
    up = 4 / 2**0.5  # the value of a note in a normalized row
    gain = (_LOUD - _FLOOR) / (1 + _GUIDANCE) / up / 2
    model.proj_out.weight.copy_((torch.eye(NOTES).repeat(2, 1) * _up_and_down()).T * gain)
    model.proj_out.bias.fill_(_FLOOR)


def _up_and_down() -> Tensor:
    return torch.tensor([1.0, -1.0]).repeat_interleave(NOTES)[:, None]


def _teach_vocoder(model: Any) -> None:
    """Set the weights from bins to amplitudes, amplitudes to tones, and tones to one wave."""
    model.conv_pre.weight.zero_()
    model.conv_pre.bias.zero_()
    middle = model.conv_pre.kernel_size[0] // 2
    for note in range(NOTES):
        model.conv_pre.weight[note, note, middle] = _LOUDNESS / 2
        model.conv_pre.bias[note] = _LOUDNESS / 2
    notes = [[4 * _FRAME_RATE + note * _FRAME_RATE] for note in range(NOTES)]
    rate = _FRAME_RATE
    for stage, stride in enumerate(RATES):
        [up] = model.ups[stage]
        rate *= stride
        up.weight.zero_()
        up.bias.zero_()
        merged = up.out_channels // 2
        for source, pitches in enumerate(notes):
            into = source * merged // len(notes)
            _modulate(up, source, into, sum(pitches) / len(pitches) / rate, real=stage == 0)
        size = len(notes) // merged
        notes = [
            [pitch for pitches in notes[start : start + size] for pitch in pitches]
            for start in range(0, len(notes), size)
        ]
    for block in model.resblocks:  # make each block return its input
        for conv in block.convs2:
            conv.weight.zero_()
            conv.bias.zero_()
    model.activation_post.act.beta.fill_(10)  # divides the sine by e^10
    model.conv_post.weight.zero_()
    model.conv_post.weight[:, ::2, model.conv_post.kernel_size[0] // 2] = 1


def _modulate(up: Any, source: int, into: int, pitch: float, *, real: bool) -> None:
    """Upsample a pair of channels to the next rate, with a kernel of `pitch` cycles a sample.

    real: the source is one channel, the amplitude of a note.
    """
    length, stride = up.kernel_size[0], up.stride[0]
    position = torch.arange(length) - (length - 1) / 2
    window = (1 - position.abs() / stride).clamp(min=0)
    phase = 2 * torch.pi * pitch * position
    cosine, sine = window * phase.cos(), window * phase.sin()
    if real:
        up.weight[source, 2 * into] = cosine
        up.weight[source, 2 * into + 1] = sine
        return
    up.weight[2 * source, 2 * into] = cosine
    up.weight[2 * source, 2 * into + 1] = sine
    up.weight[2 * source + 1, 2 * into] = -sine
    up.weight[2 * source + 1, 2 * into + 1] = cosine
