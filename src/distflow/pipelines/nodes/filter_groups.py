"""Nodes that drop groups without a learning signal, or that the user's function does not
accept."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from distflow.algorithms.group_filter import Band, drop_reason
from distflow.builtin_names import WHOLE_SCORE
from distflow.config import Config
from distflow.errors import UserError
from distflow.graph import Drop, NodeRole, node, node_factory
from distflow.import_target import LoadError, load_function
from distflow.pipelines.nodes.reward_samples import REJECTED
from distflow.rewards.reward_results import ACC


@node(role=NodeRole.DYNAMIC_SAMPLING, writes=())
def dynamic_sampling(
    acc: Tensor,
    scores: Tensor,
    valid: Tensor,
    reward_parts: list[dict[str, float]] | None = None,
    reward_errors: list[str | None] | None = None,
    domain: list[str] | None = None,
    *,
    metric: str,
    mean_range: Band | None = None,
    unfiltered: Sequence[str] = (),
) -> Drop | None:
    """DAPO (arXiv:2503.14476, equation 11): a group whose samples are all right or all wrong has no
    learning signal and is replaced; so is one whose mean is outside `mean_range`.

    metric: `acc` is that accuracy; `score` (or `seq_reward`) the whole score, including penalties;
    else a part of the reward. A sample with a reward error counts only with the whole score that
    `on_error` assigned, and one without the part does not count. unfiltered: domains whose groups
    are kept.
    """
    if domain and domain[0] in unfiltered:
        return None

    if reward_errors is not None and metric not in WHOLE_SCORE:
        valid = valid & torch.tensor([error is None for error in reward_errors])

    if metric in WHOLE_SCORE:
        acc = scores
    elif metric != ACC:
        if reward_parts is None:
            raise UserError(
                f"algorithm.filter_groups.metric={metric}: no node writes reward_parts; set it to "
                f"{ACC}"
            )

        acc = torch.tensor([part.get(metric, 0.0) for part in reward_parts], dtype=torch.float64)
        valid = valid & torch.tensor([metric in part for part in reward_parts])

    reason = drop_reason(acc, valid, mean_range)
    return Drop(reason) if reason else None


@node_factory
@node(role=NodeRole.DYNAMIC_SAMPLING, writes=())
def filter_groups(config: Config) -> Callable[..., object]:
    """The function of `algorithm.filter_groups.should_accept`. Raises UserError for an unusable
    one."""
    key = "algorithm.filter_groups.should_accept"
    target = str(config.algorithm.filter_groups.should_accept)
    try:
        function = load_function(target)
    except LoadError as error:
        raise UserError(f"{key}: {error}") from error

    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}={target} is an async function: use a synchronous one")

    @wraps(function)
    def accept(*columns: object, **named: object) -> Drop | None:
        return drop_unless(function(*columns, **named))

    return accept


def drop_unless(accepted: object) -> Drop | None:
    """accepted: the result of a `should_accept`; a str is the reason for rejecting the group."""
    if isinstance(accepted, str):
        return Drop(accepted)
    if accepted is None or bool(accepted):
        return None
    return Drop(REJECTED)
