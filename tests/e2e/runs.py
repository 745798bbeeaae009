"""Whole runs of tiny models for the end-to-end tests: what they are made of, and what they leave
behind."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification

from distflow.config import Config, load_config
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from distflow.observe.run_reader import read_events, read_metrics
from distflow.runtime.spec import Outcome, Spec
from tests.tiny_models import write_tiny_model

# Graded and deaf to meaning: what matters is that samples of a group differ.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""


SEVERAL_WORKERS = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.allocation",
    "trainer.launcher=ray",
)
"""How overrides begin that ask for workers, each of which would have a GPU of its own."""


class Playground:
    """A folder with a tiny model, a data set and a reward, and runs on them."""

    def __init__(
        self, folder: Path, family: str = "llama", num_rows: int = 12, **changes: Any
    ) -> None:
        self.folder = folder
        write_tiny_model(folder / "model", family, **changes)
        self.write_rows(
            [{"prompt": f"{'ab' * (i % 4 + 1)}{i}=", "answer": "7"} for i in range(num_rows)]
        )
        self.write_reward(REWARD)

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_reward(self, code: str) -> None:
        (self.folder / "reward.py").write_text(code)

    def write_critic(self) -> Path:
        """A value model with a head of its own, so that others can start from the same one."""
        config = AutoConfig.from_pretrained(self.folder / "model", num_labels=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            AutoModelForTokenClassification.from_config(config).save_pretrained(
                self.folder / "critic"
            )

        return self.folder / "critic"

    def overrides(self, name: str, *more: str) -> list[str]:
        """Of a cheap run: to test its reward before it takes a third of the time of two steps.
        Without rewards the key would have no effect."""
        untested = () if "~reward.functions" in more else ("trust.check_rewards=false",)
        is_shared = any(word.startswith(SEVERAL_WORKERS) for word in more)
        on_cpu = (
            ("trainer.device=cpu",) if is_shared and not torch.accelerator.is_available() else ()
        )

        return [
            f"data.train_files={self.folder}/rows.jsonl",
            "data.train_batch_size=4",
            "data.max_prompt_length=16",
            "data.max_response_length=10",
            "data.num_loader_workers=0",
            f"actor_rollout_ref.model.path={self.folder}/model",
            "actor_rollout_ref.model.dtype=float32",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=4",
            "reward.functions={default: [custom]}",
            f"custom_reward_function.path={self.folder}/reward.py",
            "reward.num_workers=1",
            f"trainer.default_local_dir={self.folder}/{name}",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.num_threads=1",
            *untested,
            *on_cpu,
            *more,
        ]

    def spec(self, preset: str, *overrides: str, name: str = "run") -> tuple[Config, Spec]:
        loaded = load_config(preset, self.overrides(name, *overrides))
        return loaded.config, make_spec(loaded, say=lambda line: None)

    def run(
        self,
        preset: str,
        *overrides: str,
        name: str = "run",
        spoil: Callable[[Spec], Spec] = lambda spec: spec,
    ) -> "Run":
        """Run to the end. spoil: changes the spec before the start."""
        config, spec = self.spec(preset, *overrides, name=name)
        return Run(self.folder / name, config, launch_local(spoil(spec)))


class Run:
    """What a finished run left in its folder."""

    def __init__(self, folder: Path, config: Config, outcome: Outcome) -> None:
        self.folder = folder
        self.config = config
        self.outcome = outcome

    def metrics(self) -> list[dict[str, float]]:
        """Of each training step."""
        return [
            dict(record.values) for record in read_metrics(self.folder) if record.kind == "train"
        ]

    def weights(self, step: int, role: str = "actor") -> dict[str, Tensor]:
        """Trained weights after `step` steps, by the model's names."""
        state = load_file(self.folder / "checkpoints" / f"step-{step:06d}" / f"{role}.safetensors")
        return {
            name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")
        }

    def notes(self, kind: str) -> list[str]:
        return notes(self.folder, kind)

    def checks(self) -> list[dict[str, Any]]:
        """What each whole check of a step or a validation has recorded, in order."""
        return [event.fields for event in read_events(self.folder) if event.kind == "checks"]


OF_TOYS = ("of responses were truncated at",)


def notes(folder: Path, kind: str) -> list[str]:
    """The messages of a run's events of one kind, but for what is true of toys: their responses
    rarely end by themselves."""
    found = [event.message for event in read_events(folder) if event.kind == kind]
    return [message for message in found if not any(text in message for text in OF_TOYS)]
