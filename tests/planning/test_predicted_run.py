"""The time line of a step: what overlaps, who waits for whom, and times that follow the amount of
work."""

from dataclasses import replace
from math import inf

import pytest

from distflow.config import RunLimits, load_config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError
from distflow.launch.select_pipeline import bind
from distflow.planning.allocation_expression import follow_allocation
from distflow.planning.assign_ranks import plan_ray
from distflow.planning.devices import Device
from distflow.planning.model_shapes import ModelShape
from distflow.planning.predicted_run import PredictedRun, RunFacts, predict
from tests.planning.test_assign_ranks import devices, two_parts

SHAPE = ModelShape(1024, 4096, 12, 16, 8, 64, 32000, tied=False)
GPU = Device("gpu", 100e12, 1e12, 40e9, 100e9, 10e9)
SIZES = [
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=4",
]
SIZES += [
    "data.max_prompt_length=512",
    "data.max_response_length=512",
    "actor_rollout_ref.model.path=llama-2-7b",
]
SIZES += ["actor_rollout_ref.model.dtype=bfloat16"]
APART = ["trainer.allocation=embedded:d2+fsdp:d2", "trainer.launcher=ray"]


def run(
    preset: str, *overrides: str, device: Device = GPU, rows: int | None = None
) -> PredictedRun:
    config = follow_allocation(load_config(preset, [*SIZES, *overrides], complete=False)).config
    pipeline = bind(config)
    return predict(
        config, pipeline, dict.fromkeys(pipeline.engines, SHAPE), device, RunFacts(RunLimits(rows))
    )


def seconds(found: PredictedRun, what: str) -> float:
    return sum(bar.seconds for bar in found.bars if bar.what == what)


def test_parts_share_the_devices_by_the_sizes_that_the_config_names() -> None:
    """As in the run itself, see `model_sizes`."""
    sizes = {"actor": "600B", "critic": "1M"}
    counted = with_values(devices(8), {"trainer.launcher": "ray"})
    configs = (counted, with_values(counted, {"dag.model_sizes": sizes}))
    plans = [predict(each, two_parts(), dict.fromkeys(sizes, SHAPE), GPU).plan for each in configs]
    assert plans[1] == plan_ray(two_parts(), counted, "cuda", sizes)
    assert plans[0].layout("critic") != plans[1].layout("critic")


def test_at_staleness_0_training_follows_generation() -> None:
    found = run("grpo", *APART, "actor_rollout_ref.actor.use_kl_loss=false")
    ends = {bar.what: bar.end for bar in found.bars}
    starts = {bar.what: bar.start for bar in found.bars}
    assert starts["actor_train"] >= ends["generate"] and found.step_seconds == pytest.approx(
        ends["weight sync"]
    )
    assert found.idle((2, 3)) == pytest.approx(seconds(found, "generate") / found.step_seconds)


def test_stale_samples_let_both_sides_work_at_once() -> None:
    apart = run("async_grpo", *APART)
    together = run("async_grpo", *APART, "async.max_staleness=0")
    generating = seconds(apart, "generate")
    training = seconds(apart, "actor_train")
    assert apart.step_seconds < together.step_seconds
    assert apart.step_seconds >= max(generating, training)
    assert seconds(together, "generate") > generating, "two steps share their longest responses"


VLLM = "actor_rollout_ref.rollout.name=vllm"
SERVED = ["trainer.allocation=vllm[rollout]:d2+fsdp[actor]:d2", "trainer.launcher=ray"]
SHARE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.gpu_memory_utilization"
ROOMY = replace(GPU, memory=80e9)


def test_generation_takes_as_many_turns_as_its_cache_asks_for() -> None:
    """A sequence has 512 tokens on average, of 24,576 bytes each: 12.6 MB."""
    roomy, tight, tighter = (
        run("grpo", *SERVED, f"{SHARE}={share}", device=ROOMY) for share in (0.9, 0.0175, 0.012)
    )
    slots = [found.times.cache_slots for found in (roomy, tight, tighter)]
    assert slots[0] > 128 > slots[1] > slots[2] >= 1
    taken = 0.0175 * 80e9 - 2 * SHAPE.parameters
    assert slots[1] == pytest.approx(taken / (2 * SHAPE.kv_elements * 512), rel=1e-6)
    times = [seconds(found, "generate") for found in (roomy, tight, tighter)]
    assert times[0] < times[1] < times[2]
    waves = 128 / slots[2]
    assert times[2] > waves / 2 * 256 * roomy.times.decode_step(1, 512), "one wave after another"
    unlimited = run("grpo", "actor_rollout_ref.rollout.name=hf", device=ROOMY)
    assert unlimited.times.cache_slots == inf, "it takes what it needs"


@pytest.mark.parametrize(
    ("keys", "least_s_per_gb"),
    [
        (APART, 1 / 4),  # hashed on the host, through the store
        ([*APART, "actor_rollout_ref.actor.weight_update_mode=disk"], 1 / 2),
        ([*APART, "actor_rollout_ref.actor.weight_update_mode=collective"], 1 / 100),
        (SERVED, 1 / 2),
    ],
)
def test_a_sync_takes_the_time_of_its_slowest_transport(
    keys: list[str], least_s_per_gb: float
) -> None:
    moved = 2 * SHAPE.parameters / 1e9
    found = run("grpo", *keys, device=ROOMY)
    assert least_s_per_gb * moved < seconds(found, "weight sync") / 2 < 4 * least_s_per_gb * moved
    far = run("grpo", *keys, "trainer.nnodes=2", "trainer.n_gpus_per_node=2", device=ROOMY)
    assert seconds(far, "weight sync") >= seconds(found, "weight sync")


