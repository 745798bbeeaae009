"""Draws prompts that the policy fails about half of the time more often: their responses differ, so
that they have the most to learn from.

    distflow train quickstart_grpo data.sampler=examples/half_failed.py:half_failed
"""

import numpy as np


def half_failed(history, count, generator):
    """A weight for each row: the variance of its mean score, 0.25 at a half, and a little more, so
    that no row is forgotten. Rows that were never drawn come first."""
    weights = 0.02 + history.mean_score * (1 - history.mean_score)
    return np.where(np.isnan(weights), 1.0, np.clip(weights, 0.02, None))
