"""Tiny runs of real pipelines whose outcomes have names, for tests that change one key."""

import copy
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from distflow.config import Config, Loaded, config_from_dict, load_config, to_dict
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.launch.configured_models import load_policy
from distflow.launch.data_sources import train_sources, validation_sources
from distflow.launch.devices import choose_device
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from distflow.launch.rollout_engines import policy_engine_options
from distflow.models.loading import load_tokenizer
from distflow.observe.run_reader import read_metrics, read_samples
from distflow.pipelines.nodes.objectives_from_config import policy_objective
from distflow.runtime.spec import Factory, Spec
from tests.tiny_models import write_tiny_model

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "flat":
        return 0.25
    return sum(map(ord, solution_str)) % 9 / 8

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5
"""
ANY_PIPELINE = {
    f"{MODEL}.path": "{lab}/model",
    f"{MODEL}.dtype": "float32",
    "data.train_files": "{lab}/train.jsonl",
    "data.train_batch_size": "4",
    "data.max_prompt_length": "24",
    "data.max_response_length": "8",
    f"{ACTOR}.ppo_mini_batch_size": "4",
    f"{ACTOR}.optim.lr": "0.001",
    f"{ACTOR}.optim.scheduler": "constant",
    "trainer.total_training_steps": "1",
    "trainer.test_freq": "-1",
    "trainer.save_freq": "-1",
    "trainer.save_groups": "all",
    "trainer.num_threads": "1",
}
# The stops are frequent, so that responses have different lengths and some are cut off.
GENERATING = {
    **ANY_PIPELINE,
    f"{ROLLOUT}.n": "4",
    f"{ROLLOUT}.stop": "['" + "','".join("abcdefghijklmnop") + "']",
    "reward.functions.default": "[custom]",
    "custom_reward_function.path": "{lab}/reward.py",
    "reward.num_workers": "1",
    "trust.check_rewards": "false",
    "trust.check_freq": "0",
}
GROUPS = {**GENERATING, f"{ACTOR}.entropy_coef": "0.0", f"{ACTOR}.use_kl_loss": "false"}
CRITIC = {"critic.optim.lr": "0.001", "critic.optim.scheduler": "constant"}
BASES = {
    "grpo": GROUPS,
    "dapo": {**GROUPS, "reward.overlong.buffer_tokens": "0"},
    "ppo": {**GENERATING, **CRITIC},
    "sft": ANY_PIPELINE,
}


@dataclass(frozen=True)
class Forward:
    """One forward of a role's model."""

    role: str
    generates: bool
    """It is the rollout engine's."""
    trains: bool
    """With gradients."""
    shape: tuple[int, ...]
    """Of its input ids."""


@dataclass
class Run:
    """What became of a run."""

    folder: Path
    error: Exception | None = None
    """What it raised; then it has no other outcome."""
    built: dict[str, Any] = field(default_factory=dict)
    """The parts of its worker, by name."""
    start: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """The trained weights of a role as they were built."""
    forwards: list[Forward] = field(default_factory=list)
    layer_calls: int = 0

    def look(self, kind: str, name: str) -> Any:
        """An outcome; of the last step where each step has one."""
        if kind == "error":
            return str(self.error or "")
        if self.error is not None:
            raise self.error
        return getattr(self, f"look_{kind}")(name)

    def look_column(self, name: str) -> Any:
        file = max((self.folder / "tokens").glob("*.safetensors"))
        return Batch.load(file)[name]

    def look_columns(self, name: str) -> list[str]:
        file = max((self.folder / "tokens").glob("*.safetensors"))
        return sorted(Batch.load(file).names)

    def look_metric(self, name: str) -> list[float | None]:
        records = [record for record in read_metrics(self.folder) if record.kind == "train"]
        return [record.values.get(name) for record in records]

    def look_validated(self, name: str) -> list[int]:
        return [record.step for record in read_metrics(self.folder) if record.kind == "val"]

    def look_samples(self, name: str) -> list[Any]:
        return [row[name] for row in read_samples(self.folder, 1)]

    def look_answers(self, name: str) -> list[Any]:
        """Of the validation before training."""
        return [row[name] for row in read_samples(self.folder, 0, "val")]

    def look_files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))

    def look_moved(self, role: str) -> float:
        """Norm of all that the trained weights moved."""
        weights = self.built[role].state().trained_weights()
        gaps = [(weights[name] - was).double().norm() for name, was in self.start[role].items()]
        return float(torch.stack(gaps).norm())

    def look_moments(self, role: str) -> float:
        tensors = self.built[role].state().tensors
        moments = [value for key, value in tensors.items() if "optimizer.exp_avg/" in key]
        return float(torch.stack([moment.norm() for moment in moments]).norm())

    def look_updates(self, role: str) -> int:
        return self.built[role].num_steps

    def look_scoring(self, role: str) -> bool:
        """Whether a forward that only scores has more than 40 tokens."""
        return self._has_large_forward(role, trains=False)

    def look_learning(self, role: str) -> bool:
        """Whether a forward that learns has more than 40 tokens."""
        return self._has_large_forward(role, trains=True)

    def _has_large_forward(self, role: str, trains: bool) -> bool:
        return any(
            prod(forward.shape) > 40
            for forward in self.forwards
            if not forward.generates and forward.role == role and forward.trains == trains
        )

    def look_layer_calls(self, name: str) -> int:
        return self.layer_calls

    def look_decode_rows(self, name: str) -> int:
        """Of the rollout engine's largest decode step: one token each."""
        shapes = [forward.shape for forward in self.forwards if forward.generates]
        return max(prod(shape) for shape in shapes if len(shape) == 1 or shape[-1] == 1)

    def look_groups_at_once(self, name: str) -> int:
        lines = (self.folder / "spans" / "rollout.jsonl").read_text().splitlines()
        spans = [record for record in map(json.loads, lines) if record["kind"] == "group"]
        ends = [record["t1"] for record in spans]
        return max(sum(record["t0"] < end <= record["t1"] for record in spans) for end in ends)


