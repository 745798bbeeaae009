"""Supervised fine-tuning on conversations: loss and gradient against plain float64, text by
text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow import cli
from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.runs import Playground
from tests.tiny_models import tiny_tokenizer

GONE = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)
ACTOR = "actor_rollout_ref.actor"
SFT = (
    *(f"~{key}" for key in GONE),
    "data.max_prompt_length=100",
    "data.max_response_length=200",
    "trainer.total_training_steps=2",
    "trust.check_freq=1",
)


def talk(number: int, num_turns: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": "be kind"}] if number % 2 else []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{number}+{turn}?" * (turn + 1)})
        messages.append({"role": "assistant", "content": f"it is {number + turn}" + "!" * number})
    return {"messages": messages}


TALKS = [talk(0, 1), talk(1, 3), talk(2, 2), talk(3, 4)]


@pytest.fixture
def ground(tmp_path):
    ground = Playground(tmp_path)
    ground.write_rows(TALKS)
    return ground


def reference(folder: Path, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The mean loss of a learnt token, and the norm of its gradient."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = tiny_tokenizer()

    losses = []
    for row in rows:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        log_probs = model(ids).logits[0].log_softmax(-1)
        for found in re.finditer(r"assistant: (.*?<eos>)", text, re.DOTALL):
            start, end = (len(tokenizer(text[:place])["input_ids"]) for place in found.span(1))
            losses += [-log_probs[place - 1, ids[0, place]] for place in range(start, end)]

    loss = torch.stack(losses).mean()
    loss.backward()
    norm = (
        torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None])
        .sum()
        .sqrt()
    )

    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("most_tokens", [300, 10_000])
def test_loss_and_gradient_are_those_of_the_turns(ground, most_tokens):
    held_out = ground.folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(talk(i, 2)) + "\n" for i in (5, 4)))
    keys = (f"{ACTOR}.ppo_max_token_len_per_gpu={most_tokens}", f"data.val_files={held_out}")
    run = ground.run(
        "sft", *SFT, *keys, "trainer.val_before_train=true", f"{ACTOR}.max_grad_norm=1e9"
    )
    loss, norm = reference(ground.folder / "model", TALKS)
    first = run.metrics()[0]
    assert first["sft/loss"] == pytest.approx(loss, rel=2e-5) and first[
        "sft/grad_norm"
    ] == pytest.approx(norm, rel=2e-4)
    (validated, *_) = [record.values for record in read_metrics(run.folder) if record.kind == "val"]
    validation_loss, _ = reference(ground.folder / "model", [talk(5, 2), talk(4, 2)])
    assert validated["sft/val_loss"] == pytest.approx(validation_loss, rel=2e-5)


def test_its_steps_are_proven(ground):
    run = ground.run("sft", *SFT)
    (proven, *_) = [
        event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"
    ]
    assert (
        set(proven) >= {"responses", "masks", "loss", "gradients", "optimizer"}
        and run.notes("warning") == []
    )


def test_one_turn_trains_what_its_prompt_and_response_do(ground):
    keys = (*SFT, "data.prompt_format=chat", "trainer.save_freq=2")
    pairs = [(f"{i}+{i}?", f"it is {2 * i}") for i in range(8)]
    ground.write_rows([{"prompt": prompt, "response": response} for prompt, response in pairs])
    one = ground.run("sft", *keys, name="pairs").weights(2)
    roles = ("user", "assistant")
    ground.write_rows(
        [
            {
                "messages": [
                    {"role": r, "content": text} for r, text in zip(roles, pair, strict=True)
                ]
            }
            for pair in pairs
        ]
    )
    other = ground.run("sft", *keys, name="talks").weights(2)
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_the_command_says_what_is_learnt_and_what_is_wrong(ground, capsys):
    assert cli.main(["sft", *ground.overrides("run", *SFT)]) == 0
    assert "tokens, 10 assistant turns to train on" in capsys.readouterr().out
    rows = [*TALKS, {"messages": TALKS[1]["messages"][:-1]}]
    ground.write_rows(rows)
    assert cli.main(["sft", *ground.overrides("other", *SFT)]) == 2
    err = capsys.readouterr().err
    assert (
        f"{ground.folder}/rows.jsonl:5: the conversation (column 'messages') ends with a "
        "message of the user"
    ) in err
    assert cli.main(["sft", *ground.overrides("other", *SFT, "data.bad_rows=skip")]) == 0
    assert "10 assistant turns to train on, 1 bad rows skipped" in capsys.readouterr().out
