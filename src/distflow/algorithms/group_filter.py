"""Groups without a learning signal (dynamic sampling of DAPO, arXiv:2503.14476)."""

from torch import Tensor

ALL_EQUAL = "all_equal"
TOO_LARGE = "too_large"
TOO_FEW_SCORES = "too_few_scores"
MEAN_TOO_LOW = "mean_too_low"
MEAN_TOO_HIGH = "mean_too_high"
Band = tuple[float, float]


def drop_reason(
    metric: Tensor, valid: Tensor | None = None, mean_range: Band | None = None
) -> str | None:
    """Why a group has no learning signal, or None if it has one.

    metric: `(n,)`, one value per sample. Reasons: `too_few_scores` (fewer than two valid samples),
    `all_equal` (all valid samples have the same metric), `too_large` (the same, of 2^53 or more,
    where float64 has no odd numbers, so that they may have differed), and `mean_too_low` or
    `mean_too_high` (the mean is outside the range).
    """
    known = metric if valid is None else metric[valid.bool()]
    if known.numel() < 2:
        return TOO_FEW_SCORES
    if bool(known.max() == known.min()):
        if abs(float(known.max())) < 2.0**53:
            return ALL_EQUAL
        return TOO_LARGE
    if mean_range is None:
        return None

    mean = float(known.double().mean())
    if mean <= mean_range[0]:
        return MEAN_TOO_LOW
    if mean >= mean_range[1]:
        return MEAN_TOO_HIGH

    return None
