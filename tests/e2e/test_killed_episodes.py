"""Killed while episodes of several turns wait for a tool, a run loses no group: each is issued
again under its group id, and at staleness 0 the run ends with the same bits."""

import json
from pathlib import Path

import pytest

from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.survivors import audit
from tests.environments.test_training import Games
from tests.rollout.servers.test_sglang import launcher

pytestmark = pytest.mark.slow

# A tool takes a time that is drawn anew and has the same result. Its n-th call kills the engine's
# server, or the run if there is none: KILL_AT=n.
TALK = """
import asyncio, itertools, os, signal
from pathlib import Path
from tests.e2e.cli_runs import children_of

kill_at, calls = int(os.environ.get("KILL_AT", "0")), itertools.count(1)

def strike():
    below = [pid for pid in children_of(os.getpid()) if b"sglang_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in below or [os.getpid()]:
        os.kill(pid, signal.SIGKILL)

async def tool(text):
    if next(calls) == kill_at:
        strike()
    await asyncio.sleep(os.urandom(1)[0] / 20_000)
    return text[::-1] + "="

async def talk(chat, row):
    reply = await chat.ask(row.prompt, max_tokens=5)
    while chat.turns < 3 and sum(reply.token_ids) % 4:
        reply = await chat.ask(await tool(reply.text), max_tokens=5)
    return sum(chat.token_ids) % 7 / 6
"""  # noqa: E501
NUM_ROWS = 8
NUM_EPOCHS = 2
PLACES = {(epoch, row) for epoch in range(NUM_EPOCHS) for row in range(NUM_ROWS)}
CALLS_A_STEP = 16
"""At least: of 16 episodes three in four have a second turn, and of these three in four a third
one."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Games(tmp_path_factory.mktemp("killed_episodes"), num_rows=NUM_ROWS)
    (ground.folder / "talk.py").write_text(TALK)
    return ground


def start(ground: Games, name: str, staleness: int, *more: str, kill_at: int = 0) -> CliRun:
    keys = (
        f"async.max_staleness={staleness}",
        f"actor_rollout_ref.rollout.workflow={ground.folder}/talk.py:talk",
        "data.max_response_length=20",
        f"trainer.total_epochs={NUM_EPOCHS}",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.optim.scheduler=constant",
        *more,
    )
    arguments = ["train", "grpo", *ground.overrides(name, *keys)]

    return CliRun(ground.folder / f"{name}.log", arguments, {"KILL_AT": str(kill_at)})


def killed_twice(ground: Games, name: str, staleness: int) -> Path:
    """In the second step or later, and again after the resume."""
    for kill_at in (3 * CALLS_A_STEP, CALLS_A_STEP // 2):
        run = start(ground, name, staleness, kill_at=kill_at)
        assert run.status() == -9, run.said()
    run = start(ground, name, staleness)
    assert run.status() == 0, run.said()
    return ground.folder / name


def check_ledger(folder: Path, staleness: int) -> None:
    survived = audit(folder, staleness, PLACES)
    assert not survived.dropped and survived.step.keys() == PLACES
    issued = [r for r in map(json.loads, (folder / "ledger.jsonl").open()) if r["kind"] == "issued"]
    restarts: dict[int, set[int]] = {}
    for record in issued:  # also those that a resume took back
        restarts.setdefault(record["group_id"], set()).add(record["restart"])
    assert len({(r["group_id"], r["epoch"], r["row"]) for r in issued}) == len(restarts), (
        "a group changed its row"
    )
    assert {restart for own in restarts.values() if len(own) > 1 for restart in own} == {0, 1, 2}


def test_at_staleness_0_it_ends_with_the_same_bits(ground):
    whole = start(ground, "whole", 0)
    assert whole.status() == 0, whole.said()
    folder = killed_twice(ground, "killed", 0)
    check_ledger(folder, 0)
    same_run(Left(folder), Left(ground.folder / "whole"))
    hit_rates = [
        v["episodes/prefix_cache_hit_rate"]
        for (_, kind), v in Left(folder).metrics().items()
        if kind == "train"
    ]
    assert max(hit_rates) > 0
    ended = [
        v["episodes/ended/length"]
        for (_, kind), v in Left(folder).metrics().items()
        if kind == "train"
    ]
    assert max(ended) > 0, "limits end episodes in the middle of a round"


def test_ahead_of_training_each_group_is_trained_once_and_in_time(ground):
    check_ledger(killed_twice(ground, "ahead", staleness=4), staleness=4)


def test_a_server_that_is_killed_between_turns_is_started_again_and_the_run_ends_with_the_same_bits(
    ground,
):
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.name=sglang", f"{rollout}.python={launcher(ground.folder)}")
    keys += (
        (
            f"{rollout}.engine_kwargs={{sglang: {{enable_deterministic_inference: true, "
            f"batch_invariant: true}}}}"
        ),
    )
    whole = start(ground, "served", 0, *keys)
    struck = start(ground, "struck", 0, *keys, kill_at=CALLS_A_STEP + 3)
    assert whole.status() == struck.status() == 0, struck.said()
    check = audit(ground.folder / "struck", 0, PLACES)
    assert not check.dropped and "the SGLang server is lost" in struck.said()
    same_run(Left(ground.folder / "struck"), Left(ground.folder / "served"))
