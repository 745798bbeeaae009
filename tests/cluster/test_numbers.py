"""The numbers of one process on 1, 2 and 4 workers, from the same recorded groups: weights, losses,
gradient norms."""

import json

import pytest
from torch import Tensor

from distflow.cluster.ray_launcher import launch_ray
from distflow.data.batch import Batch
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.spec import LaunchOptions
from tests.cluster.distance import distance
from tests.cluster.replay import ANSWERS, SAMPLED
from tests.e2e.runs import Playground, Run
from tests.sparse_params import BY_HAND, one_fast_in

pytestmark = pytest.mark.slow

STEPS = 10
ACTOR = "actor_rollout_ref.actor"
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    f"trainer.keep_last={STEPS}",
    "data.shuffle=false",
    "trust.on_mismatch=warn",
    # two mini-batches a step of two groups each, so that of four ranks two have none of it, in each
    # of two passes;
    # a few samples a micro-batch
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.ppo_max_token_len_per_gpu=48",
    f"{ACTOR}.optim.scheduler=constant",
    "actor_rollout_ref.rollout.stop=['1','5','a','e','i','o','u',' ']",  # answers of unlike lengths
)
REPLAYED = ("dag.pipeline=tests.cluster.replay:replayed", "trust.check_freq=0")


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    return Playground(tmp_path_factory.mktemp("numbers"), num_rows=4 * STEPS)


@pytest.fixture(scope="module")
def free(ground):
    """One process that answers itself."""
    return ground.run("grpo", *KEYS, "trainer.save_groups=all", name="free")


@pytest.fixture(scope="module")
def alone(ground, free):
    """One process on what that one had answered."""
    rows = [row for step in range(1, STEPS + 1) for row in recorded(free, step)]
    (ground.folder / "recorded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ground.run("grpo", *KEYS, *replaying(ground), name="alone")


def replaying(ground: Playground) -> tuple[str, ...]:
    return (f"data.train_files={ground.folder}/recorded.jsonl", *REPLAYED)


def groups(run: Run, step: int) -> Batch:
    return Batch.load(run.folder / "tokens" / f"{step:06d}.safetensors")


def recorded(run: Run, step: int) -> list[dict[str, object]]:
    """Of the data set: a row for each group of the step, in the order of groups."""
    batch = groups(run, step)
    rows = dict[int, dict[str, list[object]]]()
    lengths = batch.lengths("response").tolist()

    columns = [batch.flat(name).split(lengths) for name in ("response_ids", "rollout_log_probs")]
    for place, (ids, sampled) in enumerate(zip(*columns, strict=True)):
        row = rows.setdefault(int(batch["group_index"][place]), {ANSWERS: [], SAMPLED: []})
        row["prompt"] = batch["prompts"][place]
        row[ANSWERS].append(ids.tolist())
        row[SAMPLED].append(sampled.tolist())

    return [{**rows[prompt_group], "answer": "7"} for prompt_group in sorted(rows)]


def trained(run: Run, step: int = STEPS) -> dict[str, Tensor]:
    tensors = CheckpointStore(run.folder / "checkpoints").load(step).load("actor")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def per_token_loss(run: Run, step: int) -> float:
    """The masked mean of its absolute value, at a ratio of 1."""
    batch = groups(run, step)
    mask = batch.flat("loss_mask")
    return float((batch.flat("advantages").abs() * mask).sum() / mask.sum())


def on_workers(ground: Playground, num_workers: int, *keys: str, name: str) -> Run:
    config, spec = ground.spec(
        "grpo",
        *KEYS,
        "trainer.launcher=ray",
        f"trainer.n_gpus_per_node={num_workers}",
        *keys,
        name=name,
    )
    return Run(ground.folder / name, config, launch_ray(spec, LaunchOptions(say=lambda line: None)))


@pytest.mark.parametrize("strategy", one_fast_in(2, ["fsdp", "torch"], others=BY_HAND))
@pytest.mark.parametrize("num_workers", one_fast_in(3, [2, 1, 4], others=BY_HAND))
def test_recorded_groups_train_the_same_weights_on_any_number_of_workers(
    ground, free, alone, strategy, num_workers
):
    keys = (*replaying(ground), f"{ACTOR}.strategy={strategy}")
    if (strategy, num_workers) == ("fsdp", 4):
        # two copies of the weights, each over two workers
        keys = (*keys, f"{ACTOR}.fsdp_config.fsdp_size=2")

    found = on_workers(ground, num_workers, *keys, name=f"{strategy}-{num_workers}")
    off = distance(trained(found), trained(alone))
    print(f"{strategy} on {num_workers}: {off:.2g} of the weights' norm")

    # Weights that are spread, be it over one worker, are computed by torch, and not by native code.
    assert off == 0 if (strategy, num_workers) == ("torch", 1) else off <= 1e-5
    check_updates(found, alone, free, STEPS)


def check_updates(ours: Run, theirs: Run, free: Run, num_steps: int) -> None:
    """The first steps. free: the run that kept its groups."""
    pairs = list(zip(ours.metrics(), theirs.metrics(), strict=True))[:num_steps]
    for step, (here, there) in enumerate(pairs, start=1):
        assert abs(here["actor/loss"] - there["actor/loss"]) <= 1e-5 * per_token_loss(free, step)
        assert here["actor/grad_norm"] == pytest.approx(there["actor/grad_norm"], rel=1e-5)


def test_what_is_recorded_is_uneven(free):
    lengths = [groups(free, step).lengths("response").tolist() for step in range(1, STEPS + 1)]
    assert len({length for step in lengths for length in step}) > 5
    assert all(per_token_loss(free, step) > 0.1 for step in range(1, STEPS + 1))
