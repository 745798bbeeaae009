"""Keys of `trainer`."""

import math
import os
import re
from dataclasses import dataclass
from operator import ge, gt, le, lt
from pathlib import Path

from distflow.builtin_names import LAUNCHERS, TRACKERS, not_there_yet
from distflow.config.compose.typed_values import Differing, Mismatch, parse_differing, show
from distflow.config.keys.declare import BY_NAME, collect, group, key

_COMPARE = {">=": ge, "<=": le, ">": gt, "<": lt}
_CONDITION = re.compile(r"\s*([^\s<>=!]+)\s*(>=|<=|>|<)\s*([^\s<>=!]+)\s*")


@dataclass(frozen=True)
class StopCondition:
    """The condition on a metric that ends a run, such as `val_correct/all/mean >= 0.9`."""

    metric: str
    operator: str
    value: float

    @classmethod
    def of(cls, text: str) -> "StopCondition":
        """Parse a condition. Raises Mismatch for any other form."""
        found = _CONDITION.fullmatch(text)
        try:
            value = float(found[3]) if found else math.nan
        except ValueError:
            value = math.nan

        if found is None or not math.isfinite(value):
            advice = (
                f"write one metric, one of {', '.join(_COMPARE)}, and a number: "
                "val_correct/all/mean >= 0.9"
            )
            raise Mismatch(f"is {show(text)}, not a condition on a metric", advice)

        return cls(found[1], found[2], value)

    @property
    def is_of_validation(self) -> bool:
        return re.match("val(_correct)?/|(sft|rm)/val_", self.metric) is not None

    def holds(self, value: float) -> bool:
        """Whether the value meets the condition; NaN never does."""
        return _COMPARE[self.operator](value, self.value)

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.value:.15g}"


def parse_stop_when(value: object) -> str | None:
    """A condition, or None. Raises Mismatch for anything else."""
    if value is None:
        return None
    return str(StopCondition.of(str(value)))


_OF_A_WORKER = ("worker_cpus", "worker_memory_mb", "worker_env")


def parse_worker_roles(value: object) -> Differing:
    """Settings of workers by role. Raises Mismatch."""
    form = "write e.g. {rollout: {worker_cpus: 8}, training: {worker_env: {A: 1}}}"
    keys = collect(TrainerConfig())
    return parse_differing(value, {name: keys[name] for name in _OF_A_WORKER}, form, of="role")


@dataclass(frozen=True)
class SlurmConfig:
    """The job of launcher=slurm: trainer.nnodes nodes, trainer.n_gpus_per_node GPUs each (none with
    device=cpu)."""

    partition: str | None = key(None, "partition of the job; null is the cluster's default")
    account: str | None = key(None, "account of the job; null is the user's default")
    time: str | None = key(
        None, "time after which the job is requeued, in quotes: '24:00:00'; null is the partition's"
    )
    cpus_per_node: int | None = key(
        None, "CPUs per node; null requests whole nodes (--exclusive)", minimum=1
    )
    args: tuple[str, ...] = key((), 'additional options of sbatch, e.g. ["--qos=high","--mem=0"]')


