"""`distflow.rollouts`: what a training loop of the user's own gets is what a run gets, under the
same bounds."""

import asyncio
import json
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import distflow
from distflow.algorithms.methods.grpo import compute_grpo_advantage
from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.runtime.sample_queue.protocol import TrainingStep
from distflow.runtime.sample_queue.submissions import NothingToWaitFor
from tests.api.reward_results import HELD, digits, slow
from tests.api.small import ROWS, TINY, small
from tests.ledger_audit import verify
from tests.sparse_params import one_fast_in

OWN = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 9)]
WITHOUT_DATA = yaml.safe_load(TINY.read_text())
del WITHOUT_DATA["data"]["train_files"]
RECORDED = ("actor/loss", "actor/grad_norm", "reward/mean_score", "rollout/avg_response_length")


def opened(
    folder: Path,
    data: object = ROWS,
    should_accept: object = None,
    reward: object = digits,
    **changed: object,
):
    changes = {"trainer__total_training_steps": 4, **changed}
    config = WITHOUT_DATA if data is None else TINY
    return distflow.rollouts(
        config, small(folder, **changes), data=data, reward=reward, should_accept=should_accept
    )


@pytest.fixture
def go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that ends the reward call for which `slow` waits."""
    monkeypatch.setenv(HELD, str(tmp_path / "go on"))
    return tmp_path / "go on"


async def asks(chat, row):
    return len((await chat.ask(row.prompt)).token_ids)


def prompts(batch: Batch) -> list[str]:
    return list(dict.fromkeys(batch["prompts"]))


def learn(rollouts: distflow.Rollouts, batch: Batch) -> dict[str, float]:
    """GRPO, written out."""
    batch["old_log_probs"] = rollouts.actor.forward(batch, ("log_probs",))["log_probs"]
    names = ("token_level_rewards", "response_mask", "group_index", "valid")
    batch["advantages"], _ = compute_grpo_advantage(*(batch[name] for name in names))
    objective = PolicyObjective(
        "vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    )
    return rollouts.actor.train_step(batch, objective)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> distflow.Run:
    """The run of the command line with the same arguments."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    settings = small(folder, trainer__total_training_steps=4)
    return distflow.train(TINY, settings, data=ROWS, reward=digits)


@pytest.mark.parametrize(
    "update", [distflow.Rollouts.train, learn], ids=["pipeline", "written out"]
)
def test_at_staleness_0_its_batches_are_those_of_a_run(
    tmp_path: Path, reference: distflow.Run, update
) -> None:
    before = (
        signal.getsignal(signal.SIGINT),
        random.getstate(),
        torch.get_rng_state(),
        torch.get_num_threads(),
    )

    with opened(tmp_path / "run") as rollouts:
        while batch := rollouts.prepare_batch():
            update(rollouts, batch)
            rollouts.publish()
        assert rollouts.version == 4 and rollouts.prepare_batch() is None

    after = (
        signal.getsignal(signal.SIGINT),
        random.getstate(),
        torch.get_rng_state(),
        torch.get_num_threads(),
    )
    assert before[:2] == after[:2] and torch.equal(before[2], after[2]) and before[3] == after[3]
    run = rollouts.run
    assert run.status == "finished" and (run.folder / "report.html").is_file()
    theirs = [
        (row["step"], row["prompt"], row["response"], row["score"]) for row in reference.samples()
    ]
    assert [
        (row["step"], row["prompt"], row["response"], row["score"]) for row in run.samples()
    ] == theirs
    for ours, wanted in zip(run.metrics("train"), reference.metrics("train"), strict=True):
        assert {name: ours[name] for name in RECORDED} == {name: wanted[name] for name in RECORDED}
    assert verify(run.folder / "ledger.jsonl") == verify(reference.folder / "ledger.jsonl")


