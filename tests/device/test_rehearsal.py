"""The rehearsal's device itself: what a device forbids it forbids, and what waits for it is
counted."""

import pytest
import torch

from tests.device.rehearsal import on_device

pytestmark = pytest.mark.slow


@on_device
def test_tensors_of_the_host_and_of_the_device_do_not_mix():
    x, mask = torch.ones(2, 3, device="rehearsal"), torch.ones(2, 3).bool()
    for mistake in (
        lambda: x * mask,
        lambda: x.masked_fill(mask, 0.0),
        lambda: torch.where(mask, x, x),
    ):
        with pytest.raises(RuntimeError, match="(?s)same device.*cpu"):
            mistake()

    with pytest.raises(TypeError, match="rehearsal:0 .* numpy"):
        x.numpy()
    assert (x * torch.tensor(2.0)).sum().item() == 12  # a number may come from the host


@on_device
def test_waits_are_counted():
    from torch_rehearsal import Events

    x = torch.arange(4.0, device="rehearsal")
    counts = x.long()

    waiting = {
        "a number read": lambda: x[1].item(),
        "copy to the host": lambda: x.cpu(),
        "copy to the device": lambda: torch.tensor([1.0], device="rehearsal"),
        "aten::nonzero": lambda: x.nonzero(),
        "aten::repeat_interleave.Tensor": lambda: x.repeat_interleave(counts),
        "aten::equal": lambda: torch.equal(x, x),
        "device": lambda: torch.accelerator.synchronize(),
    }
    for what, call in waiting.items():
        with Events() as events:
            call()
        assert [place[1] for place in events.of("wait")] == [what]

    pinned = torch.ones(4).pin_memory()
    with Events() as events:
        y = (x + pinned.to("rehearsal", non_blocking=True)).relu()
        counts.repeat_interleave(counts, output_size=6)
        y[torch.arange(2, device="rehearsal")] = 0
        torch.empty(4, pin_memory=True).copy_(y, non_blocking=True)

    assert (
        not events.of("wait")
        and events.of("to device").total() == events.of("to host").total() == 1
    )
    with Events() as events:
        x[x > 1]
    assert events.of("wait")