@dataclass(frozen=True)
class TrainerConfig:
    """The run as a whole."""

    project_name: str = key("my_project", "name of the project in trackers and folders")
    experiment_name: str = key("grpo_training", "name of the run")
    default_local_dir: str | None = key(
        None, "folder of the run; null is runs/<project_name>/<experiment_name>"
    )
    total_epochs: int = key(30, "passes over the training data", minimum=1)
    total_training_steps: int | None = key(
        None,
        "steps of the run; null: by total_epochs",
        minimum=1,
        advice="null lets total_epochs decide",
    )
    stop_when: str | None = key(
        None, "condition that ends the run, e.g. val_correct/all/mean >= 0.9", parse=parse_stop_when
    )
    critic_warmup: int = key(
        0, "number of initial steps that train only the critic", minimum=0, taken_by="critic"
    )
    val_before_train: bool = key(False, "validate before the first step")
    test_freq: int = key(5, "steps between validations; 0 or less for none", taken_by=BY_NAME)
    test_freq_epochs: int | None = key(
        None,
        "epochs between validations, in addition to test_freq",
        minimum=1,
        taken_by="validation",
    )
    test_freq_secs: float | None = key(
        None,
        "seconds between validations, in addition to test_freq",
        above=0,
        taken_by="validation",
    )
    save_freq: int = key(10, "steps between checkpoints; 0 or less for none")
    save_freq_epochs: int | None = key(
        None, "epochs between checkpoints, in addition to save_freq", minimum=1
    )
    save_freq_secs: float | None = key(
        None, "seconds between checkpoints, in addition to save_freq", above=0
    )
    keep_last: int = key(
        2, "number of recent checkpoints to keep", minimum=1, taken_by="checkpoints"
    )
    keep_best: bool = key(False, "also keep the checkpoint with the best validation result")
    keep_best_metric: str = key(
        "val_correct/all/mean",
        "metric of the best checkpoint (for a loss, the lowest)",
        taken_if=lambda own: own.keep_best,
    )
    save_hf_model: bool = key(
        False, "also save each checkpoint's policy as a Hugging Face folder", taken_by="checkpoints"
    )
    resume_mode: str = key(
        "auto", "auto (from the run's last checkpoint, if any), never, or a checkpoint's folder"
    )
    save_groups: str = key(
        "none",
        "dump all columns of steps to tokens/, as safetensors",
        choices=("none", "last_k", "all"),
    )
    save_groups_last: int = key(
        5,
        "number of steps that last_k keeps",
        minimum=1,
        taken_if=lambda own: own.save_groups == "last_k",
    )
    logger: tuple[str, ...] = key(
        ("console",),
        "trackers: one or a list (metrics.jsonl is always written)",
        choices=tuple(TRACKERS),
    )
    seed: int = key(1, "seed of new weights and of sampling", minimum=0, maximum=10**18)
    device: str = key(
        "auto",
        (
            "device of each worker: cpu, cuda, another of torch, or auto: what is there, and the "
            "CPU for one worker only"
        ),
    )
    num_threads: int | None = key(
        None, "torch's threads; null: all cores, or the rest after rollout.num_threads", minimum=1
    )
    imports: tuple[str, ...] = key(
        (), "user modules to import first, for estimators, losses, rewards, config groups"
    )
    launcher: str = key(
        "local",
        "how the workers are started",
        choices=tuple(LAUNCHERS),
        later=not_there_yet(LAUNCHERS),
    )
    nnodes: int = key(1, "machines (launcher=ray)", minimum=1, taken_by="several_processes")
    n_gpus_per_node: int = key(
        1, "devices per machine: GPUs, or with device=cpu CPU workers", minimum=1
    )
    allocation: str | None = key(
        None,
        (
            "engines and their devices, e.g. embedded[rollout]:d2+torch[actor]:d2; auto: searched; "
            "null: by the scheduler"
        ),
    )
    plan_from: str | None = key(
        None, "folder of a run whose measured times and lengths the plan of this run uses"
    )
    devices: tuple[tuple[int, ...], ...] = key(
        (),
        (
            "devices of each part, by number (launcher=ray); [] is all. A command with several "
            "configs sets it for each"
        ),
        taken_by="launched_elsewhere",
    )
    worker_cpus: int = key(
        1, "CPUs that each worker reserves (launcher=ray)", minimum=1, taken_by="launched_elsewhere"
    )
    worker_memory_mb: int | None = key(
        None,
        "MB of memory per worker (launcher=ray); null: that of a worker without a model",
        minimum=1,
        taken_by="launched_elsewhere",
    )
    worker_env: dict[str, str | int] = key(
        {},
        (
            "environment of the workers (launcher=ray), e.g. {NCCL_DEBUG: INFO}; no secrets: Ray "
            "and the run show them"
        ),
        taken_by="launched_elsewhere",
    )
    worker_roles: Differing = key(
        {},
        f"{', '.join(_OF_A_WORKER)} that differ for workers that only generate (rollout), all "
        "others (training), or those with an engine such as critic",
        parse=parse_worker_roles,
        taken_by="launched_elsewhere",
    )
    max_held_mb: int | None = key(
        None,
        "maximum MB of groups in shared memory (launcher=ray); null: half of Ray's store",
        minimum=1,
        taken_by="launched_elsewhere",
    )
    peers_timeout_s: float = key(
        1800.0,
        (
            "timeout of collectives of several processes; the run then stops and names the missing "
            "workers"
        ),
        above=0,
        taken_by="several_processes",
    )
    max_restarts: int = key(
        0,
        "restarts in place from the last checkpoint after a lost process (launcher=ray)",
        minimum=0,
        taken_by="launched_elsewhere",
    )
    slurm: SlurmConfig = group(SlurmConfig, taken_by="launched_elsewhere")

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        chosen = os.path.expanduser(self.default_local_dir or "")
        return Path(chosen or Path("runs", self.project_name, self.experiment_name))
