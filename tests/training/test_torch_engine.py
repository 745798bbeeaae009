"""The train engine against a plain loop: the same gradient for every split, steps that resume bit
for bit."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from distflow.errors import UserError
from distflow.launch.run_folders.export_checkpoint import export_model
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.training.engine import TrainState
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchTrainEngine
from tests.tiny_models import write_tiny_model
from tests.training.batches import (
    TokenMeanLoss,
    plain_log_probs_at,
    plain_outputs,
    plain_values,
    ragged_batch,
)


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "m", "qwen3")


def make_engine(
    model: nn.Module, *, optimizer: str = "adamw", lr: float = 1e-2, **options
) -> TorchTrainEngine:
    schedule = options.pop("schedule", make_schedule("constant", total_steps=10))
    return TorchTrainEngine(
        model,
        optimizer=make_optimizer(optimizer, model.parameters(), lr=lr),
        schedule=schedule,
        **options,
    )


def weights_of(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


@pytest.mark.parametrize("max_tokens", [1, 16, 33, 10_000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_that_of_a_plain_loop_for_every_split(folder, max_tokens, checkpointing):
    batch = ragged_batch()
    loss_fn = TokenMeanLoss()
    plain = load_model(folder, dtype=torch.float64)
    per_token = loss_fn.per_token(plain_outputs(plain, batch, 0.8), batch)
    loss = (per_token * batch.flat("loss_mask")).sum() / batch.flat("loss_mask").sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01).step()

    engine = make_engine(
        load_model(folder, dtype=torch.float64),
        optimizer="sgd",
        lr=0.5,
        temperature=0.8,
        max_grad_norm=0.05,
        max_tokens_per_micro_batch=max_tokens,
        gradient_checkpointing=checkpointing,
    )
    metrics = engine.train_step(batch, loss_fn)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-9)
    assert metrics["mean"] == pytest.approx(float(loss), abs=1e-9)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
    assert float(norm) > 0.05 and metrics["skipped"] == 0.0 and metrics["lr"] == 0.5

    for name, weight in plain.named_parameters():
        torch.testing.assert_close(
            weights_of(engine)[name], weight.detach(), rtol=0, atol=1e-10, msg=name
        )


@pytest.mark.parametrize("max_tokens", [16, 10_000])
def test_log_probs_of_several_tokens_are_those_of_a_plain_forward_with_their_gradient(
    folder, max_tokens
):
    """Of ids in two columns, beside the log-probs of the response's own tokens."""
    batch = ragged_batch()
    num_tokens = len(batch.flat("response_ids"))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(99, (num_tokens, 4), generator=generator)
    cotangents = torch.randn(num_tokens, 4, generator=generator, dtype=torch.float64)
    batch["teacher_top_ids"] = ids
    plain = load_model(folder, dtype=torch.float64)
    at_ids = plain_log_probs_at(plain, batch, ids, 0.8)
    (at_ids * cotangents).sum().backward()

    engine = make_engine(
        load_model(folder, dtype=torch.float64),
        temperature=0.8,
        max_tokens_per_micro_batch=max_tokens,
    )
    outputs = ("log_probs", "entropy", "teacher_top_log_probs")
    scored = engine.forward(batch, outputs)
    expected = plain_outputs(plain, batch, 0.8)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(scored.flat(name).double(), expected[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        scored.flat("teacher_top_log_probs").double(), at_ids, rtol=0, atol=1e-6
    )

    found = engine.compute(batch, ("teacher_top_log_probs",))["teacher_top_log_probs"]
    torch.testing.assert_close(found, at_ids, rtol=0, atol=1e-10)
    (found * cotangents).sum().backward()
    for (name, weight), own in zip(
        plain.named_parameters(), engine.model.parameters(), strict=True
    ):
        torch.testing.assert_close(own.grad, weight.grad, rtol=0, atol=1e-10, msg=name)


def test_a_critic_learns_its_returns(tmp_path, folder):
    batch = ragged_batch()
    loss_fn = TokenMeanLoss(("values",))
    plain = load_model(folder, dtype=torch.float64, seed=1, critic=True)
    per_token = loss_fn.per_token({"values": plain_values(plain, batch)}, batch)
    ((per_token * batch.flat("loss_mask")).sum() / batch.flat("loss_mask").sum()).backward()
    make_optimizer("sgd", plain.parameters(), lr=0.1).step()

    critic = load_model(folder, dtype=torch.float64, seed=1, critic=True)
    engine = make_engine(
        critic, optimizer="sgd", lr=0.1, max_grad_norm=None, max_tokens_per_micro_batch=30
    )
    losses = [engine.train_step(batch, loss_fn)["loss"]]

    for name, weight in plain.named_parameters():
        torch.testing.assert_close(
            weights_of(engine)[name], weight.detach(), rtol=0, atol=1e-10, msg=name
        )

    losses += [engine.train_step(batch, loss_fn)["loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    again = load_model(
        export_model(critic, None, tmp_path / "critic"), dtype=torch.float64, critic=True
    )
    values = engine.forward(batch, ("values",)).flat("values")
    torch.testing.assert_close(plain_values(again, batch).float(), values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw_8bit"])
@pytest.mark.parametrize("saved_after", [0, 3])
def test_a_resumed_engine_goes_on_bit_for_bit(tmp_path, folder, optimizer, saved_after):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")

    def new_engine(path: Path) -> TorchTrainEngine:
        schedule = make_schedule("cosine_with_warmup", total_steps=6, warmup_steps=2)
        model = load_model(path)
        return make_engine(
            model, optimizer=optimizer, schedule=schedule, max_tokens_per_micro_batch=30
        )

    def train(engine: TorchTrainEngine, steps: range) -> list[dict[str, float]]:
        return [engine.train_step(ragged_batch(seed=step), TokenMeanLoss()) for step in steps]

    engine = new_engine(folder)
    train(engine, range(saved_after))
    state = engine.state()
    torch.save(state.tensors, tmp_path / "state.pt")
    export_model(engine.model, None, tmp_path / "weights")
    went_on = train(engine, range(saved_after, 6))

    # into a fresh model, a model that has since trained on other data, and one loaded from the
    # exported weights
    for path, strayed in ((folder, 0), (folder, 2), (tmp_path / "weights", 0)):
        resumed = new_engine(path)
        train(resumed, range(100, 100 + strayed))
        resumed.load_state(TrainState(torch.load(tmp_path / "state.pt"), state.meta))
        assert train(resumed, range(saved_after, 6)) == went_on
        assert_same_bits(weights_of(resumed), weights_of(engine))
        assert_same_bits(dict(resumed.state().tensors), dict(engine.state().tensors))
        assert resumed.state().meta == engine.state().meta


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(folder, fault):
    class Faulty(TokenMeanLoss):
        def __call__(self, outputs, micro, counts):
            loss, stats = super().__call__(outputs, micro, counts)
            if fault == "loss":
                return loss * float("nan"), stats
            outputs["log_probs"].register_hook(lambda grad: grad * float("inf"))
            return loss, stats

    schedule = make_schedule("constant_with_warmup", total_steps=10, warmup_steps=4)
    engine = make_engine(load_model(folder), schedule=schedule, max_tokens_per_micro_batch=30)
    for step in range(2):
        engine.train_step(ragged_batch(seed=step), TokenMeanLoss())
    before = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    metrics = engine.train_step(ragged_batch(), Faulty())
    assert metrics["skipped"] == 1.0
    assert not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
    assert_same_bits(dict(engine.state().tensors), before)
    after = engine.train_step(ragged_batch(), TokenMeanLoss())
    assert after["skipped"] == 0.0 and math.isfinite(after["grad_norm"])
    assert after["lr"] == metrics["lr"] == 1e-2 * 2 / 4, "a skipped step does not move the schedule"


@pytest.mark.parametrize("batch", ["masked", "empty", "no responses"])
def test_without_a_token_that_counts_no_step_is_taken(folder, batch):
    """Momentum and weight decay would else move the weights, and the rate go on."""
    lengths = {"masked": [(3, 4), (2, 2)], "empty": [], "no responses": [(3, 0), (2, 0)]}[batch]
    mini = ragged_batch(lengths)
    mini["response_mask"] = torch.zeros_like(mini.flat("response_mask"))
    schedule = make_schedule("constant_with_warmup", total_steps=10, warmup_steps=4)
    engine = make_engine(load_model(folder), schedule=schedule)
    for step in range(2):
        engine.train_step(ragged_batch(seed=step), TokenMeanLoss())
    before = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    metrics = engine.train_step(mini, TokenMeanLoss())
    assert metrics == {
        "loss": 0.0,
        "grad_norm": 0.0,
        "lr": 1e-2 * 2 / 4,
        "skipped": 1.0,
        "empty": 1.0,
    }
    assert_same_bits(dict(engine.state().tensors), before)
    after = engine.train_step(ragged_batch(), TokenMeanLoss())
    assert (after["lr"], after["skipped"], after["empty"]) == (metrics["lr"], 0.0, 0.0)


def test_forward_between_steps_changes_nothing(folder):
    engines = [make_engine(load_model(folder), gradient_checkpointing=True) for _ in range(2)]
    for step in range(2):
        for engine in engines:
            engine.train_step(ragged_batch(seed=step), TokenMeanLoss())
        engines[1].forward(ragged_batch(seed=9), ("log_probs", "entropy"))
    assert_same_bits(weights_of(engines[0]), weights_of(engines[1]))


def test_trainer_log_probs_equal_forward_log_probs(folder):
    """ratio = 1: what the loss sees is what `forward` gave as old log-probs, whatever the split."""

    class Watching(TokenMeanLoss):
        worst = 0.0

        def __call__(self, outputs, micro, counts):
            self.worst = max(
                self.worst, float((outputs["log_probs"] - micro["old_log_probs"]).abs().max())
            )
            return super().__call__(outputs, micro, counts)

    engine = make_engine(load_model(folder), temperature=0.6, max_tokens_per_micro_batch=30)
    batch = ragged_batch()
    batch["old_log_probs"] = engine.forward(batch, ("log_probs",)).flat("log_probs")
    watching = Watching()
    engine.max_tokens = 20
    engine.train_step(batch, watching)
    assert watching.worst < 1e-5


def test_bfloat16_computes_and_float32_keeps(folder):
    engine = make_engine(
        load_model(folder), compute_dtype=torch.bfloat16, lr=1e-6, max_tokens_per_micro_batch=30
    )
    before = weights_of(engine)
    metrics = [engine.train_step(ragged_batch(), TokenMeanLoss()) for _ in range(3)]
    assert all(
        m["skipped"] == 0.0 and math.isfinite(m["loss"]) and m["grad_norm"] > 0 for m in metrics
    )
    after = weights_of(engine)
    assert all(weight.dtype == torch.float32 for weight in after.values())
    moved = before["lm_head.weight"] - after["lm_head.weight"]
    assert 0 < moved.abs().max() < 1e-5, "an update far below bfloat16's resolution must be kept"
    with pytest.raises(UserError, match="compute_dtype"):
        make_engine(load_model(folder, dtype=torch.bfloat16))


def test_lora_trains_its_adapter_alone_and_resumes(tmp_path, folder):
    def new_engine() -> TorchTrainEngine:
        return make_engine(
            add_lora(load_model(folder), rank=4, seed=3), gradient_checkpointing=True
        )

    engine = new_engine()
    base = dict(load_model(folder).named_parameters())
    for step in range(2):
        engine.train_step(ragged_batch(seed=step), TokenMeanLoss())
    state = engine.state()
    assert all(".lora_" in name for name in state.tensors)
    state = TrainState({name: tensor.clone() for name, tensor in state.tensors.items()}, state.meta)
    merged = weights_of(engine)
    assert merged.keys() == base.keys()
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    assert not torch.equal(
        merged["model.layers.1.self_attn.v_proj.weight"],
        base["model.layers.1.self_attn.v_proj.weight"],
    )

    resumed = new_engine()
    resumed.load_state(state)
    for other in (engine, resumed):
        other.train_step(ragged_batch(seed=7), TokenMeanLoss())
    assert_same_bits(weights_of(resumed), weights_of(engine))
    plain = load_model(export_model(engine.model, None, tmp_path / "merged"))
    scores = engine.forward(ragged_batch(), ("log_probs",)).flat("log_probs")
    torch.testing.assert_close(
        plain_outputs(plain, ragged_batch())["log_probs"], scores, rtol=0, atol=1e-4
    )


def test_tied_weights_are_named_once_and_trained_by_both_uses(tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)
    engine = make_engine(load_model(folder))
    names = [name for name, _ in engine.weights()]
    assert "lm_head.weight" not in names and len(names) == len(set(names))
    engine.train_step(ragged_batch(), TokenMeanLoss())
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
