"""Faults drawn from a seed, over a real Ray: where a worker dies or stops, which one, and at which
time that it is there. Who only generates is replaced, and nothing else changes; who learns ends the
run by name, and the same command ends where a run does that nothing struck. FAULT_SEEDS names
others (`FAULT_SEEDS=0-99 pytest -m slow ...`)."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.cluster import remote_calls, worker_replacements
from distflow.cluster.ray_launcher import launch_ray
from distflow.cluster.remote_calls import WorkerDied
from distflow.runtime import fault_injection
from distflow.runtime.fault_injection import Fault
from tests.cluster.test_faults import workers
from tests.cluster.test_restarts import check_whole
from tests.cluster.test_supervisor import CONSTANT, distance, validating
from tests.e2e.cli_runs import Left
from tests.e2e.runs import Playground, Run
from tests.patience import wait_until
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SEEDS = (3, 5, 16)
GENERATES = ("build", "rollout.generate", "queue.put", "weights.take", "validate")
LEARNS = (
    *("build", "queue.taken", "train.update", "release"),
    *("weights.begin", "weights.put", "weights.sent"),
)
LEADS = ("checkpoint.part rank_0", "checkpoint.manifest", "checkpoint.renamed")
CALLS = {"build": 1, "validate": 3}
"""How often a point is reached at least, where that is not once a step."""
LAYOUTS = {"embedded:d2|torch:d2": (0, 2), "embedded[rollout]:d2+torch[actor]:d1": (2, 1)}
"""How many ranks only generate, which are the first, and how many learn."""
STEPS = ("trainer.launcher=ray", "trainer.total_training_steps=4", "trainer.save_freq=1", CONSTANT)
ENDS_WITHIN_S = 240.0


def seeds() -> list[int]:
    wanted = os.environ.get("FAULT_SEEDS")
    if wanted is None:
        return list(SEEDS)
    first, _, last = wanted.partition("-")
    return list(range(int(first), int(last or first) + 1))


def draw(seed: int) -> tuple[str, Fault]:
    rng = random.Random(seed)
    allocation = rng.choice(list(LAYOUTS))
    only_generate, learn = LAYOUTS[allocation]
    rank = rng.randrange(only_generate + learn)
    leads = LEADS if rank == only_generate else ()
    point = rng.choice(GENERATES if rank < only_generate else (*LEARNS, *leads))

    return allocation, Fault(
        point, rank, 1 + rng.randrange(CALLS.get(point, 4)), rng.choice(["SIGKILL", "SIGSTOP"])
    )


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, on_ray: None) -> Playground:
    return Playground(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def alone(ground: Playground) -> Left:
    ground.run("grpo", *STEPS, *validating(ground), "trainer.launcher=local", name="alone")
    return Left(ground.folder / "alone")


@pytest.mark.parametrize("seed", one_fast_in(3, seeds(), others=BY_HAND))
@pytest.mark.by_hand
def test_a_run_goes_on_or_ends_by_name_and_is_resumed(
    ground: Playground,
    alone: Left,
    fault_plan: Path,
    plan: Callable[..., None],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_calls, "REPLIES_WITHIN_S", 15.0)
    monkeypatch.setattr(remote_calls, "STARTS_WITHIN_S", 90.0)
    monkeypatch.setattr(worker_replacements, "STARTS_WITHIN_S", 90.0)
    allocation, fault = draw(seed)
    keys = (*STEPS, *validating(ground), f"trainer.allocation='{allocation}'")
    goes_on = fault.rank < LAYOUTS[allocation][0] and fault.point != "build"
    plan(fault)
    name = f"seed-{seed}"
    started = time.monotonic()
    config, spec = ground.spec("grpo", *keys, name=name)
    folder = ground.folder / name

    if goes_on:
        check_whole(Run(folder, config, launch_ray(spec)))
    else:
        with pytest.raises(WorkerDied, match=rf"worker {fault.rank} .* resumes from"):
            launch_ray(spec)

    assert fault_injection.fired(fault_plan), (
        f"{fault} is not reached: something else came of it, or this seed tests nothing"
    )
    assert time.monotonic() - started < ENDS_WITHIN_S
    wait_until(lambda: not workers(), "no worker is left, a stopped one neither")

    if not goes_on:
        config, spec = ground.spec("grpo", *keys, name=name)
        assert launch_ray(spec).steps == 4

    found = Left(folder)
    assert (
        found.trained_rows() == alone.trained_rows()
        and found.group_counts() == alone.group_counts()
    )
    assert distance(*(weights(left) for left in (found, alone))) < 1e-6


def weights(left: Left) -> dict[str, object]:
    return {
        name: tensor for name, tensor in left.tensors().items() if name.startswith("actor.model.")
    }
