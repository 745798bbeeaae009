"""Checks of what a run begins with: a resumed run's memory equals the saved run's, bit for bit, by
hashes in the checkpoint; the weights of a new run are those of the model's files."""

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.audit.check import NOT_APPLICABLE, Wrong, check
from distflow.audit.model_forward import model_of
from distflow.audit.record_groups_and_updates import OpenEngine
from distflow.audit.recorded_step import AuditedRun, RecordedStep, samples_of
from distflow.config import changed_keys, config_from_dict
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import resume_advice
from distflow.models.lora import plain_name, unwrapped
from distflow.models.model_identity_and_weight_soundness import bit_hash
from distflow.models.model_paths_and_folder_checks import resolve_path
from distflow.runtime.audit_protocol import AUDIT_STATE
from distflow.runtime.resources import Resources
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.training.multi_policy_engine import models_of

STREAMS = "random stream"
NODES = "state of node"
POSITION = "data position"
QUEUED = "queued group"

NUM_ROWS = 4

Hashes = dict[str, dict[str, tuple[str, str]]]
"""By part (a model's role, or one of the above) and name: the owner ("" if all ranks have the
same), and the hash."""


class Memory:
    """Hashes of a worker's memory, and their differences from the checkpoint that it resumed
    from."""

    def __init__(self, inputs: WorkerInputs, resources: Resources) -> None:
        self._inputs = inputs
        self._resources = resources
        self._rank = inputs.ports.everyone.rank
        self._saved: Hashes | None = None
        self._tolerated: dict[str, str] = {}
        self._unchecked: dict[str, str] = {}

    def models(self) -> Hashes:
        """Hashes of all weights, including frozen ones, all entries of optimizers, and their
        numbers of steps."""
        found: Hashes = {}
        for role in ("actor", "critic", "ref"):
            engine = getattr(self._resources, role)
            model = model_of(engine)
            if model is None or any(
                model is model_of(getattr(self._resources, other)) for other in found
            ):
                continue
            optimizer: Mapping[Any, Any] = (
                engine.optimizer.state if isinstance(engine, OpenEngine) else {}
            )
            found[role] = {"number of optimizer steps": ("", str(getattr(engine, "num_steps", 0)))}
            for name, parameter in model.named_parameters():
                for what, value in {"weight": parameter, **optimizer.get(parameter, {})}.items():
                    found[role][f"{what} {name}"] = (_place(value), _digest(value))
        return found

    def others(self, nodes: Mapping[str, Any], point: ResumePoint[Batch] | None) -> Hashes:
        """Hashes of everything else."""
        streams = dict(global_random_states.states())
        streams |= {f"device:{i}": state for i, state in enumerate(streams.pop("device", ()))}
        found: dict[str, Mapping[str, Any]] = {
            NODES: {name: nodes[name] for name in nodes if name != AUDIT_STATE}
        }
        if point is not None:
            elsewhere = ("plan", "restart", "ledger", "secs", "ended")
            found[POSITION] = {
                name: value for name, value in point.snapshot.items() if name not in elsewhere
            }
            found[QUEUED] = {
                str(number): samples_of(group.data) for number, group in point.queued.items()
            }
        hashes = {
            part: {name: ("", _digest(value)) for name, value in own.items()}
            for part, own in found.items()
        }
        return {
            **hashes,
            STREAMS: {name: (str(self._rank), _digest(state)) for name, state in streams.items()},
        }

    def compare_at_start(self, _: object) -> None:
        """Raises Wrong if anything differs from the saved run."""
        spec = self._inputs.spec
        checkpoint = self._inputs.resumed
        self._saved = {}
        assert checkpoint is not None, "called in a resumed run"
        parts = [part for part in checkpoint.files if part.startswith("rank_")]
        with checkpoint.reading():
            # this rank's own shards last
            for part in sorted(parts, key=lambda part: part == f"rank_{self._rank}"):
                for kind, hashes in checkpoint.load(part).get("audit", {}).items():
                    self._saved.setdefault(kind, {}).update(
                        {name: (entry[0], entry[1]) for name, entry in hashes.items()}
                    )
            before = config_from_dict(checkpoint.load("run")["config"], judge=False)
        if spec.data.max_staleness:
            self._tolerated = dict.fromkeys((STREAMS, NODES), "groups are generated meanwhile")
        changed = [
            key for key, *_ in changed_keys(before, spec.config) if not key.startswith("trainer.")
        ]
        if changed:
            self._tolerated |= dict.fromkeys((POSITION, QUEUED, "ref"), f"{changed[0]} has changed")
        point = self._inputs.ports.queue.resume_point() if self._rank == 0 else None
        self._compare(self.models() | self.others(self._inputs.state, point))

    def compare_again(self, step: int) -> str | None:
        """Compare before the first update of `step`; see `Check.run`."""
        if self._inputs.resumed is None or step != self._inputs.version.step:
            return NOT_APPLICABLE
        if self._saved is None:
            return "a training loop of the user's own may have trained before"
        self._compare(self.models())
        return "; ".join(f"{part}: {why}" for part, why in self._unchecked.items()) or None

    def _compare(self, now: Hashes) -> None:
        wrong = list[str]()
        saved = self._saved or {}
        for part, hashes in now.items():
            before = saved.get(part, {})
            if not before and part != QUEUED:
                self._unchecked[part if saved else "all"] = "the checkpoint has no hashes"
                continue
            for name in sorted(
                before.keys() & hashes.keys() if part == STREAMS else before.keys() | hashes.keys()
            ):
                (place, then), (here, found) = (
                    each.get(name, ("", "")) for each in (before, hashes)
                )
                if place != here and then and found:
                    self._unchecked[part] = "another layout over ranks"
                elif then != found and part in self._tolerated:
                    self._unchecked[part] = self._tolerated[part]
                elif then != found:
                    wrong.append(f"{part} {name}")
        if wrong:
            raise Wrong(
                f"{', '.join(wrong[:3])} ({len(wrong)} in all): not what the run had in memory "
                "when it saved. It was "
                "not restored, or has changed since, or the checkpoint has: resume from another "
                "one by "
                f"{resume_advice('PATH')}"
            )


