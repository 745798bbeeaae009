"""Check: the loss is on exactly the policy's tokens of samples that are trained on."""

import torch

from distflow.checks.check import check, check_tokens
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import Sample
from distflow.config.derived_settings import algorithm_of

ON_DRAWN = ": it is 1 on exactly the tokens that the policy generated"


@check(
    "masks",
    "loss_mask covers exactly the tokens that the policy generated, of samples that have a score "
    "and are not left out",
    needs="no custom node that writes loss_mask",
    limit="equal",
)
def check_masks(recorded: RecordedStep) -> str | None:
    if recorded.is_written("loss_mask") and not recorded.is_ours("loss_mask"):
        return "a user's node writes loss_mask"
    for sample in recorded.samples:
        _check_loss_mask(recorded, sample)
    return None


def _check_loss_mask(recorded: RecordedStep, sample: Sample) -> None:
    algorithm = algorithm_of(recorded.config, sample["domain"])
    left_out = ""
    if not sample["valid"]:
        left_out = "has no score"
    elif algorithm.mask_truncated and bool(sample["truncated"]):
        left_out = "is truncated (mask_truncated)"
    elif algorithm.mask_max_turns and sample["finish_reason"] == "max_turns":
        left_out = "reached its limit of turns (mask_max_turns)"

    drawn = (sample["versions"] >= 0).float()
    expected = torch.zeros_like(drawn) if left_out else drawn
    wrong = sample["loss_mask"] != expected
    may_be_less = (
        algorithm.mask_long_errors is not None
        or algorithm.difficulty_mask is not None
        or algorithm.mask_type == "all"
        or bool(recorded.config.algorithm.rollout_correction.rollout_rs)
    )
    if may_be_less:
        wrong = wrong & (sample["loss_mask"] != 0)
    reason = f"{ON_DRAWN}, if the sample is trained on, and this one {left_out or 'is'}"
    check_tokens(sample, "loss_mask", expected, wrong, reason)
