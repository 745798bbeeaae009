"""`distflow doctor --device` on the rehearsal's device: it passes there, and what is planted is
found."""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from distflow import cli
from distflow.commands.selftest.device import CHECKS, Subject, find_device, try_check
from distflow.commands.selftest.runs import write_models
from tests.device.rehearsal import on_device

pytestmark = [pytest.mark.slow, pytest.mark.alone]
MODEL = "actor_rollout_ref.model"


def doctor(*words: str) -> tuple[int, dict[str, list[str]]]:
    """Its exit status, and outcome and text of each line by name."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(["doctor", "--device", *words])
    lines = [
        line
        for line in out.getvalue().splitlines()[1:-1]
        if line[:24].strip() in {"device", *CHECKS}
    ]

    return status, {line[:24].strip(): [line[25:34].strip(), line[35:]] for line in lines}


def try_checks(folder: Path, *names: str) -> dict[str, str]:
    """The texts of those that fail."""
    folder.mkdir()
    write_models(folder)
    subject = Subject(torch.device("rehearsal"), folder)
    found = [try_check(name, subject) for name in names]
    return {each.name: each.text for each in found if each.outcome == "failed"}


@on_device
def test_a_device_that_computes_what_a_cpu_does_passes_every_check():
    status, found = doctor(
        "grpo", f"{MODEL}.path=builtin:tiny-arithmetic", f"{MODEL}.dtype=float32"
    )
    assert status == 0 and found.keys() == {"device", *CHECKS}, found
    assert {outcome for outcome, _ in found.values()} == {"ok"}


@on_device
def test_a_wrong_kernel_is_found(tmp_path):
    library = torch.library.Library("aten", "IMPL")
    computed = ("log-probs, float32", "GRPO steps")
    assert not try_checks(tmp_path / "sound", *computed)
    library.impl("silu", lambda x: x * (0.99 * x.sigmoid()), "PrivateUse1")
    assert try_checks(tmp_path / "wrong", *computed).keys() == {*computed}


@pytest.mark.by_hand
@on_device
def test_a_wrong_gradient_is_found(tmp_path):
    """Log-probs are right."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "silu_backward",
        lambda grad, x: 0.9 * grad * x.sigmoid() * (1 + x * (1 - x.sigmoid())),
        "PrivateUse1",
    )
    found = try_checks(tmp_path / "wrong", "log-probs, float32", "GRPO steps")
    assert (
        found.keys() == {"GRPO steps"}
        and "other responses or scores in step 2" in found["GRPO steps"]
    )


@on_device
def test_a_dtype_that_the_device_does_not_know_is_found(tmp_path):
    """torch then computes in float32, and only warns."""
    torch.rehearsal.get_amp_supported_dtype = lambda: [torch.float16]
    found = try_checks(tmp_path / "folder", "log-probs, float32", "log-probs, bfloat16")
    assert (
        found.keys() == {"log-probs, bfloat16"}
        and "are in torch.float32" in found["log-probs, bfloat16"]
    )


@on_device
def test_too_few_devices_are_found():
    found = find_device("auto", 2)
    assert found.outcome == "failed" and "trainer.n_gpus_per_node=2" in found.text
