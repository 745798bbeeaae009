"""Preference losses and gradients against TRL's trainers, over three optimizer steps of one batch.

TRL is no dependency: `pip install trl` first."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Playground
from tests.e2e.test_preferences import ACTOR, KEYS, PAIRS
from tests.tiny_models import tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.by_hand]

OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": "sigmoid"},
    "ipo": {"loss_type": "ipo"},
    "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5},
    "orpo": {},
    "kto": {"desirable_weight": 1.0, "undesirable_weight": 1.0},
}
PROMPTS = {"dpo": "{}", "ipo": "{}", "simpo": "<bos>{}", "orpo": "<bos>", "kto": "{}"}
"""TRL begins the texts of two trainers with a start token, and ORPO's likelihood has the prompt."""
NAMES = {
    "loss": "preference/loss",
    "grad_norm": "preference/grad_norm",
    "rewards/chosen": "rewards/chosen",
    "rewards/margins": "rewards/margins",
    "rewards/accuracies": "rewards/accuracies",
    "rewards/rejected": "rewards/rejected",
    "kl": "preference/kl",
}
"""By TRL's name, of those that its trainer logs."""


def trained_by_trl(method: str, folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The log of each step."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    if method in ("dpo", "ipo"):
        config, trainer = trl.DPOConfig, trl.DPOTrainer
    elif method == "simpo":
        cpo = pytest.importorskip("trl.experimental.cpo")
        config, trainer = cpo.CPOConfig, cpo.CPOTrainer
    elif method == "kto":
        config, trainer = trl.KTOConfig, trl.KTOTrainer
    else:
        orpo = pytest.importorskip("trl.experimental.orpo")
        config, trainer = orpo.ORPOConfig, orpo.ORPOTrainer

    arguments = config(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(rows),
        num_train_epochs=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1e9,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        **OPTIONS[method],
    )
    made = trainer(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    made.train()
    return made.state.log_history[:3]


def labelled(row: dict[str, Any], label: bool) -> dict[str, Any]:
    return {
        "prompt": row["prompt"],
        "completion": row["chosen" if label else "rejected"],
        "label": label,
    }


@pytest.mark.parametrize("method", list(OPTIONS))
def test_three_steps_are_trls(tmp_path: Path, method: str) -> None:
    rows = [{**row, "prompt": PROMPTS[method].format(row["prompt"])} for row in PAIRS]
    if method == "kto":
        rows = [labelled(row, number % 3 > 0) for number, row in enumerate(rows)]
    ground = Playground(tmp_path)
    ground.write_rows(rows)
    theirs = trained_by_trl(method, tmp_path, json.loads(json.dumps(rows)))
    order = ("data.shuffle=false",) if method == "kto" else ()  # whose response is mismatched
    ours = ground.run(
        method,
        *KEYS,
        *order,
        f"{ACTOR}.optim.lr=1e-2",
        f"{ACTOR}.optim.weight_decay=0",
        "trainer.total_epochs=3",
    )
    for own, other in zip(ours.metrics(), theirs, strict=True):
        logged = [name for name in NAMES if name in other]
        assert len(logged) > 4
        for name in logged:
            assert own[NAMES[name]] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
