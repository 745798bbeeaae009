"""Faults in what a policy sees and what its actions do, planted into real runs: each has a twin
that is healthy."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from distflow.acting import action_tokens, srpo_nodes, workflow
from distflow.errors import TrustError
from distflow.models.image_inputs import ImageProcessor
from tests.e2e.runs import Playground
from tests.e2e.test_acting import ACTS, options
from tests.tiny_vision_models import png, square, write_tiny_llava

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.slow


@pytest.fixture
def playground(tmp_path: Path) -> Playground:
    made = Playground(tmp_path)
    write_tiny_llava(tmp_path / "model")
    made.write_rows([{"prompt": f"{number}", "answer": "", "seed": number} for number in range(12)])
    return made


def next_bin(patch: Patch) -> None:
    right = action_tokens.ActionTokens.decode

    def decode(self: Any, token_ids: Any) -> Any:
        return right(self, [min(token + 1, self.first + self.bins - 1) for token in token_ids])

    patch.setattr(action_tokens.ActionTokens, "decode", decode)


def one_seed(patch: Patch) -> None:
    patch.setattr(workflow, "seed_of", lambda row: 99)


def first_frame(patch: Patch) -> None:
    right = srpo_nodes.pixels
    patch.setattr(srpo_nodes, "pixels", lambda frames: right(frames[:1]))


def one_task(patch: Patch) -> None:
    """The trainer's instruction is not the simulator's."""
    right = workflow.SimulatorWorkflow._encoded

    def encoded(self: Any, chat: Any, seen: Any, paths: Any) -> Any:
        return right(self, chat, workflow.Observation(seen.images, seen.state, "green"), paths)

    patch.setattr(workflow.SimulatorWorkflow, "_encoded", encoded)


def half_of_the_return(patch: Patch) -> None:
    right = workflow.SimulatorWorkflow._play

    async def play(self: Any, *given: Any) -> dict[str, Any]:
        return (found := await right(self, *given)) | {"return": found["return"] + 1.0}

    patch.setattr(workflow.SimulatorWorkflow, "_play", play)


def one_cluster_more(patch: Patch) -> None:
    right = srpo_nodes._metrics

    def metrics(*given: Any) -> dict[str, float]:
        return (found := right(*given)) | {"srpo/clusters": found["srpo/clusters"] + 1}

    patch.setattr(srpo_nodes, "_metrics", metrics)


FAULTS = {
    next_bin: r"executed \[.*but the policy drew",
    one_seed: "began with the seeds",
    first_frame: "the embedding of sample .* is not that of its last frame",
    one_task: "gives the instruction .* but the policy was shown",
    half_of_the_return: "returned rewards of",
    one_cluster_more: r"found \(rewards\): the metric srpo/clusters is reported as",
}


@pytest.mark.parametrize("plant", FAULTS)
def test_a_simulator_that_is_not_what_the_policy_acts_in(
    playground: Playground, monkeypatch: Patch, plant: Any
) -> None:
    plant(monkeypatch)
    with pytest.raises(TrustError, match=FAULTS[plant]):
        playground.run("embodied_srpo", *ACTS, options())


def test_the_same_run_without_a_fault(playground: Playground) -> None:
    """Most of its steps are looked at, not audited."""
    run = playground.run(
        "embodied_srpo", *ACTS, options(), "trust.audit_freq=20", "trainer.total_training_steps=5"
    )
    assert run.notes("warning") == run.notes("finding") == run.notes("error") == []


@pytest.mark.parametrize("is_planted", [True, False])
def test_failures_of_all_tasks_that_are_compared_with_each_other(
    playground: Playground, monkeypatch: Patch, is_planted: bool
) -> None:
    """The fault begins in step 3, which is not audited."""
    colours = ["red", "green", "blue"]
    calls = list[str]()
    right = srpo_nodes.task_of
    rows = [
        {"prompt": f"{n}", "answer": "", "seed": n, "instruction": colours[n % 3]}
        for n in range(12)
    ]
    playground.write_rows(rows)

    def task_of(domain: str, extra: Any) -> str:
        calls.append(domain)
        return domain if is_planted and len(calls) > 48 else right(domain, extra)

    monkeypatch.setattr(srpo_nodes, "task_of", task_of)
    keys = (
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "trainer.total_training_steps=5",
    )
    keys += ("embodied_sampling.filter_accuracy=false", "trust.audit_freq=20")
    with (
        pytest.raises(TrustError, match=r"step [34] found \(rewards\)")
        if is_planted
        else nullcontext()
    ):
        playground.run("embodied_srpo", *ACTS, options(), *keys)
    assert len(calls) >= 48 + 24


@pytest.mark.parametrize("fault", ["channels", "brightness"])
def test_pixels_that_are_not_those_of_the_file(
    tmp_path: Path, monkeypatch: Patch, fault: str
) -> None:
    """Engine, trainer and the model's own forward agree: they read the same wrong pixels."""
    made = Playground(tmp_path)
    right = ImageProcessor.inputs
    write_tiny_llava(tmp_path / "model")
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(png(square("rgb"[number % 3], at=number)))
    made.write_rows([{"prompt": f"{n}?", "answer": "7", "images": [f"{n}.png"]} for n in range(12)])

    def inputs(self: ImageProcessor, paths: Any) -> Any:
        pixels = (found := right(self, paths))["pixel_values"]
        return found | {"pixel_values": pixels.flip(1) if fault == "channels" else pixels / 2}

    monkeypatch.setattr(ImageProcessor, "inputs", inputs)
    keys = (
        "actor_rollout_ref.rollout.name=hf",
        "data.max_prompt_length=48",
        "trainer.total_training_steps=1",
    )
    with pytest.raises(
        TrustError, match=r"found \(responses\): the model gets other pixels than those of"
    ):
        made.run("grpo", *keys)
