"""`distflow doctor --device`: finds problems of a first run on an accelerator. Each check compares
the device with the CPU, and reports in one line what it found and what to do."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes
from transformers import PreTrainedModel

from distflow.commands.selftest.pairs import FAILED, LEFT_OUT, OK, Pair, compare
from distflow.commands.selftest.runs import Lab, write_models
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.errors import TrustError, UserError, first_line
from distflow.launch.devices import accelerator
from distflow.models.loading import load_model
from distflow.rollout.conformance import Finding
from distflow.training.torch_engine import TorchScorer

EXACT: Final = 1e-4
"""Limit for float32 against the CPU. Sums in another order differ by 1e-6; products rounded to TF32
by 1e-3."""
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_LENGTHS: Final = ((5, 9), (1, 14), (12, 1), (8, 30), (3, 64), (40, 33))
_MOST_RANKS: Final = 8
_NUMBERS: Final = 2**20
_DEADLINE_S: Final = 60.0
_STEPS: Final = 2

Result = tuple[str, str]
"""The outcome, and its figures or what to do."""


def check_device(config: Config, folder: Path) -> Iterator[Finding]:
    """Yields each finding once made; only the first if there is no device to check. folder: an
    empty one."""
    found = find_device(config.trainer.device, config.trainer.n_gpus_per_node)
    yield found

    kind = accelerator()
    if found.outcome == OK and kind is not None:
        write_models(folder)
        subject = Subject(torch.device(kind), folder)
        yield from (try_check(name, subject) for name in CHECKS)


def find_device(wanted: str, count: int = 1) -> Finding:
    """The devices of `trainer.device`, of which `count` are needed; "left out" if it is the CPU and
    there is no other."""
    found = accelerator()
    driver = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text() if _DRIVER.is_file() else "")
    if found is None and driver:
        return Finding(
            "device",
            FAILED,
            f"there is the NVIDIA driver {driver[1]}, but torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) finds no device: install a build for a CUDA that the driver "
            "knows (nvidia-smi shows it), or look at CUDA_VISIBLE_DEVICES",
        )

    if wanted not in ("auto", "cpu", found):
        has = f"only {found}" if found else "no accelerator"
        text = f"trainer.device={wanted}, but torch finds {has} here: set trainer.device=auto"
        return Finding("device", FAILED, text)

    if found is None or wanted == "cpu":
        text = "torch finds no accelerator here, or trainer.device=cpu: runs compute on the CPU"
        return Finding("device", LEFT_OUT, text)

    number = torch.accelerator.device_count()
    name = torch.get_device_module(found).get_device_name()
    free, total = torch.accelerator.get_memory_info()
    text = f"{number} of {found}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if number < count:
        text += f", and trainer.n_gpus_per_node={count}: lower it, or see CUDA_VISIBLE_DEVICES"
    return Finding("device", OK if number >= count else FAILED, text)


@dataclass(frozen=True)
class Subject:
    """The device, and a folder with tiny models, of which `policy` is compared on both sides."""

    device: torch.device
    folder: Path

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        return {
            device: load_model(self.folder / "policy", device=device)
            for device in ("cpu", self.device.type)
        }

    def log_probs(self, device: str, dtype: torch.dtype) -> Tensor:
        """The trainer's log-probs of random tokens."""
        draws = torch.Generator().manual_seed(0)
        prompts, responses = torch.tensor(_LENGTHS).unbind(1)
        batch = Batch(prompts, responses)
        vocabulary = self.models["cpu"].config.vocab_size
        for name, lengths in (("prompt_ids", prompts), ("response_ids", responses)):
            batch[name] = torch.randint(vocabulary, (int(lengths.sum()),), generator=draws)
        scorer = TorchScorer(self.models[device], compute_dtype=dtype)

        return scorer.forward(batch, ("log_probs",)).flat("log_probs").double()


def try_check(name: str, subject: Subject) -> Finding:
    check = CHECKS[name]
    try:
        outcome, text = check.run(subject)
    except (RuntimeError, UserError, TrustError) as error:  # torch's errors are RuntimeErrors
        outcome = FAILED
        text = f"{type(error).__name__}: {first_line(error)}"

    return Finding(name, outcome, f"{text}: {check.advice}" if outcome == FAILED else text)