class Lab:
    """Files that the runs share, and the runs that were made, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[tuple[str, tuple[tuple[str, str], ...]], Run] = {}
        _write_files(folder)

    def look(self, base: str, changes: Sequence[str], outcome: str) -> Any:
        """What a config comes to, by the name of an outcome."""
        kind, _, name = outcome.partition(" ")
        if look := getattr(self, f"_look_{kind}", None):
            return look(self._load(base, changes), name)
        return self._run(base, changes).look(kind, name)

    def _look_run_dir(self, loaded: Loaded, name: str) -> str:
        return str(loaded.config.trainer.run_dir)

    def _look_rows(self, loaded: Loaded, name: str) -> list[Any]:
        """An attribute of each prompt to train on."""
        return self._prompts(loaded.config, train_sources, name)

    def _look_held_out_rows(self, loaded: Loaded, name: str) -> list[Any]:
        return self._prompts(loaded.config, validation_sources, name)

    def _look_refused_rows(self, loaded: Loaded, name: str) -> str:
        """Why the prompts to train on cannot be read."""
        try:
            self._prompts(loaded.config, train_sources, "prompt_text")
        except ValueError as error:
            return str(error)
        return ""

    def _prompts(self, config: Config, sources: Any, name: str) -> list[Any]:
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path or "")
        (source,) = sources(config, scored=True)
        rows = source.encode(source.read(self.folder / "prompts"), tokenizer)
        return [getattr(row, name) for row in rows]

    def _look_policy(self, loaded: Loaded, name: str) -> Any:
        model = load_policy(loaded.config, choose_device(loaded.config))
        parameters = dict(model.named_parameters())
        if name == "trained":
            return sorted(key for key, value in parameters.items() if value.requires_grad)
        return parameters[name].detach()

    def _look_engine(self, loaded: Loaded, name: str) -> Any:
        """An option of the rollout engine."""
        return policy_engine_options(self._spec(loaded, "never").config)[name]

    def _look_loss(self, loaded: Loaded, name: str) -> float:
        """The policy's loss on three tokens. name: an advantage, and the ratios."""
        advantage, *ratios = map(float, name.split())
        old = (-1.0, -2.0, -3.0)
        segments = [
            Segment("prompt", (1,)),
            Segment("policy", (5, 6, 7), old, old, (0, 0, 0)),
        ]
        batch = Batch.from_samples([Sample("0-0", 0, segments)])
        batch["old_log_probs"] = torch.tensor([old])
        batch["advantages"] = torch.full((1, 3), advantage)
        objective = policy_objective(loaded.config)
        log_probs = torch.tensor([old]) + torch.tensor([ratios]).log()
        outputs = {"log_probs": log_probs, "entropy": torch.ones(1, 3)}
        loss, _ = objective(outputs, batch, objective.counts(batch))

        return round(float(loss), 5)

    def _load(self, base: str, changes: Sequence[str]) -> Loaded:
        """The config of a base pipeline with some keys changed; "~KEY" takes one back."""
        plain = copy.deepcopy(_plain_preset(base))
        settings = self._merged(base, changes)
        for key, value in settings.items():
            *groups, last = key.lstrip("~+").split(".")
            values = plain
            for group in groups:
                values = values[group]
            values[last] = yaml.safe_load(value) if value else None

        origins = {key.lstrip("~+"): "command line" for key in settings}
        return Loaded(config_from_dict(plain), origins)

    def _merged(self, base: str, changes: Sequence[str]) -> dict[str, str]:
        merged = dict(BASES[base])
        for change in changes:
            key, _, value = change.partition("=")
            merged.pop(key.lstrip("~+"), None)
            merged[key] = value
        return {key: value.replace("{lab}", str(self.folder)) for key, value in merged.items()}

    def _spec(self, loaded: Loaded, name: str) -> Spec:
        spec = make_spec(loaded, say=lambda line: None)
        return replace(spec, run_dir=self.folder / "runs" / name)

    def _run(self, base: str, changes: Sequence[str]) -> Run:
        """A whole run; one that was made before is given again."""
        key = (base, tuple(self._merged(base, changes).items()))
        if key in self._runs:
            return self._runs[key]

        folder = self.folder / "runs" / str(len(self._runs))
        run = self._runs[key] = Run(folder)
        try:
            loaded = self._load(base, [*changes, f"trainer.default_local_dir={folder}"])
            spec = make_spec(loaded, say=lambda line: None)
            launch_local(replace(spec, factories=_watched(spec.factories, run)))
        except Exception as error:  # kept for the test to look at
            run.error = error

        return run


