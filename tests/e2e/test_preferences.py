"""Policies from preference pairs: loss, gradient and metrics against `transformers` in float64,
response by response; the reference; resumes; several ranks; and bad pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow import cli
from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.runs import Playground
from tests.tiny_models import tiny_tokenizer, write_tiny_model

ACTOR = "actor_rollout_ref.actor"
GONE = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)
KEYS = (
    *(f"~{key}" for key in GONE),
    "data.max_prompt_length=100",
    "data.max_response_length=100",
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.optim.scheduler=constant",
    f"{ACTOR}.max_grad_norm=1e9",
    "trust.check_freq=1",
)
PAIRS = [
    {
        "prompt": f"{i}+{i}?",
        "chosen": "it is " + "!" * i,
        "rejected": f"{2 * i}" + "?" * (7 - i) + "ab" * (i % 3),
    }
    for i in range(1, 9)
]
PASSED = {"data", "responses", "mini-batches", "loss", "gradients", "optimizer", "validation"}


def reference(folder: Path, frozen: Path, beta: float = 0.1) -> dict[str, float]:
    """DPO's loss, each response alone, by the policy and its reference in these folders."""
    policy, ref = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64).eval()
        for each in (folder, frozen)
    )
    rewards = []
    for row in PAIRS:
        for name in ("chosen", "rejected"):
            ids, prompt = (
                tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
                for text in (row["prompt"] + row[name] + "<eos>", row["prompt"])
            )
            sums = []
            for model in (policy, ref):
                scores = model(ids).logits[0, :-1].log_softmax(-1)
                of_tokens = scores.gather(-1, ids[0, 1:, None])[prompt.shape[1] - 1 :]
                sums.append(of_tokens.sum())
            rewards.append(beta * (sums[0] - sums[1].detach()))

    chosen, rejected = torch.stack(rewards).view(-1, 2).unbind(1)
    margins = chosen - rejected
    loss = torch.log(1 + torch.exp(-margins)).mean()
    loss.backward()
    gradients = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    found = {
        "preference/loss": loss,
        "preference/grad_norm": torch.stack(gradients).sum().sqrt(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).double().mean(),
    }
    return {name: float(value.detach()) for name, value in found.items()}


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    ground = Playground(tmp_path)
    ground.write_rows(PAIRS)
    return ground


@pytest.mark.parametrize("most_tokens", [60, 10_000])
def test_loss_and_gradient_are_those_of_the_pairs(ground: Playground, most_tokens: int) -> None:
    """Against a reference of its own, since the policy begins at its default one, where all rewards
    are 0. Pairs stay together, also where each is a micro-batch of its own."""
    frozen = write_tiny_model(ground.folder / "frozen", seed=5)
    run = ground.run(
        "dpo",
        *KEYS,
        f"actor_rollout_ref.ref.path={frozen}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={most_tokens}",
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        *("trainer.val_before_train=true", "trainer.total_training_steps=2"),
    )
    first = run.metrics()[0]
    wanted = reference(ground.folder / "model", frozen)
    assert 0 < wanted["rewards/accuracies"] < 1
    for name, value in wanted.items():
        assert first[name] == pytest.approx(value, rel=2e-4), name

    (before, *_) = [record.values for record in read_metrics(run.folder) if record.kind == "val"]
    for name, own in (("loss", "preference/loss"), ("margin", "rewards/margins")):
        assert before[f"preference/val_{name}"] == pytest.approx(wanted[own], rel=2e-4), name
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert set(sum(proven, [])) >= {*PASSED, "log_probs", "reference"}
    assert run.notes("warning") == []


@pytest.mark.parametrize("method", ["ipo", "simpo", "orpo"])
def test_each_method_runs_with_every_check(ground: Playground, method: str) -> None:
    """In two mini-batches a step; only a loss that reads a reference has one."""
    run = ground.run(
        method, *KEYS, f"{ACTOR}.ppo_mini_batch_size=4", "trainer.total_training_steps=2"
    )
    assert run.metrics()[-1]["preference/grad_norm"] > 0
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert set(sum(proven, [])) >= PASSED - {"validation"}
    assert ("reference" in proven[0]) == (method == "ipo")
    assert run.notes("warning") == []


@pytest.mark.slow
def test_an_adapters_reference_is_its_base(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the adapter off; a resume is bit-equal, and an evaluation has the run's reference."""
    lora = ("actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=3e-2")
    keys = (
        *KEYS,
        *lora,
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        "trainer.total_training_steps=6",
        "trainer.save_freq=3",
        "trainer.test_freq=3",
    )
    whole = ground.run("dpo", *keys, name="whole")
    resume = f"trainer.resume_mode={whole.folder}/checkpoints/step-000003"
    resumed = ground.run("dpo", *keys, resume, name="resumed")
    ours = whole.weights(6)
    theirs = resumed.weights(6)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    assert whole.metrics()[0]["rewards/chosen"] == 0.0
    assert whole.metrics()[-1]["rewards/accuracies"] == 1.0

    assert cli.main(["eval", str(whole.folder)]) == 0
    evaluated = capsys.readouterr().out
    *_, last = [record.values for record in read_metrics(whole.folder) if record.kind == "val"]
    assert f"preference/val_margin: {last['preference/val_margin']:.4f}" in evaluated
    assert last["preference/val_margin"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torch", "fsdp"])
def test_two_ranks_take_the_steps_of_one(ground: Playground, strategy: str) -> None:
    keys = (*KEYS, f"{ACTOR}.ppo_mini_batch_size=4", "trainer.total_training_steps=4")
    alone = ground.run("dpo", *keys, name="alone")
    several = ("trainer.n_gpus_per_node=2", f"{ACTOR}.strategy={strategy}", "trainer.device=cpu")
    words = ground.overrides("both", *keys, *several)
    assert cli.main(["train", "dpo", *words]) == 0
    both = [
        record.values for record in read_metrics(ground.folder / "both") if record.kind == "train"
    ]
    for own, other in zip(alone.metrics(), both, strict=True):
        for name in ("preference/loss", "preference/grad_norm", "rewards/margins"):
            assert other[name] == pytest.approx(own[name], rel=1e-4, abs=1e-6), name


def test_bad_pairs_are_told_before_the_start(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: dict[str, dict[str, Any]] = {
        "hold the same response": {**PAIRS[0], "rejected": PAIRS[0]["chosen"]},
        "the response (column 'rejected') is missing": {"prompt": "a", "chosen": "b"},
        "the pair is swapped": {**PAIRS[0], "score_chosen": 1, "score_rejected": 2},
    }
    for reason, row in bad.items():
        ground.write_rows([*PAIRS, row])
        assert cli.main(["train", "dpo", *ground.overrides("bad", *KEYS)]) == 2
        err = capsys.readouterr().err
        assert f"{ground.folder}/rows.jsonl:9: " in err and reason in err

    skipped = ground.run("dpo", *KEYS, "data.bad_rows=skip", "trainer.total_training_steps=1")
    assert json.loads((skipped.folder / "run.json").read_text())

    ground.write_rows([{"prompt": "a", "better": "b", "worse": "c"}])
    assert cli.main(["train", "dpo", *ground.overrides("bad", *KEYS)]) == 2
    assert "data.chosen_key" in capsys.readouterr().err
    ground.write_rows(PAIRS)
    words = ground.overrides("bad", *KEYS, "algorithm.preference_loss=dpoo")
    assert cli.main(["train", "dpo", *words]) == 2
    assert "dpoo" in capsys.readouterr().err
