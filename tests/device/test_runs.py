"""Runs on the rehearsal's device through the command: they leave what they leave on a CPU."""

from collections import ChainMap
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distflow import cli
from distflow.algorithms.objectives import PolicyObjective
from distflow.models.loading import load_model
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.device.rehearsal import on_device
from tests.e2e.runs import Playground, Run
from tests.tiny_models import write_tiny_model
from tests.training.batches import ragged_batch

pytestmark = pytest.mark.slow
BY_HAND = pytest.mark.by_hand
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
FREE = f"{ROLLOUT}.free_cache_engine=true"
STEPS = "trainer.total_training_steps=3"
# Adam divides by the size of a gradient, so that the last bit of a small one would be all that is
# seen.
ALIKE = (
    f"{ACTOR}.optim.optimizer=sgd",
    f"{ACTOR}.optim.lr=0.1",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
    "trainer.save_freq=3",
    "trust.check_rewards=false",
)
RUNS = {
    "hf": ("grpo", f"{ROLLOUT}.name=hf"),
    "embedded": ("grpo", f"{ROLLOUT}.name=embedded"),
    "batch invariant": ("grpo", f"{ROLLOUT}.batch_invariant=true"),
    "lora": ("grpo", f"{MODEL}.lora_rank=2", f"{ACTOR}.use_kl_loss=true"),
    "checkpointing": (
        "grpo",
        f"{MODEL}.enable_gradient_checkpointing=true",
        "algorithm.recompute_old_log_probs=true",
    ),
    "ppo": ("ppo",),
    "phases": ("grpo", FREE, f"{ROLLOUT}.name=embedded"),
    "offload": (
        "ppo",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
        "critic.fsdp_config.param_offload=true",
        "critic.fsdp_config.optimizer_offload=true",
    ),
}
NOT_IN_SFT = (
    f"{ROLLOUT}.n",
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
)
SFT = (*(f"~{key}" for key in NOT_IN_SFT), "~trust.check_rewards")


def run_on(device: str, ground: Playground, preset: str, *more: str) -> Run:
    """By the command, which must succeed; without checks on the CPU, of which only the numbers
    matter."""
    keys = ground.overrides(device, STEPS, *ALIKE, f"trainer.device={device}", *more)
    assert (
        cli.main(
            ["sft" if preset == "sft" else "train", *([] if preset == "sft" else [preset]), *keys]
        )
        == 0
    )
    config, _ = ground.spec(preset, STEPS, *ALIKE, f"trainer.device={device}", *more, name="read")

    return Run(ground.folder / device, config, None)


def passed(run: Run) -> None:
    """Its three steps and their checks."""
    assert not run.notes("warning"), run.notes("warning")
    assert len(run.metrics()) == len(run.notes("checks")) == 3


def same_numbers(ours: Run, theirs: Run, steps: int = 3) -> None:
    """Weights and metrics to 1e-6."""
    same_metrics(ours, theirs, steps)
    close(ours.weights(steps), theirs.weights(steps))


COMPARED = ("actor/", "critic/", "sft/", "reward", "score", "rollout_corr/")


def same_metrics(ours: Run, theirs: Run, steps: int = 3, names: tuple[str, ...] = COMPARED) -> None:
    """names: how those that are compared begin."""
    assert len(ours.metrics()) == len(theirs.metrics()) == steps
    for here, there in zip(ours.metrics(), theirs.metrics(), strict=True):
        for name in here:
            if name.startswith(names):
                assert here[name] == pytest.approx(there[name], rel=1e-4, abs=1e-6), name


def exported(run: Run) -> dict[str, Tensor]:
    """The policy, also where ranks saved a part of it each."""
    folder = run.folder.with_name(f"{run.folder.name}-exported")
    assert cli.main(["export", str(run.folder), "--to", str(folder)]) == 0
    return load_file(folder / "model.safetensors")


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "embedded" else BY_HAND) for name in RUNS]
)
@on_device
def test_a_run_is_that_of_a_cpu_and_passes_its_checks(tmp_path, name):
    preset, *keys = RUNS[name]
    ground = Playground(tmp_path, num_rows=8)
    there = run_on("rehearsal", ground, preset, *keys, "trust.check_freq=1")
    passed(there)
    same = keys if name != "offload" else ()  # which a CPU refuses
    same_numbers(run_on("cpu", ground, preset, *same, "trust.check_freq=0"), there)


@BY_HAND
@on_device
def test_fine_tuning_is_that_of_a_cpu(tmp_path):
    ground = Playground(tmp_path)
    ground.write_rows([{"prompt": f"{i}+{i}=", "response": f"{2 * i}"} for i in range(8)])
    keys = (f"data.val_files={tmp_path}/rows.jsonl", "trainer.test_freq=1")
    same_numbers(*(run_on(device, ground, "sft", *SFT, *keys) for device in ("cpu", "rehearsal")))


