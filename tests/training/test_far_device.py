"""On a device that is not the host a step's loss and backward pass stay there, and its numbers are
read once."""

from pathlib import Path

import pytest
import torch

from distflow import builtin_names
from distflow.algorithms.objectives import PolicyObjective, SFTObjective, ValueObjective
from distflow.data.batch import Batch
from distflow.device_transfer import read_numbers
from distflow.graph.fields import Axis, find_field
from distflow.models.loading import load_model
from distflow.models.weight_soundness import magnitudes
from distflow.training.engine import LossFn
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.sparse_params import one_fast_in
from tests.tiny_models import write_tiny_model
from tests.training.batches import ragged_batch
from tests.training.far_device import FAR, FarDevice

POLICY = PolicyObjective(
    "decoupled",
    loss_agg_mode="seq-mean-token-mean",
    entropy_coef=0.01,
    kl_loss_type="kl+",
    kl_loss_coef=0.1,
    weights_field="rollout_is_weights",
)
VALUES = ValueObjective(0.3)
SMALL = 20
"""Tokens of a micro-batch: several make a mini-batch."""


def a_batch() -> Batch:
    batch = ragged_batch()
    shape = batch.flat("advantages").shape
    for name in (
        "old_log_probs",
        "prox_log_probs",
        "ref_log_prob",
        "rollout_is_weights",
        "rollout_log_probs",
        "values",
    ):
        batch[name] = -torch.rand(shape, generator=torch.Generator().manual_seed(len(name)))
    batch["valid"] = torch.arange(len(batch)) != 1
    batch["domain"] = ["warm" if row % 2 else "cold" for row in range(len(batch))]
    return batch


def far_engine(folder: Path, objective: LossFn, max_tokens: int = SMALL) -> TorchTrainEngine:
    model = load_model(folder, critic=objective is VALUES).to(FAR)
    return TorchTrainEngine(
        model,
        optimizer=make_optimizer("adamw", model.parameters(), lr=1e-2),
        schedule=make_schedule("constant", total_steps=10),
        max_tokens_per_micro_batch=max_tokens,
        temperatures={"warm": 1.3},
        gradient_checkpointing=objective is POLICY,
    )


@pytest.mark.parametrize(
    ("family", "objective"),
    one_fast_in(
        4,
        [
            ("qwen3", POLICY),
            ("qwen2", VALUES),
            ("llama", SFTObjective()),
            ("llama", PolicyObjective("gspo", derives_old=True)),
        ],
        unpack=True,
    ),
)
def test_a_step_reads_its_numbers_once(tmp_path: Path, family: str, objective: LossFn) -> None:
    batch = a_batch()
    engine = far_engine(write_tiny_model(tmp_path / "m", family), objective)
    for _ in range(2):
        with FarDevice() as device:
            metrics = engine.train_step(batch, objective)
        assert metrics["skipped"] == 0.0 and len(device.reads) == 1, device.reads
    assert engine.num_steps == 2


@pytest.mark.parametrize("name", sorted(builtin_names.POLICY_LOSSES))
def test_no_loss_waits_for_the_device(name: str) -> None:
    objective = PolicyObjective(
        name,
        kl_loss_type="low_var_kl",
        kl_loss_coef=0.1,
        entropy_coef=0.1,
        off_policy_mask_threshold=0.2,
    )
    batch = a_batch()
    shape = batch.flat("advantages").shape
    for column in (*objective.reads, *objective.optional):
        if column not in batch:
            batch[column] = torch.ones(
                len(batch) if find_field(column).axis is Axis.SAMPLE else shape
            )
    far = batch.to(FAR)
    counts = objective.counts(batch)
    values = torch.empty(shape, device=FAR, requires_grad=True)
    with FarDevice() as device:
        outputs = {output: far.pad(values, "response") for output in objective.outputs}
        loss, sums = objective(outputs, far, counts)
        loss.backward()
    assert not device.reads and values.grad is not None
    assert all(
        not isinstance(value, torch.Tensor) or value.device == FAR for value in sums.values()
    )


def test_what_is_sent_does_not_grow_with_what_is_made_of_it(tmp_path: Path) -> None:
    """Columns go there once a micro-batch; how they are padded is not sent for each that the loss
    reads."""
    folder = write_tiny_model(tmp_path / "m")
    batch = a_batch()
    sent = []
    for objective in (PolicyObjective(), POLICY):
        engine = far_engine(folder, objective, max_tokens=10_000)
        with FarDevice() as device:
            engine.train_step(batch, objective)
        sent.append(device.num_sent)
    assert len(POLICY.reads) > len(PolicyObjective().reads) and sent[0] == sent[1]


def test_scores_come_back_once_each(tmp_path: Path) -> None:
    batch = a_batch()
    model = load_model(write_tiny_model(tmp_path / "m")).to(FAR)
    scorer = TorchScorer(model, max_tokens_per_micro_batch=SMALL)
    with FarDevice() as device:
        scored = scorer.forward(batch, ("log_probs", "entropy"))
    assert device.reads == [(int(batch.lengths("response").sum()),)] * 2
    assert scored.flat("log_probs").device.type == "cpu"


def test_all_weights_are_looked_at_in_one_read(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "m"))
    with FarDevice() as device:
        found = magnitudes(model.to(FAR).named_parameters())
    # the least and the largest of each
    assert device.reads == [(2 * len(dict(model.named_parameters())),)]
    assert found.keys() == dict(model.named_parameters()).keys()


def test_numbers_of_several_places_keep_their_order() -> None:
    values = [
        torch.tensor(0.1),
        3.0,
        torch.tensor(7),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(1.5).bfloat16(),
    ]
    assert read_numbers(values) == [float(torch.tensor(0.1)), 3.0, 7.0, 0.1, 1.5]
    with FarDevice() as device:
        assert read_numbers(
            [torch.tensor(2.0), torch.empty((), device=FAR), 5.0, torch.empty((), device=FAR)]
        )[::2] == [2, 5]
    assert device.reads == [(2,)]


@pytest.mark.parametrize(
    "reading", [lambda t: float(t.sum()), lambda t: t[t > 0], lambda t: t + torch.ones(3)]
)
def test_the_watch_sees_what_waits_for_the_device(reading) -> None:
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), FarDevice():
        reading(torch.empty(3, device=FAR))
