"""The runs that the selftest compares: the same tiny run on each path, in its own folder, with its
models, its reward function, and the built-in pipelines with recorded responses instead of sampled
ones.

Also the numbers of a run that another run must reproduce, the differences between two runs, and
`reference.json`: the figures of the plain reference loop, and the groups that it trained on.
Sampled responses may differ between processors, so the groups are part of the record; weights are
float32, their bytes in base64.
"""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from distflow import NodeRole, TaskGraph, node
from distflow.cluster.ray_launcher import launch_ray
from distflow.config import Config, load_config
from distflow.data.batch import Batch
from distflow.data.sample import Sample, Segment
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from distflow.models.loading import quiet_transformers
from distflow.models.model_paths import resolve_path
from distflow.observe.run_reader import read_metrics, read_timeline
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.nodes.rollout_reward_filter import RESPONSE_FIELDS
from distflow.pipelines.ppo import ppo_pipeline
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.checkpoint.files import LATEST
from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS
from distflow.runtime.fault_injection import VARIABLE, Fault
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.run_recorder import load_groups
from distflow.runtime.spec import Launch, Spec
from distflow.runtime.stop_signals import Interrupted

RECORDED = Path(__file__).with_name("reference.json")
_LOSS = "/loss"
_NORM = "/grad_norm"


class Unlike(Exception):
    """Two runs differ in more than numbers: in tokens or in steps."""


@dataclass(frozen=True)
class Step:
    """One training step. answers: token ids of each response. sampled, log_probs: log-probs of
    these tokens, from the engine that sampled them and from the trainer before the step. scores: of
    each sample. updates: loss and gradient norm by the run's names, means over the step's
    updates."""

    answers: Sequence[Sequence[int]]
    sampled: Sequence[Sequence[float]]
    log_probs: Sequence[Sequence[float]]
    scores: Sequence[float]
    updates: Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """The figures of a whole run. weights: at its end, by "role.name"."""

    steps: Sequence[Step]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Differences:
    """The largest difference of each kind: |a - b|, relative for numbers beyond 1."""

    loss: float
    grad_norm: float
    log_prob: float
    weight: float

    def within(self, limit: float) -> bool:
        """Whether all differences are within the limit; False if one is NaN."""
        return all(
            found <= limit for found in (self.loss, self.grad_norm, self.log_prob, self.weight)
        )


def figures_of(run_dir: Path) -> Figures:
    """The figures of a finished run, whose folder has all groups and the last checkpoint."""
    steps = []
    for record in read_metrics(run_dir):
        if record.kind == "train":
            batch = load_groups(run_dir, record.step)
            updates = {name: value for name, value in record.values.items() if is_update(name)}
            steps.append(step_of(batch, batch.flat("old_log_probs"), updates))
    checkpoint = CheckpointStore(run_dir / CHECKPOINTS).load()
    if checkpoint.step != len(steps):
        raise Unlike(
            f"{run_dir} has {len(steps)} steps, and its last checkpoint is of step "
            f"{checkpoint.step}"
        )
    weights = {
        f"{role}.{name.removeprefix('model.')}": tensor
        for role in ("actor", "critic")
        if role in checkpoint.files
        for name, tensor in checkpoint.load(role).items()
        if name.startswith("model.")
    }
    return Figures(steps, weights)


def is_update(metric: str) -> bool:
    """Whether a step's metric is a loss or a gradient norm of one of its engines."""
    return metric in (f"{role}{kind}" for role in ("actor", "critic") for kind in (_LOSS, _NORM))


def step_of(batch: Batch, log_probs: Tensor, updates: Mapping[str, float]) -> Step:
    """The figures of a step's batch. log_probs: flat, the trainer's."""
    lengths = batch.lengths("response").tolist()
    answers, sampled, scored = (
        [part.tolist() for part in column.split(lengths)]
        for column in (batch.flat("response_ids"), batch.flat("rollout_log_probs"), log_probs)
    )
    return Step(answers, sampled, scored, batch["scores"].tolist(), updates)


def differences(one: Figures, other: Figures) -> Differences:
    """Raises Unlike if the runs differ in steps, responses, scores or the names of weights."""
    if len(one.steps) != len(other.steps):
        raise Unlike(f"{len(one.steps)} steps and {len(other.steps)}")
    _same("weights", one.weights.keys(), other.weights.keys())
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        _same(f"responses in step {number}", a.answers, b.answers)
        _same(f"scores in step {number}", a.scores, b.scores)
        _same(f"losses in step {number}", a.updates.keys(), b.updates.keys())
    return Differences(
        *(_largest(a, b) for a, b in zip(_numbers(one), _numbers(other), strict=True))
    )


def _same(what: str, one: object, other: object) -> None:
    if one != other:
        raise Unlike(f"other {what}")


