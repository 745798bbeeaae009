"""Whole runs over a real Ray: the results of one process, whatever the number of workers and who
does what."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.cluster import supervisor
from distflow.cluster.local_processes_launcher import launch_processes
from distflow.cluster.ray_launcher import launch_ray
from distflow.errors import TrustError, UserError
from distflow.observe.run_reader import read_events, read_metrics, read_samples
from distflow.runtime.fault_injection import Fault
from distflow.runtime.rollout_loop.user_calls import Callbacks
from distflow.runtime.spec import LaunchOptions
from distflow.scheduling import ledger
from tests.cluster.distance import distance
from tests.cluster.unordered_actors import UnorderedCoordinator
from tests.e2e import three_domains
from tests.e2e.runs import Playground, Run
from tests.ledger_audit import verify
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = pytest.mark.slow
RAY = "trainer.launcher=ray"
CONSTANT = "actor_rollout_ref.actor.optim.scheduler=constant"
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", CONSTANT)
DISK = "actor_rollout_ref.actor.weight_update_mode=disk"
COLLECTIVE = "actor_rollout_ref.actor.weight_update_mode=collective"
SPLIT = "trainer.allocation='embedded[rollout]:d1+torch[actor]:d2'"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, on_ray: None) -> Playground:
    return Playground(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(ground: Playground) -> Run:
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
def two(ground: Playground) -> Run:
    return run(ground, *STEPS, *validating(ground), "trainer.n_gpus_per_node=2", name="w2")


def check_whole(found: Run, alone: Run) -> None:
    assert found.outcome.steps == 4
    check_same(found, alone)
    ours, theirs = (
        sorted(str(row["uid"]) for row in read_samples(run.folder, 4)) for run in (found, alone)
    )
    assert ours == theirs and len(ours) == 16
    assert found.notes("end") == ["the run finished"]


def test_two_workers_end_where_one_process_does(two: Run, alone: Run) -> None:
    check_whole(two, alone)


@pytest.mark.by_hand
def test_as_many_processes_without_ray_end_with_the_same_bits(ground: Playground, two: Run) -> None:
    keys = (*STEPS, *validating(ground), "trainer.n_gpus_per_node=2")
    config, spec = ground.spec("grpo", *keys, name="without_ray")
    found = Run(ground.folder / "without_ray", config, launch_processes(spec))
    assert distance(found.weights(4), two.weights(4)) == 0


@pytest.mark.by_hand
@pytest.mark.parametrize("num_workers", [1, 4])
def test_any_number_of_workers_ends_where_one_process_does(
    ground: Playground, alone: Run, num_workers: int
) -> None:
    found = run(
        ground,
        *STEPS,
        *validating(ground),
        f"trainer.n_gpus_per_node={num_workers}",
        name=f"w{num_workers}",
    )
    check_whole(found, alone)
    if num_workers == 1:
        assert distance(found.weights(4), alone.weights(4)) == 0


@pytest.mark.by_hand
def test_workers_that_read_their_own_rows_end_where_one_process_does_that_reads_all(
    ground: Playground, alone: Run
) -> None:
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


@pytest.mark.parametrize(("preset", "more"), one_fast_in(2, OTHERS, unpack=True, others=BY_HAND))
def test_figures_of_other_pipelines_are_those_of_one_process(
    ground: Playground, preset: str, more: tuple[str, ...]
) -> None:
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


@pytest.mark.by_hand
def test_domains_have_their_shares_and_figures_over_two_workers(ground: Playground) -> None:
    files = f"train_files: {ground.folder}/rows.jsonl, val_files: {ground.folder}/rows.jsonl"
    domains = (
        f"data.domains={{a: {{{files}, weight: 3}}, b: {{{files}, top_k: 20, max_response_length: "
        f"5}}}}"
    )
    settings = ("data.train_files=[]", domains, *STEPS, "trainer.test_freq=2")
    alone = ground.run("grpo", *settings, name="domains_alone")
    found = run(ground, *settings, "trainer.n_gpus_per_node=2", name="domains_w2")
    check_same(found, alone)
    group_counts = verify(found.folder / "ledger.jsonl")
    assert {name: each.consumed for name, each in group_counts.domains.items()} == {"a": 12, "b": 4}
    assert [step["domains/b/groups"] for step in found.metrics()] == [1, 1, 1, 1]


@pytest.mark.by_hand
@pytest.mark.faults
def test_three_domains_ahead_of_training_over_two_workers_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ray: None, plan: Callable[..., None]
) -> None:
    """All reward processes live, by the command; the leading worker is killed in the third step."""
    three_domains.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    more = (
        RAY,
        "trainer.n_gpus_per_node=2",
        "async.max_staleness=1",
        "trainer.total_training_steps=4",
    )
    command = [
        "train",
        "examples/rlvr_three.yaml",
        *three_domains.small(tmp_path / "run", *more, "trainer.save_freq=1"),
    ]
    plan(Fault("train.backward", rank=1, call=3))
    assert main(command) != 0
    assert main(command) == 0
    assert three_domains.shares(tmp_path / "run") == [Counter(math=2, code=1, instructions=1)] * 4
    group_counts = verify(tmp_path / "run" / "ledger.jsonl")
    assert {name: each.consumed for name, each in group_counts.domains.items()} == {
        "math": 8,
        "code": 4,
        "instructions": 4,
    }
    trained = [record.values for record in read_metrics(tmp_path / "run") if record.kind == "train"]
    assert len(trained) == 4 and all(step["domains/code/groups"] == 1 for step in trained)
    assert max(step["async/version_diff/max"] for step in trained) == 1


def test_generation_and_training_on_workers_of_their_own(ground: Playground, alone: Run) -> None:
    check_same(run(ground, *STEPS, *validating(ground), SPLIT, name="split"), alone)


@pytest.mark.by_hand
def test_in_which_order_the_coordinator_takes_calls_changes_nothing(
    ground: Playground, alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray promises none for an actor with many threads."""
    monkeypatch.setattr(supervisor, "CoordinatorActor", UnorderedCoordinator)
    told = list[tuple[str, int]]()
    callbacks = Callbacks(
        on_step=lambda step, metrics: told.append(("step", step)),
        on_validation=lambda step, metrics: told.append(("validation", step)),
        on_save=lambda step, path: told.append(("save", step)),
    )
    config, spec = ground.spec("grpo", RAY, *STEPS, *validating(ground), SPLIT, name="unordered")
    found = Run(
        ground.folder / "unordered", config, launch_ray(spec, LaunchOptions(callbacks=callbacks))
    )
    check_same(found, alone)
    both = [f"{what} {step}" for what, step in told if what != "save"]
    assert both == [
        *("validation 0", "step 1"),
        *("validation 2", "step 2"),
        "step 3",
        *("validation 4", "step 4"),
    ]
    assert [step for what, step in told if what == "save"] == [2, 4]


