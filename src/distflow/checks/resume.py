"""Check: a resumed run's memory equals the saved run's, bit for bit, by hashes in the
checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.plain_forward import model_of
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import samples_of
from distflow.checks.update_records import OpenEngine
from distflow.config import changed_keys, config_from_dict
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import resume_advice
from distflow.models.model_identity import bit_hash
from distflow.runtime.checks_protocol import CHECK_STATE
from distflow.runtime.resources import Resources
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.worker_inputs import WorkerInputs

STREAMS = "random stream"
NODES = "state of node"
POSITION = "data position"
QUEUED = "queued group"

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
        found: Hashes = {}
        found[NODES] = _hashed({name: nodes[name] for name in nodes if name != CHECK_STATE})

        if point is not None:
            elsewhere = ("plan", "restart", "ledger", "secs", "ended")
            position = {n: value for n, value in point.snapshot.items() if n not in elsewhere}
            queued = {str(n): samples_of(group.data) for n, group in point.queued.items()}
            found[POSITION] = _hashed(position)
            found[QUEUED] = _hashed(queued)

        found[STREAMS] = _hashed(streams, owner=str(self._rank))
        return found

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
                for kind, hashes in checkpoint.load(part).get("checks", {}).items():
                    saved = self._saved.setdefault(kind, {})
                    for name, (place, digest) in hashes.items():
                        saved[name] = (place, digest)

            before = config_from_dict(checkpoint.load("run")["config"], judge=False)

        if spec.data.max_staleness:
            self._tolerated = dict.fromkeys((STREAMS, NODES), "groups are generated meanwhile")
        changed = [
            key for key, *_ in changed_keys(before, spec.config) if not key.startswith("trainer.")
        ]
        if changed:
            self._tolerated |= dict.fromkeys((POSITION, QUEUED, "ref"), f"{changed[0]} has changed")

        point = None
        if self._rank == 0:
            point = self._inputs.ports.queue.resume_point()

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

            names = before.keys() | hashes.keys()
            if part == STREAMS:  # each rank has its own
                names = before.keys() & hashes.keys()

            for name in sorted(names):
                place, then = before.get(name, ("", ""))
                here, found = hashes.get(name, ("", ""))
                if place != here and then and found:
                    self._unchecked[part] = "another layout over ranks"
                elif then != found and part in self._tolerated:
                    self._unchecked[part] = self._tolerated[part]
                elif then != found:
                    wrong.append(f"{part} {name}")

        if wrong:
            raise Wrong(
                f"{', '.join(wrong[:3])} ({len(wrong)} in all): not what the run had in memory "
                "when it saved. It was not restored, or has changed since, or the checkpoint has: "
                f"resume from another one by {resume_advice('PATH')}"
            )


@check(
    "resume",
    "after a resume weights, optimizer, random streams, state of nodes, data position and queued "
    "groups are what the saved run had in memory",
    needs="a checkpoint of a run with checks; the same layout over ranks; no staleness for random "
    "streams and nodes",
    limit="equal bits",
)
def check_resume(recorded: RecordedStep) -> str | None:
    return recorded.run.compare_memory(recorded.step)


def _place(value: object) -> str:
    """Text on which part of the whole tensor this rank has."""
    if not isinstance(value, DTensor):
        return ""
    return (
        f"{tuple(value.device_mesh.shape)} {value.device_mesh.get_coordinate()} {value.placements}"
    )


def _hashed(values: Mapping[str, object], owner: str = "") -> dict[str, tuple[str, str]]:
    return {name: (owner, _digest(value)) for name, value in values.items()}


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
    if isinstance(value, Tensor):
        return bit_hash(value)

    return json.dumps(value)
