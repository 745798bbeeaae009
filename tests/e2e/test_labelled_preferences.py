"""KTO: loss, gradient and baseline against `transformers` in float64, response by response; several
ranks; and bad labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from distflow import cli
from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.runs import Playground
from tests.e2e.test_preferences import ACTOR, KEYS, PAIRS, PASSED
from tests.tiny_models import tiny_tokenizer, write_tiny_model

LABELLED: list[dict[str, Any]] = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in PAIRS[:3]
]
LABELLED += [
    {"prompt": row["prompt"], "completion": row["rejected"], "label": 0} for row in PAIRS[3:5]
]
ROWS = [*LABELLED, *PAIRS[5:]]
"""Of the 11 responses, 5 are labelled and the others those of pairs."""
LOADED = (
    *KEYS,
    "data.train_batch_size=11",
    f"{ACTOR}.ppo_mini_batch_size=11",
    "data.shuffle=false",
    "algorithm.kto={beta: 0.2, desirable_weight: 1.3, undesirable_weight: 0.8}",
)


def responses() -> list[tuple[str, str, bool]]:
    found = [(row["prompt"], row["completion"], bool(row["label"])) for row in LABELLED]
    for row in PAIRS[5:]:
        found += [(row["prompt"], row["chosen"], True), (row["prompt"], row["rejected"], False)]
    return found


def log_prob(model: Any, prompt: str, response: str) -> Tensor:
    ids, given = (
        tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
        for text in (prompt + response + "<eos>", prompt)
    )
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return scores[given.shape[1] - 1 :].sum()


def reference(folder: Path, frozen: Path) -> dict[str, float]:
    """KTO's loss by the policy and its reference in these folders."""
    policy, ref = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64).eval()
        for each in (folder, frozen)
    )
    rows = responses()

    def ratio(prompt: str, response: str) -> Tensor:
        return log_prob(policy, prompt, response) - log_prob(ref, prompt, response).detach()

    mismatched = []
    for place, (prompt, _, _) in enumerate(rows):
        back = 2 if rows[place - 1][0] == prompt else 1  # the other one of its pair
        mismatched.append(float(ratio(prompt, rows[place - back][1]).detach()))
    kl = max(sum(mismatched) / len(rows), 0.0)

    losses, rewards = [], {True: list[Tensor](), False: list[Tensor]()}
    for prompt, response, label in rows:
        reward = 0.2 * ratio(prompt, response)
        rewards[label].append(reward)
        side = reward - 0.2 * kl if label else 0.2 * kl - reward
        losses.append((1.3 if label else 0.8) * (1 - torch.sigmoid(side)))

    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    found = {
        "preference/loss": loss,
        "preference/kl": torch.tensor(kl),
        "preference/grad_norm": torch.stack(gradients).sum().sqrt(),
        "rewards/chosen": torch.stack(rewards[True]).mean(),
        "rewards/rejected": torch.stack(rewards[False]).mean(),
    }
    return {name: float(value.detach()) for name, value in found.items()}


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    ground = Playground(tmp_path)
    ground.write_rows(ROWS)
    write_tiny_model(tmp_path / "model", seed=5)
    write_tiny_model(tmp_path / "frozen")
    return ground


@pytest.mark.parametrize("most_tokens", [40, 10_000])
def test_loss_and_gradient_are_those_of_the_responses(ground: Playground, most_tokens: int) -> None:
    """Also over micro-batches; and the validation is the loss before the first update."""
    frozen = ground.folder / "frozen"
    run = ground.run(
        "kto",
        *LOADED,
        f"actor_rollout_ref.ref.path={frozen}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={most_tokens}",
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        *("trainer.val_before_train=true", "trainer.total_training_steps=2"),
    )
    wanted = reference(ground.folder / "model", frozen)
    assert wanted["preference/kl"] > 0
    first = run.metrics()[0]
    for name, value in wanted.items():
        assert first[name] == pytest.approx(value, rel=2e-4), name

    (before, *_) = [record.values for record in read_metrics(run.folder) if record.kind == "val"]
    margin = wanted["rewards/chosen"] - wanted["rewards/rejected"]
    assert before["preference/val_loss"] == pytest.approx(wanted["preference/loss"], rel=2e-4)
    assert before["preference/val_margin"] == pytest.approx(margin, rel=2e-4)
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert set(sum(proven, [])) >= {*PASSED, "log_probs", "reference"}
    assert run.notes("warning") == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torch", "fsdp"])
def test_two_ranks_take_the_steps_of_one(ground: Playground, strategy: str) -> None:
    """Whose response is mismatched does not depend on the ranks, nor does a last mini-batch of one
    response, which has no other prompt."""
    keys = (*LOADED, f"{ACTOR}.ppo_mini_batch_size=5", f"{ACTOR}.optim.lr=1e-2")
    keys = (*keys, "trainer.total_training_steps=3")
    alone = ground.run("kto", *keys, name="alone")
    several = ("trainer.n_gpus_per_node=2", f"{ACTOR}.strategy={strategy}", "trainer.device=cpu")
    assert cli.main(["train", "kto", *ground.overrides("both", *keys, *several)]) == 0
    both = [
        record.values for record in read_metrics(ground.folder / "both") if record.kind == "train"
    ]
    for own, other in zip(alone.metrics(), both, strict=True):
        for name in ("loss", "kl", "grad_norm"):
            key = f"preference/{name}"
            assert other[key] == pytest.approx(own[key], rel=1e-4, abs=1e-6), name
    assert any(own["preference/kl"] for own in both)


def test_bad_labels_are_told_before_the_start(
    ground: Playground, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: dict[str, dict[str, Any]] = {
        "the label (column 'label') is str 'good'": {**LABELLED[0], "label": "good"},
        "the label (column 'label') is missing": {"prompt": "a", "completion": "b"},
        "the response (column 'completion') is missing": {"prompt": "a", "label": True},
        "the response (column 'completion') is": {**LABELLED[0], "completion": ""},
        "hold the same response": {**PAIRS[0], "rejected": PAIRS[0]["chosen"]},
    }
    for reason, row in bad.items():
        ground.write_rows([*ROWS, row])
        assert cli.main(["train", "kto", *ground.overrides("bad", *LOADED)]) == 2
        err = capsys.readouterr().err
        assert f"{ground.folder}/rows.jsonl:9: " in err and reason in err, err

    faults: dict[str, list[dict[str, Any]]] = {
        "data.completion_key=response": [{"prompt": "a", "response": "b", "label": True}],
        "desirable": LABELLED[:3],
    }
    for reason, rows in faults.items():
        ground.write_rows(rows)
        assert cli.main(["train", "kto", *ground.overrides("bad", *LOADED)]) == 2
        assert reason in capsys.readouterr().err

    ground.write_rows(ROWS)
    words = ground.overrides("bad", *LOADED, f"{ACTOR}.ppo_mini_batch_size=1")
    assert cli.main(["train", "kto", *words]) == 2
    assert "ppo_mini_batch_size" in capsys.readouterr().err
