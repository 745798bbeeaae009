"""Policy losses, one a file. Importing this registers them all."""

from distflow.algorithms.losses.cispo import compute_cispo_loss
from distflow.algorithms.losses.cpgd import compute_cpgd_loss
from distflow.algorithms.losses.decoupled import compute_decoupled_loss
from distflow.algorithms.losses.gmpo import compute_gmpo_loss
from distflow.algorithms.losses.gpg import compute_gpg_loss
from distflow.algorithms.losses.gspo import compute_gspo_loss
from distflow.algorithms.losses.sapo import compute_sapo_loss
from distflow.algorithms.losses.topr import compute_topr_loss
from distflow.algorithms.losses.vanilla import compute_vanilla_loss

__all__ = [
    "compute_cispo_loss",
    "compute_cpgd_loss",
    "compute_decoupled_loss",
    "compute_gmpo_loss",
    "compute_gpg_loss",
    "compute_gspo_loss",
    "compute_sapo_loss",
    "compute_topr_loss",
    "compute_vanilla_loss",
]
