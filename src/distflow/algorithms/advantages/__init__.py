"""Advantage estimators, one a file. Importing this registers them all."""

from distflow.algorithms.advantages.cpgd import compute_cpgd_advantage
from distflow.algorithms.advantages.gae import compute_gae_advantage
from distflow.algorithms.advantages.gpg import compute_gpg_advantage
from distflow.algorithms.advantages.grpo import compute_grpo_advantage
from distflow.algorithms.advantages.grpo_passk import compute_grpo_passk_advantage
from distflow.algorithms.advantages.gspo import compute_gspo_advantage
from distflow.algorithms.advantages.opo import compute_opo_advantage
from distflow.algorithms.advantages.reinforce import compute_reinforce_advantage
from distflow.algorithms.advantages.reinforce_plus_plus import compute_reinforce_plus_plus_advantage
from distflow.algorithms.advantages.reinforce_plus_plus_baseline import compute_reinforce_plus_plus_baseline_advantage
from distflow.algorithms.advantages.remax import compute_remax_advantage
from distflow.algorithms.advantages.rloo import compute_rloo_advantage

__all__ = [
    "compute_cpgd_advantage",
    "compute_gae_advantage",
    "compute_gpg_advantage",
    "compute_grpo_advantage",
    "compute_grpo_passk_advantage",
    "compute_gspo_advantage",
    "compute_opo_advantage",
    "compute_reinforce_advantage",
    "compute_reinforce_plus_plus_advantage",
    "compute_reinforce_plus_plus_baseline_advantage",
    "compute_remax_advantage",
    "compute_rloo_advantage",
]
