"""Rows are copied from a device while it computes, and are not visible before they arrive."""

import weakref

import pytest
import torch

from headstart.omni.stage_decoder import StreamCopies, host_copies
from tests.omni.late_device import LateDevice
from tests.omni.pipelines import Speech, oracle, request, said

DEVICE = torch.device("cuda")


def test_on_a_cpu_the_rows_are_the_tensors_themselves() -> None:
    rows = {"hidden": torch.randn(3, 2)}
    assert host_copies(torch.device("cpu"))(rows).wait()["hidden"] is rows["hidden"]


def test_a_copy_comes_after_the_rows_and_before_anybody_sees_them() -> None:
    device = LateDevice()
    begin = StreamCopies(DEVICE, device, device.empty)
    rows = torch.zeros(3, 2)
    device.queue(lambda: rows.fill_(5))  # the pass that computes them
    copy = begin({"hidden": rows})
    device.queue(lambda: rows.fill_(6))  # what comes after it may go on before the copy
    [stream] = device.copies
    assert device.compute.done == stream.done == 0  # the host waited for nothing yet
    host = copy.wait()["hidden"]
    assert torch.equal(torch.Tensor(host), torch.full((3, 2), 5.0))
    assert device.compute.done == 1  # nor for more than it had to
    assert copy.wait()["hidden"] is host


def test_the_device_s_rows_are_kept_until_they_are_copied_and_no_longer() -> None:
    device = LateDevice()
    begin = StreamCopies(DEVICE, device, device.empty)
    rows = {"hidden": torch.zeros(3, 2)}
    known = weakref.ref(rows["hidden"])
    copy = begin(rows)
    device.copies[0].work[1] = lambda: None  # a real stream holds no tensors
    del rows
    assert known() is not None
    copy.wait()
    assert known() is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pipeline_on_such_a_device_says_the_same(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    device = LateDevice()
    monkeypatch.setattr(
        "headstart.omni.stage_decoder.host_copies",
        lambda _: StreamCopies(DEVICE, device, device.empty),
    )
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 20, 21]]
    with Speech(deterministic=deterministic) as speech:
        for round_ in range(2):
            done = speech.run(*(request(f"{round_} {n}", p) for n, p in enumerate(prompts)))
            for prompt, progress in zip(prompts, done, strict=True):
                assert said(progress)[:2] == oracle(prompt)
                assert progress.metrics["thinker"].hit_rows["hidden"] >= 8 * round_
    assert sum(len(stream.work) for stream in device.copies) > 0
