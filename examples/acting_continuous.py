"""Reach a place in the plane by continuous moves: `python examples/acting_continuous.py` writes a
tiny model with random weights (of `SEED=1`); `ACTION_TOKENS=640` gives it the tokens of denoised
actions."""

import os
from pathlib import Path
from random import Random

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import distflow
from distflow.acting.simulator import ChunkResult, Observation

START = "runs/acting_continuous/start"
TINY = Path(distflow.__file__).parent / "models/builtin/tiny-arithmetic"
BINS = 32
CHUNK = 2
DIM = 2


class Plane:
    """A point with a target, both between -1 and 1 in each dimension; an action moves it by up to
    0.5 in each. Within
    0.15 of the target the episode succeeds; after 6 steps it ends. A step's reward is how much
    nearer it came."""

    async def reset(self, seed, options):
        draws = np.random.default_rng(seed)
        self.place, self.target = draws.uniform(-1, 1, (2, DIM))
        self.steps = 0
        return self.seen()

    async def step(self, chunk):
        rewards = []
        won = []
        late = []
        for action in chunk:
            before = self.gap()
            self.place = np.clip(self.place + 0.5 * action, -1, 1)
            self.steps = self.steps + 1
            rewards.append(float(before - self.gap()))
            won.append(self.gap() < 0.15)
            late.append(not won[-1] and self.steps == 6)
            if won[-1] or late[-1]:
                break

        return ChunkResult(rewards, won, late, won, self.seen())

    def gap(self):
        return float(np.linalg.norm(self.target - self.place))

    def seen(self):
        return Observation({}, (self.target - self.place).astype(np.float32), "reach")


def tasks(number=2048, seed=1):
    """Rows with the seed of a state."""
    draws = Random(seed)
    for _ in range(number):
        yield {"prompt": "plane", "answer": "", "seed": draws.randrange(2**31)}


def held_out():
    return tasks(256, seed=2)


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", 0)))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens([f"<state {number}>" for number in range(BINS)])
    num_tokens = int(os.environ.get("ACTION_TOKENS", 2 * DIM * CHUNK))
    tokenizer.add_tokens([f"<action {number}>" for number in range(num_tokens)])
    sizes = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **sizes
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    for part in (model, tokenizer):
        part.save_pretrained(START)