@pytest.mark.slow
def test_generate_draws_from_the_newest_weights_and_leaves_the_groups_as_they_are(
    tmp_path: Path, reference: distflow.Run
) -> None:
    """Log-probs are those of the trainer's own forward pass."""

    async def asked(rollouts: distflow.Rollouts, ids: list[int]) -> list:
        return await asyncio.gather(*(rollouts.agenerate(ids, max_tokens=5) for _ in range(3)))

    async def trained_meanwhile(rollouts: distflow.Rollouts, ids: list[int], batch: Batch) -> None:
        waiting = asyncio.create_task(rollouts.agenerate(ids))
        await asyncio.sleep(0)

        with pytest.raises(UserError, match="^1 prompt groups .* still"):
            rollouts.train(batch)

        await waiting

    drawn = []
    with opened(tmp_path / "run") as rollouts:
        ids = rollouts.tokenizer.encode("12+3=")
        while batch := rollouts.prepare_batch():
            drawn.append([*rollouts.generate(ids, n=2, temperature=0.7, max_tokens=6)])
            drawn[-1] += [made for (made,) in asyncio.run(asked(rollouts, ids))]

            for made in drawn[-1]:
                at = 0.7 if made in drawn[-1][:2] else 1.0
                logits = rollouts.actor.model(torch.tensor([[*ids, *made.token_ids]])).logits[
                    0, len(ids) - 1 : -1
                ]
                wanted = (logits / at).log_softmax(-1)[range(len(made.token_ids)), made.token_ids]
                assert made.rollout_log_probs == pytest.approx(wanted.tolist(), abs=1e-4)
                assert set(made.versions) == {rollouts.version}
                assert made.finish_reason in ("stop", "length") and 1 <= len(made.token_ids) <= 6

            asyncio.run(trained_meanwhile(rollouts, ids, batch))
            rollouts.train(batch)
            with pytest.raises(UserError, match="generate: .* since"):
                rollouts.generate(ids)
            rollouts.publish()

    tokens = [[tuple(made.token_ids) for made in each] for each in drawn]
    assert len({answer for each in tokens for answer in each}) > 10, (
        "each request has draws of its own"
    )
    samples = [(row["step"], row["prompt"], row["response"]) for row in rollouts.run.samples()]
    assert samples == [(row["step"], row["prompt"], row["response"]) for row in reference.samples()]


MORE = {"algorithm__filter_groups__oversampling": 1.0}


