"""All checks of `distflow doctor --device`: those of launch/check_device.py, collectives in processes, and a run."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from distflow.config import Config
from distflow.launch import check_device
from distflow.launch.check_device import EXACT, FAILED, OK, Check, Finding, Result, Subject, try_check
from distflow.launch.device_and_threads import accelerator
from distflow.selftest.collectives import check_collectives
from distflow.selftest.compared_runs import Pair, compare
from distflow.selftest.run_numbers import RECORDED, read_recorded
from distflow.selftest.runs import TOKENIZER, Lab, write_models

_STEPS: Final = 2


def check_all(config: Config, folder: Path) -> Iterator[Finding]:
    """A finding as soon as it is made; only the first where there is no device to check. folder: an empty one."""
    found = check_device.find_device(config.trainer.device)
    yield found
    kind = accelerator()
    if found.outcome == OK and kind is not None:
        write_models(folder)
        subject = Subject(config, torch.device(kind), folder, TOKENIZER)
        yield from (try_check(name, check, subject) for name, check in CHECKS.items())


def _grpo(subject: Subject) -> Result:
    """Rollout, reward, advantages, updates and a checkpoint of the selftest's run, on both devices."""
    recorded = read_recorded(RECORDED)["grpo"]
    first = replace(recorded.figures, steps=recorded.figures.steps[:_STEPS])
    lab = Lab.of(subject.folder / "grpo", "grpo", replace(recorded, prompts=recorded.prompts[:_STEPS], figures=first))
    on_cpu, on_device = (partial(lab.on_device, device) for device in ("cpu", subject.device.type))
    row = compare(lab, Pair(f"CPU = {subject.device.type}", EXACT, on_cpu, on_device))
    if row.found is None:
        return FAILED, row.fault
    names = ("loss", "gradient", "log-probs", "weights")
    found = ", ".join(f"{name} {value:.0e}" for name, value in zip(names, astuple(row.found), strict=True))
    return OK if row.ok else FAILED, f"{_STEPS} steps differ from the CPU's by: {found} (limit {EXACT:.0e})"


CHECKS: Final = {
    **check_device.CHECKS,
    "collectives": Check(
        lambda subject: (OK, check_collectives(subject.device.type, subject.folder)),
        "train on one device until they work; NCCL_DEBUG=INFO says more",
    ),
    "GRPO steps": Check(_grpo, "do not train on this device"),
}
