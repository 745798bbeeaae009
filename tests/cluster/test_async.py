"""Generation ahead of training over a real Ray: how far, with weights in flight, and behind a
resume."""

import json
from pathlib import Path

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.observe.run_reader import read_samples, sample_steps
from distflow.scheduling import ledger
from tests.e2e.runs import Playground, Run
from tests.ledger_audit import verify
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = pytest.mark.slow

STALENESS = 2
LONG = (
    "trainer.launcher=ray",
    "data.max_response_length=240",
    # of 16 samples a step: whoever trains waits for answers
    "actor_rollout_ref.rollout.max_num_seqs=2",
    # steps slow enough for weights to come between them
    "actor_rollout_ref.rollout.enforce_eager=true",
    f"async.max_staleness={STALENESS}",
    "trainer.save_freq=3",
)
TOGETHER = ("trainer.n_gpus_per_node=2",)
APART = ("trainer.allocation='embedded[rollout]:d2+torch[actor]:d2'",)


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    return Playground(tmp_path_factory.mktemp("stream"), num_rows=16)


def run(ground: Playground, *overrides: str, steps: int, name: str) -> Run:
    config, spec = ground.spec(
        "grpo", *LONG, f"trainer.total_training_steps={steps}", *overrides, name=name
    )
    return Run(ground.folder / name, config, launch_ray(spec))


def records(run: Run, kind: str) -> list[dict[str, object]]:
    return [
        dict(record)
        for _, record in ledger.timeline(run.folder / "ledger.jsonl")
        if record["kind"] == kind
    ]


def ages(run: Run) -> set[int]:
    """How many steps after its start a group was trained on, of all groups."""
    issued = {record["group_id"]: record["version"] for record in records(run, "issued")}
    return {
        step["step"] - 1 - issued[prompt_group]
        for step in records(run, "consumed")
        for prompt_group in step["group_ids"]
    }  # type: ignore[operator,attr-defined]


def versions(run: Run) -> list[list[int]]:
    folder = Path(run.folder)
    return [row["versions"] for step in sample_steps(folder) for row in read_samples(folder, step)]  # type: ignore[misc]


def check_stream(found: Run, workers: set[str], steps: int) -> None:
    group_counts = verify(found.folder / "ledger.jsonl")
    assert (
        group_counts.consumed == 4 * steps
        and not group_counts.dropped
        and found.outcome.steps == steps
    )
    assert (
        max(ages(found))
        == STALENESS
        == max(step["async/version_diff/max"] for step in found.metrics())
    )
    assert {record["worker"] for record in records(found, "assigned")} == workers
    assert not found.notes("error")


@pytest.mark.parametrize(
    ("place", "kv"),
    one_fast_in(2, [(TOGETHER, "keep"), (APART, "recompute")], unpack=True, others=BY_HAND),
    ids=["together", "apart"],
)
def test_answers_go_on_over_new_weights_within_the_bound(ground, place, kv, request):
    name = request.node.callspec.id
    found = run(ground, *place, f"actor_rollout_ref.rollout.kv_on_update={kv}", steps=6, name=name)
    check_stream(found, {"0", "1"}, 6)
    assert max(map(len, versions(found))) >= 2, "no answer has tokens of two versions"
    spans = [
        json.loads(line)
        for path in found.folder.glob("spans/engine*.jsonl")
        for line in path.open()
    ]
    served = {span["version"] for span in spans if span["kind"] == "decode"}
    assert {1, 2, 3} <= served, "engines decoded under the weights of each step"
