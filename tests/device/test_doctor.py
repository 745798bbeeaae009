"""`distflow doctor --device` on the rehearsal's device: it passes there, and what is planted is
found."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from distflow import cli
from distflow.commands.selftest.compared_runs import CHECKS
from distflow.commands.selftest.runs import TOKENIZER, write_models
from distflow.config import load_config
from distflow.launch.without_run.device_checks import Subject, try_check
from tests.device.rehearsal import on_device

pytestmark = [pytest.mark.slow, pytest.mark.alone]
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}
MODEL = "actor_rollout_ref.model"
FREES = "actor_rollout_ref.rollout.free_cache_engine"


def doctor(*words: str) -> tuple[int, dict[str, list[str]]]:
    """Its exit status, and outcome and text of each line by name."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(["doctor", "--device", *words])
    lines = [
        line
        for line in out.getvalue().splitlines()[1:-1]
        if line[:24].strip() in {"device", *CHECKS}
    ]
    return status, {line[:24].strip(): [line[25:34].strip(), line[35:]] for line in lines}


def try_checks(folder: Path, *names: str, keys: tuple[str, ...] = ()) -> dict[str, str]:
    """The texts of those that fail."""
    config = load_config(
        "grpo", [f"{MODEL}.path=builtin:tiny-arithmetic", *keys], complete=False
    ).config
    folder.mkdir()
    write_models(folder)
    subject = Subject(config, torch.device("rehearsal"), folder, TOKENIZER)
    found = [try_check(name, CHECKS[name], subject) for name in names]
    return {each.name: each.text for each in found if each.outcome == "failed"}


@on_device
def test_a_device_that_computes_what_a_cpu_does_passes_every_check() -> None:
    status, found = doctor(
        "grpo", f"{MODEL}.path=builtin:tiny-arithmetic", f"{MODEL}.dtype=float32"
    )
    assert status == 0 and found.keys() == {"device", *CHECKS}, found
    left_out = {name for name, (outcome, _) in found.items() if outcome != "ok"}
    assert left_out == {
        "CUDA graphs",
        *(f"attention, {kind}" for kind in ("efficient", "cudnn", "overrideable")),
    }


@on_device
def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    library = torch.library.Library("aten", "IMPL")
    computed = ("kernels", "log-probs, float32", "decode steps")
    assert not try_checks(tmp_path / "sound", *computed)
    library.impl("silu", lambda x: x * (0.99 * x.sigmoid()), "PrivateUse1")
    found = try_checks(tmp_path / "wrong", *computed)
    assert found.keys() == {*computed} and found["kernels"].startswith("silu differs by")


@pytest.mark.by_hand
@on_device
def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    """Log-probs are right."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "silu_backward",
        lambda grad, x: 0.9 * grad * x.sigmoid() * (1 + x * (1 - x.sigmoid())),
        "PrivateUse1",
    )
    found = try_checks(tmp_path / "wrong", "kernels", "log-probs, float32", "GRPO steps")
    assert found.keys() == {"GRPO steps"} and "other responses in step 2" in found["GRPO steps"]


@on_device
def test_a_dtype_that_the_device_does_not_know_is_found(tmp_path: Path) -> None:
    """torch then computes in float32, and only warns."""
    torch.rehearsal.get_amp_supported_dtype = lambda: [torch.float16]
    found = try_checks(tmp_path / "folder", "log-probs, float32", "log-probs, bfloat16")
    assert (
        found.keys() == {"log-probs, bfloat16"}
        and "are in torch.float32" in found["log-probs, bfloat16"]
    )


@on_device
def test_too_little_memory_is_found(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN_7B))
    large = f"{MODEL}.path={tmp_path}/model"
    found = try_checks(tmp_path / "memory", "memory of the config", keys=(large,))
    assert "weights 28.4, gradients 28.4, optimizer 56.7" in found["memory of the config"]
    assert not try_checks(tmp_path / "enough", "memory of the config")
    import rehearsal_backend

    # 6.3 MiB are loaded, half of the 11 MiB that are left go to keys and values, and 9.4 MiB are
    # wanted to train
    rehearsal_backend.limit_memory(torch.accelerator.memory_allocated() + 17 * 2**20)
    short = ("data.max_prompt_length=32", "data.max_response_length=32", f"{MODEL}.dtype=float32")
    taken = try_checks(
        tmp_path / "taken", "memory of the config", keys=(*short, "trainer.device=rehearsal")
    )
    assert (
        "for keys and values: set actor_rollout_ref.rollout.free_cache_engine=true"
        in taken["memory of the config"]
    )
    assert not try_checks(
        tmp_path / "returned", "memory of the config", keys=(*short, f"{FREES}=true")
    )
    rehearsal_backend.limit_memory(2**25)
    assert "OutOfMemoryError" in try_checks(tmp_path / "copies", "copies")["copies"]


@on_device
def test_too_few_devices_are_found(tmp_path: Path) -> None:
    found = try_checks(tmp_path / "folder", "devices", keys=("trainer.n_gpus_per_node=2",))
    assert found["devices"].startswith(
        "1 here, 2 on each machine in the config: lower trainer.n_gpus_per_node"
    )
