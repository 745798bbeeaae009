"""The search for an allocation, against all allocations of a small cluster written out one by
one."""

from dataclasses import replace
from itertools import product

import pytest

from distflow.config import load_config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.launch.plans.run_planner import as_overrides
from distflow.launch.select_pipeline import bind
from distflow.planning.devices import Device
from distflow.planning.model_shapes import ModelShape
from distflow.planning.predicted_run import PredictedRun, predict
from distflow.planning.search_allocations import (
    CHECKPOINTING,
    Change,
    Choices,
    Search,
    _candidates,
    search_allocations,
)

SHAPE = ModelShape(1024, 4096, 12, 16, 8, 64, 32000, tied=False)
GPU = Device("gpu", 100e12, 1e12, 17e9, 100e9, 10e9)
KEYS = [
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=4",
]
KEYS += [
    "data.max_prompt_length=512",
    "data.max_response_length=512",
    "actor_rollout_ref.model.path=llama-2-7b",
]
KEYS += [
    "actor_rollout_ref.model.dtype=bfloat16",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.launcher=ray",
]
# beside a trainer
KEYS += ["actor_rollout_ref.rollout.engine_kwargs.vllm.gpu_memory_utilization=0.25"]


class Cluster:
    def __init__(
        self,
        preset: str,
        num_devices: int,
        device: Device = GPU,
        strategy: str | None = None,
        staleness: tuple[int, ...] = (0, 2),
    ) -> None:
        config = load_config(
            preset, [*KEYS, f"trainer.n_gpus_per_node={num_devices}"], complete=False
        ).config
        self.choices = Choices(config, num_devices, strategy, staleness)
        self.device = device
        self.pipeline: BoundPipeline = bind(config)

    def predict(self, config: object) -> PredictedRun:
        shapes = dict.fromkeys(self.pipeline.engines, SHAPE)
        return predict(config, self.pipeline, shapes, self.device)  # type: ignore[arg-type]

    def search(self, refused: tuple[str, ...] = ()) -> Search:
        def is_allowed(change: Change) -> bool:
            return dict(change)["trainer.allocation"] not in refused

        return search_allocations(self.choices, self.predict, is_allowed)

    def seconds(self) -> dict[tuple[str, int], float]:
        """The steps of all allocations that fit, by brute force over data and tensor
        sizes."""
        total = self.choices.num_devices
        found = {}
        powers = (1, 2, 4, 8)

        datas = range(1, total + 1)
        for data, tensor, trained, parts, sign in product(datas, powers, datas, powers, "+|"):
            own = data * tensor
            theirs = trained * parts
            if (own + theirs if sign == "+" else own) != total or (sign == "|" and theirs != total):
                continue

            for engine in (
                ("torch", "fsdp")
                if parts == 1 and theirs > 1
                else ("torch",)
                if parts == 1
                else ("fsdp",)
            ):
                sizes = [
                    f"d{d}" + (f"t{t}" if t > 1 else "")
                    for d, t in ((data, tensor), (trained, parts))
                ]
                text = f"vllm[rollout]:{sizes[0]}{sign}{engine}[actor]:{sizes[1]}"
                keys = {"trainer.allocation": text, "actor_rollout_ref.actor.strategy": engine}
                keys["actor_rollout_ref.rollout.tensor_model_parallel_size"] = tensor

                for staleness in self.choices.staleness:
                    try:
                        own = {**keys, "async.max_staleness": staleness}
                        run = self.predict(with_values(self.choices.config, own))
                    except UserError:
                        continue

                    if run.fits:
                        found[text, staleness] = run.step_seconds

        return found


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("preset", ["grpo", "async_grpo"])
def test_the_best_is_the_best_of_all(preset, num_devices):
    cluster = Cluster(preset, num_devices)
    found = cluster.search()
    every = cluster.seconds()
    assert found.num_fitting == len(every)
    expected = sorted(every.values())[:10]
    assert [each.run.step_seconds for each in found.best] == pytest.approx(expected, rel=0.01)
    assert found.best[0].run.step_seconds == pytest.approx(expected[0], rel=1e-3)
    assert all(
        every[each.text, each.staleness] == each.run.step_seconds and each.run.fits
        for each in found.best
    )


@pytest.mark.slow
def test_it_is_deterministic_and_says_why_the_first_wins():
    found, again = (Cluster("async_grpo", 4).search() for _ in range(2))
    assert [each.line() for each in found.best] == [each.line() for each in again.best]
    assert (
        found.best[0].text in found.why()
        and f"{found.num_fitting} of {found.num_tried} allocations fit" in found.why()
    )


@pytest.mark.slow
def test_what_the_rules_refuse_is_left_out_and_a_chosen_engine_stays():
    first = Cluster("grpo", 4).search().best[0].text
    assert first not in [each.text for each in Cluster("grpo", 4).search((first,)).best]
    roomy = Device("gpu", 100e12, 1e12, 80e9, 100e9, 10e9)
    texts = [
        each.text
        for each in Cluster("grpo", 4, roomy, strategy="torch", staleness=(0,)).search().best
    ]
    assert texts and all("torch[actor]" in text for text in texts)


@pytest.mark.slow
def test_the_staleness_that_is_as_fast_as_a_greater_one_wins():
    found = Cluster("async_grpo", 4, staleness=(0, 1, 4)).search()
    first = found.best[0]
    greater = [
        each for each in found.best if each.text == first.text and each.staleness > first.staleness
    ]
    assert all(each.rank[0] >= first.rank[0] for each in greater)
    assert {each.staleness for each in found.best} > {first.staleness}


def test_memory_is_that_of_the_responses_that_may_run_at_each_staleness():
    cluster = Cluster("async_grpo", 2, staleness=(0, 1, 4))
    keys = {
        "actor_rollout_ref.rollout.max_num_seqs": 10_000,
        "actor_rollout_ref.rollout.name": "hf",
    }
    cluster.choices = replace(cluster.choices, config=with_values(cluster.choices.config, keys))

    peaks: dict[str, list[float]] = {}
    for each in _candidates(cluster.choices, cluster.predict, ()):
        assert each.run.fullest.peak == cluster.predict(each.run.config).fullest.peak
        peaks.setdefault(each.text, []).append(each.run.fullest.peak)

    assert any(peak[0] < peak[1] < peak[2] for peak in peaks.values()), peaks


def test_too_little_memory_names_what_lacks_least():
    with pytest.raises(UserError, match=r"none of \d+ allocations of 2 devices .* vllm"):
        Cluster("grpo", 2, Device("gpu", 100e12, 1e12, 2e9, 100e9, 10e9)).search()


def test_checkpointing_is_switched_on_where_nothing_fits_without_it():
    tight = Device("gpu", 100e12, 1e12, 13e9, 100e9, 10e9)
    cluster = Cluster("grpo", 2, tight, staleness=(0,))
    with pytest.raises(UserError, match=r"none of \d+ allocations"):
        cluster.search()
    cluster.choices = replace(cluster.choices, may_recompute=True)
    found = cluster.search()
    assert all((CHECKPOINTING, True) in each.change and each.run.fits for each in found.best)
    assert f"{CHECKPOINTING}=true, and none without it" in found.why()
    assert f"{CHECKPOINTING}=true" in as_overrides(found.best[0].change)
    roomy = Cluster("grpo", 2, replace(tight, memory=80e9), staleness=(0,))
    roomy.choices = replace(roomy.choices, may_recompute=True)
    assert all(len(each.change) == 3 for each in roomy.search().best), (
        "it costs time, so it stays off where all fits"
    )
