"""The hardware that a run computes on: its device, and its cores for training and generation."""

import torch

from distflow.config import Config
from distflow.config.derived_settings import is_rl, offload_keys
from distflow.errors import UserError
from distflow.planning.threads import share_threads, usable_cores


def choose_device(config: Config) -> torch.device:
    """The device that `trainer.device` means on this machine. Raises UserError where it has none of that kind."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device=cuda, but torch finds no CUDA device here: set trainer.device=auto or cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)


def refuse_offload_here(config: Config, device: torch.device) -> None:
    """Raises UserError for a key that offloads to the host's memory where the device is the host."""
    if device.type == "cpu" and (keys := offload_keys(config)):
        raise UserError(
            f"{', '.join(keys)}: a CPU's data are in the host's memory already (trainer.device="
            f"{config.trainer.device} is a CPU here): leave {'it' if len(keys) == 1 else 'them'} out"
        )


def threads_of(config: Config) -> tuple[int | None, int | None]:
    """Threads of (training, generation) in each worker. None for training: torch's default, or a worker's share of
    its machine. None for generation: the training thread generates while it waits."""
    if not is_rl(config) or config.async_.max_staleness == 0:
        return config.trainer.num_threads, None
    trainer, rollout = config.trainer.num_threads, config.actor_rollout_ref.rollout.num_threads
    return share_threads(worker_cores(config), trainer, rollout)


def worker_cores(config: Config) -> int:
    """Cores for each worker of a machine."""
    beside = config.trainer.n_gpus_per_node if config.trainer.launcher == "ray" else 1
    return max(1, usable_cores() // beside)
