"""Whole runs in which the agents of an episode have policies of their own."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.config import ConfigError, load_config
from distflow.data.batch import Batch
from distflow.environments.builtin_workflows import solver_checker
from distflow.environments.chat import Prompt, Reply
from distflow.environments.workflows import Row
from distflow.errors import UserError
from distflow.rewards.reward_results import Error
from distflow.rewards.router import RewardOutcome
from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.multi_policy_engine import MultiPolicyRollout
from tests.e2e.runs import Playground, Run
from tests.tiny_models import write_tiny_model

AGENTS = "actor_rollout_ref.rollout.agents"
FLOW = """
import asyncio

async def talk(agents, row):
    first = await agents["solver"].ask(row.prompt, max_tokens=3)
    remark, advice = await asyncio.gather(
        agents["checker"].ask(f"{row.prompt}{first.text}?", max_tokens=2),
        agents["judge"].ask(row.prompt, max_tokens=2),
    )
    last = await agents["solver"].ask(remark.text + advice.text, max_tokens=2)
    return {"solver": sum(map(ord, last.text)) % 7 / 6, "checker": sum(map(ord, remark.text)) % 5 / 4, "judge": 9.0}
"""  # noqa: E501
WHO = (
    f"{AGENTS}={{solver: {{}}, checker: {{policy: second}}, judge: {{policy: third, trainable: "
    f"false}}}}"
)


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("policies"), num_rows=4)
    write_policies(ground.folder)
    return ground


def write_policies(folder: Path) -> None:
    """The models of two more policies, and a workflow of three agents."""
    for number, name in enumerate(("second", "third")):
        write_tiny_model(folder / name, seed=number + 1)
    (folder / "flow.py").write_text(FLOW)


def overrides(ground: Playground, *more: str) -> list[str]:
    models = ", ".join(
        f"{name}: {{model: {{path: {ground.folder}/{name}}}}}" for name in ("second", "third")
    )
    return [
        f"actor_rollout_ref.rollout.workflow={ground.folder}/flow.py:talk",
        WHO,
        f"dag.policies={{{models}}}",
        "algorithm.agent_rewards=own",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.optim.scheduler=constant",
        "~reward.functions",
        "~custom_reward_function.path",
        "~reward.num_workers",
        "data.max_prompt_length=32",
        "data.max_response_length=40",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_both_policies_train_on_their_own_tokens_and_every_check_passes(
    playground, staleness, monkeypatch
):
    load, served = MultiPolicyRollout.load_weights, list[dict[str, str]]()

    async def watched(self: MultiPolicyRollout, *loaded: Any) -> Any:
        receipt = await load(self, *loaded)
        served.append(await self.hashes())
        return receipt

    monkeypatch.setattr(MultiPolicyRollout, "load_weights", watched)
    steps = ["trainer.total_training_steps=3", "trust.check_freq=1", "trainer.save_groups=all"]
    options = [
        *steps,
        "trainer.save_freq=1",
        "trainer.keep_last=3",
        f"async.max_staleness={staleness}",
    ]
    own = (
        "dag.policies={second: {actor: {max_grad_norm: 0.01, optim: {lr: 3e-4, scheduler: "
        "constant_with_warmup}}}}"
    )
    run = playground.run("grpo", *overrides(playground, *options, own), name=f"checked{staleness}")
    assert run.checks() and not run.notes("warning")

    for step in run.checks():
        assert {
            "weights",
            "log_probs",
            "draws",
            "mini-batches",
            "loss",
            "optimizer",
        } <= {*step["passed"]}

    first = run.weights(1)
    last = run.weights(3)
    assert {name.partition(".")[0] for name in first} == {"actor", "second"}, (
        "the frozen policy is not trained"
    )
    moved = {name.partition(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert moved == {"actor", "second"}
    frozen = AutoModelForCausalLM.from_pretrained(
        playground.folder / "third", dtype=torch.float32
    ).named_parameters()
    own = {f"third.{name}": value for name, value in stripe_hashes(list(frozen)).items()}
    assert all({name: each[name] for name in own} == own for each in served), (
        "the frozen policy never changes"
    )
    assert (
        len(served) >= 3
        and len({tuple(sorted({*each.items()} - {*own.items()})) for each in served}) >= 3
    )

    for row in run.metrics():
        assert row["actor/grad_norm"] > 0 and row["policies/second/grad_norm"] > 0
        assert row["async/version_diff/max"] <= staleness
        assert row["actor/lr"] == 1e-3 and (row["policies/second/lr"] == 3e-4 or row["step"] == 1)

    batch = Batch.load(sorted((run.folder / "tokens").glob("*.safetensors"))[0])
    assert batch["scores"].max() <= 2, "the judge's score is in no mean"
    assert {name for forks in batch["forks"] for name, _ in forks} == {"checker"}, (
        "the judge is in no sample"
    )


def solver_and_checker(ground: Playground, *more: str) -> list[str]:
    """Overrides of the preset multi_agent. A reply with an "a" counts as yes."""
    kwargs = "actor_rollout_ref.rollout.workflow_kwargs={question: '{prompt}{response}?', yes: a}"
    own = [
        f"dag.policies.checker.model.path={ground.folder}/second",
        kwargs,
        "data.max_prompt_length=48",
    ]

    return [
        *own,
        "trainer.total_training_steps=3",
        "trust.check_freq=1",
        "trainer.save_groups=all",
        *more,
    ]


def check_solver_and_checker(run: Run, staleness: int) -> None:
    assert len(run.checks()) == 3 and not run.notes("warning")
    for row in run.metrics():
        assert row["actor/grad_norm"] > 0 and row["policies/checker/grad_norm"] > 0
        assert row["async/version_diff/max"] <= staleness

    for path in sorted((run.folder / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        for said, parts, acc in zip(
            batch["conversation"], batch["reward_parts"], batch["acc"].tolist(), strict=True
        ):
            solved, verdict = (
                re.sub(r"<\w+>|</s>", "", turn["text"])
                for turn in said
                if turn["owner"] == "policy"
            )
            assert (
                parts["solver"]
                == pytest.approx(sum(map(ord, solved)) % 7 / 6)
                == pytest.approx(acc)
            )
            assert parts["checker"] == (("a" in verdict.lower()) == (acc == 1))


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "in_reward"), [(0, "false"), (1, "true")])
def test_each_policy_has_its_own_reference(playground, staleness, in_reward):
    """In the first step, each policy is its reference; later they differ, and the checks compute
    both again."""
    options = [
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"algorithm.use_kl_in_reward={in_reward}",
        f"async.max_staleness={staleness}",
        *(
            "trainer.total_training_steps=3",
            "trust.check_freq=1",
            "trainer.save_groups=all",
            "algorithm.agent_rewards=shared",
        ),
    ]
    flow = playground.folder / "shared.py"
    flow.write_text(FLOW.replace('"judge": 9.0', '"judge": 0.0'))
    own = overrides(playground, *options, f"actor_rollout_ref.rollout.workflow={flow}:talk")
    run = playground.run("grpo", *own, name=f"reference{staleness}")
    assert len(run.checks()) == 3 and not run.notes("warning")
    for step in run.checks():
        assert {"log_probs", "reference", "loss"} <= {*step["passed"]}

    gaps = []
    for path in sorted((run.folder / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        is_checker = torch.zeros_like(batch["loss_mask"], dtype=torch.bool)
        for row, forks in enumerate(batch["forks"]):
            is_checker[row, dict(map(tuple, forks)).get("checker", is_checker.shape[1]) :] = True
        gap = (batch["ref_log_prob"] - batch["old_log_probs"]).abs() * batch["loss_mask"]
        gaps.append([float((gap * own).max()) for own in (~is_checker, is_checker)])

    assert max(gaps[0]) < 1e-5 < min(gaps[-1])


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_preset_of_a_solver_and_a_checker_trains_both(playground, staleness):
    options = solver_and_checker(playground, f"async.max_staleness={staleness}")
    check_solver_and_checker(
        playground.run("multi_agent", *options, name=f"pair{staleness}"), staleness
    )


def test_a_solver_without_a_score_has_a_reward_error_and_its_checker_is_not_asked():
    failed = RewardOutcome(Error("broken"))

    class Solver:
        async def ask(self, content: str) -> Reply:
            return Reply("4", (4,), "stop")

    async def reward_fn(reply: object) -> RewardOutcome:
        return failed

    row = Row(Prompt("2+2=", (2,)))
    assert asyncio.run(solver_checker({"solver": Solver()}, row, reward_fn)) is failed  # type: ignore[arg-type]


def test_a_resumed_run_would_report_another_frozen_model(playground):
    """The checkpoint has the trained policies, and of a frozen one its fingerprint alone."""
    facts = playground.spec("grpo", *overrides(playground))[1].facts
    other = overrides(
        playground, f"dag.policies={{third: {{model: {{path: {playground.folder}/second}}}}}}"
    )
    changed = playground.spec("grpo", *other)[1].facts
    assert {name for name in facts if name.startswith("policy_")} == {"policy_third"}
    assert facts["policy_third"] != changed["policy_third"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [WHO.replace("policy: second", "policy: secnd")],
            "no engine serves the policy 'secnd' of the agent 'checker'",
        ),
        ([WHO.replace("policy: second", "policy: actor")], "no agent has the policy 'second'"),
        (
            [
                (
                    f"{AGENTS}={{solver: {{trainable: false}}, checker: {{policy: second}}, b: "
                    f"{{policy: third}}}}"
                )
            ],
            "exchange",
        ),
        (
            ["dag.policies={third: {actor: {optim: {lr: 1e-3}}}}"],
            "of the policy 'third', which no agent trains",
        ),
        (
            ["dag.policies={second: {rollout: {n: 2}}}"],
            "differ in their models and optimizers alone",
        ),
        (["actor_rollout_ref.model.lora_rank=2"], "cannot train adapters yet"),
        (["algorithm.adv_estimator=gae_marft", "dag.pipeline=ppo"], "cannot train a critic yet"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(playground, changes, said):
    given = playground.overrides("refused", *overrides(playground, *changes))
    with pytest.raises(ConfigError) as refused:
        load_config("grpo", given)
    assert said in str(refused.value)


def test_a_policy_with_another_tokenizer_is_refused(playground, tmp_path):
    write_tiny_model(tmp_path / "other", seed=3)
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"zz":', 1))
    changes: list[Any] = [f"dag.policies={{second: {{model: {{path: {tmp_path}/other}}}}}}"]
    two = f"{AGENTS}={{solver: {{}}, checker: {{policy: second}}, judge: {{trainable: false}}}}"

    with pytest.raises(UserError, match="dag.policies.second.model.path"):
        playground.run(
            "grpo",
            *overrides(playground, *changes, two, "trainer.total_training_steps=1"),
            name="other",
        )
