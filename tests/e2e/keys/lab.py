"""Tiny runs of real pipelines, for tests that change one key and look at what changes with it."""

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from distflow.config import Config, Loaded, config_from_dict, load_config, to_dict
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptSet
from distflow.launch.configured_models import load_policy
from distflow.launch.data_sets import train_sources, validation_sources
from distflow.launch.devices import choose_device
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from distflow.models.loading import load_tokenizer
from distflow.observe.run_reader import Event, read_events, read_metrics, read_samples
from distflow.runtime.spec import Factory, Spec
from tests.tiny_models import write_tiny_model

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

# The stops are frequent, so that responses have different lengths and some are cut off at the
# limit.
REWARD = """
import os
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "flat":
        return 0.25
    return sum(map(ord, solution_str)) % 9 / 8

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.0 if extra_info["number"] % 2 else 0.3)
    return sum(map(ord, solution_str)) % 9 / 8

def sometimes(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(map(ord, solution_str))
    return 1 / (number % 9) if number % 9 < 8 else 0.0

def process(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.05)
    return float(os.getpid())
"""
ANY_PROGRAM = {
    f"{MODEL}.path": "{lab}/model",
    f"{MODEL}.dtype": "float32",
    "data.train_files": "{lab}/train.jsonl",
    "data.train_batch_size": "4",
    "data.max_prompt_length": "24",
    "data.max_response_length": "8",
    f"{ACTOR}.ppo_mini_batch_size": "4",
    f"{ACTOR}.optim.lr": "0.001",
    f"{ACTOR}.optim.scheduler": "constant",
    "trainer.total_training_steps": "2",
    "trainer.test_freq": "-1",
    "trainer.save_freq": "-1",
    "trainer.save_groups": "all",
    "trainer.num_threads": "1",
}
GENERATING = {
    **ANY_PROGRAM,
    f"{ROLLOUT}.n": "4",
    f"{ROLLOUT}.stop": "['" + "','".join("abcdefghijklmnop") + "']",
    "reward.functions.default": "[custom]",
    "custom_reward_function.path": "{lab}/reward.py",
    "reward.num_workers": "1",
    "trust.check_rewards": "false",
    "trust.check_freq": "0",  # a third of what a run of two steps takes
}
GROUP_RELATIVE = {f"{ACTOR}.entropy_coef": "0.0", f"{ACTOR}.use_kl_loss": "false"}
BASES: dict[str, tuple[str, dict[str, str]]] = {
    "grpo": ("grpo", {**GENERATING, **GROUP_RELATIVE}),
    "dapo": (
        "dapo",
        {**GENERATING, **GROUP_RELATIVE, f"{ROLLOUT}.n": "4", "reward.overlong.buffer_tokens": "0"},
    ),
    "ppo": (
        "ppo",
        {**GENERATING, "critic.optim.lr": "0.001", "critic.optim.scheduler": "constant"},
    ),
    "sft": ("sft", ANY_PROGRAM),
}


@dataclass(frozen=True)
class Forward:
    """One forward of a role's model. generates: it is the rollout engine's. learns: with gradients.
    shape: of its input ids."""

    role: str
    generates: bool
    trains: bool
    shape: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return prod(self.shape)


