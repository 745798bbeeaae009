"""Keys of `actor_rollout_ref.model`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.e2e.keys.case import Case, close, differ, the_policy
from tests.e2e.keys.lab import MODEL, Lab, Run

ONE = "trainer.total_training_steps=1"
LORA = f"{MODEL}.lora_rank=4"
COMMITS = ("a" * 40, "b" * 40)
_SHOW_NORM = """
import sys
from distflow.config import load_config
from distflow.launch.devices import choose_device
from distflow.launch.configured_models import load_policy
config = load_config("grpo", sys.argv[1:]).config
model = load_policy(config, choose_device(config))
print("norm", sum(float(p.detach().double().norm()) for p in model.parameters()))
"""


def width_is(before_width: int, after_width: int) -> Callable[[Any, Any], None]:
    def check(before: Any, after: Any) -> None:
        assert (before.config.hidden_size, after.config.hidden_size) == (before_width, after_width)

    return check


def other_token_ids(before: Run, after: Run) -> None:
    """The other tokenizer calls "+" what this one calls "=", and the other way round."""
    ours = before.built["tokenizer"]
    theirs = after.built["tokenizer"]
    plus, equals = ours.convert_tokens_to_ids(["+", "="])
    swapped = {plus: equals, equals: plus}
    row = before.spec.rows[0]
    assert tuple(swapped.get(i, i) for i in row.prompt_ids) == after.spec.rows[0].prompt_ids
    assert theirs.decode(after.spec.rows[0].prompt_ids) == row.prompt_text


def other_weights(before: nn.Module, after: nn.Module) -> None:
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert old.shape == new.shape
        if not name.endswith("norm.weight"):
            differ(old.detach(), new.detach())


def code_of_the_folder(before: nn.Module, after: nn.Module) -> None:
    assert (type(before).__name__, type(after).__name__) == ("LlamaForCausalLM", "OwnLlama")


def computed_in_bfloat16(before: Run, after: Run) -> None:
    """Engine and trainer round differently then, and the engine has its own copy, which the canary
    compares."""
    assert (
        before.column("mismatch/mean_abs")[0] < 1e-5 < 1e-3 < after.column("mismatch/mean_abs")[0]
    )
    assert "canary/mean_abs" in after.steps[0] and "canary/mean_abs" not in before.steps[0]
    assert all(tensor.dtype is torch.float32 for tensor in after.weights().values())


def layers_twice(before: Run, after: Run) -> None:
    """One layer's forwards: learning twice instead of once; the same gradient."""
    assert after.layer_calls == before.layer_calls + 1, (before.layer_calls, after.layer_calls)
    close(after.column("actor/grad_norm")[0], before.column("actor/grad_norm")[0])


def adapters_of_rank(rank: int) -> Callable[[nn.Module, nn.Module], None]:
    def check(before: nn.Module, after: nn.Module) -> None:
        trained = {name: p for name, p in after.named_parameters() if p.requires_grad}
        assert trained and all(".lora_" in name and rank in p.shape for name, p in trained.items())
        assert all(p.requires_grad for p in before.parameters())

    return check


def twice_the_gradient(before: Run, after: Run) -> None:
    """B is 0 at the start, so that only B has a gradient, in proportion to alpha / rank."""
    close(after.column("actor/grad_norm")[0], 2 * before.column("actor/grad_norm")[0], 1e-4)


def only_queries(before: nn.Module, after: nn.Module) -> None:
    def adapted(model: nn.Module) -> set[str]:
        return {
            name.split(".lora_")[0].rpartition(".")[2]
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    assert adapted(after) == {"q_proj"} < adapted(before)


def norm_at_revision(lab: Lab, base: str, changes: Sequence[str]) -> float:
    """Loads `tests/tiny` from a hub's cache that holds two commits of it, in a process that sees
    that cache."""
    cache = lab.folder / "hub"
    for commit, folder in zip(COMMITS, ("model", "other_model"), strict=True):
        snapshot = cache / "models--tests--tiny" / "snapshots" / commit
        if not snapshot.exists():
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            snapshot.symlink_to(lab.folder / folder)
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    arguments = [f"{MODEL}.path=tests/tiny", "data.train_files=x.jsonl", *changes]
    done = subprocess.run(
        [sys.executable, "-c", _SHOW_NORM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def another_commit(before: float, after: float) -> None:
    differ(before, after, 0.1)


def model_with_code(lab: Lab, base: str, changes: Sequence[str]) -> Any:
    """The policy of a folder that brings its own class."""
    _write_own_code(lab.folder / "own_code", lab.folder / "model")
    modules = lab.folder / "modules"
    previous = os.environ.get("HF_MODULES_CACHE")
    import transformers.dynamic_module_utils as dynamic

    kept = dynamic.HF_MODULES_CACHE
    dynamic.HF_MODULES_CACHE = str(modules)
    try:
        return the_policy(lab, base, (*changes, f"{MODEL}.path={lab.folder}/own_code"))
    finally:
        dynamic.HF_MODULES_CACHE = kept
        assert os.environ.get("HF_MODULES_CACHE") == previous


def _write_own_code(folder: Path, model: Path) -> None:
    if folder.exists():
        return
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.OwnLlama"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnLlama(LlamaForCausalLM):\n"
        "    pass\n"
    )


CASES = (
    Case(
        f"{MODEL}.path",
        f"{MODEL}.path={{lab}}/other_model",
        "the model",
        width_is(32, 40),
        look=the_policy,
    ),
    Case(
        f"{MODEL}.tokenizer_path",
        f"{MODEL}.tokenizer_path={{lab}}/swapped",
        "token ids",
        other_token_ids,
        given=(ONE,),
    ),
    Case(
        f"{MODEL}.revision",
        f"{MODEL}.revision={COMMITS[1]}",
        "the weights of that commit",
        another_commit,
        given=(f"{MODEL}.revision={COMMITS[0]}",),
        look=norm_at_revision,
    ),
    Case(
        f"{MODEL}.trust_remote_code",
        f"{MODEL}.trust_remote_code=true",
        "the class of the model",
        code_of_the_folder,
        look=model_with_code,
    ),
    Case(
        f"{MODEL}.init",
        f"{MODEL}.init=random",
        "the weights at the start",
        other_weights,
        look=the_policy,
    ),
    Case(
        f"{MODEL}.dtype",
        f"{MODEL}.dtype=bfloat16",
        "mismatch/mean_abs, a canary",
        computed_in_bfloat16,
        # native code rounds as the trainer does
        given=(ONE, "actor_rollout_ref.rollout.enforce_eager=true"),
    ),
    Case(
        f"{MODEL}.enable_gradient_checkpointing",
        f"{MODEL}.enable_gradient_checkpointing=true",
        "forwards of a layer",
        layers_twice,
        given=(ONE, "trust.check_freq=0"),
    ),
    Case(
        f"{MODEL}.lora_rank",
        f"{MODEL}.lora_rank=3",
        "trained weights",
        adapters_of_rank(3),
        look=the_policy,
    ),
    Case(
        f"{MODEL}.lora_alpha",
        f"{MODEL}.lora_alpha=32",
        "the gradient",
        twice_the_gradient,
        given=(ONE, LORA),
    ),
    Case(
        f"{MODEL}.target_modules",
        f"{MODEL}.target_modules=[q_proj]",
        "modules with an adapter",
        only_queries,
        given=(LORA,),
        look=the_policy,
    ),
)
