"""Claim: losses and gradients are finite. Where one is not, the step is skipped and can be run again elsewhere."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from distflow.data.batch import Batch
from distflow.runtime.checks import TrustError
from distflow.training.engine import TrainEngine


@dataclass
class NonFinite:
    """Saves a bundle for each skipped update and stops a run that only skips.

    folder: where bundles go. limit: skipped updates in a row that end the run. config_yaml: kept in each bundle.
    """

    folder: Path
    limit: int
    config_yaml: str
    _in_a_row: int = 0

    def updated(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int
    ) -> Path | None:
        """Call after each update; the bundle's folder where this one was skipped. Raises TrustError at the limit."""
        if not metrics.get("skipped"):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        bundle = self._save(role, engine, batch, metrics, step)
        if self._in_a_row >= self.limit:
            raise TrustError(
                f"{self._in_a_row} updates of the {role} in a row had a non-finite loss or gradient. Look at one with "
                f"`distflow replay {bundle}`; lower the learning rate, or resume from an earlier checkpoint"
            )
        return bundle

    def _save(self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int) -> Path:
        bundle = self.folder / f"step-{step + 1:06d}-{role}"
        bundle.mkdir(parents=True, exist_ok=True)
        batch.save(bundle / "batch.safetensors")
        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in engine.weights()}
        save_file(weights, bundle / "weights.safetensors")
        (bundle / "config.yaml").write_text(self.config_yaml)
        facts = {"role": role, "step": step, "metrics": {k: repr(v) for k, v in metrics.items()}}
        (bundle / "bundle.json").write_text(json.dumps(facts, indent=2))
        return bundle