@dataclass
class Run:
    """What became of a run. error: what it raised; then the properties that read its folder raise
    that again.

    built: the parts that its worker built, by name.
    """

    folder: Path
    made: Spec | None = None
    built: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    start: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    layer_calls: int = 0

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of each training step."""
        self._must_have_ended()
        return [
            dict(record.values) for record in read_metrics(self.folder) if record.kind == "train"
        ]

    @cached_property
    def validations(self) -> dict[int, dict[str, float]]:
        """Metrics of each validation, by step."""
        self._must_have_ended()
        return {
            record.step: dict(record.values)
            for record in read_metrics(self.folder)
            if record.kind == "val"
        }

    def column(self, metric: str) -> list[float]:
        """A metric in each training step."""
        return [step[metric] for step in self.steps]

    def batch(self, step: int = 1) -> Batch:
        """All columns of a step, as `trainer.save_groups` kept them."""
        self._must_have_ended()
        return Batch.load(self.folder / "tokens" / f"{step:06d}.safetensors")

    def samples(self, step: int = 1, split: str = "train") -> list[dict[str, Any]]:
        self._must_have_ended()
        return read_samples(self.folder, step, split)

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.folder) if event.kind == kind]

    def checkpoints(self) -> list[str]:
        self._must_have_ended()
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of each prompt group."""
        records = map(
            json.loads, (self.folder / "spans" / "rollout.jsonl").read_text().splitlines()
        )
        return [(record["t0"], record["t1"]) for record in records if record["kind"] == "group"]

    @property
    def spec(self) -> Spec:
        self._must_have_ended()
        assert self.made is not None
        return self.made

    def engine(self, role: str) -> Any:
        """None where the run built none."""
        self._must_have_ended()
        return self.built.get(role)

    def weights(self, role: str = "actor") -> dict[str, Tensor]:
        """The trained weights at the end."""
        return {
            name: tensor.clone()
            for name, tensor in self.engine(role).state().trained_weights().items()
        }

    def moved(self, role: str = "actor") -> float:
        """Norm of all that the trained weights moved."""
        gaps = [
            (tensor - self.start[role][name]).double().square().sum()
            for name, tensor in self.weights(role).items()
        ]
        return float(torch.stack(gaps).sum().sqrt())

    def moment(self, name: str, role: str = "actor") -> Tensor:
        """A state of the optimizer (exp_avg, exp_avg_sq), all parameters in one vector."""
        tensors = self.engine(role).state().tensors
        return torch.cat(
            [
                t.flatten()
                for key, t in sorted(tensors.items())
                if key.startswith(f"optimizer.{name}/")
            ]
        )

    def largest_forward(self, role: str, trains: bool = False) -> int:
        """Tokens of the largest forward of a role that scores, or that learns."""
        return max(
            f.tokens
            for f in self.forwards
            if not f.generates and f.role == role and f.trains == trains
        )

    def decode_rows(self) -> int:
        """Rows of the rollout engine's largest decode step: one token each."""
        shapes = [f.shape for f in self.forwards if f.generates]
        return max(prod(shape) for shape in shapes if len(shape) == 1 or shape[-1] == 1)

    def _must_have_ended(self) -> None:
        if self.error is not None:
            raise self.error


