"""The memory of a config's models, counted from real ones, and builds of torch for other devices.
What is found on a device is in tests/device/test_doctor.py."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from distflow.commands.selftest.compared_runs import CHECKS as ALL_CHECKS
from distflow.config import load_config
from distflow.launch.plans.run_planner import RunPlanner
from distflow.launch.without_run.device_checks import (
    CHECKS,
    Subject,
    kv_bytes_of_token,
    resident_bytes,
    try_check,
)
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from tests.tiny_models import write_tiny_model

DOCS = Path(__file__).parents[3] / "docs/devices.md"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"


def test_the_docs_list_every_check() -> None:
    table = DOCS.read_text().split("## Before the first run")[1].split("\n## ")[0]
    listed = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    assert set(listed) == {"device", *(name.partition(", ")[0] for name in ALL_CHECKS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "qwen3", head_dim=16)


@pytest.mark.parametrize(
    ("capability", "kernels", "outcome"),
    [
        ((8, 0), ["sm_80", "sm_90"], "ok"),
        ((8, 6), ["sm_80", "sm_90"], "ok"),  # the same kernels run on it
        ((8, 0), ["sm_86"], "failed"),
        ((7, 0), ["sm_80", "compute_90"], "failed"),
        ((12, 0), ["sm_80", "sm_90"], "failed"),
        ((12, 0), ["sm_80", "sm_90", "compute_90"], "ok"),  # translated when it is loaded
    ],
)
def test_a_build_without_kernels_for_the_device_is_found(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernels: list[str], outcome: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    config = load_config("grpo", complete=False).config
    subject = Subject(config, torch.device("cuda"), Path("no/such/folder"), "none")
    found = try_check("build", CHECKS["build of torch"], subject)
    assert found.outcome == outcome and f"sm_{10 * capability[0] + capability[1]}" in found.text
    assert ("https://pytorch.org" in found.text) == (outcome == "failed")


def parts(folder: Path, *keys: str, preset: str = "grpo") -> dict[str, float]:
    return resident_bytes(
        load_config(preset, [f"{MODEL}.path={folder}", *keys], complete=False).config
    )


def test_weights_gradients_and_moments_are_those_of_a_train_step(folder: Path) -> None:
    model = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    size = sum(p.nbytes for p in model.parameters())
    low = (f"{MODEL}.dtype=bfloat16", "actor_rollout_ref.rollout.enforce_eager=true")
    found = parts(folder, f"{ACTOR}.use_kl_loss=true", *low)
    assert found["weights"] == found["reference"] == size
    assert found["gradients"] == sum(
        p.grad.nbytes for p in model.parameters() if p.grad is not None
    )
    assert found["optimizer"] == sum(state.nbytes for state in states)
    assert found["rollout engine"] == size / 2
    shared = parts(folder, f"{ACTOR}.use_kl_loss=false", f"{MODEL}.dtype=float32")
    assert shared.keys() == {"weights", "gradients", "optimizer"}


def test_an_adapter_and_a_critic_have_what_they_train(folder: Path) -> None:
    adapted = add_lora(load_model(folder), rank=2)
    trained = sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
    found = parts(
        folder, f"{MODEL}.lora_rank=2", f"{MODEL}.dtype=float32", f"{ACTOR}.use_kl_loss=true"
    )
    assert (
        found["gradients"] == trained
        and found["optimizer"] == 2 * trained
        and "reference" not in found
    )
    assert found["weights"] == sum(p.nbytes for p in adapted.parameters())
    alone = parts(folder)
    assert parts(folder, preset="ppo")["gradients"] == 2 * alone["gradients"]


def test_shards_have_their_part(folder: Path) -> None:
    keys = (f"{ACTOR}.strategy=fsdp", "trainer.n_gpus_per_node=4")
    assert 4 * parts(folder, *keys)["weights"] == parts(folder)["weights"]


def test_models_that_score_have_float32_weights_but_for_a_judge_in_a_rollout_engine(
    folder: Path,
) -> None:
    model = load_model(folder)
    size = sum(p.nbytes for p in model.parameters())
    judge = sum(p.nbytes for p in model.bfloat16().parameters())
    models = (
        f"reward_model.models={{helpful: {{path: {folder}}}, critique: {{path: {folder}, judge: "
        f"true}}}}"
    )
    keys = (models, f"{MODEL}.dtype=bfloat16")
    assert parts(folder, *keys)["reward models"] == size + judge
    sharded = parts(folder, *keys, f"{ACTOR}.strategy=fsdp", "trainer.n_gpus_per_node=4")
    assert sharded["reward models"] == size / 4 + judge, "each device has the judge whole"


def test_a_plan_counts_the_same(folder: Path) -> None:
    models = (
        f"reward_model.models={{helpful: {{path: {folder}}}, critique: {{path: {folder}, judge: "
        f"true}}}}"
    )
    keys = (models, f"{MODEL}.dtype=bfloat16", f"{ACTOR}.use_kl_loss=true")
    (worker,) = RunPlanner("grpo", [f"{MODEL}.path={folder}", *keys], "h100").run.workers
    named = {
        "ref": "reference",
        "rollout": "rollout engine",
        "helpful": "reward models",
        "critique": "reward models",
    }
    planned = Counter[str]()
    for item in worker.items:
        if item.what in ("weights", "gradients", "optimizer"):
            planned[named.get(item.role, item.what)] += int(item.num_bytes)
    assert parts(folder, *keys, "actor_rollout_ref.rollout.enforce_eager=true") == planned


def test_keys_and_values_are_those_of_a_cache(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.ones(1, 9, dtype=torch.int64), past_key_values=cache)
    config = load_config(
        "grpo", [f"{MODEL}.path={folder}", f"{MODEL}.dtype=float32"], complete=False
    ).config
    assert 9 * kv_bytes_of_token(config) == sum(
        layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )
