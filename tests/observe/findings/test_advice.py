"""Situations of a run, and the advice that fits them: what the condition does not support is not
said."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distflow.observe.report.build import report_data
from distflow.observe.writing.run_folder import RunFolder

NUM_STEPS = 12
Metrics = dict[str, tuple[float, ...]]

SOUND: Metrics = {
    "reward/mean_score": (0.3, 0.35, 0.4, 0.42, 0.45, 0.5, 0.52, 0.55, 0.58, 0.6, 0.62, 0.65),
    "reward/accuracy": (0.3, 0.35, 0.4, 0.42, 0.45, 0.5, 0.52, 0.55, 0.58, 0.6, 0.62, 0.65),
    "reward/max": (1.0,) * NUM_STEPS,
    "reward/min": (0.0,) * NUM_STEPS,
    "reward/frac_reward_zero_std": (0.2,) * NUM_STEPS,
    "actor/entropy": tuple(0.9 - 0.03 * step for step in range(NUM_STEPS)),
    "actor/grad_norm": (0.5,) * NUM_STEPS,
    "actor/lr": (1e-6,) * NUM_STEPS,
    "rollout/truncated": (0.0,) * NUM_STEPS,
    "timing_s/step": (1.0,) * NUM_STEPS,
}


def always(value: float) -> tuple[float, ...]:
    return (value,) * NUM_STEPS


SITUATIONS: dict[str, tuple[Metrics, str, tuple[str, ...], tuple[str, ...]]] = {
    "sound": ({}, "", (), ("harder", "easier", "Lower", "Raise", "got worse")),
    "nothing solved, with points for the format": (
        {
            "reward/mean_score": always(0.19),
            "reward/accuracy": always(0.0),
            "reward/max": always(0.2),
            "reward/frac_reward_zero_std": always(0.9),
        },
        "",
        ("easier prompts", "let algorithm.filter_groups"),
        ("harder",),
    ),
    "all solved, at a charge for the length": (
        {
            "reward/mean_score": always(0.1),
            "reward/accuracy": always(1.0),
            "reward/frac_reward_zero_std": always(0.9),
        },
        "",
        ("harder prompts",),
        ("easier",),
    ),
    "half solved, each prompt always or never": (
        {
            "reward/mean_score": always(0.5),
            "reward/accuracy": always(0.5),
            "reward/frac_reward_zero_std": always(0.9),
        },
        "",
        ("solves sometimes",),
        ("easier", "harder"),
    ),
    "no group differs": (
        {"reward/accuracy": always(0.1), "reward/frac_reward_zero_std": always(1.0)},
        "",
        ("easier prompts",),
        ("filter_groups",),
    ),
    "equal groups are replaced already": (
        {"reward/accuracy": always(0.1), "reward/frac_reward_zero_std": always(0.8)},
        "algorithm: {filter_groups: {enable: true}}",
        ("easier prompts",),
        ("filter_groups",),
    ),
    "always the lowest reward of a range from -1": (
        {
            "reward/mean_score": always(-1.0),
            "reward/max": always(-1.0),
            "reward/min": always(-1.0),
            "reward/accuracy": always(0.0),
            "reward/frac_reward_zero_std": always(1.0),
        },
        "",
        ("never solves a prompt", "does not recognise"),
        ("harder", "does not distinguish"),
    ),
    "always right": (
        {
            "reward/mean_score": always(1.0),
            "reward/min": always(1.0),
            "reward/accuracy": always(1.0),
            "reward/frac_reward_zero_std": always(1.0),
        },
        "",
        ("harder prompts", "accepts every response"),
        ("easier", "does not distinguish"),
    ),
    "a learning rate that destroys the policy": (
        {
            "reward/mean_score": (0.3, *always(0.0)[1:]),
            "reward/accuracy": (0.3, *always(0.0)[1:]),
            "reward/max": (1.0, *always(0.0)[1:]),
            "actor/entropy": (7.08, 3.0, *always(0.007)[2:]),
            "rollout/truncated": (0.0, 0.1, *always(1.0)[2:]),
            "reward/frac_reward_zero_std": (0.3, *always(1.0)[1:]),
        },
        "actor_rollout_ref: {actor: {optim: {lr: 1.0}}}",
        (
            "came apart at step 3",
            "7.08 to 0.007",
            "Lower the learning rate (actor_rollout_ref.actor.optim.lr, now 1)",
        ),
        ("easier", "harder", "stops exploring", "Raise data.max_response_length"),
    ),
    "a policy that comes apart into noise": (
        {
            "reward/mean_score": (0.5, 0.5, *always(0.0)[2:]),
            "reward/accuracy": (0.5, 0.5, *always(0.0)[2:]),
            "actor/entropy": (1.0, 1.0, *always(8.0)[2:]),
            "reward/frac_reward_zero_std": (0.3, 0.3, *always(1.0)[2:]),
        },
        "actor_rollout_ref: {actor: {optim: {lr: 0.1}}}",
        ("came apart at step 3", "Lower the learning rate"),
        ("easier", "harder"),
    ),
    "an entropy that falls while the policy learns": (
        {
            "actor/entropy": (2.0, 1.0, *always(0.05)[2:]),
            "reward/mean_score": (0.1, 0.5, *always(0.95)[2:]),
            "reward/accuracy": (0.1, 0.5, *always(0.95)[2:]),
        },
        "",
        (),
        ("came apart", "Lower"),
    ),
    "a schedule that keeps the learning rate at 0": (
        {"actor/lr": always(0.0)},
        "actor_rollout_ref: {actor: {optim: {lr: 1.0e-6}}}",
        ("the learning rate was 0", "schedule"),
        ("Raise actor_rollout_ref.actor.optim.lr",),
    ),
    "a learning rate of 0": (
        {"actor/lr": always(0.0)},
        "",
        ("Raise actor_rollout_ref.actor.optim.lr",),
        (),
    ),
}


def said_of(folder: Path, changed: Metrics, config: str) -> str:
    columns = SOUND | changed
    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {"total_steps": NUM_STEPS})
        run.write_text("config.yaml", config or "{}\n")
        for step in range(NUM_STEPS):
            run.metrics(step + 1, "train", {name: values[step] for name, values in columns.items()})
        run.event("end", "the run finished", status="finished")

    data: Mapping[str, Any] = report_data(folder)
    return "\n".join(f"{each['text']} {each['advice']}" for each in data["sentences"])


@pytest.mark.parametrize("name", SITUATIONS)
def test_advice_fits_its_situation(name, tmp_path):
    changed, config, wanted, unwanted = SITUATIONS[name]
    said = said_of(tmp_path / "run", changed, config)
    assert all(part in said for part in wanted), said
    assert not any(part in said for part in unwanted), said
