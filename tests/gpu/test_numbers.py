"""On a device: log-probs of rollout and trainer agree, and a step is that of a plain loop in
float64 on the CPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distflow.algorithms.objectives import PolicyObjective
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from distflow.rollout.engine_weights import stripe_hashes
from distflow.training.engine import TrainState
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.rollout.drive import make_engine, prompt_of, request_of, run_all, tokens_of
from tests.tiny_models import write_tiny_model
from tests.training.batches import TokenMeanLoss, plain_outputs, plain_values, ragged_batch

pytestmark = pytest.mark.gpu
FAMILIES = ("llama", "qwen2", "qwen3")


def trainer(
    model: nn.Module, optimizer: str = "sgd", lr: float = 0.5, **options
) -> TorchTrainEngine:
    schedule = make_schedule("constant", total_steps=10)
    made = make_optimizer(optimizer, model.parameters(), lr=lr)
    return TorchTrainEngine(
        model, optimizer=made, schedule=schedule, max_tokens_per_micro_batch=30, **options
    )


def answers(
    folder: Path, device: torch.device, **params
) -> tuple[list[tuple[int, ...]], list[tuple[Segment, ...]]]:
    engine = make_engine(load_model(folder, device=device).eval(), max_num_seqs=5)
    prompts = [prompt_of(length) for length in (3, 17, 1, 8)]
    return prompts, run_all(
        engine, [request_of(p, (0, 1), row, **params) for row, p in enumerate(prompts)]
    )


def batch_of(prompts: list[tuple[int, ...]], results: list[tuple[Segment, ...]]) -> Batch:
    rows = [(prompt, each) for prompt, one in zip(prompts, results, strict=True) for each in one]
    lengths = [(len(prompt), len(each.token_ids)) for prompt, each in rows]
    batch = ragged_batch(lengths)
    batch["prompt_ids"] = torch.tensor([token for prompt, _ in rows for token in prompt])
    batch["response_ids"] = torch.tensor([token for _, each in rows for token in each.token_ids])
    batch["rollout_log_probs"] = torch.tensor(
        [value for _, each in rows for value in each.rollout_log_probs]
    )

    return batch


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree(tmp_path, device, family):
    folder = write_tiny_model(tmp_path / "m", family)
    prompts, results = answers(folder, device, temperature=0.8)
    batch = batch_of(prompts, results)
    scorer = TorchScorer(
        load_model(folder, device=device), temperature=0.8, max_tokens_per_micro_batch=40
    )
    scored = scorer.forward(batch, ("log_probs",)).flat("log_probs")
    exact = plain_outputs(load_model(folder, dtype=torch.float64), batch, 0.8)["log_probs"]
    assert (scored - batch.flat("rollout_log_probs")).abs().max() <= 1e-4
    assert (scored - exact).abs().max() <= 1e-4


def test_the_streams_draw_the_tokens_that_they_draw_on_a_cpu(tmp_path, device):
    folder = write_tiny_model(tmp_path / "m")
    for params in (
        {},
        {"top_p": 0.9, "top_k": 20},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"greedy": True},
    ):
        here, there = (
            tokens_of(answers(folder, where, **params)[1])
            for where in (torch.device("cpu"), device)
        )
        assert here == there, params


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_that_of_a_plain_loop(tmp_path, device, family, checkpointing):
    """transformers makes rotary tables in float32, whatever the model's type, and a device rounds
    them its own way."""
    folder = write_tiny_model(tmp_path / "m", family)
    batch = ragged_batch()
    loss_fn = TokenMeanLoss()
    plain = load_model(folder, dtype=torch.float64)
    loss, norm = plain_step(plain, loss_fn, plain_outputs(plain, batch, 0.8), batch)

    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-5)):
        model = load_model(folder, dtype=dtype, device=device)
        engine = trainer(
            model, temperature=0.8, max_grad_norm=0.05, gradient_checkpointing=checkpointing
        )
        metrics = engine.train_step(batch, loss_fn)
        assert metrics["loss"] == pytest.approx(loss, rel=10 * tolerance)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=10 * tolerance)
        found = dict(engine.weights())

        for name, weight in plain.named_parameters():
            assert found[name].device.type == device.type
            assert (found[name].double().cpu() - weight.detach()).abs().max() <= tolerance, name


def plain_step(
    plain: nn.Module, loss_fn: TokenMeanLoss, outputs: dict[str, Tensor], batch: Batch
) -> tuple[float, float]:
    """Loss and gradient norm of a step of SGD over the model's own forwards, which is taken."""
    loss = (loss_fn.per_token(outputs, batch) * batch.flat("loss_mask")).sum() / batch.flat(
        "loss_mask"
    ).sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    make_optimizer("sgd", plain.parameters(), lr=0.5).step()
    return float(loss.detach()), float(norm)


