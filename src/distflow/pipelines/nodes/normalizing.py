"""Nodes that normalise what an estimator is given and what it gives (AReaL)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import on_last_token, sample_scores
from distflow.algorithms.normalization import Normalization
from distflow.config import Config
from distflow.config.watch import plain
from distflow.graph import node, node_factory
from distflow.training.collective import Collective


@node_factory
@node(writes="token_level_rewards")
def normalize_rewards(config: Config) -> Callable[..., object]:
    """Rewards of samples, by `algorithm.reward_norm`; a KL is taken off them afterwards."""
    return partial(normalized_rewards, norm=Normalization(**plain(config.algorithm.reward_norm)))  # type: ignore[arg-type]  # the config checks them


@node(writes="token_level_rewards")
def normalized_rewards(
    token_level_scores: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    episode_index: Tensor,
    valid: Tensor,
    reduce: Collective,
    *,
    norm: Normalization,
) -> Tensor:
    """One reward a sample, on its last policy token: float32 `(bs, response_length)`."""
    scores = sample_scores(token_level_scores, response_mask)[:, None]
    rewards = norm(scores, torch.ones_like(scores), group_index, valid, episode_index, reduce)
    return on_last_token(rewards[:, 0], response_mask)


@node_factory
@node(writes="advantages")
def normalize_advantages(config: Config) -> Callable[..., object]:
    """Advantages of tokens, by `algorithm.adv_norm`; the returns that a critic learns stay as they are."""
    return partial(normalized_advantages, norm=Normalization(**plain(config.algorithm.adv_norm)))  # type: ignore[arg-type]  # the config checks them


@node(writes="advantages")
def normalized_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    episode_index: Tensor,
    valid: Tensor,
    reduce: Collective,
    *,
    norm: Normalization,
) -> Tensor:
    """float32 `(bs, response_length)`."""
    return norm(advantages, response_mask, group_index, valid, episode_index, reduce).float()
