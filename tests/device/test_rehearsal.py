"""The rehearsal's device itself: what a device forbids it forbids, and what waits for it is
counted."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.device.rehearsal import build, on_device

pytestmark = pytest.mark.slow


def test_torch_finds_it_wherever_it_is_on_the_path() -> None:
    """As `launch` starts workers: in a fresh interpreter, by nothing but the path."""
    code = (
        "import torch; print(torch.accelerator.current_accelerator(), torch.ones(2, "
        "device='rehearsal').sum().item())"
    )
    environment = {**os.environ, "PYTHONPATH": str(build())}
    assert (
        subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        == "rehearsal 2.0\n"
    )


def test_who_reads_its_memory_on_the_host_dies() -> None:
    code = "import ctypes, torch; ctypes.string_at(torch.ones(2, device='rehearsal').data_ptr(), 1)"
    environment = {**os.environ, "PYTHONPATH": str(build())}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGSEGV
    )


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
def test_attention_is_that_of_the_cpu() -> None:
    query = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(2).bool(), -torch.inf)
    results = []
    for x, mask in ((query.clone(), bias), (query.to("rehearsal"), bias.to("rehearsal"))):
        x.requires_grad_()
        (
            scaled_dot_product_attention(x, x, x, mask)
            + scaled_dot_product_attention(x, x, x, is_causal=True)
        ).sum().backward()
        assert x.grad is not None
        results.append(x.grad.cpu())
    assert torch.equal(*results)


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
def test_a_copy_that_does_not_block_arrives_when_its_event_is_waited_for() -> None:
    x = torch.ones(3, device="rehearsal")
    arriving = torch.zeros(3, pin_memory=True).copy_(x, non_blocking=True)
    event = torch.Event("rehearsal")
    event.record()
    later = torch.zeros(3, pin_memory=True).copy_(x + 1, non_blocking=True)
    x.zero_()  # after the copies, in the order of the stream
    assert arriving.isnan().all() and later.isnan().all()
    event.synchronize()
    assert arriving.tolist() == [1, 1, 1] and later.isnan().all()
    torch.accelerator.current_stream().synchronize()
    assert later.tolist() == [2, 2, 2]


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


@on_device
def test_its_random_numbers_are_its_own() -> None:
    host = torch.get_rng_state()
    torch.rehearsal.manual_seed_all(7)
    state = torch.rehearsal.get_rng_state()
    drawn = torch.randn(5, device="rehearsal")
    assert torch.equal(host, torch.get_rng_state())
    torch.rehearsal.set_rng_state(state)
    assert torch.equal(drawn, torch.randn(5, device="rehearsal"))
    own = torch.Generator("rehearsal").manual_seed(7)
    assert torch.equal(drawn, torch.randn(5, device="rehearsal", generator=own))


@on_device
@pytest.mark.by_hand
def test_autocast_has_products_in_bfloat16() -> None:
    x = torch.ones(2, 2, device="rehearsal")
    with torch.autocast("rehearsal", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and (x + x).dtype == torch.float32
        assert (x @ x).softmax(-1).dtype == torch.float32
