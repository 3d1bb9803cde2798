"""Outputs with a row per token, declared or detected at two lengths."""

import pytest
import torch

from headstart.errors import ConfigError, EngineError
from headstart.omni.stage import Alignment, AlignmentDetector, Kind, Output, parse_alignment


def look(detector: AlignmentDetector, rows: int, tokens: int, requests: int = 1) -> list[str]:
    return detector.observe({"x": torch.zeros(rows, 3)}, tokens, requests)


def test_two_lengths_confirm_an_output() -> None:
    detector = AlignmentDetector({})
    look(detector, 12, 12)
    assert detector.is_undecided("x") and not detector.is_by_token("x")
    look(detector, 12, 12)
    assert not detector.is_by_token("x")
    look(detector, 8, 8)
    assert detector.is_by_token("x") and not detector.is_undecided("x")


def test_a_first_axis_of_the_same_length_by_chance_is_rejected() -> None:
    detector = AlignmentDetector({})
    look(detector, 12, 12)
    look(detector, 12, 8)
    look(detector, 9, 9)
    look(detector, 7, 7)
    assert not detector.is_by_token("x") and not detector.is_undecided("x")


def test_one_row_per_request_is_not_one_row_per_token() -> None:
    detector = AlignmentDetector({})
    look(detector, 1, 1, requests=1)
    look(detector, 3, 3, requests=3)
    assert not detector.is_by_token("x") and detector.is_undecided("x")
    look(detector, 3, 20, requests=3)
    assert not detector.is_undecided("x")


def test_a_shorter_pass_settles_an_output_that_matched_a_dense_pass() -> None:
    detector = AlignmentDetector({})
    look(detector, 12, 12)
    assert detector.is_decided_by(4) and not detector.is_decided_by(12)
    detector = AlignmentDetector({})
    look(detector, 3, 3, requests=3)
    assert not detector.is_decided_by(1)


def test_a_confirmed_output_that_changes_is_reported() -> None:
    detector = AlignmentDetector({})
    look(detector, 12, 12)
    look(detector, 8, 8)
    assert look(detector, 8, 9) == ["x"]
    assert not detector.is_by_token("x")
    assert look(detector, 8, 9) == []


def test_a_number_has_no_first_axis() -> None:
    detector = AlignmentDetector({})
    detector.observe({"x": torch.tensor(1.0)}, 1, 1)
    assert not detector.is_undecided("x")


def test_declared_outputs_are_not_detected() -> None:
    detector = AlignmentDetector({"x": Alignment(Kind.FRAMES, 2), "y": Alignment(Kind.REQUEST)})
    look(detector, 24, 12)
    assert detector.is_by_token("x") and detector.ratio("x") == 2
    detector.observe({"y": torch.zeros(12, 1)}, 12, 1)
    detector.observe({"y": torch.zeros(8, 1)}, 8, 1)
    assert not detector.is_by_token("y") and not detector.is_undecided("y")


@pytest.mark.parametrize("text", ["token", "request", "global", "frames(4)"])
def test_alignments_are_written_and_parsed(text: str) -> None:
    assert str(parse_alignment(text)) == text


@pytest.mark.parametrize("text", ["tokens", "frames", "frames(0)", "frames(x)", ""])
def test_other_alignments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: token, request, global, frames\(n\)"):
        parse_alignment(text)


def test_a_declared_output_is_checked() -> None:
    output = Output("audio", parse_alignment("frames(4)"), dtype="float32")
    output.check(torch.zeros(12), 3)
    with pytest.raises(
        EngineError, match=r"'audio' has the shape \[3\]; declared as frames\(4\), it needs 12"
    ):
        output.check(torch.zeros(3), 3)
    with pytest.raises(EngineError, match="float64, declared float32"):
        output.check(torch.zeros(12, dtype=torch.float64), 3)


def test_an_invalid_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="'floaty'"):
        Output("x", dtype="floaty")
    with pytest.raises(ConfigError, match="name"):
        Output("")
