"""Runs over several domains: shares counted in the ledger, of runs that drop groups, resume, and
are asynchronous."""

import json
import shutil
from collections import Counter
from typing import Any

import pytest

from distflow.data.batch import Batch
from distflow.rollout.engine import SamplingParams
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.sparse_params import one_fast_in

# Every other group of `code` has nothing to teach.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "code" and extra_info["number"] % 2:
        return 1.0
    return sum(map(ord, solution_str)) % 7 / 6
"""
DOMAINS = {
    "math": {
        "train_files": "math.jsonl",
        "val_files": "math.jsonl",
        "weight": 3,
        "filter_groups": False,
    },
    "code": {
        "train_files": "code.jsonl",
        "val_files": "code.jsonl",
        "reward": ["custom", {"name": "format", "weight": 0}],
        "prompt_key": "question",
        "prompt_template": "do {prompt}",
        "max_response_length": 4,
        "top_k": 30,
    },
}
FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=20")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("domains"))
    ground.write_reward(REWARD)

    for name, key, num_rows in (("math", "prompt", 7), ("code", "question", 5)):
        rows = [
            {key: f"{'ab' * (i % 3 + 1)}{i}=", "answer": "7", "number": i, "data_source": "x"}
            for i in range(num_rows)
        ]
        (ground.folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )

    return ground


def given(ground: Playground, *more: str, domains: Any = DOMAINS) -> tuple[str, ...]:
    found = json.loads(json.dumps(domains))
    for domain in found.values():
        for key in ("train_files", "val_files"):
            if key in domain:
                domain[key] = str(ground.folder / domain[key])

    text = json.dumps(found).replace('"', "'")

    # JSON quotes keys, which Hydra's grammar does not take.
    for key in {key for name, domain in found.items() for key in (name, *domain)} | {
        "name",
        "weight",
    }:
        text = text.replace(f"'{key}':", f"{key}:")

    return (
        "data.train_files=[]",
        f"data.domains={text}".replace("True", "true").replace("False", "false"),
        "trainer.save_freq=2",
        *(
            ["data.allow_overlap=true"]
            if any("val_files" in domain for domain in found.values())
            else []
        ),
        *more,
    )


def issued(run: Run) -> list[tuple[int, int, int]]:
    """Group, epoch and row of those that were handed out first."""
    records = [
        record for _, record in timeline(run.folder / "ledger.jsonl") if record["kind"] == "issued"
    ]
    return [
        (record["group_id"], record["epoch"], record["row"])
        for record in records
        if record["attempt"] == 0
    ]


def go_back(run: Run, step: int, name: str) -> None:
    """A copy of the run's folder as a kill behind that checkpoint leaves it: the ledger knows
    more."""
    copy = run.folder.parent / name
    shutil.copytree(run.folder, copy)
    for checkpoint in (copy / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def test_a_domain_has_its_own_prompts_rewards_and_sampling(ground):
    config, spec = ground.spec("grpo", *given(ground, *FILTERED))
    assert spec.sampling_of["math"] == SamplingParams(10)
    assert spec.sampling_of["code"] == SamplingParams(4, top_k=30)
    assert [(domain.name, domain.num_rows, domain.weight) for domain in spec.data.domains] == [
        ("math", 7, 3.0),
        ("code", 5, 1.0),
    ]
    assert (spec.data.total_groups, spec.data.total_steps) == (
        None,
        config.trainer.total_epochs * 12 // 4,
    )
    assert {row.domain for row in spec.rows[:7]} == {"math"} and {
        row.domain for row in spec.rows[7:]
    } == {"code"}
    assert spec.rows[7].prompt_text == "do ab0=" and spec.rows[7].extra_info == {
        "number": 0,
        "data_source": "x",
    }
    math, code = spec.validation
    assert (math.name, len(math.rows), code.name, len(code.rows)) == ("math", 7, "code", 5)
    assert math.greedy is not None and math.greedy.max_tokens == 10
    assert code.greedy is not None and code.greedy.max_tokens == 4


@pytest.mark.parametrize("estimator", one_fast_in(3, ["grpo", "rloo", "reinforce_plus_plus"]))
def test_a_domain_may_have_groups_of_another_size(ground, estimator):
    domains = {"math": {"train_files": "math.jsonl", "n": 3}, "code": {"train_files": "code.jsonl"}}
    domains["code"] |= {"reward": ["custom"], "prompt_key": "question"}
    run = ground.run(
        "grpo",
        *given(ground, domains=domains),
        f"algorithm.adv_estimator={estimator}",
        "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        name=f"sizes-{estimator}",
    )
    batch = Batch.load(run.folder / "tokens" / "000001.safetensors")
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group_index"].tolist()):
        groups.setdefault(group, []).append(row)
    assert Counter((batch["domain"][rows[0]], len(rows)) for rows in groups.values()) == {
        ("math", 3): 2,
        ("code", 5): 2,
    }

    for rows in groups.values() if estimator == "rloo" else ():
        scores = [float(batch["scores"][row]) for row in rows]
        for row, score in zip(rows, scores, strict=True):
            others = (sum(scores) - score) / (len(rows) - 1)
            assert float(batch["advantages"][row, 0]) == pytest.approx(score - others, abs=1e-5)

    assert all("sampled policy" in note for note in run.notes("warning"))