@pytest.mark.by_hand
def test_streams_stay_within_their_staleness_and_every_group_is_accounted_for(
    ground: Playground,
) -> None:
    found = run(ground, *STEPS, SPLIT, "async.max_staleness=1", name="stream")
    journal = found.folder / "ledger.jsonl"
    verify(journal)
    ages = [step["async/version_diff/max"] for step in found.metrics()]
    assert max(ages) == 1 and found.outcome.steps == 4
    assert {
        record["worker"] for _, record in ledger.timeline(journal) if record["kind"] == "assigned"
    } == {"0"}


@pytest.mark.by_hand
def test_a_run_of_two_workers_goes_on_with_one_and_with_four(
    ground: Playground, alone: Run
) -> None:
    for number in (1, 4):
        name = f"from-two-to-{number}"
        run(
            ground, *STEPS, "trainer.total_training_steps=2", "trainer.n_gpus_per_node=2", name=name
        )
        said: list[str] = []
        found = run(ground, *STEPS, f"trainer.n_gpus_per_node={number}", name=name, said=said)
        assert found.outcome.steps == 4
        assert distance(found.weights(4), alone.weights(4)) < 1e-6


@pytest.mark.by_hand
def test_a_reward_that_fails_is_told_as_in_one_process(ground: Playground) -> None:
    (ground.folder / "broken.py").write_text(
        "def compute_score(**kwargs):\n    raise KeyError('mine')\n"
    )
    broken = f"custom_reward_function.path={ground.folder}/broken.py"
    more = ("trust.check_rewards=false", "trainer.n_gpus_per_node=2", "trainer.max_restarts=2")
    with pytest.raises(UserError, match="broken.py"):
        run(ground, *STEPS, broken, *more, name="broken")
    check_started_once(ground.folder / "broken")


def check_started_once(folder: Path) -> None:
    """What is no loss of a process is no cause to start again."""
    assert [event.restart for event in read_events(folder) if event.kind == "start"] == [0]


def test_a_plan_that_the_cluster_cannot_hold_is_refused_at_once(ground: Playground) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"needs 1 machine\(s\) with 9 CPU and 3.1 GB of memory, and the cluster has 4 CPU "
            r"and"
        ),
    ):
        run(ground, *STEPS, "trainer.n_gpus_per_node=9", name="large")


def test_every_wait_of_every_process_says_for_whom(two: Run) -> None:
    spans = [
        json.loads(line) for path in (two.folder / "spans").glob("*.jsonl") for line in path.open()
    ]
    waits = [span for span in spans if span["kind"] == "wait"]
    assert all(wait["on"] and wait["what"] and wait["t0"] <= wait["t1"] for wait in waits)
    told = {(wait["what"], wait["on"]) for wait in waits}
    assert {("checkpoint of step 2", "other ranks"), ("release of step 1", "other ranks")} <= told


