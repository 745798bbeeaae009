"""A run's folder, or a checkpoint's, where a model is wanted: trained from, evaluated, exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from distflow import cli
from distflow.errors import UserError
from distflow.launch.one_process_launcher import launch_local
from distflow.launch.run_folders.export_checkpoint import export_checkpoint
from distflow.observe.run_reader import read_metrics
from distflow.runtime.spec import LaunchOptions
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow

CHEAP = ("trust.check_rewards=false", "trust.check_freq=0")
SAVED = (*CHEAP, "trainer.save_freq=1", "trainer.keep_last=9")
MODEL = "actor_rollout_ref.model.path"
STEPS = "trainer.total_training_steps"


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """With two runs of two steps, of all weights and of an adapter."""
    ground = Playground(tmp_path_factory.mktemp("models"))
    val = (f"data.val_files={ground.folder}/rows.jsonl", "data.val_max_samples=3")
    ground.run("grpo", *SAVED, *val, f"{STEPS}=2", name="source")
    ground.run(
        "grpo", *SAVED, *val, f"{STEPS}=2", "actor_rollout_ref.model.lora_rank=2", name="lora"
    )
    return ground


def start(ground: Playground, *overrides: str, name: str) -> list[str]:
    """What was said."""
    from distflow.config import load_config
    from distflow.launch.make_spec import make_spec

    said: list[str] = []
    loaded = load_config("grpo", ground.overrides(name, *SAVED, *overrides))
    launch_local(make_spec(loaded, said.append), LaunchOptions(say=said.append))
    return said


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert cli.main(["eval", "--trust-code", *arguments]) == 0, capsys.readouterr().err
    lines = (
        line.split(": ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("val_", "val/"))
    )
    return {name: float(value.split()[0]) for name, value, *_ in lines}


@pytest.mark.parametrize("which", ["", "/checkpoints", "/checkpoints/step-000002"])
@pytest.mark.parametrize("run", ["source", "lora"])
def test_a_run_begins_from_the_policy_of_another(ground, run, which):
    source = ground.folder / f"{run}{which}"
    name = f"from-{run}{which.replace('/', '-')}"
    said = start(
        ground,
        f"{MODEL}={source}",
        f"{STEPS}=1",
        "actor_rollout_ref.actor.optim.lr=1e-30",
        name=name,
    )
    assert f"model: step 2 of {source}" in said
    exported = load_file(
        export_checkpoint(source, ground.folder / f"{name}-model") / "model.safetensors"
    )
    (copy,) = (ground.folder / name / "models").iterdir()
    begun = load_file(copy / "model.safetensors")
    assert begun.keys() == exported.keys() and all(
        torch.equal(begun[key], exported[key]) for key in begun
    )
    trained = load_file(ground.folder / name / "checkpoints" / "step-000001" / "actor.safetensors")
    for key, tensor in begun.items():
        torch.testing.assert_close(trained[f"model.{key}"], tensor, rtol=0, atol=1e-12)

    if run == "source":
        last = load_file(
            ground.folder / "source" / "checkpoints" / "step-000002" / "actor.safetensors"
        )
        assert all(torch.equal(last[f"model.{key}"], tensor) for key, tensor in begun.items())


def test_it_goes_on_from_its_copy_when_the_other_run_has_gone(ground):
    shutil.copytree(ground.folder / "source", ground.folder / "passing")
    path = f"{MODEL}={ground.folder}/passing"
    kl = "actor_rollout_ref.actor.use_kl_loss=true"  # the reference is the model that it began from
    start(ground, path, kl, f"{STEPS}=1", name="child")
    shutil.rmtree(ground.folder / "passing" / "checkpoints" / "step-000002")
    said = start(ground, path, kl, f"{STEPS}=2", name="child")
    assert any("this run's own copy" in line for line in said)
    assert [r.step for r in read_metrics(ground.folder / "child") if r.kind == "train"] == [1, 2]

    said = start(ground, path, kl, f"{STEPS}=1", "trainer.resume_mode=never", name="child")
    assert f"model: step 1 of {ground.folder}/passing" in said
    assert len(list((ground.folder / "child" / "models").iterdir())) == 2, (
        "the run that was set aside has its own"
    )


def test_eval_asks_a_run_what_the_run_asked(ground, capsys):
    """The accuracy is that of the run's own last validation, of all weights and of an adapter."""
    val = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=12",
        "trainer.test_freq=1",
    )

    for name, more in (("judged", ()), ("judged-lora", ("actor_rollout_ref.model.lora_rank=2",))):
        run = ground.run("grpo", *SAVED, *val, *more, f"{STEPS}=2", name=name)
        by_step = {
            r.step: r.values["val_correct/all/mean"]
            for r in read_metrics(run.folder)
            if r.kind == "val"
        }
        assert evaluate(capsys, str(run.folder))["val_correct/all/mean"] == pytest.approx(
            by_step[2], abs=1e-4
        )
        first = evaluate(capsys, str(run.folder / "checkpoints" / "step-000001"))
        assert first["val_correct/all/mean"] == pytest.approx(by_step[1], abs=1e-4)
        preset = ["grpo", *ground.overrides("unused", *val, f"{MODEL}={run.folder}")]
        assert evaluate(capsys, *preset)["val_correct/all/mean"] == pytest.approx(
            by_step[2], abs=1e-4
        )
        assert not (ground.folder / "unused").exists()


def test_an_export_given_twice_does_nothing_and_overwrites_nothing(ground):
    target = ground.folder / "out"
    said = list[str]()
    export_checkpoint(ground.folder / "source", target)
    note = json.loads((target / "distflow.json").read_text())
    assert (note["run"], note["step"]) == (str(ground.folder / "source"), 2)
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert export_checkpoint(ground.folder / "source", target, say=said.append) == target
    assert f"{target} holds it already" in said
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before
    with pytest.raises(UserError, match=f"{target}.* empty folder"):
        export_checkpoint(ground.folder / "source" / "checkpoints" / "step-000001", target)
