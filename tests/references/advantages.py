"""The reference of each built-in estimator, by its name under which its file registers it."""

from collections.abc import Callable

from tests.references import group_advantages, token_advantages
from tests.references.samples import Advantages

REFERENCES: dict[str, Callable[..., Advantages]] = {
    "gae": token_advantages.gae,
    "gae_marft": token_advantages.gae_marft,
    "grpo": group_advantages.grpo,
    "rloo": group_advantages.rloo,
    "reinforce": token_advantages.reinforce,
    "reinforce_plus_plus": token_advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": group_advantages.reinforce_plus_plus_baseline,
    "remax": token_advantages.remax,
    "opo": group_advantages.opo,
    "cpgd": group_advantages.grpo,
    "gspo": group_advantages.grpo,
    "gpg": group_advantages.gpg,
    "grpo_passk": group_advantages.grpo_passk,
    "grpo_turns": token_advantages.grpo_turns,
    "gdpo": group_advantages.gdpo,
}
"""(samples, **options) → (advantages, returns); defaults are those that the docs promise."""
