"""Keys of `trainer` (length, frequencies, folders, devices), `trust` (checks during a run), `profiler` and `async`."""

from dataclasses import dataclass
from pathlib import Path

from distflow.builtin_names import LAUNCHERS, TRACKERS, not_there_yet
from distflow.config.keys.declare import key


@dataclass(frozen=True)
class TrainerConfig:
    """The run as a whole."""

    project_name: str = key("my_project", "name of the group of runs in trackers and folders")
    experiment_name: str = key("grpo_training", "name of the run")
    default_local_dir: str | None = key(None, "folder of the run; null is runs/<project_name>/<experiment_name>")
    total_epochs: int = key(30, "passes over the training data", minimum=1)
    total_training_steps: int | None = key(
        None, "steps of the run; null goes by total_epochs", minimum=1, advice="null lets total_epochs decide"
    )
    critic_warmup: int = key(0, "steps in which only the critic learns", minimum=0)
    val_before_train: bool = key(False, "validate before the first step")
    test_freq: int = key(5, "validate every so many steps; 0 or less is never")
    save_freq: int = key(10, "save a checkpoint every so many steps; 0 or less is never")
    keep_last: int = key(2, "number of recent checkpoints to keep", minimum=1)
    keep_best: bool = key(False, "also keep the checkpoint that validated best")
    keep_best_metric: str = key(
        "val_correct/all/mean", "metric that chooses the best checkpoint (the lowest of a loss)"
    )
    resume_mode: str = key("auto", "auto (from the run's last checkpoint, if any), never, or a checkpoint's folder")
    save_groups: str = key(
        "none", "dump all columns of steps to tokens/, as safetensors", choices=("none", "last_k", "all")
    )
    save_groups_last: int = key(5, "number of steps that last_k keeps", minimum=1)
    logger: tuple[str, ...] = key(
        ("console",), "trackers: one or a list (metrics.jsonl is always written)", choices=tuple(TRACKERS)
    )
    seed: int = key(1, "seed of fresh weights and of sampling", minimum=0)
    device: str = key("auto", "device to run on", choices=("auto", "cpu", "cuda"))
    num_threads: int | None = key(
        None, "threads of torch; null is all cores, or what rollout.num_threads leaves", minimum=1
    )
    imports: tuple[str, ...] = key(
        (), "user modules to import first: they register estimators, losses, rewards, groups"
    )
    launcher: str = key("local", "what starts the workers", choices=tuple(LAUNCHERS), later=not_there_yet(LAUNCHERS))
    nnodes: int = key(1, "machines (launcher=ray)", minimum=1)
    n_gpus_per_node: int = key(1, "devices of any kind on each, CPU workers too (launcher=ray)", minimum=1)
    allocation: str | None = key(
        None,
        "which engines run on how many devices (launcher=ray), e.g. embedded[rollout]:d2+torch[actor]:d2; null leaves "
        "it to the scheduler",
    )
    worker_cpus: int = key(1, "CPUs that each worker takes of its machine (launcher=ray)", minimum=1)
    worker_memory_mb: int | None = key(
        None,
        "MB of memory that each worker takes of its machine; null is the size of one without a model (launcher=ray)",
        minimum=1,
    )
    worker_env: dict[str, str | int] = key(
        {},
        "environment variables of the workers' processes, e.g. {NCCL_DEBUG: INFO}; not secrets: Ray and the run "
        "show them (launcher=ray)",
    )
    max_held_mb: int | None = key(
        None,
        "MB of groups that may wait in shared memory; above it only groups of the next step start; null is "
        "half of Ray's object store (launcher=ray)",
        minimum=1,
    )
    peers_timeout_s: float = key(
        1800.0,
        "timeout of collectives (launcher=ray): the run then stops and names the workers that are missing",
        above=0,
    )

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.default_local_dir or Path("runs", self.project_name, self.experiment_name))


@dataclass(frozen=True)
class TrustConfig:
    """Checks during a run."""

    canary_freq: int = key(
        1, "compare engine and trainer on fixed prompts every so many weight syncs; 0 is never", minimum=0
    )
    audit_freq: int = key(20, "audit every so many steps, and at start and resume; 0 is never", minimum=0)
    on_mismatch: str = key(
        "correct",
        "if rollout and trainer log-probs diverge: weigh each token by their ratio from then on, stop, or only warn",
        choices=("correct", "stop", "warn"),
    )
    max_skipped_updates: int = key(
        5, "stop after so many consecutive updates with a loss that is not finite", minimum=1
    )
    unmoved_after: int = key(20, "warn of a weight that has not changed after so many updates", minimum=1)
    check_rewards: bool = key(
        True, "before the start, test that reward functions accept good responses and reject bad ones"
    )


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces of kernels."""

    enable: bool = key(False, "record traces of the devices", later=True)


@dataclass(frozen=True)
class AsyncConfig:
    """How far rollout may run ahead of training."""

    max_staleness: int = key(0, "largest staleness of a sample in steps; 0 is synchronous", minimum=0)
    max_concurrent_rollouts: int | None = key(
        None, "prompt groups in flight at once; null is max_staleness + 1 steps of them", minimum=1
    )