def _log_probs(subject: Subject, dtype: torch.dtype) -> Result:
    """The error against float32 on the CPU: the maximum in float32, the mean in bfloat16."""
    ones = torch.ones(2, 2, device=subject.device)
    with torch.autocast(ones.device.type, dtype=dtype, enabled=dtype != torch.float32):
        computed = (ones @ ones).dtype
    if computed != dtype:
        return FAILED, f"products under autocast are in {computed}"

    exact = subject.log_probs("cpu", torch.float32)
    errors = (subject.log_probs(subject.device.type, dtype) - exact).abs()

    error = float(errors.max())
    limit = EXACT
    if dtype != torch.float32:
        rounded = subject.log_probs("cpu", dtype)
        error = float(errors.mean())
        limit = 2 * float((rounded - exact).abs().mean()) + 1e-3

    text = f"they differ by {error:.1e} from float32 on the CPU (limit {limit:.1e})"
    return OK if error <= limit else FAILED, text


def _collectives(subject: Subject) -> Result:
    """One process per device, at most eight."""
    size = min(torch.accelerator.device_count(), _MOST_RANKS)
    arguments = (subject.device.type, size, str(subject.folder / "meeting"))
    ranks = start_processes(_reduce, arguments, size, join=False, start_method="spawn")
    assert ranks is not None

    due = time.monotonic() + _DEADLINE_S
    try:
        while not ranks.join(1.0):
            if time.monotonic() > due:
                return FAILED, f"a rank did not finish within {_DEADLINE_S:.0f} s"
    except Exception as error:
        return FAILED, str(error).strip().splitlines()[-1]
    finally:
        for process in ranks.processes:
            process.kill()

    return OK, f"all_reduce and reduce_scatter on {size} rank(s)"


def _reduce(rank: int, device: str, size: int, store: str) -> None:
    """Runs in each rank's process. Raises RuntimeError for wrong sums."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.accelerator.set_device_index(rank)
    backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    meeting = dist.FileStore(store, size)
    timeout = timedelta(seconds=_DEADLINE_S)
    dist.init_process_group(backend, timeout=timeout, world_size=size, rank=rank, store=meeting)
    whole = torch.full((size * _NUMBERS,), float(rank + 1), device=torch.device(device, rank))
    part = whole.new_empty(_NUMBERS)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_reduce(whole)
    expected = float(size * (size + 1) // 2)
    if not (whole == expected).all() or not (part == expected).all():
        raise RuntimeError(f"sums over {backend} are wrong")
    dist.destroy_process_group()


def _train(subject: Subject) -> Result:
    """Rollout, reward, advantages, updates and a checkpoint of the selftest's run, on both
    devices."""
    lab = Lab.of(subject.folder / "grpo", "grpo", _STEPS)
    pair = Pair("device", EXACT, partial(lab.on_device, subject.device.type))
    found = compare("device", partial(lab.on_device, "cpu"), pair)
    return found.outcome, found.text


class Check(NamedTuple):
    """advice: what to do if it fails."""

    run: Callable[[Subject], Result]
    advice: str


_OTHER_TORCH: Final = (
    "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE if it is set; install a build of torch for this device "
    "(https://pytorch.org/get-started); if that does not help, test the device"
)
CHECKS: Final[dict[str, Check]] = {
    "log-probs, float32": Check(partial(_log_probs, dtype=torch.float32), _OTHER_TORCH),
    "log-probs, bfloat16": Check(partial(_log_probs, dtype=torch.bfloat16), _OTHER_TORCH),
    "collectives": Check(
        _collectives, "train on one device until they work; NCCL_DEBUG=INFO says more"
    ),
    "GRPO steps": Check(
        _train,
        "do not train on this device, unless a config with "
        "actor_rollout_ref.rollout.enforce_eager=true, or rollout.name=hf, passes",
    ),
}
"""The checks by name, in order."""
