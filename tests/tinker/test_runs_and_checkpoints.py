"""A run's adapter starts a model of the Tinker API, and a checkpoint of it starts a run."""

import shutil
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from distflow.models.loading import load_model
from tests.e2e.runs import Playground
from tests.tinker.server import tinker_server

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

MODEL = "actor_rollout_ref.model"
IDS = [5, 9, 7, 8, 6, 10, 11]


def loss_of(folder: Path) -> float:
    """Of the model in a folder, or below an adapter in it."""
    ids = torch.tensor([IDS])
    log_probs = load_model(folder)(ids).logits[0, :-1].detach().log_softmax(-1)
    return -float(log_probs.gather(1, ids[0, 1:, None]).sum())


LORA = (f"{MODEL}.lora_rank=3", f"{MODEL}.target_modules=[q_proj,down_proj]")


@pytest.mark.parametrize(("options", "kind"), [(LORA, ["--adapter"]), ((), [])])
def test_a_runs_weights_go_to_a_client_and_back_to_a_run(
    tmp_path: Path, options: tuple[str, ...], kind: list[str]
) -> None:
    """Those of an adapter, and all."""
    ground = Playground(tmp_path)
    steps = ("trainer.total_training_steps=1", "trainer.save_freq=1")
    ground.run("grpo", *options, *steps, "actor_rollout_ref.actor.optim.lr=0.03", name="first")
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "first"), "--to", str(exported), *kind]) == 0

    kept = tmp_path / "checkpoints"
    shutil.copytree(exported, kept / "first" / "weights" / "final")
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:]},
    )
    with tinker_server(tmp_path, checkpoints=kept) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
        model = client.create_training_client_from_state("tinker://first/weights/final").result()
        assert model.get_info().is_lora == bool(kind)
        assert model.get_info().lora_rank == (3 if kind else None)
        passed = model.forward_backward([datum], "cross_entropy").result()
        assert passed.metrics["loss:sum"] == pytest.approx(loss_of(exported), rel=1e-5)
        assert loss_of(exported) != pytest.approx(loss_of(tmp_path / "model"), rel=1e-5)

        model.optim_step(tinker.types.AdamParams(learning_rate=0.01)).result()
        path = model.save_state("trained").result().path
        trained = model.forward([datum], "cross_entropy").result().metrics["loss:sum"]
        sampler = model.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(tinker.types.ModelInput.from_ints(IDS)).result()
        assert -sum(scored[1:]) == pytest.approx(trained, rel=1e-4)
        client.close("success").result()

    saved = kept / path.removeprefix("tinker://")
    assert loss_of(saved) == pytest.approx(trained, rel=1e-5)
    start = (f"{MODEL}.path={saved}", f"{MODEL}.tokenizer_path={tmp_path}/model")
    run = ground.run("grpo", *start, *steps, name="second")
    assert len(run.metrics()) == 1
