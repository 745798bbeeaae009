"""Functions of the user that never return, each in a whole run: one message in time, and nobody
waits at the exit."""

import time

import pytest

from tests.e2e.cli_runs import CliRun, children_of, is_alive
from tests.e2e.runs import Playground

PROGRAM = """
import asyncio
import time
from distflow import NodeRole, Pipeline, node
from distflow.pipelines import nodes


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.Event().wait()


async def compute_custom_reward(batch, config, **kwargs):
    await asyncio.sleep(1e9)


@node(writes="scores", role=NodeRole.REWARD)
async def swallows(responses):
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue


@node(writes="scores", role=NodeRole.REWARD)
async def blocks(responses):
    while True:
        time.sleep(0.1)


@node(writes="scores", role=NodeRole.REWARD)
async def in_a_task(responses):
    return await asyncio.gather(*(asyncio.sleep(1e9) for text in responses))


@node(writes="scores", role=NodeRole.REWARD)
async def behind_the_judge(samples, reward_fn):
    await reward_fn(samples)
    await asyncio.Event().wait()


@node(writes=("responses", "response_ids", "response_mask"), role=NodeRole.ROLLOUT, reads=("prompt_ids",))
async def workflow(group, rollout, tokenizer):
    made = await nodes.generate(group, rollout, tokenizer)
    await asyncio.Event().wait()
    return made


def make(*rewards, answer=nodes.generate):
    pipeline = Pipeline("infinite")
    pipeline.add_node("answer", answer)
    for reward in rewards:
        pipeline.add_node("reward", reward, node_role=NodeRole.REWARD, deps=["answer"])
    pipeline.add_node("compare", nodes.compute_advantage)
    pipeline.add_node("learn", nodes.train_actor)
    return pipeline.build()


def by_sample():
    return make(compute_score)


def by_batch():
    return make(compute_custom_reward)


def swallowing():
    return make(swallows)


def blocking():
    return make(blocks)


def tasks():
    return make(in_a_task)


def judging():
    return make(behind_the_judge)


def answering():
    return make(nodes.compute_reward, answer=workflow)
"""  # noqa: E501
LATE = "did not return within 0.4 s (reward.timeout_s for each sample)"
CASES = {
    "by_sample": LATE,
    "by_batch": LATE,
    "swallowing": f"{LATE}, suppresses its cancellation and was abandoned",
    "blocking": "an async function has blocked everything else for 0.4 s (at endless.py:",
    "tasks": LATE,
    "judging": LATE,
    "answering": LATE,
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("infinite"), num_rows=4)
    (ground.folder / "endless.py").write_text(PROGRAM)
    return ground


def start(ground: Playground, command: str, builder: str, *more: str) -> CliRun:
    keys = ground.overrides(
        f"{command}-{builder}", "trust.check_rewards=false", "reward.timeout_s=0.1", *more
    )
    if builder not in ("judging", "answering"):
        unused = ("reward.functions", "reward.num_workers", "custom_reward_function.", "trust.")
        keys = [key for key in keys if not key.startswith(unused)]

    pipeline = (f"dag.pipeline={ground.folder}/endless.py:{builder}",)
    quiet = "actor_rollout_ref.actor.use_kl_loss=false"
    return CliRun(
        ground.folder / f"{command}-{builder}.log", [command, "grpo", *keys, *pipeline, quiet]
    )


QUICK = ("answering",)


@pytest.mark.parametrize(
    "builder",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES],
)
def test_a_run_ends_in_time_and_says_which_function_it_was(ground, builder):
    run = start(
        ground,
        "train",
        builder,
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )

    children: list[int] = []
    while run.running:
        children += children_of(run.pid)
        time.sleep(0.05)

    assert run.status() == 2 and CASES[builder] in run.said(), run.said()
    assert (
        run.said().count("distflow: ") == 1
        and "Traceback" not in run.said()
        and "ignored" not in run.said()
    )
    assert not any(is_alive(pid) for pid in children)


@pytest.mark.parametrize(
    "builder", ["by_sample", pytest.param("swallowing", marks=[pytest.mark.slow])]
)
def test_a_validation_counts_it_and_goes_on(ground, builder):
    run = start(
        ground,
        "eval",
        builder,
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=2",
    )
    assert run.status() == 0, run.said()
    assert "did not return within 0.1 s" in run.said() and "val/errors: 2.0000" in run.said()
    assert "2 of 2 scores are reward errors (100%) in a validation" in run.said()


@pytest.mark.slow
def test_a_blocked_evaluation_ends(ground):
    run = start(
        ground,
        "eval",
        "blocking",
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=2",
    )
    assert run.status() == 2 and CASES["blocking"] in run.said(), run.said()