def test_bfloat16_products_stay_near_float64(tmp_path, device):
    folder = write_tiny_model(tmp_path / "m", "qwen3")
    batch = ragged_batch()
    scorer = TorchScorer(load_model(folder, device=device), compute_dtype=torch.bfloat16)
    found = scorer.forward(batch, ("log_probs", "entropy"))
    for name, exact in plain_outputs(load_model(folder, dtype=torch.float64), batch).items():
        assert (found.flat(name) - exact).abs().mean() <= 2e-2, name


def test_values_are_those_of_a_plain_forward(tmp_path, device):
    folder = write_tiny_model(tmp_path / "m")
    batch = ragged_batch()
    critic = load_model(folder, seed=1, device=device, critic=True)
    values = (
        TorchScorer(critic, max_tokens_per_micro_batch=30)
        .forward(batch, ("values",))
        .flat("values")
    )
    exact = plain_values(load_model(folder, dtype=torch.float64, seed=1, critic=True), batch)
    torch.testing.assert_close(values, exact.float(), rtol=0, atol=1e-5)


def test_lora_trains_its_adapter_as_on_a_cpu(tmp_path, device):
    folder = write_tiny_model(tmp_path / "m")
    found = []
    for where in ("cpu", device):
        model = add_lora(
            load_model(folder, device=where), rank=2, alpha=4.0, target_modules="all-linear", seed=3
        )
        engine = trainer(model)
        metrics = [engine.train_step(ragged_batch(seed=step), TokenMeanLoss()) for step in range(3)]
        found.append(({name: weight.cpu() for name, weight in engine.weights()}, metrics))

    (here, ours), (there, theirs) = found
    assert [step["loss"] for step in ours] == pytest.approx(
        [step["loss"] for step in theirs], rel=1e-4
    )
    for name, weight in here.items():
        torch.testing.assert_close(there[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_checkpoints_go_between_devices(tmp_path, device, optimizer):
    """What training left on the CPU is on the device, bit for bit, and back; from there both go on
    alike."""
    folder = write_tiny_model(tmp_path / "m")
    here, there = (
        trainer(load_model(folder, device=where), optimizer, 1e-3) for where in ("cpu", device)
    )
    for step in range(2):
        here.train_step(ragged_batch(seed=step), TokenMeanLoss())
    there.load_state(here.state())
    same_state(here.state(), there.state())
    assert all(p.device.type == device.type for p in there.model.parameters())
    there.offload()
    there.onload()
    metrics = [engine.train_step(ragged_batch(seed=9), TokenMeanLoss()) for engine in (here, there)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
    here.load_state(there.state())
    same_state(here.state(), there.state())


def same_state(ours: TrainState, theirs: TrainState) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys() and ours.meta == theirs.meta
    different = [
        name
        for name, tensor in ours.tensors.items()
        if not torch.equal(tensor.cpu(), theirs.tensors[name].cpu())
    ]
    assert not different


def test_receipts_are_those_of_the_weights_on_a_cpu(tmp_path, device):
    model = load_model(write_tiny_model(tmp_path / "m"))
    here = stripe_hashes(model.named_parameters())
    assert stripe_hashes(model.to(device).named_parameters()) == here


@pytest.mark.parametrize(
    "objective", [PolicyObjective(entropy_coef=0.01), PolicyObjective("gspo", derives_old=True)]
)
def test_a_step_waits_for_its_device_once(tmp_path, device, objective):
    if device.type != "cuda":
        pytest.skip("wants CUDA, which tells when something waits for it")
    engine = trainer(load_model(write_tiny_model(tmp_path / "m"), device=device), "adamw")
    batch = ragged_batch()
    batch["old_log_probs"] = -torch.rand(batch.flat("advantages").shape)
    engine.train_step(batch, objective)  # allocates
    torch.cuda.set_sync_debug_mode("warn")

    try:
        with pytest.warns(UserWarning, match="synchronizing CUDA operation") as waits:
            engine.train_step(batch, objective)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert len([each for each in waits if "synchronizing" in str(each.message)]) == 1