class Lab:
    """Files that the runs share, and the runs that were made, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[tuple[str, tuple[tuple[str, str], ...]], Run] = {}
        _write_files(folder)

    def load(self, base: str, changes: Sequence[str]) -> Loaded:
        """The config of a base pipeline with some keys changed; "~KEY" takes one back."""
        preset, values = BASES[base]
        settings = self._merged(values, changes)
        plain = copy.deepcopy(_plain_preset(preset))
        for key, value in settings.items():
            _set(plain, key, value)
        config = config_from_dict(plain)
        return Loaded(config, {key.lstrip("~+"): "command line" for key in settings})

    def config(self, base: str, changes: Sequence[str]) -> Config:
        return self.load(base, changes).config

    def prompts(self, base: str, changes: Sequence[str]) -> tuple[PromptSet, PromptSet | None]:
        """The prompts to train and to validate on."""
        config = self.config(base, changes)
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path or "")
        folder = self.folder / "prompts"
        (train,) = train_sources(config, scored=True)
        held_out = validation_sources(config, scored=True)
        return (
            train.encode(train.read(folder), tokenizer),
            held_out[0].encode(held_out[0].read(folder), tokenizer) if held_out else None,
        )

    def policy(self, base: str, changes: Sequence[str]) -> nn.Module:
        """The model that would be trained."""
        config = self.config(base, changes)
        return load_policy(config, choose_device(config))

    def run(self, base: str, changes: Sequence[str]) -> Run:
        """A whole run; one that was made before is given again."""
        key = (base, tuple(self._merged(BASES[base][1], changes).items()))
        if key not in self._runs:
            self._runs[key] = self._run(base, changes)
        return self._runs[key]

    def _run(self, base: str, changes: Sequence[str]) -> Run:
        folder = self.folder / "runs" / str(len(self._runs))
        run = Run(folder)
        if not any("default_local_dir" in change or "project_name" in change for change in changes):
            changes = [*changes, f"trainer.default_local_dir={folder}"]
        try:
            loaded = self.load(base, changes)
            run.made = make_spec(loaded, say=lambda line: None)
            run.folder = run.made.run_dir
            launch_local(replace(run.made, factories=_watched(run.made.factories, run)))
        except Exception as error:  # kept for the test to look at
            run.error = error
        return run

    def _merged(self, values: dict[str, str], changes: Sequence[str]) -> dict[str, str]:
        merged = dict(values)
        for change in changes:
            key, _, value = change.partition("=")
            merged.pop(key.lstrip("~+"), None)
            merged[key] = value
        return {key: value.replace("{lab}", str(self.folder)) for key, value in merged.items()}


def _watched(factories: Mapping[str, Factory], run: Run) -> dict[str, Factory]:
    """The same factories; what they build is noted, its weights at the start, and every forward of
    its model."""

    def watched(name: str, build: Factory) -> Factory:
        def built(get: Any, device: torch.device) -> object:
            part: Any = build(get, device)
            run.built[name] = part
            if name in ("actor", "critic"):
                run.start[name] = {
                    key: t.clone() for key, t in part.state().trained_weights().items()
                }
            if name in ("actor", "critic", "ref"):
                _part(part.model, "embed_tokens").register_forward_pre_hook(_note(run, name))
            if name == "actor":
                _part(part.model, "layers.0.mlp").register_forward_pre_hook(_count_layer_call(run))
            return part

        return built

    return {name: watched(name, build) for name, build in factories.items()}


def _note(run: Run, role: str) -> Any:
    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        generates = torch.is_inference_mode_enabled()  # nothing else runs in it
        run.forwards.append(
            Forward(role, generates, torch.is_grad_enabled(), tuple(arguments[0].shape))
        )

    return note


def _count_layer_call(run: Run) -> Any:
    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        run.layer_calls += not threading.current_thread().name.startswith("embedded")

    return count


def _part(model: nn.Module, name: str) -> nn.Module:
    return next(module for path, module in model.named_modules() if path.endswith(name))


@cache
def _plain_preset(name: str) -> dict[str, Any]:
    """A preset as nested values. Composed once: Hydra takes longer than a run."""
    return to_dict(load_config(name, [f"{MODEL}.path=x", "data.train_files=x"]).config)


def _set(values: dict[str, Any], key: str, value: str) -> None:
    """Set a dotted key to a value in YAML; "~KEY" sets it to null."""
    *groups, last = key.lstrip("~+").split(".")
    for group in groups:
        values = values[group]
    values[last] = yaml.safe_load(value) if value else None


def _write_files(folder: Path) -> None:
    write_tiny_model(folder / "model", eos_token_id=2)
    write_tiny_model(folder / "other_model", seed=5, hidden_size=40)
    template = folder / "model" / "chat_template.jinja"
    more = (
        "{% if enable_thinking %}<think>{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}{{ "
        "date_string }}"
    )
    template.write_text(template.read_text() + more)
    _write_swapped_tokenizer(folder / "swapped", folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "half.py").write_text(
        REWARD.replace("compute_score", "unused").replace("constant", "compute_score")
    )
    rows = [
        {
            "prompt": f"{'say ' * (i % 3)}{i}+{i + 1}=",
            "answer": str(2 * i + 1),
            "response": str(2 * i + 1),
            "data_source": "flat" if i % 4 == 3 else "free",
            "other_prompt": f"what is {i}?",
            "other_answer": f"x{i}",
            "other_response": f"y{i}",
            "other_source": "elsewhere",
            "other_tools": [{"name": "add"}],
            "format_regex": ".*[A-Z].*",
            "number": i,
            "other_number": i // 2,
        }
        for i in range(12)
    ]
    _write_rows(folder / "train.jsonl", rows)
    _write_rows(folder / "val.jsonl", rows[:6])
    _write_rows(folder / "long.jsonl", [*rows, {**rows[0], "prompt": "0123456789" * 3}])
    _write_rows(folder / "bad.jsonl", [*rows, {"answer": "no prompt"}])
    _write_rows(folder / "many.jsonl", [{"prompt": f"{i}", "answer": "1"} for i in range(1600)])
    talks = [
        [{"role": "user", "content": c}, {"role": "assistant", "content": "1"}]
        for c in ("say", "what")
    ]
    _write_rows(
        folder / "talks.jsonl",
        [{"messages": talks[0], "other_messages": talks[1], "answer": "1"}] * 4,
    )
    _write_rows(folder / "unmarkable.jsonl", [{**row, "answer": "\\frac{1}{"} for row in rows])


def _write_swapped_tokenizer(folder: Path, model: Path) -> None:
    """The model's tokenizer with the ids of "+" and "=" swapped."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((model / name).read_text())
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["+"], vocabulary["="] = vocabulary["="], vocabulary["+"]
    (folder / "tokenizer.json").write_text(json.dumps(state))


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
