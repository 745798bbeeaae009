"""A pipeline whose groups and steps wait until a test lets them go, so that their order is the
test's."""

import asyncio
import threading

from distflow import NodeRole, node
from distflow.graph import Drop, Node, TaskGraph
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.nodes.rollout_reward_filter import SAMPLED_FIELDS, generate

Key = tuple[str, int]
"""("group", its id) once its responses are there, or ("step", its number from 0) once it is to be
trained on."""


class Held:
    """arrived: what waits or has waited. free: what may go on. dropped: groups that a filter drops
    then."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived = set[Key]()
        self.free = set[Key]()
        self.dropped = set[int]()
        self.all_free = False

    def arrive(self, key: Key) -> None:
        with self.changed:
            self.arrived.add(key)
            self.changed.notify_all()

    def let_go(self, key: Key | None = None) -> None:
        """None: everything from now on."""
        with self.changed:
            self.all_free |= key is None
            self.free |= {key} if key else set()
            self.changed.notify_all()

    def may_go(self, key: Key) -> bool:
        return self.all_free or key in self.free


HELD = Held()


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def generate_and_wait(group, rollout, tokenizer):
    sampled = await generate(group, rollout, tokenizer)
    key = ("group", group.prompt_group.group_id)
    HELD.arrive(key)
    while not HELD.may_go(key):
        await asyncio.sleep(0.002)
    return Drop("filtered") if key[1] in HELD.dropped else sampled


@node(writes="token_level_rewards", role=NodeRole.REWARD)
def wait_for_turn(token_level_scores, ctx):
    key = ("step", ctx.step)
    HELD.arrive(key)
    with HELD.changed:
        HELD.changed.wait_for(lambda: HELD.may_go(key))
    return token_level_scores


def make() -> TaskGraph:
    graph = grpo_pipeline()
    graph.nodes["rollout_actor"] = Node("rollout_actor", generate_and_wait)
    graph.add_node(Node("wait_for_turn", wait_for_turn, plane="training"))
    return graph