@pytest.mark.slow
def test_it_resumes_with_a_change_that_is_allowed(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.optim.lr"

    def one_step(num_steps: int, lr: float, *allowed: str) -> None:
        config = small(
            tmp_path / "run", trainer__save_freq=1, trainer__total_training_steps=num_steps
        ) | {key: lr}
        with distflow.rollouts(
            TINY, config, data=ROWS, reward=digits, allow_change=allowed
        ) as rollouts:
            rollouts.train(rollouts.prepare_batch())
            rollouts.publish()

    one_step(1, 1e-3)
    with pytest.raises(UserError, match=rf"(?s){key}: .*allow_change=\['{key}'\]"):
        one_step(2, 1e-2)
    one_step(2, 1e-2, key)


@pytest.mark.slow
def test_submitted_prompts_that_are_aborted_come_in_a_later_step(tmp_path: Path) -> None:
    with opened(tmp_path / "run", None, **MORE) as rollouts:
        for row in OWN:
            rollouts.submit(row)

        found = []
        for _ in range(4):
            found += [*prompts(rollouts.wait(1)), *prompts(rollouts.wait(1))]
            said = (
                r"further groups start after publish\(\)"
                if len(found) < 8
                else "0 are running, 0 .*: submit more"
            )
            with pytest.raises(NothingToWaitFor, match=said):
                rollouts.wait(1)
            rollouts.publish()

    assert sorted(found) == sorted(row["prompt"] for row in OWN)
    assert verify(tmp_path / "run" / "ledger.jsonl").aborted > 2


def test_ahead_of_the_loop_nothing_is_staler_than_the_bound(tmp_path: Path) -> None:
    oldest = []
    with opened(
        tmp_path / "run", async__max_staleness=2, trainer__total_training_steps=8
    ) as rollouts:
        while batch := rollouts.prepare_batch():
            versions = batch.flat("versions")
            oldest.append(rollouts.version - int(versions[versions >= 0].min()))
            rollouts.train(batch)
            rollouts.publish()
        stats = rollouts.stats

    assert len(oldest) == 8 and max(oldest) == 2 and min(oldest) == 0
    assert (stats.submitted, stats.accepted, stats.running, stats.rejected) == (16, 16, 0, 0)
    account = verify(tmp_path / "run" / "ledger.jsonl")
    assert account.consumed == 16


@pytest.mark.parametrize("staleness", one_fast_in(2, [1, 0]))
def test_a_loop_that_forgets_to_publish_is_told_so(tmp_path: Path, staleness: int) -> None:
    with opened(tmp_path / "run", async__max_staleness=staleness) as rollouts:
        for _ in range(staleness + 1):
            assert len(rollouts.prepare_batch()) == 4

        with pytest.raises(NothingToWaitFor, match=r"version 0.*publish\(\)"):
            rollouts.prepare_batch()

        metrics = rollouts.publish()
        assert metrics["async/accepted"] == 2 * (staleness + 1)
        assert len(rollouts.prepare_batch()) == 4

    verify(tmp_path / "run" / "ledger.jsonl")


def test_submitted_prompts_come_back_in_their_order(tmp_path: Path) -> None:
    """Without data. Answers of different lengths end in another order than they began."""
    with opened(
        tmp_path / "run", None, async__max_staleness=1, data__max_response_length=12
    ) as rollouts:
        for row in OWN:
            rollouts.submit(row)
        begun = {row["prompt"]: row["answer"] for row in OWN[:4]}

        # of four that run, those that have ended
        first = rollouts.wait(2)
        second = rollouts.wait(2)
        assert len(first) == 4 and sorted(prompts(first) + prompts(second)) == list(begun)
        assert prompts(first) == sorted(prompts(first)) and prompts(second) == sorted(
            prompts(second)
        )
        assert set(first["ground_truth"]) == {begun[prompt] for prompt in prompts(first)}
        assert (rollouts.stats.enqueued, rollouts.stats.submitted) == (4, 4), (
            "one batch may be a version ahead"
        )

        with pytest.raises(NothingToWaitFor, match=r"^[^:]*: 0 of .*; 0 .*, 4 .* publish\(\)"):
            rollouts.wait(1)

        rollouts.publish()
        batch = rollouts.wait(2)
        assert prompts(batch) == [row["prompt"] for row in OWN[4:6]]
        assert set(batch.flat("versions").tolist()) == {1}
        learn(rollouts, batch)
        rollouts.publish()

        with pytest.raises(NothingToWaitFor, match="2 of .*; .*submit more"):
            rollouts.wait(3)

        assert prompts(rollouts.wait(2)) == [row["prompt"] for row in OWN[6:]]

    assert verify(tmp_path / "run" / "ledger.jsonl").complete == 2, (
        "the last two were taken, and no step consumed them"
    )


@pytest.mark.parametrize("staleness", one_fast_in(2, [1, 0]))
def test_a_timeout_loses_nothing(tmp_path: Path, staleness: int, go_on: Path) -> None:
    with opened(tmp_path / "run", None, reward=slow, async__max_staleness=staleness) as rollouts:
        for row in OWN[:2]:
            rollouts.submit(row)
        with pytest.raises(TimeoutError, match="not in time: 0 of 2 "):
            rollouts.wait(2, timeout=0.3)
        go_on.touch()
        batch = rollouts.wait(2, timeout=60)
        assert prompts(batch) == [row["prompt"] for row in OWN[:2]]
        assert rollouts.stats.rejected == 0


@pytest.mark.slow
def test_each_call_may_bring_a_function_of_its_own(tmp_path: Path) -> None:
    """A str is the reason why a group is dropped; without one the function of the rollouts
    decides."""

    def is_answer(*wanted: str):
        return lambda group: group["ground_truth"][0] in wanted or f"not {wanted[0]}"

    with opened(tmp_path / "run", should_accept=is_answer("3", "4")) as rollouts:
        assert set(rollouts.prepare_batch(should_accept=is_answer("5"))["ground_truth"]) == {"5"}
        rollouts.publish()
        rollouts.submit(OWN[3], should_accept=is_answer("8"))
        rollouts.submit(OWN[4])
        rollouts.submit(OWN[1])
        assert prompts(rollouts.wait(2)) == [OWN[3]["prompt"], OWN[1]["prompt"]]
        rollouts.publish()

    assert set(verify(tmp_path / "run" / "ledger.jsonl").dropped) == {"not 5", "not 3"}


@pytest.mark.slow
def test_weights_that_the_engine_shares_are_not_changed_while_it_answers(
    tmp_path: Path, go_on: Path
) -> None:
    with opened(tmp_path / "run", None, reward=slow) as rollouts:
        rollouts.submit(OWN[3])
        batch = rollouts.wait(1)
        rollouts.submit(OWN[0])
        with pytest.raises(TimeoutError):
            rollouts.wait(1, timeout=0.3)

        with pytest.raises(UserError, match="^1 prompt groups .* still"):
            learn(rollouts, batch)

        go_on.touch()
        rollouts.wait(1)
        learn(rollouts, batch)


def test_a_pause_starts_nothing_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "run", async__max_staleness=1) as rollouts:
        rollouts.pause()
        with pytest.raises(NothingToWaitFor, match=r"resume\(\)"):
            rollouts.prepare_batch()
        assert rollouts.stats.submitted == 0
        rollouts.resume()
        assert len(rollouts.prepare_batch()) == 4
        rollouts.pause()
        rollouts.publish()
        rollouts.resume()
        assert len(rollouts.prepare_batch()) == 4


