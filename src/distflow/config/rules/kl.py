"""Rules of the KL to the reference: its coefficients, and the controller of that in the reward."""

from distflow.config.keys.schema import Config
from distflow.config.rules import Finding, Findings

_CONTROL = "algorithm.kl_ctrl"
_IN_REWARD = "algorithm.use_kl_in_reward"


def adaptive_controller(config: Config) -> Findings:
    """The adaptive controller has its target and horizon."""
    control = config.algorithm.kl_ctrl
    kind = "algorithm.kl_ctrl.type"
    if control.type != "adaptive":
        return

    for name, example in (("target_kl", "0.1"), ("horizon", "10000")):
        if getattr(control, name) is None:
            advice = f"set algorithm.kl_ctrl.{name}={example}, or {kind}=fixed"
            yield Finding(
                (f"algorithm.kl_ctrl.{name}", kind), "the adaptive controller needs it", advice
            )


RULES = (adaptive_controller,)
