"""Runs judged by a reward model: whose score is whose, what a resume does, and what the run's folder says of it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distflow.observe.reading.run_reader import read_events
from tests.e2e.runs import Playground, Run
from tests.tiny_models import EOS, tiny_tokenizer, write_tiny_reward_model

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
SYSTEM = "Be brief."


def reference(folder: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model.config.pad_token_id = None
        return float(model(input_ids=ids).logits[0, 0])


def read_samples(run: Run, step: int) -> list[dict]:
    lines = (run.folder / "samples" / f"{step:06d}.jsonl").read_text().splitlines()
    return [{**json.loads(line), "restart": 0} for line in lines]


def weights_after(run: Run, step: int) -> bytes:
    return (run.folder / "checkpoints" / f"step-{step:06d}" / "actor.safetensors").read_bytes()


@pytest.mark.slow
def test_a_reward_model_judges_a_run_and_its_resume_alike(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    reward_fn = write_tiny_reward_model(tmp_path / "reward_fn", "qwen3", seed=7, tokenizer=tokenizer)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    options = f"{{path: {reward_fn}, dtype: float32, device: cpu, max_tokens: 200}}"
    part = f"{{name: model, weight: 2, options: {options}}}"
    keys = (
        f"reward.functions={{default: [{{name: custom, weight: 0.25}}, {part}]}}",
        *("data.prompt_format=chat", f"data.system_prompt='{SYSTEM}'", "data.max_prompt_length=60"),
        *("trainer.total_training_steps=2", "trainer.save_freq=1", "trust.audit_freq=1", "reward.timeout_s=60"),
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
        assert parts["reward_model"] == pytest.approx(said, abs=2e-5), "the engine scores as the reward function"
        wanted = 2 * parts["model"] + parts["custom"] / 4 + parts["reward_model"] / 2
        assert sample["score"] == pytest.approx(wanted, abs=1e-5)
    proven = [event.fields["proven"] for event in read_events(whole.folder) if event.kind == "audit"]
    assert {"rewards", "advantages"} <= set(sum(proven, []))
    assert {"reward/model/mean", "reward/custom/mean"} <= set(whole.metrics()[-1])
    assert not whole.notes("warning")

    resumed = ground.run(
        "grpo", *keys, *engine, f"trainer.resume_mode={whole.folder}/checkpoints/step-000001", name="resumed"
    )
    assert weights_after(resumed, 2) == weights_after(whole, 2)
    assert read_samples(resumed, 2) == read_samples(whole, 2)
    known = json.loads((whole.folder / "run.json").read_text())["reward_model_default"]
    assert known == json.loads((whole.folder / "run.json").read_text())["reward_model"]
    assert (known["path"], known["revision"], len(known["fingerprint"])) == (str(reward_fn), "", 12)
