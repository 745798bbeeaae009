"""Check: the rollout engine computes with the trainer's weights, and training reaches the weights
that the config names."""

import re

from torch import nn

from distflow.checks.check import NOT_APPLICABLE, Wrong, check, is_builtin
from distflow.checks.plain_forward import model_of
from distflow.checks.recorded_step import RecordedStep
from distflow.models.image_inputs import UNUSED
from distflow.models.lora import unwrapped
from distflow.training.multi_policy_engine import models_of


@check(
    "weights",
    "the rollout engine's tensors are the trainer's of the same version, cast to its dtype; with "
    "LoRA only adapters are trained, on all linear layers if target_modules=all-linear; without "
    "LoRA frozen weights cause a warning",
    needs="an engine on this worker; no unmerged adapter",
    limit="equal hashes of sampled elements of each tensor",
)
def check_weights(recorded: RecordedStep) -> str | None:
    resources = recorded.run.resources
    model = model_of(resources.actor) if is_builtin(type(resources.actor)) else None
    for own in models_of(model).values() if model is not None else ():
        _check_trained(recorded, own)
    if resources.rollout is None or resources.actor is None:
        generates = recorded.is_written("rollout_log_probs")
        return "the rollout engine is on another worker" if generates else NOT_APPLICABLE
    if not recorded.sent_hashes:
        return (
            "no weights were synced, or an adapter is applied unmerged, on the trainer's own "
            "storage"
        )
    found = recorded.run.engine_hashes()
    different = [name for name, own in recorded.sent_hashes.items() if found.get(name) != own]
    if different:
        raise Wrong(
            f"the rollout engine serves version {recorded.synced_version}, but {len(different)} of "
            f"its tensors are not the trainer's of that version ({', '.join(different[:4])}): they "
            "were not sent, or not loaded"
        )
    return None


def _check_trained(recorded: RecordedStep, model: nn.Module) -> None:
    """Check that all weights are trained (except sinusoidal positions), or all adapter weights and
    nothing else, and that an adapter is scaled by alpha over rank."""
    settings = recorded.config.actor_rollout_ref.model
    adapts = settings.lora_rank > 0
    left = getattr(unwrapped(model), UNUSED, ())
    odd = list[str]()
    is_trained = False
    for name, parameter in model.named_parameters():
        if "position" in name or name in left:
            continue
        if parameter.requires_grad != (not adapts or ".lora_" in name):
            is_trained = is_trained if odd else parameter.requires_grad
            odd.append(name)
    if odd:
        what = (
            f"{odd[0]} and {len(odd) - 1} more of the policy's weights are "
            f"{'trained' if is_trained else 'frozen'}"
        )
        if adapts:
            raise Wrong(f"{what}, but adapters and nothing else should be trained")
        recorded.run.warn(
            f"{what}, and no key freezes any: this is correct only if the model's own code freezes "
            "them"
        )
    if not adapts:
        return
    modules = dict(unwrapped(model).named_modules())
    expected = settings.lora_alpha / settings.lora_rank
    for name, module in modules.items():
        if not hasattr(module, "get_delta_weight"):
            continue
        for scale in getattr(module, "scaling", {}).values():
            if abs(scale - expected) > 1e-6 * expected:
                raise Wrong(
                    f"the adapter of {name} is scaled by {scale:g}, but lora_alpha / lora_rank is "
                    f"{expected:g}"
                )
    if settings.target_modules != "all-linear":
        return
    head = unwrapped(model).get_output_embeddings()
    plain = list[str]()
    for name, module in modules.items():
        is_adapter = re.search(r"\.base_layer$|\.lora_", name)
        if isinstance(module, nn.Linear) and module is not head and not is_adapter:
            plain.append(name)
    if plain:
        raise Wrong(
            f"target_modules is all-linear, but {plain[0]} and {len(plain) - 1} more have no "
            "adapter"
        )