@check(
    "resume",
    "after a resume weights (frozen ones and the reference too), optimizer, random streams, state "
    "of nodes, data "
    "position and queued groups are what the saved run had in memory, at the start and before the "
    "first update",
    needs=(
        "a checkpoint of an audited run; the same layout over ranks; no staleness for random "
        "streams and nodes"
    ),
    limit="equal bits",
)
def audit_resume(recorded: RecordedStep) -> str | None:
    return recorded.run.compare_memory(recorded.step)


@check(
    "loaded",
    "at the start the policy's weights equal those of the same name in the model's files",
    needs="a folder with safetensors in floating point, without code of its own; whole weights",
    limit=f"equal, {NUM_ROWS} rows of each tensor",
)
def audit_loaded(run: AuditedRun) -> str | None:
    settings = run.spec.config.actor_rollout_ref.model
    model = model_of(run.resources.actor)
    if (
        model is None
        or settings.init == "random"
        or settings.path is None
        or run.inputs.resumed is not None
    ):
        return NOT_APPLICABLE
    if settings.trust_remote_code or settings.gguf_file:
        return "the run does not begin with safetensors alone"
    first = unwrapped(next(iter(models_of(model).values())))
    own = {
        plain_name(name): p.detach()
        for name, p in first.named_parameters()
        if not isinstance(p, DTensor)
    }
    num_same = 0
    folder = Path(resolve_path(settings.path))
    for path in sorted(folder.glob("model.safetensors")) or sorted(
        folder.glob("model-*-of-*.safetensors")
    ):
        with safe_open(path, "pt") as file:
            for name in own.keys() & set(file.keys()):
                kept = file.get_slice(name)
                weight = own[name]
                is_float = kept.get_dtype() in ("F64", "F32", "F16", "BF16")
                if not is_float or weight.dim() == 0 or tuple(kept.get_shape()) != weight.shape:
                    continue
                start = random.Random(name).randrange(max(len(weight) - NUM_ROWS, 0) + 1)
                rows = slice(start, start + NUM_ROWS)
                if not torch.equal(kept[rows].to(weight.dtype), weight[rows].cpu()):
                    raise Wrong(
                        f"{name} of the policy is not what {path} has: it was loaded from another "
                        "model, or rounded, "
                        "scaled or changed after it was loaded"
                    )
                num_same += 1
    return None if num_same else "the model's path has no tensors of the same names"


def _place(value: object) -> str:
    """Text on which part of the whole tensor this rank has."""
    if not isinstance(value, DTensor):
        return ""
    return (
        f"{tuple(value.device_mesh.shape)} {value.device_mesh.get_coordinate()} {value.placements}"
    )


def _digest(value: object) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]


def _text(value: object) -> str:
    """Text that is the same before and after a JSON round trip; tensors and arrays are represented
    by their bits."""
    if isinstance(value, Mapping):
        return f"{{{sorted((str(name), _text(entry)) for name, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, np.ndarray):
        return value.tobytes().hex()
    return bit_hash(value) if isinstance(value, Tensor) else json.dumps(value)
