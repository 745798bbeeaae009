"""Low-rank adapters through `peft` (LoRA, Hu et al. 2021, arXiv 2106.09685), which is imported on
demand."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.errors import UserError, hint
from distflow.models.model_folder import require_files
from distflow.observe.crash_safe_files import read_object

ADAPTER_CONFIG = "adapter_config.json"


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: float = 16,
    target_modules: str | Sequence[str] = "all-linear",
    seed: int = 0,
    name: str = "default",
) -> nn.Module:
    """Freeze the model and put a trainable adapter of that rank on its linear layers.

    W x becomes W x + (alpha / rank) · B A x, with B = 0 at the start. target_modules: "all-linear"
    (all but the output head), or names of modules. The adapter's weights are float32 and depend
    only on `seed`. A model that this function returned gets one more, by another name, which is
    then the one in use. Raises UserError if `peft` is not installed or no module has such a name.
    """
    require_peft()
    if target_modules != "all-linear":
        check_targets(model, target_modules)
    from peft import LoraConfig, get_peft_model

    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        # PEFT names it for a model's first adapter only
        base_model_name_or_path=unwrapped(model).name_or_path,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not has_adapter(model):
            return get_peft_model(model, config, adapter_name=name)
        model.add_adapter(name, config)
        model.set_adapter(name)
        return model


def require_peft() -> None:
    """Raises UserError if `peft` is not installed."""
    if find_spec("peft") is None:
        raise UserError("lora_rank > 0 needs the extra: pip install 'distflow[lora]'")


def check_targets(model: nn.Module, target_modules: str | Sequence[str]) -> None:
    """Raises UserError for a target that matches no layer. The model needs no weights."""
    modules = dict(model.named_modules())
    linear = {
        name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)
    }
    is_pattern = isinstance(target_modules, str)

    for target in [target_modules] if isinstance(target_modules, str) else target_modules:
        try:
            pattern = re.compile(target if is_pattern else rf"(.*\.)?{re.escape(target)}")
        except re.error as error:
            raise UserError(f"'{target}' is not a regular expression ({error})") from error

        if not any(map(pattern.fullmatch, modules)):
            if target in linear:
                advice = f"; for all layers of that name write [{target}]"
            else:
                advice = hint(target, linear)
            raise UserError(f"'{target}' matches no layer of the model{advice}")


def base_of_adapter(folder: str) -> str | None:
    """The base model of the adapter in a folder that `peft` wrote; None for another folder. Raises
    UserError if it is not a LoRA adapter in safetensors, or names no model."""
    if not (Path(folder) / ADAPTER_CONFIG).is_file() or (Path(folder) / "config.json").is_file():
        return None

    require_files(folder, ("adapter_model.safetensors",), "adapter weights")
    config = read_object(Path(folder) / ADAPTER_CONFIG, Path(folder))

    base = config.get("base_model_name_or_path")
    if config.get("peft_type") != "LORA" or not isinstance(base, str) or not base:
        raise UserError(
            f"{ADAPTER_CONFIG} in '{folder}' is not that of a LoRA adapter that names its base "
            "model"
        )

    return base


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with a folder's adapter merged into its weights."""
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(model, folder, use_safetensors=True)
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return merged.requires_grad_(True)


def unwrapped(model: nn.Module) -> Any:
    """The `transformers` model itself, below an adapter's wrapper; its adapted layers stay in
    place."""
    # peft's
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def has_adapter(model: nn.Module) -> bool:
    """Whether the model carries an adapter of `add_lora`."""
    return hasattr(model, "disable_adapter")


def adapter_off(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the adapter is off: the model is the frozen reference. A plain model is unchanged."""
    # peft's
    return model.disable_adapter() if has_adapter(model) else nullcontext()  # type: ignore[operator]


def plain_name(name: str) -> str:
    """The Hugging Face name of a weight below an adapter; other names stay."""
    return name.replace(".base_layer.", ".")


def adapter_config(model: nn.Module) -> dict[str, Any] | None:
    """Rank, scale and modules of the model's adapter, by PEFT's names; None for a model without
    one."""
    if not has_adapter(model):
        return None

    config: Any = model.peft_config["default"]  # type: ignore[index]  # peft's
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(config.target_modules),
    }


def named_weights(model: nn.Module, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The weights by their Hugging Face names, tied ones once, adapters merged into copies of the
    adapted weights.

    Other weights are the model's own storage. merge: False yields the weights below the adapters,
    and the adapters' own by their names in the module.
    """
    causal: nn.Module = unwrapped(model)
    if not merge:
        yield from (
            (plain_name(name), parameter.detach()) for name, parameter in causal.named_parameters()
        )
        return

    adapted = {
        name: module
        for name, module in causal.named_modules()
        if hasattr(module, "get_delta_weight")
    }

    for name, parameter in causal.named_parameters():
        owner, _, leaf = name.partition(".base_layer.")
        if leaf:
            merged = parameter.detach()
            if leaf == "weight":
                merged = merged + _delta(adapted[owner]).to(merged.dtype)
            yield f"{owner}.{leaf}", merged
        elif ".lora_" not in name:
            yield name, parameter.detach()


@torch.no_grad()
def _delta(module: Any) -> Tensor:
    """What the active adapters of a layer add to its weight."""
    return torch.stack(
        [module.get_delta_weight(adapter) for adapter in module.active_adapters]
    ).sum(0)