def _numbers(figures: Figures) -> Iterator[Tensor]:
    """Losses, gradient norms, log-probs and weights of the whole run."""
    for kind in (_LOSS, _NORM):
        names = (
            (step, name)
            for step in figures.steps
            for name in sorted(step.updates)
            if name.endswith(kind)
        )
        yield torch.tensor([step.updates[name] for step, name in names], dtype=torch.float64)
    samples = (sample for step in figures.steps for sample in (*step.sampled, *step.log_probs))
    yield torch.tensor([value for sample in samples for value in sample])
    yield torch.cat([figures.weights[name].flatten() for name in sorted(figures.weights)])


def _largest(one: Tensor, other: Tensor) -> float:
    a = one.double()
    b = other.double()
    return float(((a - b).abs() / a.abs().clamp(min=1)).max())


@dataclass(frozen=True)
class Recorded:
    """The record of a pipeline. prompts: of each step, in order; a step's responses follow the
    order of its prompts."""

    prompts: list[list[str]]
    figures: Figures


def read_recorded(path: Path) -> dict[str, Recorded]:
    """The records, by pipeline."""
    return {
        name: Recorded(
            found["prompts"],
            Figures(
                [Step(**step) for step in found["steps"]],
                {name: _tensor(text, shape) for name, (shape, text) in found["weights"].items()},
            ),
        )
        for name, found in json.loads(path.read_text()).items()
    }


def _tensor(text: str, shape: list[int]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)).view(
        shape
    )


TOKENIZER = "builtin:tiny-arithmetic"
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
_SPREAD = 0.4  # large enough that neighbouring tokens matter: a leak between sequences shows


def write_models(folder: Path) -> None:
    """Write `folder`/policy and `folder`/critic as Hugging Face folders without a tokenizer. Their
    weights have the same bits on every machine: they come from Python's generator, since torch's
    depends on the processor."""
    config = transformers.AutoConfig.from_pretrained(resolve_path(TOKENIZER), **_SIZES)
    policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.num_labels = 1
    critic = transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    with quiet_transformers():
        _draw_weights(policy, "policy").save_pretrained(folder / "policy")
        _draw_weights(critic, "critic").save_pretrained(folder / "critic")


def _draw_weights(model: transformers.PreTrainedModel, seed: str) -> transformers.PreTrainedModel:
    """Draw matrices around 0, norms (of one axis) around 1."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = random.Random(f"{seed} {name}")
            numbers = torch.tensor(
                [2 * draw.random() - 1 for _ in range(weight.numel())], dtype=torch.float64
            )
            weight.copy_((_SPREAD * numbers + (weight.ndim == 1)).view_as(weight))
    return model


ANSWERS = "answers"
SAMPLED = "sampled"
"""Columns of a data set: token ids of each sample of the row's group, and the log-probs that they
were drawn with."""


def replayed(config: Config) -> TaskGraph:
    """The pipeline of the estimator: PPO with a critic, else GRPO."""
    graph = (
        ppo_pipeline(config) if config.algorithm.adv_estimator == "gae" else grpo_pipeline(config)
    )
    graph.update_node("rollout_actor", func=replay)
    return graph


@node(writes=RESPONSE_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def replay(group: Group, tokenizer: transformers.PreTrainedTokenizerBase) -> list[Sample]:
    """The recorded responses of the group's row."""
    recorded: Mapping[str, Any] = group.row.extra_info or {}
    samples = []
    for index, (ids, sampled) in enumerate(zip(recorded[ANSWERS], recorded[SAMPLED], strict=True)):
        versions = (group.prompt_group.version,) * len(ids)
        # nothing is truncated
        segment = Segment("policy", tuple(ids), tuple(sampled), tuple(sampled), versions)
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        reason = "length" if len(ids) == group.params.max_tokens else "stop"
        samples.append(group.sample(index, segment, text, reason))
    return samples


REWARD = """
def graded(solution_str):
    return sum(map(ord, solution_str)) % 7 / 6
"""
"""A meaningless score, which only has to differ between the responses of a group. It has its own
file, since reward processes would import torch with this one."""

_DEADLINE_S = 1800.0  # of a run that takes seconds on an idle machine
_STEP_S = 0.05  # the approximate time of a step
_KEYS = tomllib.loads(Path(__file__).with_name("keys.toml").read_text("utf-8"))
PRESET_KEYS: dict[str, Sequence[str]] = _KEYS["presets"]

REPLAYED = ("dag.pipeline=distflow.commands.selftest.runs:replayed", "trust.check_freq=0")
"""Checks of whole steps need engine requests, of which there are none; the reference loop checks
each step instead."""

_SHARDED = "actor_rollout_ref.actor.strategy=fsdp"
_UNCHECKED = "trust.check_freq=0"
"""Checks of whole steps need whole weights, which no rank has here."""

AHEAD = ("async.max_staleness=1", "actor_rollout_ref.rollout.num_threads=1")


class Died(Exception):
    """A run in a separate process did not end as expected."""


