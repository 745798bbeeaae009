"""GSPO (Zheng et al. 2025, arXiv:2507.18071) takes GRPO's advantages; what is its own is the loss of that name."""

from distflow.algorithms.advantages.grpo import compute_grpo_advantage, describe_grpo
from distflow.algorithms.registry import register_adv_est

compute_gspo_advantage = register_adv_est("gspo", scope="global", describe=describe_grpo)(compute_grpo_advantage)