def test_nothing_is_left_in_the_folder_but_the_run(two: Run) -> None:
    assert {name for name in os.listdir(two.folder) if name.startswith(".")} == {
        ".distflow-run",
        ".writer",
    }


SHARDED = (
    "actor_rollout_ref.actor.strategy=fsdp",
    "trust.check_freq=1",
    "trainer.n_gpus_per_node=2",
)


@pytest.mark.by_hand
def test_a_run_goes_on_where_ranks_compute_layers_together(ground: Playground, alone: Run) -> None:
    """From two shards of each layer to two halves of it, checked, and to one process."""
    run(ground, *STEPS, *SHARDED, "trainer.total_training_steps=2", name="together")
    halves = "trainer.allocation='embedded:d2|fsdp:d1t2'"
    found = run(ground, *STEPS, halves, "trust.check_freq=1", name="together")
    assert found.outcome.steps == 4 and found.notes("warning") == []
    found_checks = [event.fields for event in read_events(found.folder) if event.kind == "checks"][
        -2:
    ]
    assert all(
        {"weights", "log_probs", "optimizer"} <= set(step["passed"]) for step in found_checks
    )
    whole = ground.run(
        "grpo", *STEPS, "trust.check_freq=1", "trainer.total_training_steps=5", name="together"
    )
    longer = ground.run(
        "grpo", *STEPS, "trust.check_freq=1", "trainer.total_training_steps=5", name="five"
    )
    assert distance(whole.weights(5), longer.weights(5)) < 1e-6


@pytest.mark.by_hand
def test_weights_spread_over_two_workers_end_where_one_process_does(
    ground: Playground, alone: Run
) -> None:
    found = run(ground, *STEPS, *SHARDED, name="sharded")
    longer = (*STEPS, "trainer.total_training_steps=6", "trust.check_freq=1")
    resumed = ground.run("grpo", *longer, name="sharded")
    whole = ground.run("grpo", *longer, name="six")
    assert found.outcome.steps == 4 and resumed.outcome.steps == 6
    assert distance(resumed.weights(6), whole.weights(6)) < 1e-6
    found_checks = [event.fields for event in read_events(resumed.folder) if event.kind == "checks"]
    unproven = [set(dict(step["not_checked"])) for step in found_checks]
    of_others = {"draws", "reward_results", "responses"}  # of a group that another worker made
    assert not any(names - of_others for names in unproven[:4])
    assert unproven[4:] == [{"resume"}, set()], (
        "the memory of a resume in another layout is not compared"
    )
    proven = {"weights", "log_probs", "reference", "gradients", "optimizer", "groups"}
    assert proven <= set(found_checks[0]["passed"])
    assert resumed.notes("warning") == []


@pytest.mark.by_hand
def test_engines_that_free_their_memory_while_training_change_no_number_over_two_workers(
    ground: Playground,
) -> None:
    """Weights that ranks share are gathered into the memory that the engine allocates again."""
    keys = (*STEPS, *SHARDED, "actor_rollout_ref.model.dtype=bfloat16")
    plain = run(ground, *keys, name="kept")
    freed = run(ground, *keys, "actor_rollout_ref.rollout.free_cache_engine=true", name="freed")
    ours, theirs = (
        [
            {name: value for name, value in step.items() if not name.startswith(TIMES)}
            for step in each.metrics()
        ]
        for each in (freed, plain)
    )
    assert len(ours) == 4 and ours == theirs
    assert freed.notes("warning") == plain.notes("warning")


SILENT = """
import sys

from distflow.pipelines.grpo import grpo_pipeline as silent
from distflow.runtime.weight_sync.sender import WeightSender

if "pytest" not in sys.modules and not hasattr(WeightSender, "speaks"):  # in the workers, once
    WeightSender.speaks = sync = WeightSender.sync
    WeightSender.sync = lambda self, version, *at, **how: sync(self, version, *at, **how) if version.step < 2 else {}
"""  # noqa: E501


@pytest.mark.by_hand
def test_weights_that_are_not_sent_to_an_engine_elsewhere_are_named(ground: Playground) -> None:
    (ground.folder / "silent.py").write_text(SILENT)
    pipeline = (f"dag.pipeline={ground.folder}/silent.py:silent",)
    with pytest.raises(
        TrustError, match="version 2 was sent, but an engine has 1: weights did not reach it"
    ):
        run(ground, *STEPS, SPLIT, *pipeline, "trainer.max_restarts=2", name="silent")
    check_started_once(ground.folder / "silent")


@pytest.mark.parametrize("mode", one_fast_in(2, [DISK, COLLECTIVE], others=BY_HAND))
@pytest.mark.by_hand
def test_weights_spread_over_two_workers_go_to_an_engine_elsewhere(
    ground: Playground, alone: Run, mode: str
) -> None:
    """By files, and through a process group."""
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
