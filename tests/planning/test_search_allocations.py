"""The search for an allocation, against all allocations of a small cluster written out one by one."""

from itertools import product

import pytest

from distflow.config import load_config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.launch.select_pipeline import bind
from distflow.planning.known_models_and_devices import Device, ModelShape
from distflow.planning.predicted_run import PredictedRun, predict
from distflow.planning.search_allocations import Choices, Search, nearest_change, search_allocations

SHAPE = ModelShape(1024, 4096, 12, 16, 8, 64, 32000, tied=False)
GPU = Device("gpu", 100e12, 1e12, 17e9, 100e9, 10e9)
KEYS = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.n=4"]
KEYS += ["data.max_prompt_length=512", "data.max_response_length=512", "actor_rollout_ref.model.path=llama-2-7b"]
KEYS += ["actor_rollout_ref.model.dtype=bfloat16", "actor_rollout_ref.rollout.name=vllm", "trainer.launcher=ray"]


class Cluster:
    def __init__(self, preset: str, num_devices: int, device: Device = GPU, strategy: str | None = None) -> None:
        config = load_config(preset, [*KEYS, f"trainer.n_gpus_per_node={num_devices}"], complete=False).config
        self.choices, self.device = Choices(config, num_devices, strategy), device
        self.pipeline: BoundPipeline = bind(config)

    def predict(self, config: object) -> PredictedRun:
        shapes = dict.fromkeys(self.pipeline.engines, SHAPE)
        return predict(config, self.pipeline, shapes, self.device)  # type: ignore[arg-type]

    def search(self, refused: tuple[str, ...] = ()) -> Search:
        return search_allocations(self.choices, self.predict, lambda text: text not in refused)

    def seconds(self) -> dict[str, float]:
        """The steps of all allocations that fit, by brute force over data and tensor sizes."""
        total, found = self.choices.num_devices, {}
        powers, datas = (1, 2, 4, 8), range(1, total + 1)
        for data, tensor, trained, parts, sign in product(datas, powers, datas, powers, "+|"):
            own, theirs = data * tensor, trained * parts
            if (own + theirs if sign == "+" else own) != total or (sign == "|" and theirs != total):
                continue
            for engine in ("torch", "fsdp") if parts == 1 and theirs > 1 else ("torch",) if parts == 1 else ("fsdp",):
                sizes = [f"d{d}" + (f"t{t}" if t > 1 else "") for d, t in ((data, tensor), (trained, parts))]
                text = f"vllm[rollout]:{sizes[0]}{sign}{engine}[actor]:{sizes[1]}"
                keys = {"trainer.allocation": text, "actor_rollout_ref.actor.strategy": engine}
                keys["actor_rollout_ref.rollout.tensor_model_parallel_size"] = tensor
                try:
                    run = self.predict(with_values(self.choices.config, keys))
                except UserError:
                    continue
                if run.fits:
                    found[text] = run.step_seconds
        return found


@pytest.mark.parametrize("num_devices", [2, 3, 4, 6])
@pytest.mark.parametrize("preset", ["grpo", "async_grpo"])
def test_the_best_is_the_best_of_all(preset: str, num_devices: int) -> None:
    cluster = Cluster(preset, num_devices)
    found, every = cluster.search(), cluster.seconds()
    assert found.num_fitting == len(every)
    expected = sorted(every.values())[:10]
    assert [each.run.step_seconds for each in found.best] == pytest.approx(expected)
    assert all(every[each.text] == each.run.step_seconds and each.run.fits for each in found.best)


def test_it_is_deterministic_and_says_why_the_first_wins() -> None:
    found, again = (Cluster("async_grpo", 4).search() for _ in range(2))
    assert [each.line() for each in found.best] == [each.line() for each in again.best]
    assert (
        found.best[0].text in found.why() and f"{found.num_fitting} of {found.num_tried} allocations fit" in found.why()
    )


def test_what_the_rules_refuse_is_left_out_and_a_chosen_engine_stays() -> None:
    first = Cluster("grpo", 4).search().best[0].text
    assert first not in [each.text for each in Cluster("grpo", 4).search((first,)).best]
    roomy = Device("gpu", 100e12, 1e12, 80e9, 100e9, 10e9)
    texts = [each.text for each in Cluster("grpo", 4, roomy, strategy="torch").search().best]
    assert texts and all("torch[actor]" in text for text in texts)


def test_too_little_memory_names_what_lacks_least() -> None:
    with pytest.raises(UserError, match=r"none of \d+ allocations of 2 devices fits; the nearest is vllm"):
        Cluster("grpo", 2, Device("gpu", 100e12, 1e12, 2e9, 100e9, 10e9)).search()


def test_many_devices_are_split_in_64ths() -> None:
    found = Cluster("async_grpo", 128).search()
    assert all(int(each.text.partition(":d")[2].split("+")[0].split("t")[0]) > 0 for each in found.best)
    assert found.num_tried < 64 * 4 * 5 + 20


def test_the_nearest_change_keeps_one_key_where_one_suffices() -> None:
    config = load_config("grpo", [key for key in KEYS if "vllm" not in key], complete=False).config
    pipeline, small = bind(config), Device("gpu", 100e12, 1e12, 13e9, 100e9, 10e9)

    def again(config: object) -> PredictedRun:
        return predict(config, pipeline, dict.fromkeys(pipeline.engines, SHAPE), small)  # type: ignore[arg-type]

    found = again(config)
    assert not found.fits and "activations of the actor" in found.excess()
    change = nearest_change(found, again, lambda change: with_values(config, dict(change)))
    assert change is not None and len(change) == 1
    assert again(with_values(config, dict(change))).fits
    assert nearest_change(found, again, lambda change: None) is None