@pytest.mark.parametrize("error", one_fast_in(2, [KeyboardInterrupt, ZeroDivisionError]))
def test_leaving_by_an_error_ends_everything(tmp_path: Path, error: type[BaseException]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error), opened(tmp_path / "run", async__max_staleness=2) as rollouts:
        rollouts.prepare_batch()
        raise error

    until = time.monotonic() + 60.0

    # one that looks every quarter of a second has to see it
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < until, left
        time.sleep(0.1)

    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert any(event["kind"] == "error" and error.__name__ in event["message"] for event in events)
    assert rollouts.run.status == "failed"
    with pytest.raises(UserError, match="ended .*`with`"):
        rollouts.prepare_batch()


def test_what_cannot_be_used_is_refused_where_it_is_given(tmp_path: Path) -> None:
    with opened(tmp_path / "run", None) as rollouts:
        for row, said in (
            ("1+1=", "submit takes a dict"),
            (
                {"promt": "1+1=", "answer": "2"},
                "no row of the submitted rows has the column 'prompt'.*promt",
            ),
            ({"prompt": "1+" * 40, "answer": "2"}, "submitted prompt 1: the prompt has 80 tokens"),
        ):
            with pytest.raises(UserError, match=said):
                rollouts.submit(row)

        with pytest.raises(UserError, match="prepare_batch .*data="):
            rollouts.prepare_batch()

        for count in (0, 1.5, True):
            with pytest.raises(UserError, match=rf"wait\({count}\): "):
                rollouts.wait(count)

        with pytest.raises(UserError, match="should_accept is 3"):
            rollouts.submit(OWN[0], should_accept=3)
        with pytest.raises(UserError, match="no episodes: .*workflow"):
            rollouts.submit(OWN[0], workflow=asks)
        with pytest.raises(UserError, match="has no ref"):
            _ = rollouts.ref
        assert rollouts.stats.enqueued == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": None, "trainer__total_training_steps": None}, "trainer.total_training_steps"),
        ({"should_accept": 3}, "should_accept is 3"),
        ({"async__max_staleness": -1}, "max_staleness"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_built(
    tmp_path: Path, changed: dict, said: str
) -> None:
    with pytest.raises(UserError, match=said), opened(tmp_path / "run", **changed):
        pytest.fail("it was entered")


class _Worker:
    """What `publish` asks of a worker. recorded: the metrics of the step."""

    recorded: dict[str, float]

    def reward_metrics(self) -> dict[str, float]:
        return {}

    def finish(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        self.recorded = metrics
        return metrics


def test_a_step_of_several_parts_and_updates_has_the_metrics_of_all(tmp_path: Path) -> None:
    """Independent of our code: 3 groups with a mean of 1 and 1 group with 5 have a mean of 2."""
    rollouts = opened(tmp_path / "run")
    worker = _Worker()
    queue = SimpleNamespace(standing=lambda: SimpleNamespace(num_owed=0))
    rollouts._running = SimpleNamespace(intake=queue, worker=worker)
    empty = Batch(torch.ones(0, dtype=torch.int64), torch.ones(0, dtype=torch.int64))
    rollouts._parts = [
        TrainingStep((0, 1, 2), (), empty, {"mine": 1.0, "async/version_end": 9.0}),
        TrainingStep((3,), (), empty, {"mine": 5.0, "async/version_end": 4.0}),
    ]
    stepped = {"actor/loss": 2.0, "actor/skipped": 0.0, "actor/empty": 0.0}
    rollouts._updates = [
        stepped,
        {**stepped, "actor/loss": 4.0, "actor/skipped": 1.0},
        {"actor/loss": 0.0, "actor/skipped": 1.0, "actor/empty": 1.0},
    ]
    rollouts.publish()
    assert worker.recorded == {
        **{"mine": 2.0, "async/version_end": 9.0},
        **{"actor/loss": 3.0, "actor/skipped": 2.0, "actor/empty": 1.0},
    }
