"""Check: the weights of a new run are those of the model's files."""

import random
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.plain_forward import model_of
from distflow.checks.recorded_step import CheckedRun
from distflow.models.lora import plain_name, unwrapped
from distflow.models.model_paths import resolve_path
from distflow.training.multi_policy_engine import models_of

NUM_ROWS = 4
FLOATS = ("F64", "F32", "F16", "BF16")


@check(
    "loaded",
    "at the start the policy's weights equal those of the same name in the model's files",
    needs="a folder with safetensors in floating point, without code of its own; whole weights",
    limit=f"equal, {NUM_ROWS} rows of each tensor",
)
def check_loaded(run: CheckedRun) -> str | None:
    settings = run.spec.config.actor_rollout_ref.model
    model = model_of(run.resources.actor)
    has_files = settings.init != "random" and settings.path is not None
    if model is None or not has_files or run.inputs.resumed is not None:
        return NOT_APPLICABLE
    if settings.trust_remote_code or settings.gguf_file:
        return "the run does not begin with safetensors alone"
    first = unwrapped(next(iter(models_of(model).values())))
    own = dict[str, Tensor]()
    for name, parameter in first.named_parameters():
        if not isinstance(parameter, DTensor):
            own[plain_name(name)] = parameter.detach()
    folder = Path(resolve_path(str(settings.path)))
    paths = sorted(folder.glob("model.safetensors"))
    num_same = 0
    for path in paths or sorted(folder.glob("model-*-of-*.safetensors")):
        num_same += _num_same(path, own)
    return None if num_same else "the model's path has no tensors of the same names"


def _num_same(path: Path, own: dict[str, Tensor]) -> int:
    """The number of tensors of the file that were compared."""
    number = 0
    with safe_open(path, "pt") as file:
        for name in own.keys() & set(file.keys()):
            kept = file.get_slice(name)
            weight = own[name]
            is_float = kept.get_dtype() in FLOATS
            if not is_float or weight.dim() == 0 or tuple(kept.get_shape()) != weight.shape:
                continue
            start = random.Random(name).randrange(max(len(weight) - NUM_ROWS, 0) + 1)
            rows = slice(start, start + NUM_ROWS)
            if not torch.equal(kept[rows].to(weight.dtype), weight[rows].cpu()):
                raise Wrong(
                    f"{name} of the policy is not what {path} has: it was loaded from another "
                    "model, or rounded, scaled or changed after it was loaded"
                )
            number += 1
    return number
