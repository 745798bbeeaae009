"""Reach a target with a robot's arm, from its state: `python examples/fetch_reach.py` writes a tiny
model with random weights (of `SEED=1`). It needs the extra `robotics` (docs/acting.md)."""

import os
from pathlib import Path
from random import Random

import gymnasium
import gymnasium_robotics
import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import distflow
from distflow.acting.action_tokens import ActionTokens
from distflow.acting.gymnasium_simulator import GymnasiumSimulator

START = "runs/fetch_reach/start"
TINY = Path(distflow.__file__).parent / "models/builtin/tiny-arithmetic"
STATE = ActionTokens((-0.2,) * 3, (0.2,) * 3, bins=16, first=0, chunk=1, clips=True)
ACTIONS = ActionTokens((-1.0,) * 4, (1.0,) * 4, bins=5, first=0, chunk=2)


def reach():
    """FetchReach whose state is the way from the hand to the target, in metres."""
    gymnasium.register_envs(gymnasium_robotics)
    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def way(seen):
        return seen["desired_goal"] - seen["achieved_goal"]

    def make():
        robot = gymnasium.make("FetchReach-v4", max_episode_steps=10)
        return gymnasium.wrappers.TransformObservation(robot, way, space)

    return GymnasiumSimulator(make, "<reach>", ends_at_success=True)


def demonstrations(number=6144, seed=0):
    """Rows with a state, and actions of a slow controller, half of whose numbers are random."""
    draws = np.random.default_rng(seed)
    for _ in range(number):
        way = draws.uniform(-0.2, 0.2, 3)
        prompt = "".join(f"<s{place}>" for place in STATE.encode(way[None]))

        actions = np.zeros((2, 4))  # the gripper stays
        for step in actions:
            step[:3] = np.clip(way / 0.15, -1, 1)
            way -= 0.031 * step[:3]  # as far as the hand moves in a step

        random = draws.random((2, 3)) < 0.5
        actions[:, :3][random] = draws.uniform(-1, 1, random.sum())
        response = "".join(f"<a{move}>" for move in ACTIONS.encode(actions))
        yield {"prompt": "<reach>" + prompt, "response": response, "answer": response}


def tasks(number=4096, seed=1):
    """Rows with the seed of a target."""
    draws = Random(seed)
    for _ in range(number):
        yield {"prompt": "<reach>", "answer": "", "seed": draws.randrange(2**31)}


def held_out():
    return tasks(256, seed=2)


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", 0)))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokens = [
        f"<{kind}{place}>"
        for kind, codec in (("s", STATE), ("a", ACTIONS))
        for place in range(codec.bins)
    ]
    tokenizer.add_tokens(["<reach>", *tokens])
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), initializer_range=0.1, max_position_embeddings=64, **sizes, **ids
    )
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(START)
