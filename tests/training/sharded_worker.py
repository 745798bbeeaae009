"""One of two gloo ranks that share a model: what each can see of its own part, and what it measures
for the test."""

import asyncio
import ctypes
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from distflow.checks.movement import Movement
from distflow.cluster.process_groups import TorchCollective
from distflow.config import load_config
from distflow.errors import TrustError
from distflow.launch.engines import make_factories
from distflow.models.loading import load_model
from distflow.models.lora import add_lora, named_weights
from distflow.models.sharding import (
    DATA,
    TENSOR,
    Sharding,
    at_places,
    own_part,
    shard_model,
    square_sum,
    whole,
)
from distflow.planning.plan import RankPlan
from distflow.rollout.engine import RolloutEngine
from distflow.runtime.checkpoint.files import own_shards
from distflow.runtime.resources import build_resources
from distflow.runtime.weight_sync.sender import buckets
from distflow.runtime.weight_sync.sent_weights import check_sent
from distflow.training.engine import TrainState
from distflow.training.optimizer import make_optimizer, make_schedule
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.training.batches import RAGGED, TokenMeanLoss, ragged_batch

OUTPUTS = ("log_probs", "entropy")
SHARES = (list(range(6)), [6, 7])
BIG = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20}
M_MMAP_THRESHOLD = -3


def make_engine(model: nn.Module, optimizer: str = "adamw", **options: object) -> TorchTrainEngine:
    return TorchTrainEngine(
        model,
        optimizer=make_optimizer(optimizer, model.parameters(), lr=1e-2, **options),
        schedule=make_schedule("constant", total_steps=10),
        max_tokens_per_micro_batch=30,
        group=TorchCollective(),
    )


def train(engine: TorchTrainEngine, steps: range) -> list[dict[str, float]]:
    rows = SHARES[dist.get_rank()]
    return [
        engine.train_step(ragged_batch(seed=step).select(rows), TokenMeanLoss()) for step in steps
    ]


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(own_part(ours[name]), own_part(theirs[name])) for name in ours)


def scores(folder: Path, mesh: DeviceMesh) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder / "model", sharding=Sharding(mesh, dtype)).requires_grad_(False)
        scorer = TorchScorer(model, max_tokens_per_micro_batch=30, group=TorchCollective())
        found = scorer.forward(ragged_batch().select(SHARES[mesh.get_rank()]), OUTPUTS)
        flat = {name: found.flat(name) for name in OUTPUTS}
        kept = load_model(
            folder / "model", sharding=Sharding(mesh, dtype, on_host=True)
        ).requires_grad_(False)
        again = TorchScorer(kept, max_tokens_per_micro_batch=30, group=TorchCollective())
        found = again.forward(ragged_batch().select(SHARES[mesh.get_rank()]), OUTPUTS)
        assert all(torch.equal(found.flat(name), flat[name]) for name in OUTPUTS)
        torch.save(flat, folder / f"scores-{str(dtype)[6:]}-{mesh.get_rank()}.pt")


def bfloat16(folder: Path, mesh: DeviceMesh) -> None:
    """It computes in it, and keeps what is far below its resolution."""
    engine = make_engine(load_model(folder / "model", sharding=Sharding(mesh, torch.bfloat16)))
    assert all(step["skipped"] == 0 and step["grad_norm"] > 0 for step in train(engine, range(2)))
    assert {weight.dtype for _, weight in engine.weights()} == {torch.float32}
    before = dict(engine.weights())
    engine.optimizer.param_groups[0]["lr"] = engine._base_lrs[0] = 1e-6
    train(engine, range(1))
    moved = (dict(engine.weights())["lm_head.weight"] - before["lm_head.weight"]).abs().max()
    assert 0 < moved < 1e-5


def states(folder: Path, mesh: DeviceMesh) -> None:
    """Parts or the whole of each tensor: an engine that takes them goes on bit for bit."""

    def new_engine(optimizer: str = "adamw") -> TorchTrainEngine:
        return make_engine(load_model(folder / "model", sharding=Sharding(mesh)), optimizer)

    engine = new_engine()
    train(engine, range(2))
    live = engine.state()
    assert all(
        isinstance(tensor, DTensor) == (tensor.dim() > 0) for tensor in live.tensors.values()
    ), "but counters"
    parts = TrainState({name: tensor.clone() for name, tensor in live.tensors.items()}, live.meta)
    full = TrainState(
        {name: whole(tensor).clone() for name, tensor in live.tensors.items()}, live.meta
    )
    went_on = train(engine, range(2, 4))

    for state in (parts, full):
        resumed = new_engine()
        resumed.load_state(state)
        assert same(resumed.state().tensors, state.tensors if state is parts else parts.tensors)
        assert train(resumed, range(2, 4)) == went_on
        assert same(resumed.state().tensors, engine.state().tensors)

    with pytest.raises(ValueError, match="optim.optimizer"):
        new_engine("sgd").load_state(parts)