def same(one: Any, other: Any) -> bool:
    """Numbers are the same up to rounding."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=1e-9)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(*pair) for pair in pairs)

    return one == other


def _watched(factories: Mapping[str, Factory], run: Run) -> dict[str, Factory]:
    """The same factories; what they build is noted, its weights at the start, and every forward of
    its model."""

    def watched(name: str, build: Factory) -> Factory:
        def built(get: Any, device: torch.device) -> object:
            part: Any = build(get, device)
            run.built[name] = part

            if name in ("actor", "critic"):
                weights = part.state().trained_weights()
                run.start[name] = {key: weight.clone() for key, weight in weights.items()}

            if name in ("actor", "critic", "ref"):
                _part(part.model, "embed_tokens").register_forward_pre_hook(_note(run, name))
            if name == "actor":
                _part(part.model, "layers.0.mlp").register_forward_pre_hook(_count(run))
            return part

        return built

    return {name: watched(name, build) for name, build in factories.items()}


def _note(run: Run, role: str) -> Any:
    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        generates = torch.is_inference_mode_enabled()  # nothing else runs in it
        shape = tuple(arguments[0].shape)
        run.forwards.append(Forward(role, generates, torch.is_grad_enabled(), shape))

    return note


def _count(run: Run) -> Any:
    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        run.layer_calls += not threading.current_thread().name.startswith("embedded")

    return count


def _part(model: nn.Module, name: str) -> nn.Module:
    return next(module for path, module in model.named_modules() if path.endswith(name))


@cache
def _plain_preset(name: str) -> dict[str, Any]:
    """A preset as nested values. Composed once: Hydra takes longer than a run."""
    return to_dict(load_config(name, [f"{MODEL}.path=x", "data.train_files=x"]).config)


SAMPLER = """
def backwards(history, count, generator):
    return range(len(history.times_drawn))[::-1]
"""


def _write_files(folder: Path) -> None:
    write_tiny_model(folder / "model", eos_token_id=2)
    template = folder / "model" / "chat_template.jinja"
    more = (
        "{% if enable_thinking %}<think>{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{{ date_string }}"
    )
    template.write_text(template.read_text() + more)
    (folder / "reward.py").write_text(REWARD)
    (folder / "sampler.py").write_text(SAMPLER)
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
    long = {**rows[0], "prompt": "0123456789" * 3}
    said = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "1"}]
    asked = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "1"}]
    talks = [{"messages": said, "other_messages": asked, "answer": "1"}] * 4

    files = {
        "train": rows,
        "val": rows[:6],
        "long": [*rows, long],
        "bad": [*rows, {"answer": "no prompt"}],
        "talks": talks,
    }
    for name, content in files.items():
        lines = [json.dumps(row) + "\n" for row in content]
        (folder / f"{name}.jsonl").write_text("".join(lines))
