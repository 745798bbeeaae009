"""Rules of policies that act in a simulator."""

from collections.abc import Mapping
from typing import Any

from distflow.config.derived_settings import is_sharded
from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, MODEL, ROLLOUT, Finding, Findings
from distflow.config.rules.sampling import samplings

_OPTIONS = f"{ROLLOUT}.workflow_kwargs"
_WORKFLOW = f"{ROLLOUT}.workflow"
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def action_head(config: Config) -> str | None:
    """What draws the numbers of a simulator's actions (`actions.head`); None if actions are
    tokens."""
    options = config.actor_rollout_ref.rollout.workflow_kwargs
    for own in (options, *options.values()):  # of domains
        actions = own.get("actions") if isinstance(own, Mapping) else None
        head = None
        if isinstance(actions, Mapping):
            head = actions.get("head")

        if head not in (None, "action_tokens"):
            return str(head)

    return None


def noise_of_flow(config: Config) -> Findings:
    """A flow that draws actions has noise."""
    actions: Any = config.actor_rollout_ref.rollout.workflow_kwargs.get("actions", {})
    noise = 0.5
    if action_head(config) == "flow_sde":
        noise = actions.get("noise", 0.5)

    if not (isinstance(noise, int | float) and noise > 0):
        yield Finding(
            (_OPTIONS,),
            "a flow without noise is deterministic: its actions have no density, and the policy no "
            "gradient",
            "set actions.noise to a number above 0, such as 0.5",
        )


def sampled_actions(config: Config) -> Findings:
    """Actions that are drawn as numbers are not sampled as tokens: such settings change nothing."""
    rollout = config.actor_rollout_ref.rollout
    for group, settings in samplings(config):
        is_used = not group.endswith("val_kwargs") or rollout.val_kwargs.n
        if ".agents." in group or not is_used:
            continue

        for name, neutral in _NEUTRAL.items():
            if getattr(settings, name) not in (None, neutral):
                key = f"{group}.{name}"
                yield from _unsupported(config, key, f"set {key}={neutral}")

    for name, neutral in (("min_p", 0.0), ("repetition_penalty", 1.0)):
        if getattr(rollout, name) != neutral:
            key = f"{ROLLOUT}.{name}"
            yield from _unsupported(config, key, f"set {key}={neutral}")

    if rollout.stop:
        yield from _unsupported(config, f"{ROLLOUT}.stop", f"set {ROLLOUT}.stop=[]")


def drawn_actions(config: Config) -> Findings:
    """What draws actions runs in one engine, with whole weights."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "hf":
        yield from _unsupported(config, f"{ROLLOUT}.name", "set it to hf")
    if rollout.workflow != "simulator":
        yield from _unsupported(config, _WORKFLOW, "set it to simulator")
    if rollout.agents:
        yield from _unsupported(config, f"{ROLLOUT}.agents", "remove them")
    if config.actor_rollout_ref.model.lora_rank:
        yield from _unsupported(config, f"{MODEL}.lora_rank", "set it to 0")
    if is_sharded(config):
        yield from _unsupported(config, f"{ACTOR}.strategy", "set it to torch")


def _unsupported(config: Config, key: str, advice: str) -> Findings:
    head = action_head(config)
    if head:
        what = f"actions.head={head} draws numbers, and does not support this"
        yield Finding((key, _OPTIONS), what, advice)


RULES = (noise_of_flow, sampled_actions, drawn_actions)
