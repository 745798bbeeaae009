"""Whole runs over a real Ray: the results of one process, whatever the number of workers and who
does what."""

import json
import os

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.errors import UserError
from distflow.observe.run_reader import read_events, read_metrics, read_samples
from distflow.runtime.spec import LaunchOptions
from tests.cluster.distance import distance
from tests.e2e.runs import Playground, Run
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = pytest.mark.slow
RAY = "trainer.launcher=ray"
CONSTANT = "actor_rollout_ref.actor.optim.scheduler=constant"
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", CONSTANT)
DISK = "actor_rollout_ref.actor.weight_update_mode=disk"
COLLECTIVE = "actor_rollout_ref.actor.weight_update_mode=collective"
SPLIT = "trainer.allocation='embedded[rollout]:d1+torch[actor]:d2'"


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    return Playground(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(ground):
    return ground.run("grpo", *STEPS, *validating(ground), name="alone")


def validating(ground: Playground) -> tuple[str, ...]:
    return (
        f"data.val_files={ground.folder}/rows.jsonl",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
    )


def run(ground: Playground, *overrides: str, name: str, said: list[str] | None = None) -> Run:
    config, spec = ground.spec("grpo", RAY, *overrides, name=name)
    outcome = launch_ray(
        spec, LaunchOptions(say=lambda line: said.append(line) if said is not None else None)
    )
    return Run(ground.folder / name, config, outcome)


TIMES = ("timing_s/", "throughput/", "memory/", "perf/")


def check_same(ours: Run, theirs: Run) -> None:
    check_same_figures(ours, theirs)
    assert distance(ours.weights(4), theirs.weights(4)) < 1e-6


def check_same_figures(ours: Run, theirs: Run) -> None:
    """Figures that are means or sums over the whole batch are the same, whoever computed which part
    of them."""
    for here, there in zip(ours.metrics(), theirs.metrics(), strict=True):
        wanted = {name: value for name, value in there.items() if not name.startswith(TIMES)}
        found = {name: here.get(name) for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def two(ground):
    return run(ground, *STEPS, *validating(ground), "trainer.n_gpus_per_node=2", name="w2")


def check_whole(found: Run, alone: Run) -> None:
    assert found.outcome.steps == 4
    check_same(found, alone)
    ours, theirs = (
        sorted(str(row["uid"]) for row in read_samples(run.folder, 4)) for run in (found, alone)
    )
    assert ours == theirs and len(ours) == 16
    assert found.notes("end") == ["the run finished"]


def test_two_workers_end_where_one_process_does(two, alone):
    check_whole(two, alone)


def test_workers_that_read_their_own_rows_end_where_one_process_does_that_reads_all(ground, alone):
    check_whole(
        run(
            ground,
            *STEPS,
            *validating(ground),
            "trainer.n_gpus_per_node=2",
            "data.lazy=true",
            name="own",
        ),
        alone,
    )


KL_AND_CRITIC = (
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "actor_rollout_ref.rollout.n=2",
)
FILTERED = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.when_exhausted=continue",
)


OTHERS = [("ppo", KL_AND_CRITIC), ("dapo", FILTERED)]


@pytest.mark.parametrize(("preset", "more"), OTHERS)
def test_figures_of_other_pipelines_are_those_of_one_process(ground, preset, more):
    common = (*STEPS, *validating(ground), *more)
    one = ground.run(preset, *common, name=f"{preset}_alone")
    config, spec = ground.spec(
        preset, RAY, *common, "trainer.n_gpus_per_node=2", name=f"{preset}_w2"
    )
    two = Run(ground.folder / f"{preset}_w2", config, launch_ray(spec))
    check_same(two, one)
    ours, theirs = (
        [m.values for m in read_metrics(run.folder) if m.kind == "val"] for run in (two, one)
    )
    for here, there in zip(ours, theirs, strict=True):
        assert dict(here) == pytest.approx(dict(there), rel=1e-4, abs=1e-5)


def test_generation_and_training_on_workers_of_their_own(ground, alone):
    check_same(run(ground, *STEPS, *validating(ground), SPLIT, name="split"), alone)


def test_a_plan_that_the_cluster_cannot_hold_is_refused_at_once(ground):
    with pytest.raises(
        UserError,
        match=r"1 machine\(s\) with 9 CPU and 3\.1 GB .* 4 CPU ",
    ):
        run(ground, *STEPS, "trainer.n_gpus_per_node=9", name="large")


def test_every_wait_of_every_process_says_for_whom(two):
    spans = [
        json.loads(line) for path in (two.folder / "spans").glob("*.jsonl") for line in path.open()
    ]
    waits = [span for span in spans if span["kind"] == "wait"]
    assert all(wait["on"] and wait["what"] and wait["t0"] <= wait["t1"] for wait in waits)
    told = {(wait["what"], wait["on"]) for wait in waits}
    assert {("checkpoint of step 2", "other ranks"), ("release of step 1", "other ranks")} <= told


def test_nothing_is_left_in_the_folder_but_the_run(two):
    assert {name for name in os.listdir(two.folder) if name.startswith(".")} == {
        ".distflow-run",
        ".writer",
    }


SHARDED = (
    "actor_rollout_ref.actor.strategy=fsdp",
    "trust.check_freq=1",
    "trainer.n_gpus_per_node=2",
)


@pytest.mark.parametrize("sizes", ["d1t2", "d1c2"])
def test_a_run_goes_on_where_ranks_compute_layers_or_rows_together(ground, alone, sizes):
    """From two shards of each layer to two halves of it or of each row, checked, and to one
    process."""
    run(ground, *STEPS, *SHARDED, "trainer.total_training_steps=2", name=f"together_{sizes}")
    halves = f"trainer.allocation='embedded:d2|fsdp:{sizes}'"
    found = run(ground, *STEPS, halves, "trust.check_freq=1", name=f"together_{sizes}")
    assert found.outcome.steps == 4 and found.notes("warning") == []
    found_checks = [event.fields for event in read_events(found.folder) if event.kind == "checks"][
        -2:
    ]
    assert all(
        {"weights", "log_probs", "optimizer"} <= set(step["passed"]) for step in found_checks
    )
    whole = ground.run(
        "grpo",
        *STEPS,
        "trust.check_freq=1",
        "trainer.total_training_steps=5",
        name=f"together_{sizes}",
    )
    longer = ground.run(
        "grpo", *STEPS, "trust.check_freq=1", "trainer.total_training_steps=5", name=f"five_{sizes}"
    )
    assert distance(whole.weights(5), longer.weights(5)) < 1e-6


@pytest.mark.parametrize("mode", one_fast_in(2, [COLLECTIVE, DISK], others=BY_HAND))
def test_weights_spread_over_two_workers_go_to_an_engine_elsewhere(ground, alone, mode):
    """Through a process group, and by files."""
    apart = "trainer.allocation='embedded[rollout]:d1+fsdp[actor]:d2'"
    found = run(
        ground, *STEPS, *validating(ground), apart, mode, name=f"spread_{mode.rpartition('=')[2]}"
    )
    check_same_figures(found, alone)
    assert not any("bucket" in note for note in found.notes("warning"))
    assert {name for name in os.listdir(found.folder) if name.startswith(".")} == {
        ".distflow-run",
        ".writer",
    }
