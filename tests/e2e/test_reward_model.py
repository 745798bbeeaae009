"""Runs judged by a reward model: whose score is whose, what a resume does, and what the run's
folder says of it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distflow.cli import main
from distflow.errors import UserError
from distflow.observe import run_reader
from distflow.observe.run_reader import read_events
from tests.e2e.runs import Playground, Run
from tests.tiny_models import (
    EOS,
    tiny_tokenizer,
    write_tiny_judge,
    write_tiny_reward_model,
)

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% "
    "endfor %}"
)
SYSTEM = "Be brief."


def reference(folder: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model.config.pad_token_id = None
        return float(model(input_ids=ids).logits[0, 0])


def read_samples(run: Run, step: int) -> list[dict]:
    return samples_in(run.folder, step)


def samples_in(folder: Path, step: int) -> list[dict]:
    return [{**row, "restart": 0, "t": 0.0} for row in run_reader.read_samples(folder, step)]


def weights_after(run: Run, step: int) -> bytes:
    return (run.folder / "checkpoints" / f"step-{step:06d}" / "actor.safetensors").read_bytes()


@pytest.mark.slow
def test_a_reward_model_judges_a_run_and_its_resume_alike(tmp_path):
    ground = Playground(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    reward_fn = write_tiny_reward_model(
        tmp_path / "reward_fn", "qwen3", seed=7, tokenizer=tokenizer
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    options = f"{{path: {reward_fn}, dtype: float32, device: cpu, max_tokens: 200}}"
    part = f"{{name: model, weight: 2, options: {options}}}"
    keys = (
        f"reward.functions={{default: [{{name: custom, weight: 0.25}}, {part}]}}",
        *("data.prompt_format=chat", f"data.system_prompt='{SYSTEM}'", "data.max_prompt_length=60"),
        *(
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
            "trust.check_freq=1",
            "reward.timeout_s=60",
        ),
    )
    engine = (f"reward_model.model.path={reward_fn}", "reward_model.weight=0.5")
    whole = ground.run("grpo", *keys, *engine, name="whole")
    by_prompt = {row["prompt"] for row in rows}

    for sample in read_samples(whole, 1):
        prompt = next(prompt for prompt in by_prompt if f"user: {prompt}" in sample["prompt"])
        turns = (("system", SYSTEM), ("user", prompt), ("assistant", sample["response"]))
        said = reference(reward_fn, "".join(f"<{role}>{content}{EOS}" for role, content in turns))
        parts = sample["reward_parts"]
        assert parts["model"] == pytest.approx(said, abs=2e-5)
        assert parts["reward_model"] == pytest.approx(said, abs=2e-5), (
            "the engine scores as the reward function"
        )
        wanted = 2 * parts["model"] + parts["custom"] / 4 + parts["reward_model"] / 2
        assert sample["score"] == pytest.approx(wanted, abs=1e-5)

    proven = [
        event.fields["passed"] for event in read_events(whole.folder) if event.kind == "checks"
    ]
    assert {"rewards", "advantages"} <= set(sum(proven, []))
    assert {"reward/model/mean", "reward/custom/mean"} <= set(whole.metrics()[-1])
    assert not whole.notes("warning")

    resumed = ground.run(
        "grpo",
        *keys,
        *engine,
        f"trainer.resume_mode={whole.folder}/checkpoints/step-000001",
        name="resumed",
    )
    assert weights_after(resumed, 2) == weights_after(whole, 2)
    assert read_samples(resumed, 2) == read_samples(whole, 2)
    known = json.loads((whole.folder / "run.json").read_text())["reward_model_default"]
    assert known == json.loads((whole.folder / "run.json").read_text())["engine_reward_model"]
    assert (known["path"], known["revision"], len(known["fingerprint"])) == (str(reward_fn), "", 12)


@pytest.mark.parametrize(
    "form", ["reward_model.model.path={}", "reward_model.models={{h: {{path: {}}}}}"]
)
def test_an_engine_with_the_tokenizer_of_another_model_is_refused_before_the_first_step(
    tmp_path, form
):
    folder = write_tiny_reward_model(tmp_path / "other", "qwen3", vocab_size=50)
    with pytest.raises(
        UserError,
        match=r"reward_model\.model.* tokenizer .* token ' ' ",
    ):
        Playground(tmp_path).run("grpo", form.format(folder))

    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_models_by_domain_score_their_own_rows_beside_functions_by_domain(tmp_path):
    """In one process, and in two that have the models in shards, of which one may have no row of a
    domain."""
    ground = Playground(tmp_path)
    kinds = ("math", "chat", "chat")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ground.write_rows([{**row, "data_source": kinds[at % 3]} for at, row in enumerate(rows)])
    helpful = write_tiny_reward_model(tmp_path / "helpful", "qwen3", seed=7)
    judge = write_tiny_judge(tmp_path / "judge")
    (tmp_path / "question.txt").write_text("{prompt}\n{response}")
    judged_by = f"judge: true, template: {tmp_path}/question.txt, answer_tokens: 4, domains: [math]"
    models = (
        f"{{helpful: {{path: {helpful}, domains: [chat]}}, critique: {{path: {judge}, "
        f"{judged_by}}}}}"
    )
    keys = (
        f"reward_model.models={models}",
        "reward.functions={math: [{name: custom, weight: 3}], default: [custom, length]}",
        *("algorithm.adv_estimator=gdpo", "trainer.total_training_steps=2", "trust.check_freq=1"),
    )
    run = ground.run("grpo", *keys, name="run")
    source = {row["prompt"]: kinds[at % 3] for at, row in enumerate(rows)}

    seen = set()
    for row in (row for step in (1, 2) for row in read_samples(run, step)):
        parts = row["reward_parts"]
        domain = source[row["prompt"]]
        seen.add(domain)
        added = {"math": {"critique"}, "chat": {"helpful", "length"}}[domain]
        if row["score"] is None:
            assert domain == "math" and parts.keys() == {"custom"}, "the judge was silent"
            continue

        assert parts.keys() == {"custom", *added}, row["errors"]
        total = sum(parts.values()) + (2 * parts["custom"] if domain == "math" else 0)
        assert row["score"] == pytest.approx(total, abs=1e-5)

    assert seen == {"math", "chat"} and not run.notes("warning")
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    assert {"rewards", "advantages", "groups"} <= set(sum(proven, []))
    two = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=fsdp")
    assert main(["train", "grpo", *ground.overrides("two", *keys, *two)]) == 0
    scores = {(row["prompt"], row["response"]): row["score"] for row in read_samples(run, 1)}
    for row in (found := samples_in(tmp_path / "two", 1)):  # those of one process
        assert row["score"] == pytest.approx(scores[row["prompt"], row["response"]], abs=1e-4)
    assert found
