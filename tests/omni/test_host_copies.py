"""Rows are copied from a device while it computes, and are not visible before they arrive."""

import weakref

import pytest
import torch

from headstart.omni.stage_decoder import StreamCopies, host_copies
from tests.omni.late_device import LateDevice
from tests.omni.pipelines import Speech, oracle, request, result_of

DEVICE = torch.device("cuda")


def test_on_a_cpu_rows_are_not_copied() -> None:
    rows = {"hidden": torch.randn(3, 2)}
    assert host_copies(torch.device("cpu"))(rows).wait()["hidden"] is rows["hidden"]


def test_a_copy_runs_after_its_rows_and_before_they_are_read() -> None:
    device = LateDevice()
    begin = StreamCopies(DEVICE, device, device.empty)
    rows = torch.zeros(3, 2)
    device.queue(lambda: rows.fill_(5))  # the pass that computes them
    copy = begin({"hidden": rows})
    device.queue(lambda: rows.fill_(6))  # later work may run before the copy
    [stream] = device.copies
    assert device.compute.done == stream.done == 0  # the host has not waited yet
    host = copy.wait()["hidden"]
    assert torch.equal(torch.Tensor(host), torch.full((3, 2), 5.0))
    assert device.compute.done == 1  # the host waited only for the copy
    assert copy.wait()["hidden"] is host


def test_rows_on_the_device_are_freed_after_the_copy() -> None:
    device = LateDevice()
    begin = StreamCopies(DEVICE, device, device.empty)
    rows = {"hidden": torch.zeros(3, 2)}
    reference = weakref.ref(rows["hidden"])
    copy = begin(rows)
    device.copies[0].work[1] = lambda: None  # a real stream holds no tensors
    del rows
    assert reference() is not None
    copy.wait()
    assert reference() is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pipeline_on_a_late_device_gives_the_same_result(
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
                assert result_of(progress)[:2] == oracle(prompt)
                assert progress.metrics["thinker"].hit_rows["hidden"] >= 8 * round_
    assert sum(len(stream.work) for stream in device.copies) > 0
