"""Claim: the coefficient of the KL in the reward is the config's, or moves by the controller's rule."""

from distflow.runtime.audit.check import Check, Wrong
from distflow.runtime.audit.evidence import Evidence

LIMIT = 1e-4


def prove(evidence: Evidence) -> str | None:
    control = evidence.config.algorithm.kl_ctrl
    if not evidence.config.algorithm.use_kl_in_reward or not evidence.is_written("token_level_rewards"):
        return ""
    found = evidence.metrics.get("actor/kl_coef")
    if found is None:
        return "the program does not tell its coefficient"
    before = evidence.state.get("kl_control")
    if control.type == "fixed" or (before is None and evidence.step == 0):
        expected = control.kl_coef
    elif before is None or before["step"] != evidence.step - 1:
        return "the step before was not seen"
    else:
        assert control.target_kl is not None and control.horizon is not None, "the config's rules see to it"
        error = min(max(before["kl"] / control.target_kl - 1.0, -0.2), 0.2)
        expected = max(before["coefficient"] * (1.0 + error * before["samples"] / control.horizon), 0.0)
    if not abs(found - expected) <= LIMIT * max(abs(expected), 1e-12):
        raise Wrong(
            f"the KL in the reward has the coefficient {found:.6g}, but it should be {expected:.6g} in this step"
        )
    return None


CHECK = Check(
    "kl_control",
    "the coefficient of the KL in the reward is the config's, or what the adaptive controller makes of the last "
    "step's KL "
    "(arXiv:1909.08593)",
    "a program with the KL in the reward, and the step before in this process or its checkpoint",
    f"{LIMIT:g} relative",
    prove,
)
