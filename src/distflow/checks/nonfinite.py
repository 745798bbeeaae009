"""Checks of every update: losses, gradients and weights are finite, and weights have a plausible
size. A non-finite update is skipped, and saved so that it can be replayed."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.models.sharding import whole
from distflow.models.weight_soundness import magnitudes, unsound
from distflow.observe.crash_safe_files import read_object
from distflow.training.engine import TrainEngine

BATCH = "batch.safetensors"
WEIGHTS = "weights.safetensors"
CONFIG = "config.yaml"
FACTS = "bundle.json"
KEPT_OBJECTS = ("uid", "prompts", "responses", "finish_reason")


@dataclass
class NonFinite:
    """Saves a bundle for each skipped update, and stops a run that only skips.

    folder: of the bundles; the newest `limit` are kept. limit: consecutive skipped updates of an
    engine that end the run. config_yaml: for each bundle. start: by role, the magnitude of each
    trained weight before the first update."""

    folder: Path
    limit: int
    config_yaml: str
    start: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    _in_a_row: Counter[str] = field(default_factory=Counter)
    _last: dict[str, Path] = field(default_factory=dict)
    _num_saved: int = 0
    _parameters: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)

    def updated(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int
    ) -> Path | None:
        """Call after each update; returns the bundle's folder if the update was skipped.

        Raises TrustError at the limit, and if an update left a weight that is not finite or
        implausibly large: such weights must not be synced or saved.
        """
        if metrics.get("empty"):
            return None  # nothing was computed

        if not metrics.get("skipped"):
            self._in_a_row[role] = 0
            wrong = unsound(magnitudes(self._trained(role, engine).items()), self.start.get(role))
            if wrong:
                raise TrustError(
                    f"after an update in step {step + 1} weights of the {role} are not finite or "
                    f"garbage ({len(wrong)} tensors, {wrong[0]} first); they were not synced or "
                    "saved. Lower the learning rate, or resume from the last checkpoint"
                )

            return None

        self._in_a_row[role] += 1
        bundle = self._save(role, engine, batch, metrics, step)

        if self._in_a_row[role] >= self.limit:
            raise TrustError(
                f"{self._in_a_row[role]} updates of the {role} in a row had a non-finite loss or "
                "gradient (trust.max_skipped_updates). Look at one with `distflow replay "
                f"{bundle}`; lower the learning rate, or resume from an earlier checkpoint"
            )

        return bundle

    def _trained(self, role: str, engine: TrainEngine) -> Mapping[str, Tensor]:
        """The engine's trained weights. Those of an open model are listed once: `TrainEngine.state`
        takes as long as the check, for the optimizer's entries."""
        if role not in self._parameters:
            model = getattr(engine, "model", None)
            named = model.named_parameters() if isinstance(model, nn.Module) else ()
            self._parameters[role] = {
                name: parameter for name, parameter in named if parameter.requires_grad
            }

        return self._parameters[role] or engine.state().trained_weights()

    def _save(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int
    ) -> Path:
        bundle = self._make_folder(role, step)
        names = [n for n in batch.names if n in KEPT_OBJECTS or isinstance(batch.flat(n), Tensor)]
        batch.only(names).save(bundle / BATCH)

        if self._in_a_row[role] > 1:
            # another rank has removed it, or the file system has no hard links
            with suppress(OSError):
                # a skipped update changed nothing
                os.link(self._last[role] / WEIGHTS, bundle / WEIGHTS)

        is_there = (bundle / WEIGHTS).exists()

        weights = {}
        for name, tensor in engine.state().trained_weights().items():
            # All ranks take part in making sharded weights whole, whichever of them have a file.
            tensor = whole(tensor)
            if not is_there:
                weights[name] = tensor.cpu().contiguous().clone()

        if not is_there:
            save_file(weights, bundle / WEIGHTS)

        (bundle / CONFIG).write_text(self.config_yaml, encoding="utf-8")
        facts = {"role": role, "step": step, "metrics": {k: repr(v) for k, v in metrics.items()}}
        (bundle / FACTS).write_text(json.dumps(facts, indent=2))
        self._last[role] = bundle
        self._remove_old()

        return bundle

    def _make_folder(self, role: str, step: int) -> Path:
        """Make a folder with an unused name: an earlier start, or another rank, may have saved one
        for this step."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._num_saved += 1
            bundle = self.folder / f"step-{step + 1:06d}-{role}-{self._num_saved}"
            with suppress(FileExistsError):
                bundle.mkdir(mode=0o700)
                return bundle

    def _remove_old(self) -> None:
        """Remove old bundles, but only files that distflow writes; other files in a bundle stay."""
        bundles = []
        for path in self.folder.iterdir():
            is_named = re.fullmatch(r"step-\d{6,}-\w+-\d+", path.name) and not path.is_symlink()
            if is_named and "role" in read_object(path / FACTS):
                bundles.append(path)

        bundles.sort(key=_written)
        for old in bundles[: -self.limit]:
            for name in (BATCH, WEIGHTS, CONFIG, FACTS):
                (old / name).unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or another rank was faster
                old.rmdir()


def _written(bundle: Path) -> int:
    try:
        return bundle.stat().st_mtime_ns
    except FileNotFoundError:  # another rank has just removed it
        return 0