def offloading(folder: Path, mesh: DeviceMesh) -> None:
    """Weights, moments or both, again and again: the numbers are those of an engine that stays."""
    engines = [make_engine(load_model(folder / "model", sharding=Sharding(mesh))) for _ in range(2)]
    for step, (weights, moments) in enumerate([(True, True), (True, False), (False, True)]):
        ours, theirs = (train(engine, range(step, step + 1)) for engine in engines)
        assert ours == theirs
        engines[1].offload(weights, moments)
        assert same(engines[1].state().tensors, engines[0].state().tensors)
        assert same(dict(engines[1].weights()), dict(engines[0].weights()))
        if weights:
            engines[1].onload()

    ours, theirs = (train(engine, range(3, 4)) for engine in engines)
    assert ours == theirs
    assert same(engines[1].state().tensors, engines[0].state().tensors)


def reductions(folder: Path, mesh: DeviceMesh) -> None:
    """What ranks computed in bfloat16 is added up in float32: two ranks give the sum of what each
    gives by itself."""
    alone = DeviceMesh.from_group(
        [dist.new_group([rank]) for rank in range(2)][mesh.get_rank()], "cpu"
    )

    found = []
    for own in (mesh, alone):
        engine = make_engine(load_model(folder / "model", sharding=Sharding(own, torch.bfloat16)))
        kept: dict[str, Tensor] = {}
        engine.optimizer.register_step_pre_hook(
            lambda *_, engine=engine, kept=kept: kept.update(
                {name: whole(p.grad).clone() for name, p in engine.model.named_parameters()}
            )
        )
        engine.max_grad_norm = None
        train(engine, range(1))
        found.append(kept)

    together, by_itself = found
    assert {grad.dtype for grad in together.values()} == {torch.float32}
    summed = {name: TorchCollective().sum(grad) for name, grad in by_itself.items()}
    worst = max(
        float((together[name] - grad).norm() / grad.norm()) for name, grad in summed.items()
    )
    rounded = min(
        float((grad.bfloat16().float() - grad).norm() / grad.norm()) for grad in summed.values()
    )
    assert worst < 1e-6 and rounded > 1e-4, (worst, rounded)


def not_finite(folder: Path, mesh: DeviceMesh) -> None:
    """A gradient that is infinite in one rank's part alone, under a loss that is finite: all ranks
    skip the step."""
    engine = make_engine(load_model(folder / "model", sharding=Sharding(mesh)))
    train(engine, range(1))
    before = TrainState(
        {name: tensor.clone() for name, tensor in engine.state().tensors.items()},
        engine.state().meta,
    )
    norm = dict(engine.model.named_parameters())["model.norm.weight"]

    def spoil(weight: Tensor) -> None:
        if mesh.get_rank() == 1:
            own_part(weight.grad)[0] = float("inf")  # type: ignore[arg-type]  # it has one

    handle = norm.register_post_accumulate_grad_hook(spoil)
    (metrics,) = train(engine, range(1, 2))
    handle.remove()
    assert (
        metrics["skipped"] == 1.0
        and abs(metrics["loss"]) < 100
        and metrics["grad_norm"] == float("inf")
    )
    assert engine.num_steps == before.meta["num_steps"] == 1 and same(
        engine.state().tensors, before.tensors
    )
    (metrics,) = train(engine, range(1, 2))
    assert metrics["skipped"] == 0.0


def sent(folder: Path, mesh: DeviceMesh) -> None:
    """A wrong element is seen by the rank whose part it lies in, adapters merged or not."""
    for adapted in (False, True):
        model: nn.Module = load_model(folder / "model")
        model = add_lora(model, rank=4, seed=1) if adapted else model
        shard_model(model, Sharding(mesh))
        engine = make_engine(model)
        train(engine, range(1))
        (bucket,) = buckets(
            ((name, weight.to(torch.bfloat16)) for name, weight in engine.weights()), 2**28
        )
        check_sent(bucket, model, 1)
        name = "model.layers.0.self_attn.q_proj.weight"
        next(tensor for own, tensor in bucket if own == name)[-8:] += 1.0

        if mesh.get_rank() == 0:
            check_sent(bucket, model, 1)
        else:
            with pytest.raises(TrustError, match="q_proj"):
                check_sent(bucket, model, 1)


