"""The runs that the selftest compares: the same tiny run on each path, in its own folder, with its
models and its reward function; and the numbers of a run that another run must reproduce."""

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

import torch
import transformers
from torch import Tensor

from distflow.cluster.ray_launcher import launch_ray
from distflow.config import load_config
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from distflow.models.loading import quiet_transformers
from distflow.models.model_paths import resolve_path
from distflow.observe.run_reader import read_metrics, read_timeline
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.checkpoint.find_checkpoint import CHECKPOINTS
from distflow.runtime.fault_injection import VARIABLE, Fault
from distflow.runtime.saved_groups import load_groups
from distflow.runtime.spec import Launch, Spec
from distflow.runtime.stop_signals import Interrupted

NUM_STEPS = 8
_BATCH_SIZE = 4


class Unlike(Exception):
    """Two runs differ in more than numbers: in tokens, scores or steps."""


@dataclass(frozen=True)
class Figures:
    """What a whole run trained on, and its numbers."""

    trained_on: Sequence[object]
    """Of each step: lengths and token ids of its responses, and their scores."""
    numbers: Mapping[str, Tensor]
    """Losses, gradient norms, log-probs (of the engine and of the trainer), and the final
    weights, each flat."""


def figures_of(run_dir: Path) -> Figures:
    """The figures of a finished run, whose folder has all groups and the last checkpoint."""
    trained_on = list[object]()
    losses = list[float]()
    norms = list[float]()
    log_probs = list[Tensor]()
    for record in read_metrics(run_dir):
        if record.kind != "train":
            continue

        batch = load_groups(run_dir, record.step)
        lengths = batch.lengths("response").tolist()
        trained_on.append((lengths, batch.flat("response_ids").tolist(), batch["scores"].tolist()))
        log_probs += [batch.flat("rollout_log_probs"), batch.flat("old_log_probs")]

        for role in ("actor", "critic"):
            if f"{role}/loss" in record.values:
                losses.append(record.values[f"{role}/loss"])
                norms.append(record.values[f"{role}/grad_norm"])

    checkpoint = CheckpointStore(run_dir / CHECKPOINTS).load()
    weights = list[Tensor]()
    for role in ("actor", "critic"):
        tensors = checkpoint.load(role) if role in checkpoint.files else {}

        weights += [
            tensors[name].flatten() for name in sorted(tensors) if name.startswith("model.")
        ]

    numbers = {
        "loss": torch.tensor(losses, dtype=torch.float64),
        "grad norm": torch.tensor(norms, dtype=torch.float64),
        "log-prob": torch.cat(log_probs),
        "weight": torch.cat(weights),
    }
    return Figures(trained_on, numbers)


def differences(one: Figures, other: Figures) -> dict[str, float]:
    """The largest difference of each kind of number: |a - b|, relative beyond 1, NaN for NaN.
    Raises Unlike if the runs differ in steps, responses or scores."""
    if len(one.trained_on) != len(other.trained_on):
        raise Unlike(f"{len(one.trained_on)} steps and {len(other.trained_on)}")

    for number, (a, b) in enumerate(zip(one.trained_on, other.trained_on, strict=True), 1):
        if a != b:
            raise Unlike(f"other responses or scores in step {number}")

    found = dict[str, float]()
    for name, own in one.numbers.items():
        if own.shape != other.numbers[name].shape:
            raise Unlike(f"another number of {name}s")
        a = own.double()
        error = (a - other.numbers[name].double()).abs() / a.abs().clamp(min=1)
        found[name] = float(error.max())

    return found


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

_SHARDED = "actor_rollout_ref.actor.strategy=fsdp"
_UNCHECKED = "trust.check_freq=0"
"""Checks of whole steps need whole weights, which no rank has here."""

AHEAD = ("async.max_staleness=1", "actor_rollout_ref.rollout.num_threads=1")


class Died(Exception):
    """A run in a separate process did not end as expected."""


@dataclass(frozen=True)
class Lab:
    """Runs of one pipeline, each in a folder below `folder`."""

    folder: Path
    preset: str
    num_steps: int

    @staticmethod
    def of(folder: Path, preset: str, num_steps: int = NUM_STEPS) -> "Lab":
        """Write the models and data of the runs: a row for each group of each step."""
        folder.mkdir()
        write_models(folder)
        (folder / "reward.py").write_text(REWARD)

        with (folder / "rows.jsonl").open("w") as file:
            for number in range(num_steps * _BATCH_SIZE):
                step, place = divmod(number, _BATCH_SIZE)
                row = {"prompt": f"{17 * step + place}+{7 * place}="}
                file.write(json.dumps(row) + "\n")

        return Lab(folder, preset, num_steps)

    def keys(self, name: str) -> list[str]:
        """The config of the run `name` as lines of a command."""
        lines = (*_KEYS["every"], *PRESET_KEYS[self.preset])
        sizes = {"num_steps": self.num_steps, "batch": _BATCH_SIZE, "half": _BATCH_SIZE // 2}
        return [Template(line).substitute(sizes, folder=self.folder, run=name) for line in lines]

    def sync(self) -> Figures:
        """A synchronous run."""
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
        wanted = folder / CHECKPOINTS / f"step-{after:06d}"

        with self._process({VARIABLE: str(faults)}) as process:
            while process.poll() is None and not wanted.is_dir():
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
