"""Sends metrics to Weights & Biases, or into an offline folder that `wandb sync` uploads later."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from distflow.observe.files import to_json
from distflow.observe.writing.trackers import TrackedRun

_MODES = ("online", "offline", "disabled", "shared", "dryrun")


class WandbTracker:
    """One run of Weights & Biases for each run folder: a resumed run goes on in the same one.

    The environment variable WANDB_MODE decides (`online`, `offline`, `disabled`); without it the run is online if
    there is an API key and offline otherwise: it never asks for one.
    """

    def __init__(self, run: TrackedRun):
        self._run = wandb.init(
            dir=str(run.run_dir),
            project=run.project,
            name=run.experiment,
            id=_run_id(run.run_dir),
            resume="allow",
            config={name: to_json(value) for name, value in run.config.items()},
            mode=_mode(),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all metrics against `step`, which may repeat (training, validation) or go back (a resume)."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run: what is queued is sent or written."""
        self._run.finish()


def _mode() -> Any:
    asked = os.environ.get("WANDB_MODE")
    if asked in _MODES:
        return asked
    return "online" if wandb.login(verify=False, prompt=False) else "offline"


def _run_id(run_dir: Path) -> str:
    """The same for every restart: stored in the run's folder, derived from its path and time at the first start."""
    kept = run_dir / "wandb.json"
    if kept.exists():
        return str(json.loads(kept.read_bytes())["id"])
    run_id = hashlib.sha256(f"{run_dir.resolve()} {os.urandom(8).hex()}".encode()).hexdigest()[:16]
    kept.write_text(json.dumps({"id": run_id}) + "\n")
    return run_id
