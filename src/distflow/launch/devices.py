"""The devices that a run computes on, and the dtype of its models there."""

import os
from collections import Counter
from collections.abc import Callable
from typing import cast

import torch

from distflow.builtin_names import GPUS_OF_CLUSTER
from distflow.config import Config, Loaded
from distflow.config.compose.load_config import with_changes
from distflow.config.derived_settings import is_one_process, offload_keys
from distflow.errors import UserError
from distflow.import_target import load
from distflow.launch.threads import own_cores
from distflow.models.cpu_kernels.build import NotNative, outcome
from distflow.observe.sanitized_output import escape_control
from distflow.planning.allocation_expression import follow_allocation


def follow_machines(loaded: Loaded) -> Loaded:
    """The config with the settings that its allocation implies. With several workers or a cluster,
    `trainer.device` is resolved too: `auto` becomes torch's accelerator (cuda over Ray), or, for a
    single worker without one, the CPU. Raises UserError for devices that are not there."""
    loaded = follow_allocation(loaded)
    trainer = loaded.config.trainer
    is_local = trainer.launcher == "local"
    size = trainer.n_gpus_per_node
    if is_one_process(loaded.config) or trainer.launcher == "slurm" or trainer.device == "cpu":
        return loaded

    if is_local:
        gpus = [torch.accelerator.device_count()]
    else:
        gpus = cast(Callable[[], list[int]], load(GPUS_OF_CLUSTER))()

    has_enough = sum(number >= size for number in gpus) >= trainer.nnodes
    has = []
    for number, machines in sorted(Counter(gpus).items(), reverse=True):
        if number:
            has.append(f"{number} GPU(s) on {machines} machine(s)")

    why = (
        f"the workers need {size} GPU(s) on {trainer.nnodes} machine(s); "
        f"{'torch' if is_local else 'Ray'} has {', '.join(has) or 'no GPU'}"
    )

    if not has_enough and (trainer.device != "auto" or trainer.nnodes * size > 1):
        raise UserError(
            f"trainer.device={trainer.device}: {why}: lower trainer.nnodes, "
            "trainer.n_gpus_per_node or trainer.allocation, or set trainer.device=cpu for workers "
            "that compute on the CPU"
        )
    if trainer.device != "auto":
        return loaded

    found = accelerator() if is_local else "cuda"
    device = found if found and has_enough else "cpu"
    return with_changes(loaded, [("trainer.device", device, why)])


def choose_device(config: Config) -> torch.device:
    """The device of `trainer.device` on this machine, or on those of the workers
    (`follow_machines`); a Slurm job gets GPUs unless it is cpu. Raises UserError if this machine
    must compute but lacks it."""
    wanted = config.trainer.device
    if config.trainer.launcher == "slurm":
        return torch.device("cpu" if wanted == "cpu" else "cuda")

    found = accelerator()
    if wanted == "auto":
        return torch.device(found or "cpu")

    is_elsewhere = wanted == "cuda" and config.trainer.launcher != "local"
    if wanted in ("cpu", found) or is_elsewhere:
        return torch.device(wanted)

    more = ""
    if wanted == "gpu":
        more = " (torch calls the GPUs of NVIDIA and AMD cuda)"

    raise UserError(
        f"trainer.device={wanted}, but torch finds no {wanted} device here: set "
        f"trainer.device=auto or {found or 'cpu'}{more}"
    )


def accelerator() -> str | None:
    """The type of torch's accelerator here, e.g. cuda; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def choose_dtype(config: Config) -> str:
    """The dtype of `model.dtype` on the run's device: most CPUs are slow in bfloat16."""
    wanted = config.actor_rollout_ref.model.dtype
    if wanted != "auto":
        return wanted
    if choose_device(config).type == "cpu":
        return "float32"
    return "bfloat16"


def follow_device(loaded: Loaded) -> Loaded:
    """The config with `auto` replaced by the dtype of `choose_dtype`."""
    dtype = choose_dtype(loaded.config)
    device = choose_device(loaded.config).type
    if dtype == loaded.config.actor_rollout_ref.model.dtype:
        return loaded
    why = f"the run is on a {'CPU' if device == 'cpu' else 'GPU'}"
    return with_changes(loaded, [("actor_rollout_ref.model.dtype", dtype, why)])


def refuse_offload_here(config: Config, device: torch.device) -> None:
    """Raises UserError for a key that offloads to host memory if the device is the host."""
    if device.type == "cpu" and (keys := offload_keys(config)):
        raise UserError(
            f"{', '.join(keys)}: on a CPU all data is in host memory already "
            f"(trainer.device={config.trainer.device} is a CPU here): leave "
            f"{'it' if len(keys) == 1 else 'them'} out"
        )


def describe_hardware() -> list[str]:
    """Cores, memory, native code and accelerators of this machine, one line each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    native = outcome()
    by_native = "yes"
    if isinstance(native, NotNative):
        by_native = f"no, and torch is several times slower: {native}"

    names = torch.get_device_module()
    devices = [names.get_device_name(i) for i in range(torch.accelerator.device_count())]
    return [
        (
            f"{os.cpu_count()} cores, {own_cores()} of them for this process, "
            f"{memory / 1024**3:.0f} GiB memory"
        ),
        f"native code for generation on the CPU: {escape_control(by_native, one_line=True)}",
        f"accelerators: {', '.join(devices) or 'none'}",
    ]
