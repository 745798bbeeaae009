"""Reward models from preference pairs: loss, gradient and metrics against `transformers` in
float64, text by text; a resume; and from pairs to a reward that trains a policy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from distflow import cli
from distflow.observe.run_reader import read_events, read_metrics, read_samples
from distflow.rewards.model_reward import compute_score
from tests.e2e.runs import Playground
from tests.tiny_models import tiny_tokenizer, write_tiny_reward_model

ACTOR = "actor_rollout_ref.actor"
GONE = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)
RM = (
    *(f"~{key}" for key in GONE),
    "data.max_prompt_length=100",
    "data.max_response_length=100",
    f"{ACTOR}.optim.scheduler=constant",
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


def texts(row: dict[str, Any]) -> list[str]:
    """Both texts as the reward function `model` would read them."""
    return [
        tiny_tokenizer().apply_chat_template(
            [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row[name]},
            ],
            tokenize=False,
        )
        for name in ("chosen", "rejected")
    ]


def reference(folder: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each text alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    model.config.pad_token_id = None
    ids = [
        [tiny_tokenizer()(text, return_tensors="pt")["input_ids"] for text in texts(row)]
        for row in rows
    ]
    scores = torch.stack([torch.stack([model(each).logits[0, 0] for each in pair]) for pair in ids])
    margins = scores[:, 0] - scores[:, 1]
    loss = -logsigmoid(margins).mean()
    loss.backward()
    norm = (
        torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
        .sum()
        .sqrt()
    )
    found = {
        "loss": loss,
        "accuracy": (margins > 0).double().mean(),
        "margin": margins.mean(),
        "grad_norm": norm,
    }

    return {name: float(value.detach()) for name, value in found.items()}


@pytest.fixture
def ground(tmp_path):
    ground = Playground(tmp_path)
    ground.write_rows(PAIRS)
    write_tiny_reward_model(tmp_path / "start", seed=8)
    return ground


@pytest.mark.parametrize("most_tokens", [60, 10_000])
def test_loss_and_gradient_are_those_of_the_pairs(ground, most_tokens):
    """Pairs stay together, also where each is a micro-batch of its own."""
    held_out = [
        {"prompt": "what", "chosen": "yes", "rejected": "no"},
        {"prompt": "or", "chosen": "b?", "rejected": "a!!"},
    ]
    (ground.folder / "held_out.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in held_out)
    )
    keys = (
        f"actor_rollout_ref.model.path={ground.folder}/start",
        f"{ACTOR}.ppo_max_token_len_per_gpu={most_tokens}",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.max_grad_norm=1e9",
        "data.train_batch_size=8",
        f"data.val_files={ground.folder}/held_out.jsonl",
        *("trainer.val_before_train=true", "trainer.total_training_steps=2"),
    )
    run = ground.run("rm", *RM, *keys)
    first = run.metrics()[0]
    wanted = reference(ground.folder / "start", PAIRS)
    assert 0 < wanted["accuracy"] < 1
    for name, value in wanted.items():
        assert first[f"rm/{name}"] == pytest.approx(value, rel=2e-4), name
    (validated, *_) = [record.values for record in read_metrics(run.folder) if record.kind == "val"]
    held = reference(ground.folder / "start", held_out)
    for name in ("loss", "accuracy", "margin"):
        assert validated[f"rm/val_{name}"] == pytest.approx(held[name], rel=2e-4), name
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert set(sum(proven, [])) >= {
        "data",
        "responses",
        "mini-batches",
        "loss",
        "gradients",
        "optimizer",
        "validation",
    }
    assert run.notes("warning") == []


@pytest.mark.slow
def test_from_pairs_to_a_reward_that_trains_a_policy(ground, capsys):
    """What is worked out wins: the model learns it from pairs, resumes bit-equal, and scores the
    responses of a run."""
    keys = (
        *RM,
        f"{ACTOR}.optim.lr=3e-3",
        "trainer.total_epochs=6",
        "trainer.save_freq=6",
        "trust.check_freq=0",
    )
    whole = ground.run("rm", *keys, name="whole")
    resume = f"trainer.resume_mode={whole.folder}/checkpoints/step-000006"
    resumed = ground.run("rm", *keys, resume, name="resumed")
    ours = whole.weights(12)
    theirs = resumed.weights(12)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    assert whole.metrics()[-1]["rm/accuracy"] == 1.0 and "score.weight" in ours

    assert cli.main(["eval", str(whole.folder), f"data.val_files={ground.folder}/rows.jsonl"]) == 0
    assert "rm/val_accuracy: 1.0000" in capsys.readouterr().out

    model = ground.folder / "reward_model"
    assert cli.main(["export", str(whole.folder), "--to", str(model)]) == 0
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model, dtype=torch.float64
    ).eval()
    assert classifier.config.num_labels == 1
    classifier.config.pad_token_id = None

    for row in PAIRS:
        ids = [tiny_tokenizer()(text, return_tensors="pt")["input_ids"] for text in texts(row)]
        chosen, rejected = (float(classifier(each).logits[0, 0].detach()) for each in ids)
        assert chosen > rejected
        given = [row["prompt"]] * 2
        scored = compute_score(
            [row["chosen"], row["rejected"]], [None] * 2, given, path=str(model), dtype="float32"
        )
        assert [each["score"] for each in scored] == pytest.approx([chosen, rejected], abs=2e-5)

    ground.write_rows([{"prompt": row["prompt"]} for row in PAIRS])

    # A function without a weight measures; the run of the reward model is named as it is.
    reward = "reward.functions={default: [{name: custom, weight: 0}]}"
    keys = (
        reward,
        f"reward_model.model.path={whole.folder}",
        "trainer.total_training_steps=2",
        "trust.check_freq=1",
    )

    for pipeline in ("grpo", "ppo"):
        policy = ground.run(pipeline, *keys, name=pipeline)
        for sample in read_samples(policy.folder, 1):
            (scored,) = compute_score(
                [sample["response"]], [None], [sample["prompt"]], path=str(model), dtype="float32"
            )
            assert sample["score"] == pytest.approx(scored["score"], abs=2e-5)

        assert policy.metrics()[-1]["actor/grad_norm"] > 0


def test_bad_pairs_are_told_before_the_start(ground, capsys):
    bad = {
        "the columns 'chosen' and 'rejected' hold the same response": {
            **PAIRS[0],
            "rejected": PAIRS[0]["chosen"],
        },
        "the response (column 'rejected') is missing": {"prompt": "a", "chosen": "b"},
        "is list [7], neither a text nor messages that end with one": {**PAIRS[0], "chosen": [7]},
        "the prompt (column 'prompt') is missing": {"chosen": "a", "rejected": "b"},
    }
    for reason, row in bad.items():
        ground.write_rows([*PAIRS, row])
        assert cli.main(["train", "rm", *ground.overrides("bad", *RM)]) == 2
        err = capsys.readouterr().err
        assert f"{ground.folder}/rows.jsonl:9: " in err and reason in err

    ground.write_rows([{"prompt": "a", "better": "b", "worse": "c"}])
    assert cli.main(["train", "rm", *ground.overrides("bad", *RM)]) == 2
    assert "has the column 'chosen' (data.chosen_key)" in capsys.readouterr().err
