"""A notebook's cells: functions of `__main__`, which no other process can import."""

from typing import Any

CELLS = """
from distflow import NodeOutput, Pipeline, node, register_adv_est
from distflow.pipelines.policy_gradient import policy_gradient

LEVEL = 0.25

def level(token_level_rewards, response_mask, *, gain: float = 1.0):
    advantages = gain * LEVEL * response_mask
    return advantages, advantages

def plain(log_probs, advantages, loss_mask):
    return -log_probs * advantages, {"advantage": advantages.detach()}

@node(writes=())
def count(response_mask):
    return NodeOutput(None, {"rollout/rows": float(len(response_mask))})

def counting(config):
    return policy_gradient(Pipeline("counting").add_node("count", count, plane="training"), config)
"""
REGISTERED = """
register_adv_est("cells_level", scope="sample")(level)
"""


def cells(code: str = CELLS) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(code, namespace)
    return namespace