@BY_HAND
@on_device
def test_generation_ahead_of_training_passes_its_checks(tmp_path):
    """Two threads use the device at once."""
    ground = Playground(tmp_path, num_rows=8)
    passed(run_on("rehearsal", ground, "grpo", "async.max_staleness=1", "trust.check_freq=1"))


@BY_HAND
@on_device
def test_generation_ahead_of_training_is_that_of_a_cpu(tmp_path):
    """At a learning rate that moves no weight: else it depends on time which tokens have which
    weights."""
    ground = Playground(tmp_path, num_rows=16)
    keys = ("async.max_staleness=1", f"{ACTOR}.optim.lr=1e-30")
    runs = [
        run_on(device, ground, "grpo", *keys, "trust.check_freq=0")
        for device in ("cpu", "rehearsal")
    ]
    same_metrics(*runs, names=("actor/", "reward/mean_score", "rollout/avg", "rollout_corr/"))
    close(*(run.weights(3) for run in runs))


@BY_HAND
@on_device
def test_an_engine_that_frees_its_own_weights_while_training_generates_the_same_bits(tmp_path):
    runs = {}
    for name, more in (("plain", ()), ("freed", (FREE,))):
        (tmp_path / name).mkdir()
        ground = Playground(tmp_path / name, num_rows=8)
        runs[name] = run_on(
            "rehearsal", ground, "grpo", f"{MODEL}.dtype=bfloat16", *more, "trust.check_freq=1"
        )
        passed(runs[name])

    weights = runs["plain"].weights(3)
    assert all(
        torch.equal(weight, weights[name]) for name, weight in runs["freed"].weights(3).items()
    )
    most = {
        name: max(step["memory/rehearsal/train_step"] for step in run.metrics())
        for name, run in runs.items()
    }
    assert most["freed"] < most["plain"], most


@pytest.mark.parametrize("name", [None, "loss_mask", pytest.param("advantages", marks=BY_HAND)])
@on_device
def test_a_column_that_is_left_on_the_host_is_found(tmp_path, name):
    """On a CPU the same run ends."""
    model = load_model(write_tiny_model(tmp_path), device="rehearsal")
    optimizer = make_optimizer("sgd", model.parameters(), lr=1e-3)
    engine = TorchTrainEngine(
        model, optimizer=optimizer, schedule=make_schedule("constant", total_steps=10)
    )

    class LeavesOne(PolicyObjective):
        def __call__(self, outputs, micro, counts):
            here = {name: micro[name].cpu()} if name else {}
            return super().__call__(outputs, ChainMap(here, micro), counts)

    batch = ragged_batch()
    batch["old_log_probs"] = -torch.rand(batch.flat("advantages").shape)

    with (
        pytest.raises(RuntimeError, match="rehearsal.*cpu|cpu.*rehearsal")
        if name
        else nullcontext()
    ):
        engine.train_step(batch, LeavesOne())


@BY_HAND
@on_device
def test_weights_that_are_offloaded_while_an_engine_in_bfloat16_generates_pass_their_checks(
    tmp_path,
):
    ground = Playground(tmp_path, num_rows=8)
    away = (
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
    )
    passed(
        run_on("rehearsal", ground, "grpo", f"{MODEL}.dtype=bfloat16", *away, "trust.check_freq=1")
    )


@BY_HAND
@on_device
def test_a_run_resumes_bit_for_bit_and_exports(tmp_path):
    """Also from what a CPU saved."""
    ground = Playground(tmp_path, num_rows=8)
    keys = (f"data.val_files={tmp_path}/rows.jsonl", "trainer.test_freq=1", "trainer.save_freq=1")
    whole, other = (run_on(device, ground, "grpo", *keys) for device in ("rehearsal", "cpu"))

    for name, begun in (("resumed", "rehearsal"), ("moved", "cpu")):
        more = (*ALIKE, *keys, f"trainer.default_local_dir={tmp_path}/{name}")
        saved = tmp_path / begun / "checkpoints/step-000002"
        arguments = ground.overrides(
            name, STEPS, *more, "trainer.device=rehearsal", f"trainer.resume_mode={saved}"
        )
        assert cli.main(["train", "grpo", *arguments, "--allow-change", "trainer.device"]) == 0
        weights = Run(tmp_path / name, whole.config, whole.outcome).weights(3)
        exact = {"resumed": whole, "moved": other}[name].weights(3)
        if name == "resumed":
            assert all(torch.equal(weight, exact[key]) for key, weight in weights.items())
        close(weights, exact)

    close(exported(Run(tmp_path / "resumed", whole.config, whole.outcome)), whole.weights(3))
