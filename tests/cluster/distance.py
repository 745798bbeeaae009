"""How far the weights of two runs are apart."""

import torch
from torch import Tensor


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """‖Δw‖ / ‖w‖ over all weights."""
    assert ours.keys() == theirs.keys()
    difference = torch.cat(
        [(ours[name].double() - theirs[name].double()).flatten() for name in theirs]
    )
    return float(
        difference.norm() / torch.cat([w.double().flatten() for w in theirs.values()]).norm()
    )