@dataclass(frozen=True)
class Lab:
    """Runs of one pipeline, each in a folder below `folder`. prompts: of each step."""

    folder: Path
    preset: str
    prompts: Sequence[Sequence[str]]

    @staticmethod
    def of(folder: Path, preset: str, recorded: Recorded) -> "Lab":
        """Write the models and data of the runs: a row for each group of each step."""
        folder.mkdir()
        write_models(folder)
        (folder / "reward.py").write_text(REWARD)
        with (folder / "rows.jsonl").open("w") as file:
            for prompts, step in zip(recorded.prompts, recorded.figures.steps, strict=True):
                size = len(step.answers) // len(prompts)
                for i, prompt in enumerate(prompts):
                    own = slice(i * size, (i + 1) * size)
                    row = {"prompt": prompt, ANSWERS: step.answers[own], SAMPLED: step.sampled[own]}
                    file.write(json.dumps(row) + "\n")
        return Lab(folder, preset, recorded.prompts)

    def keys(self, name: str) -> list[str]:
        """The config of the run `name` as lines of a command."""
        batch = len(self.prompts[0])
        lines = (*_KEYS["every"], *PRESET_KEYS[self.preset])
        sizes = {"num_steps": len(self.prompts), "batch": batch, "half": batch // 2}
        return [Template(line).substitute(sizes, folder=self.folder, run=name) for line in lines]

    def replayed(self) -> Figures:
        """A synchronous run on the recorded responses."""
        return self._run(self._spec("replayed", *REPLAYED))

    def sync(self) -> Figures:
        """A synchronous run that samples its responses."""
        return self._run(self._spec("sync"))

    def on_device(self, device: str) -> Figures:
        """The synchronous run on a device, by its name in `trainer.device`."""
        return self._run(self._spec(f"on-{device}", f"trainer.device={device}"))

    def asynchronous(self) -> Figures:
        """A run with the parts for generating while training: the engine has its own thread and its
        own copy of the weights, to which each version is sent. Only the queue lets nothing run
        ahead."""
        spec = self._spec("async", *AHEAD)
        return self._run(replace(spec, data=replace(spec.data, max_staleness=0)))

    def workers(self, count: int) -> Figures:
        """A synchronous run on `count` workers over Ray, each with the whole model."""
        return self._run(self._spec(f"workers-{count}", *_over_ray(count)), launch_ray)

    def resharded(self, saved_at: int) -> Figures:
        """Two workers over Ray with half of each weight, and one process that resumes from their
        checkpoint of step `saved_at`."""
        self._run(self._spec("resharded", *_over_ray(2), _SHARDED, _UNCHECKED), launch_ray)
        checkpoint = self.folder / "resharded" / CHECKPOINTS / f"step-{saved_at:06d}"
        return self._run(self._spec("resharded", _UNCHECKED, f"trainer.resume_mode={checkpoint}"))

    def killed(self, after: int) -> Figures:
        """A run in a process that is killed during the step after `after`, and resumed by another
        one."""
        folder = self.folder / "killed"
        faults = self.folder / "faults.json"
        # The run is killed before it is done, however busy the machine is.
        faults.write_text(
            json.dumps([asdict(Fault("checkpoint.begun", rank=0, call=after + 1, action="sleep"))])
        )
        latest = folder / CHECKPOINTS / LATEST
        wanted = f"step-{after:06d}"
        with self._process({VARIABLE: str(faults)}) as process:
            while process.poll() is None and not (
                latest.is_file() and latest.read_text() == wanted
            ):
                time.sleep(0.002)
            time.sleep(random.uniform(0, _STEP_S))
            process.kill()
        if process.returncode != -signal.SIGKILL:
            raise Died(
                f"the run ended with status {process.returncode} before it could be killed; see "
                "killed.log"
            )
        with self._process() as process:
            process.wait(_DEADLINE_S)
        if process.returncode != 0:
            raise Died(f"the resumed run ended with status {process.returncode}; see killed.log")
        if max(read_timeline(folder).kept_until.values(), default=0) < after:
            raise Died(
                f"the second process did not resume from a checkpoint of step {after} or later"
            )
        return figures_of(folder)

    @contextmanager
    def _process(
        self, variables: Mapping[str, str] | None = None
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """`distflow train` in a separate process, which is killed afterwards. It has this one's
        import path. variables: of its environment."""
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        command = [sys.executable, "-m", "distflow", "train", self.preset, *self.keys("killed")]
        environment = {**os.environ, "PYTHONPATH": paths, **(variables or {})}
        with (
            (self.folder / "killed.log").open("ab") as log,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def _spec(self, name: str, *more: str) -> Spec:
        return make_spec(load_config(self.preset, [*self.keys(name), *more]), say=lambda line: None)

    def _run(self, spec: Spec, launch: Launch = launch_local) -> Figures:
        """Run with output to a file."""
        with (
            (self.folder / "runs.log").open("a") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            outcome = launch(spec)
        if outcome is not None and outcome.signal is not None:
            raise Interrupted(outcome.signal)
        return figures_of(spec.run_dir)


def _over_ray(num_workers: int) -> tuple[str, ...]:
    has_enough = torch.accelerator.device_count() >= num_workers
    device = "auto" if has_enough else "cpu"
    return (
        "trainer.launcher=ray",
        f"trainer.n_gpus_per_node={num_workers}",
        f"trainer.device={device}",
    )
