"""Memory by role, purpose and phase: amounts by hand, and constants that are those of the
engines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.launch.rollout_engines import shares_weights
from distflow.launch.select_pipeline import bind
from distflow.models import log_probs
from distflow.models.cpu_kernels.decode_step import NativeStep
from distflow.models.loading import load_model
from distflow.planning import memory, model_memory
from distflow.planning.allocation_expression import follow_allocation
from distflow.planning.assign_ranks import plan_devices
from distflow.planning.devices import Device
from distflow.planning.memory import MemoryItem, WorkerMemory, worker_memory
from distflow.planning.model_memory import activation_bytes, adapter_weights
from distflow.planning.model_shapes import ModelShape
from distflow.rollout.embedded import decode_steps
from distflow.runtime.weight_sync import sender
from distflow.training import torch_engine
from tests.tiny_models import write_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"
SHAPE = ModelShape(64, 128, 3, 4, 2, 16, 1000, tied=False)
GPU = Device("gpu", 1e12, 1e9, 1e9, 1e9, 1e9)
CPU = replace(GPU, is_cpu=True)
SIZES = [
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
]
SIZES += [
    "data.max_prompt_length=10",
    "data.max_response_length=30",
    "actor_rollout_ref.model.path=llama-2-7b",
]


def workers(preset: str, *overrides: str, device: Device = GPU) -> tuple[WorkerMemory, ...]:
    dtype = "actor_rollout_ref.model.dtype=bfloat16"
    config = follow_allocation(
        load_config(preset, [*SIZES, dtype, *overrides], complete=False)
    ).config
    pipeline = bind(config)
    shapes = dict.fromkeys(pipeline.engines, SHAPE)
    plan = plan_devices(pipeline, config, "cuda", lambda: dict.fromkeys(shapes, SHAPE.parameters))

    return worker_memory(plan, config, shapes, device)


def item(
    worker: WorkerMemory, role: str, what: str, phase: memory.Phase, on_host: bool = False
) -> float:
    found = [
        i
        for i in worker.items
        if (i.role, i.what, i.on_host) == (role, what, on_host) and phase in i.phases
    ]
    return sum(i.num_bytes for i in found)


def test_weights_gradients_and_moments_are_float32_and_the_engine_has_its_own_copy() -> None:
    (worker,) = workers("grpo")
    weights = SHAPE.parameters
    assert item(worker, "actor", "weights", "generate") == 4 * weights
    assert item(worker, "actor", "gradients", "update") == 4 * weights and not item(
        worker, "actor", "gradients", "sync"
    )
    assert item(worker, "actor", "optimizer", "generate") == 8 * weights
    assert item(worker, "ref", "weights", "update") == 4 * weights
    assert item(worker, "rollout", "weights", "update") == 2 * weights
    (by_need,) = workers("grpo", "actor_rollout_ref.rollout.name=hf")
    running = 8 * 2
    assert item(by_need, "rollout", "KV cache", "generate") == running * 40 * (2 * 3 * 2 * 16) * 2
    (shared,) = workers("grpo", "actor_rollout_ref.model.dtype=float32")
    assert not item(shared, "rollout", "weights", "generate")


def test_a_critic_has_weights_and_moments_of_its_own_without_the_head() -> None:
    (worker,) = workers("ppo")
    assert item(worker, "critic", "optimizer", "generate") == 8 * (SHAPE.parameters - 1000 * 64)


def test_micro_batches_of_a_critic_are_parts_of_its_own_mini_batches() -> None:
    (worker,) = workers("ppo")
    (larger,) = workers("ppo", "critic.ppo_mini_batch_size=8")
    assert item(larger, "critic", "activations", "update") == 2 * item(
        worker, "critic", "activations", "update"
    )
    assert item(larger, "actor", "activations", "update") == item(
        worker, "actor", "activations", "update"
    )


def test_shards_and_tensor_parts_divide_what_is_sharded() -> None:
    allocation = "trainer.allocation=vllm[rollout]:d2t2+fsdp[actor]:d4"
    generating, training = workers("async_grpo", allocation, "trainer.launcher=ray")
    assert (generating.ranks, training.ranks) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert item(training, "actor", "weights", "sync") == SHAPE.parameters
    assert item(training, "actor", "optimizer", "sync") == 2 * SHAPE.parameters
    assert item(generating, "rollout", "weights", "generate") == 2 * SHAPE.parameters / 2
    assert (
        item(generating, "actor", "buckets in flight", "sync", on_host=True)
        == 2 * sender.BUCKET_BYTES
    )
    assert not item(generating, "actor", "weights", "generate")


def test_ranks_that_divide_rows_have_half_of_a_long_one_and_gather_its_keys_and_values() -> None:
    def training(sizes: str, limit: int, *keys: str) -> WorkerMemory:
        actor = f"trainer.allocation=vllm[rollout]:d1+fsdp[actor]:{sizes}"
        size = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={limit}"
        return workers("async_grpo", actor, size, "trainer.launcher=ray", *keys)[1]

    activations = [
        item(training(sizes, limit), "actor", "activations", "update")
        for sizes, limit in (("d1", 10), ("d1c2", 10), ("d1", 80), ("d1c2", 80))
    ]
    assert activations[1] == activations[0] / 2, "a sample of 40 tokens, alone in its row"
    assert activations[3] == activations[2], "the limit is that of each rank"
    kept = 2 * (2 * 3 * 2 * 16)
    assert item(training("d1c2", 10), "actor", "keys and values", "update") == 40 * kept
    low = "actor_rollout_ref.model.dtype=float32"
    masks = 4 * 20 * 40
    assert item(training("d1c2", 10, low), "actor", "keys and values", "update") == (
        40 * 2 * kept + masks
    )
    assert item(training("d1c2", 10), "actor", "weights", "sync") == 4 * SHAPE.parameters / 2
    assert not item(training("d1", 10), "actor", "keys and values", "update")


def test_experts_of_other_ranks_are_not_gathered() -> None:
    mixture = replace(SHAPE, experts=8, active_experts=2)
    attention = mixture.attention_weights
    inner = 8 * mixture.expert_weights
    assert mixture.computed_weights(1, 1) == mixture.layer_weights == attention + inner
    assert mixture.computed_weights(1, 4) == attention + inner / 4
    assert mixture.computed_weights(2, 1) == (attention + inner) / 2
    assert mixture.computed_weights(2, 8) == attention / 2 + inner / 8


def test_checkpointing_and_small_micro_batches_need_fewer_activations() -> None:
    whole = activation_bytes(SHAPE, 4, 1, trains=True, checkpointed=False)
    assert whole == 3 * (4 * 64 * 6 + 4 * (2 * 64 + 2 * 32 + 4 * 128))
    assert activation_bytes(SHAPE, 4, 1, trains=True, checkpointed=True) == whole / 3 + 4 * 64 * 3
    assert activation_bytes(SHAPE, 4, 1, trains=False, checkpointed=False) < whole / 3
    (full,) = workers("grpo")
    (small,) = workers("grpo", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=80")
    assert item(small, "actor", "activations", "update") == item(
        full, "actor", "activations", "update"
    ) * 80 / (4 * 2 * 40)


def test_offloaded_parts_are_on_the_host_outside_their_phase() -> None:
    keys = [
        f"actor_rollout_ref.actor.fsdp_config.{name}=true"
        for name in ("param_offload", "optimizer_offload")
    ]
    (worker,) = workers("grpo", *keys)
    assert not item(worker, "actor", "optimizer", "update") and not item(
        worker, "actor", "weights", "generate"
    )
    assert item(worker, "actor", "optimizer", "update", on_host=True) == 8 * SHAPE.parameters
    assert item(worker, "actor", "weights", "generate", on_host=True) == 4 * SHAPE.parameters
    assert item(worker, "actor", "optimizer", "optimizer") == 8 * SHAPE.parameters


def test_an_adapter_has_gradients_and_moments_alone_and_the_reference_no_weights() -> None:
    (worker,) = workers(
        "grpo", "actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.actor.use_kl_loss=true"
    )
    adapter = adapter_weights(SHAPE, 2)
    assert adapter == 2 * 3 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 128))
    assert item(worker, "actor", "optimizer", "sync") == 8 * adapter
    assert item(worker, "actor", "weights", "sync") == 4 * (SHAPE.parameters + adapter)
    assert not item(worker, "ref", "weights", "forward")


def test_the_embedded_engine_takes_its_cache_in_advance_on_a_gpu_and_keeps_it() -> None:
    """As many pages as all slots could need, or half of what is free when it first generates."""
    (worker,) = workers("grpo")
    pages = 2 * 256 * 40 * (2 * 3 * 2 * 16) * 2
    assert (
        item(worker, "rollout", "KV cache", "update")
        == item(worker, "rollout", "KV cache", "generate")
        == pages
    )
    (small,) = workers("grpo", device=replace(GPU, memory=706e6))
    loaded = (4 + 4 + 2) * SHAPE.parameters  # policy, reference, engine
    assert item(small, "rollout", "KV cache", "update") == pytest.approx((6e6 - loaded) / 2)
    (freed,) = workers("grpo", f"{ROLLOUT}.free_cache_engine=true")
    assert (
        not item(freed, "rollout", "KV cache", "update")
        and item(freed, "rollout", "KV cache", "generate") == pages
    )


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (["name=vllm"], 0.92 * 80e9),
        (["name=vllm", "engine_kwargs.vllm.gpu_memory_utilization=0.5"], 0.5 * 80e9),
        # of what policy and reference leave free
        (["name=sglang"], 0.9 * (80e9 - 700e6 - 8 * SHAPE.parameters)),
        (
            ["name=sglang", "engine_kwargs.sglang.mem_fraction_static=0.4"],
            0.4 * (80e9 - 700e6 - 8 * SHAPE.parameters),
        ),
        (
            ["name=vllm", "engine_kwargs.vllm.gpu_memory_utilization=0"],
            2 * SHAPE.parameters + 40 * 384,
        ),
        (["name=vllm", "url=http://127.0.0.1:1"], 0),  # on devices of its own
    ],
)
def test_a_server_takes_its_share_of_a_gpu_whatever_it_needs(keys: list[str], taken: float) -> None:
    words = [f"{ROLLOUT}.{key}" for key in keys]
    (worker,) = workers("grpo", *words, device=replace(GPU, memory=80e9))
    of_server = [i for i in worker.items if i.role == "rollout"]
    assert sum(i.num_bytes for i in of_server) == pytest.approx(taken)
    assert all(i.phases == memory.PHASES for i in of_server)

    if taken:
        (freed,) = workers(
            "grpo", *words, f"{ROLLOUT}.free_cache_engine=true", device=replace(GPU, memory=80e9)
        )
        of_server = [i for i in freed.items if i.role == "rollout"]
        assert {phase for i in of_server for phase in i.phases} == {"generate", "sync"}


@pytest.mark.parametrize(
    ("keys", "itemsizes"),
    [
        (["model.dtype=float32"], (0, 4, 4)),  # on the trainer's weights
        # torch, which packs nothing
        (["model.dtype=float32", "rollout.enforce_eager=true"], (0, 0, 4)),
        # native code casts; it stores keys in float32, values in bfloat16
        (["model.dtype=bfloat16"], (4, 2, 3)),
        (["model.dtype=bfloat16", "rollout.enforce_eager=true"], (2, 2, 2)),  # oneDNN's layout
    ],
)
def test_on_a_cpu_the_embedded_engine_has_a_packed_copy_of_its_matrices(
    keys: list[str], itemsizes: tuple[int, int, int]
) -> None:
    (worker,) = workers("grpo", *(f"actor_rollout_ref.{key}" for key in keys), device=CPU)
    matrices = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 1000 * 64
    weights, packed, cached = itemsizes
    assert item(worker, "rollout", "weights", "update") == weights * SHAPE.parameters
    assert item(worker, "rollout", "packed weights", "update") == packed * matrices
    assert item(worker, "rollout", "KV cache", "generate") == 8 * 2 * 40 * (2 * 3 * 2 * 16) * cached


@pytest.mark.parametrize("low", [False, True])
def test_the_packed_copy_is_as_large_as_that_of_the_native_code(tmp_path: Path, low: bool) -> None:
    folder = write_tiny_model(
        tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=128
    )
    packed = NativeStep(load_model(folder), halves=low)._packed
    real = sum(held[0].nbytes for held in packed.memory if isinstance(held, tuple))
    found = ModelShape.of(json.loads((folder / "config.json").read_text()))
    assert real == (2 if low else 4) * (found.active_weights + found.head_weights)


def test_a_judge_is_in_its_engines_dtype_and_whole_where_others_are_sharded() -> None:
    models = (
        "reward_model.models={helpful: {path: llama-2-7b}, critique: {path: llama-2-7b, judge: "
        "true}}"
    )
    sharded = [
        "trainer.launcher=ray",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.strategy=fsdp",
    ]
    (worker,) = workers("grpo", models, *sharded)
    assert item(worker, "critique", "weights", "forward") == 2 * SHAPE.parameters
    assert not item(worker, "critique", "weights cast to bfloat16", "forward"), "they are in it"
    assert item(worker, "helpful", "weights", "forward") == 4 * SHAPE.parameters / 4


def test_amounts_are_those_of_the_engines() -> None:
    assert (
        memory.BUCKET_BYTES == sender.BUCKET_BYTES
        and model_memory.CACHE_SHARE == decode_steps.MEMORY_SHARE
    )
    assert memory.CHUNK_LOGITS == {
        "cpu": log_probs.CHUNK_ELEMENTS,
        "gpu": log_probs.CHUNK_ON_DEVICE,
    }
    source = torch_engine.TorchScorer.__post_init__.__code__.co_consts
    assert set(model_memory.MICRO_TOKENS.values()) <= set(source)


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        (["actor_rollout_ref.model.dtype=float32"], True),
        (["actor_rollout_ref.model.dtype=bfloat16"], False),
        (["actor_rollout_ref.model.dtype=float32", "async.max_staleness=1"], False),
    ],
)
def test_the_launcher_shares_storage_by_the_same_rule(overrides: list[str], shares: bool) -> None:
    config = load_config("grpo", [*SIZES, *overrides], complete=False).config
    assert shares_weights(config) is shares


def test_what_a_server_takes_is_not_lost_to_fragments() -> None:
    server = MemoryItem("rollout", "KV cache", 22e9, ("generate",), in_server=True)
    worker = WorkerMemory((0,), (server, MemoryItem("process", "libraries", 1e9)))
    assert worker.bytes_in("generate") <= worker.usable("generate", 24e9)
    assert worker.usable("update", 24e9) == pytest.approx(0.94 * 24e9)