def movement(folder: Path, mesh: DeviceMesh) -> None:
    """A part that no token touches is no finding; a tensor that stays as it was is one, on every
    rank."""
    engine = make_engine(
        load_model(folder / "model", sharding=Sharding(mesh)), "sgd", weight_decay=0.0
    )
    weights = engine.state().trained_weights()
    start = {name: own_part(weight).clone() for name, weight in weights.items()}
    watch = Movement(after=2)
    stays = "model.layers.1.mlp.up_proj.weight"

    found = []
    for step in range(4):
        batch = ragged_batch(seed=step, vocabulary=40).select(SHARES[mesh.get_rank()])
        metrics = engine.train_step(batch, TokenMeanLoss())
        with torch.no_grad():
            own_part(weights[stays]).copy_(start[stays])
        found += watch.updated(engine, metrics)

    assert found == [stays]
    embedding = "model.embed_tokens.weight"
    assert same({"": weights[embedding]}, {"": start[embedding]}) == (mesh.get_rank() == 1)


def halves(folder: Path, mesh: DeviceMesh) -> None:
    """Layers that two ranks compute together: each knows which part of every weight it has, and
    fresh ones are those of one process."""
    two = Sharding(init_device_mesh("cpu", (1, 2), mesh_dim_names=(DATA, TENSOR)))
    plain = load_model(folder / "model", init="random", seed=3)
    model = load_model(folder / "model", sharding=two, init="random", seed=3)
    weights = dict(model.named_parameters())

    norms = 0.0
    for name, weight in plain.named_parameters():
        held, found = at_places(weights[name], torch.arange(weight.numel()))
        assert torch.equal(whole(weights[name]), weight) and torch.equal(
            found, weight.detach().flatten()[held]
        )
        assert len(held) == own_part(weights[name]).numel()
        norms += float(weight.double().square().sum())

    assert square_sum(weights.values()) == pytest.approx(norms)
    divided = [
        name for name, weight in weights.items() if own_part(weight).numel() < weight.numel()
    ]
    assert len(divided) == 7 * plain.config.num_hidden_layers + 2, (
        "all matrices of the layers, embeddings and the head"
    )
    shards = own_shards(weights, leads=mesh.get_rank() == 0)
    assert set(shards.tensors) == (set(weights) if mesh.get_rank() == 0 else set(divided)), (
        "each is written once"
    )


def resources(folder: Path, mesh: DeviceMesh) -> None:
    """What a worker builds: the facts of whole weights, the generator on a copy of its own."""
    settings = load_config(
        "ppo",
        [
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "data.train_files=rows.jsonl",
            "actor_rollout_ref.model.dtype=float32",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ],
    ).config
    actor = replace(settings.actor_rollout_ref.actor, strategy="fsdp")
    sharded = replace(settings, actor_rollout_ref=replace(settings.actor_rollout_ref, actor=actor))
    engines = ("actor", "critic", "ref", "rollout")
    rank = RankPlan(mesh.get_rank(), "cpu", (), (), engines, ())
    plain = build_resources(make_factories(settings, engines, (), 1), rank)
    built = build_resources(
        make_factories(sharded, engines, (), 1), rank, TorchCollective(), Sharding(mesh)
    )
    assert (built.facts, built.sizes.policy) == (plain.facts, plain.sizes.policy)
    assert built.stop_token_ids == plain.stop_token_ids
    assert (
        built.actor is not None
        and built.critic is not None
        and built.ref is not None
        and plain.ref is not None
    )

    for engine in (built.actor, built.critic):
        assert all(
            isinstance(weight, DTensor) for weight in engine.state().trained_weights().values()
        )

    batch = ragged_batch().select(SHARES[mesh.get_rank()])
    ours, theirs = (
        part.forward(batch, ("log_probs",)).flat("log_probs") for part in (built.ref, plain.ref)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert asyncio.run(held(built.rollout)) == asyncio.run(held(plain.rollout))


async def held(engine: RolloutEngine | None) -> dict[str, str]:
    assert engine is not None
    async with engine:
        return await engine.hashes()


def memory(folder: Path, mesh: DeviceMesh) -> None:
    def grown() -> int:
        return _peak_bytes() - before

    # what is freed goes back at once, or the heap's holes count too
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    load_model(folder / "model", sharding=Sharding(mesh))
    _forget_peak()
    before = _peak_bytes()
    model = load_model(folder / "big", sharding=Sharding(mesh))
    for _, weight in named_weights(model):
        whole(weight)
    sharded = grown()
    del model
    _forget_peak()
    before = _peak_bytes()
    load_model(folder / "big")
    (folder / f"memory-{mesh.get_rank()}.json").write_text(
        json.dumps({"sharded": sharded, "whole": grown()})
    )


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The most memory that this process has had since `_forget_peak`, with what of mapped files it
    has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert sum(SHARES, []) == list(range(len(RAGGED)))

    for part in (
        scores,
        bfloat16,
        reductions,
        states,
        offloading,
        sent,
        not_finite,
        movement,
    ):
        part(folder, mesh)

    for part in (halves, resources, memory):
        part(folder, mesh)
