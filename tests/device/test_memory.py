"""What lies in the device's memory: nothing that grows, no full logits, no second copy of the
model."""

import copy
from pathlib import Path

import pytest
import torch

from distflow.models.loading import load_model
from distflow.rollout import engine_weights
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.device.rehearsal import on_device
from tests.e2e.runs import Playground, Run
from tests.tiny_models import write_tiny_model
from tests.training.batches import TokenMeanLoss, ragged_batch

pytestmark = [pytest.mark.slow, pytest.mark.by_hand]
VOCABULARY = 32768
LENGTHS = ((4, 300),) * 7


def memory_of(run: Run) -> list[float]:
    """The most that was allocated in each step, in bytes."""
    return [
        max(
            n
            for name, n in step.items()
            if name.startswith("memory/rehearsal/") and not name.endswith("/peak")
        )
        for step in run.metrics()
    ]


@on_device
def test_memory_is_flat_over_fifty_steps(tmp_path: Path) -> None:
    ground = Playground(tmp_path, num_rows=8)
    keys = (
        "trainer.total_training_steps=50",
        "actor_rollout_ref.rollout.n=2",
        "data.max_response_length=4",
    )
    run = ground.run(
        "grpo", *keys, "trust.check_freq=0", "trust.check_rewards=false", "trainer.device=rehearsal"
    )
    steps = memory_of(run)
    assert len(steps) == 50 and max(steps[25:]) <= 1.01 * max(steps[2:25])


@on_device
def test_an_update_allocates_no_full_logits(tmp_path: Path) -> None:
    from torch_rehearsal import Events

    model = load_model(write_tiny_model(tmp_path, vocab_size=VOCABULARY), device="rehearsal")
    optimizer = make_optimizer("sgd", model.parameters(), lr=1e-3)
    engine = TorchTrainEngine(
        model, optimizer=optimizer, schedule=make_schedule("constant", total_steps=10)
    )
    batch = ragged_batch(LENGTHS, vocabulary=VOCABULARY)
    full = 4 * VOCABULARY * int(batch.lengths("response").sum())
    events = Events()
    events.start(watched_bytes=full)
    engine.train_step(batch, TokenMeanLoss())
    assert not events.of("allocated")
    with torch.no_grad():
        model(batch.flat("input_ids")[None].to("rehearsal"))  # whose logits would have been found
    events.stop()
    assert events.of("allocated")


def copies_while_generating(folder: Path) -> float:
    """What is allocated while the engine generates, by the size of the model, of which all else is
    a small part."""
    ground = Playground(
        folder, num_rows=8, hidden_size=256, intermediate_size=1024, num_hidden_layers=4
    )
    keys = ("trainer.total_training_steps=2", "actor_rollout_ref.rollout.max_num_seqs=4")
    plain = (
        "actor_rollout_ref.actor.optim.optimizer=sgd",
        "actor_rollout_ref.actor.use_kl_loss=false",
    )
    proofs = ("trust.check_freq=0", "trust.check_rewards=false", "trainer.device=rehearsal")
    steps = ground.run("grpo", *keys, *plain, *proofs).metrics()
    most = max(step["memory/rehearsal/rollout"] for step in steps)
    return most / sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))


@on_device
def test_an_engine_on_the_trainers_weights_has_no_copy_of_them(tmp_path: Path) -> None:
    assert 1.0 < copies_while_generating(tmp_path) < 1.5


@on_device
def test_a_second_copy_of_the_model_is_found(tmp_path: Path) -> None:
    make = engine_weights.EngineWeights.__init__

    def keeps_a_copy(self, model, *more):
        make(self, model, *more)
        self.too_many = copy.deepcopy(model)

    engine_weights.EngineWeights.__init__ = keeps_a_copy
    assert copies_while_generating(tmp_path) > 2.0
