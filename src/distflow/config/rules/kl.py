"""Rules of the KL to the reference: its coefficients, and the controller of that in the reward."""

from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, Finding, Findings
from distflow.config.rules.idle_options import find_idle

_CONTROL = "algorithm.kl_ctrl"
_IN_REWARD = "algorithm.use_kl_in_reward"
_NO_WEIGHT = "the term is on but has the weight 0"


def controller(config: Config) -> Findings:
    """Without a KL in the reward there is nothing to control."""
    if not config.algorithm.use_kl_in_reward:
        why = "there is no KL in the reward to control"
        yield from find_idle(config, _IN_REWARD, "true", why, "algorithm.kl_ctrl.type")


def adaptive_controller(config: Config) -> Findings:
    """The adaptive controller has its target and horizon, which a fixed coefficient ignores."""
    control = config.algorithm.kl_ctrl
    kind = "algorithm.kl_ctrl.type"
    if control.type != "adaptive":
        names = (
            "algorithm.kl_ctrl.target_kl",
            "algorithm.kl_ctrl.horizon",
            "algorithm.kl_ctrl.mean",
        )
        yield from find_idle(config, kind, "adaptive", "a fixed coefficient ignores it", *names)
        return
    for name, example in (("target_kl", "0.1"), ("horizon", "10000")):
        if getattr(control, name) is None:
            advice = f"set algorithm.kl_ctrl.{name}={example}, or {kind}=fixed"
            yield Finding(
                (f"algorithm.kl_ctrl.{name}", kind), "the adaptive controller needs it", advice
            )


def coefficient_in_reward(config: Config) -> Findings:
    """A KL in the reward has a weight."""
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        advice = "set it to 0.001, or algorithm.use_kl_in_reward=false"
        yield Finding(("algorithm.kl_ctrl.kl_coef", _IN_REWARD), _NO_WEIGHT, advice)


def coefficient_in_loss(config: Config) -> Findings:
    """A KL in the loss has a weight."""
    actor = config.actor_rollout_ref.actor
    keys = (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss")
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield Finding(keys, _NO_WEIGHT, f"set it to 0.001, or {keys[1]}=false")


RULES = (controller, adaptive_controller, coefficient_in_reward, coefficient_in_loss)