def test_a_server_beside_the_trainer_reads_files_and_an_offloaded_trainer_brings_its_weights() -> (
    None
):
    here, server = (run("grpo", *keys, device=ROOMY) for keys in ((), (VLLM,)))
    assert (
        seconds(server, "weight sync")
        > 2 * SHAPE.parameters / 4e9
        > 10 * seconds(here, "weight sync")
    )
    offloaded = run("grpo", "actor_rollout_ref.actor.fsdp_config.param_offload=true", device=ROOMY)
    brought = seconds(offloaded, "weight sync") - seconds(here, "weight sync")
    assert brought == pytest.approx(4 * SHAPE.parameters / 25e9)


@pytest.mark.parametrize(
    "keys",
    [
        ("actor_rollout_ref.rollout.workflow=multi_turn",),
        ("actor_rollout_ref.rollout.workflow=distflow.environments.builtin_workflows:multi_turn",),
        (VLLM, "actor_rollout_ref.rollout.url=[http://localhost:1]"),
        ("reward.functions={default: [{name: judge, options: {model: m}}]}",),
    ],
)
def test_times_that_nothing_tells_are_not_predicted(keys: tuple[str, ...]) -> None:
    steps = "trainer.total_training_steps=7"
    found = run("grpo", steps, *keys)
    assert (
        found.why_untimed
        and found.hours is None
        and "steps" not in found.line()
        and "GB" in found.line()
    )
    assert run("grpo", steps, "actor_rollout_ref.rollout.workflow=single_turn").hours
    assert run("sft", steps).hours


def test_independent_models_run_at_once_and_the_update_waits_for_both() -> None:
    parts = "trainer.allocation=embedded:d1|torch[actor]:d1+torch[critic]:d1+torch[ref]:d1"
    found = run("ppo", parts, "trainer.launcher=ray")
    bars = {bar.what: bar for bar in found.bars}
    values = bars["compute_value"]
    scores = bars["actor_old_log_prob"]
    assert values.start == scores.start and values.ranks != scores.ranks
    assert bars["actor_train"].start >= max(values.end, scores.end, bars["reference_log_prob"].end)


def test_time_follows_the_work() -> None:
    one = run("grpo")
    assert seconds(run("grpo", "data.train_batch_size=128"), "actor_train") == pytest.approx(
        2 * seconds(one, "actor_train"), rel=0.1
    )
    assert seconds(
        run("grpo", "actor_rollout_ref.actor.ppo_epochs=3"), "actor_train"
    ) == pytest.approx(3 * seconds(one, "actor_train"), rel=0.1)
    slow = run("grpo", device=replace(GPU, flops=50e12))
    assert seconds(slow, "actor_old_log_prob") == pytest.approx(
        2 * seconds(one, "actor_old_log_prob")
    )
    checkpointed = run("grpo", "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    assert seconds(checkpointed, "actor_train") == pytest.approx(
        4 / 3 * seconds(one, "actor_train"), rel=0.1
    )


def test_a_matrix_product_bound_pass_takes_its_flops_at_the_share_of_the_peak() -> None:
    found = run("grpo")
    tokens = 64 * 4 * 512
    responses = 64 * 4 * 256
    flops = SHAPE.forward_flops(tokens, 256, responses)
    by_hand = 2 * tokens * 12 * (1024 * 64 * 48 + 3 * 1024 * 4096) + 4 * 12 * 16 * 64 * tokens * 256
    assert flops == by_hand + 2 * responses * 32000 * 1024
    assert seconds(found, "actor_old_log_prob") == pytest.approx(flops / 40e12)


def test_the_length_of_a_run_is_known_from_its_steps_or_its_rows() -> None:
    assert run("grpo").hours is None and run("grpo").cost is None
    by_steps = run("grpo", "trainer.total_training_steps=7", "cost.gpu_hour=3")
    assert by_steps.hours == pytest.approx(7 * by_steps.step_seconds / 3600)
    assert by_steps.cost == pytest.approx(3 * (by_steps.hours or 0))
    assert run("grpo", "trainer.total_epochs=2", rows=640).steps == 20


def test_layers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(
        UserError,
        match="(intermediate = 4096|heads = 16), .* 3",
    ):
        run("grpo", "trainer.allocation=vllm[rollout]:d1+fsdp[actor]:t3", "trainer.launcher=ray")


def test_experts_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(UserError, match="no experts to divide .d4e2"):
        run(
            "grpo",
            "trainer.allocation=vllm[rollout]:d1+fsdp[actor]:d4e2",
            "trainer.launcher=ray",
        )


def test_a_thousand_devices_are_planned() -> None:
    found = run(
        "async_grpo",
        "trainer.allocation=embedded:d512+fsdp:d512",
        "trainer.launcher=ray",
        "trainer.nnodes=128",
    )
    assert len(found.plan.ranks) == 1024 and [len(worker.ranks) for worker in found.workers] == [
        512,
        512,
    ]
