"""The rehearsal's device itself: what a device forbids it forbids, and what waits for it is
counted."""

import pytest
import torch

from tests.device.rehearsal import on_device

pytestmark = pytest.mark.slow


@on_device
def test_kernels_are_those_of_the_cpu() -> None:
    here = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for x in (here.clone().requires_grad_(), here.to("rehearsal").requires_grad_()):
        out = (x.softmax(-1) @ x.t()).cumsum(0).sort(descending=True)[0]
        (out[:, 1:].relu() * x.new_full((3, 1), 0.5)).sum().backward()
        assert x.grad is not None and x.grad.device == out.device == x.device
        in_place = x.detach().clone()
        in_place[:, 1].mul_(2).add_(1)
        in_place.t_().clamp_(max=1)
        results.append(
            (
                out,
                x.grad,
                in_place,
                *torch.topk(x, 2),
                torch.cat([x, in_place.t()]),
                torch.var_mean(x, 0)[0],
            )
        )
    assert all(torch.equal(ours, theirs.cpu()) for ours, theirs in zip(*results, strict=True))


@on_device
def test_tensors_of_the_host_and_of_the_device_do_not_mix() -> None:
    x, mask = torch.ones(2, 3, device="rehearsal"), torch.ones(2, 3).bool()
    for mistake in (
        lambda: x * mask,
        lambda: x.masked_fill(mask, 0.0),
        lambda: torch.where(mask, x, x),
    ):
        with pytest.raises(RuntimeError, match="(?s)same device.*cpu"):
            mistake()
    with pytest.raises(TypeError, match="convert rehearsal:0 device type tensor to numpy"):
        x.numpy()
    assert (x * torch.tensor(2.0)).sum().item() == 12  # a number may come from the host


@on_device
def test_waits_are_counted() -> None:
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


@on_device
def test_memory_is_accounted_for() -> None:
    before = torch.accelerator.memory_allocated()
    assert torch.empty(4, device="rehearsal").isnan().all()  # what nobody wrote shows
    torch.accelerator.reset_peak_memory_stats()
    x = torch.ones(256, device="rehearsal")
    y = x.view(2, 128).t()[1:] + 1
    assert torch.accelerator.memory_allocated() - before == 1024 + 1016
    del x, y
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 1024 + 1016
    import rehearsal_backend

    rehearsal_backend.limit_memory(before + 1000)
    with pytest.raises(torch.OutOfMemoryError, match="1024 bytes wanted"):
        torch.ones(256, device="rehearsal")
