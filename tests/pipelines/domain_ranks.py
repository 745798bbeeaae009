"""Processing by domain on several gloo ranks, one of which lacks a domain, against one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distflow.cluster.process_groups import TorchCollective
from distflow.config import load_config
from distflow.data.batch import Batch
from distflow.launch.select_pipeline import bind_graph, select_pipeline
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.node_context import NodeContext
from distflow.training.engine import Collective, OneRank
from tests.algorithms.toy_policy import toy_batch
from tests.tiny_models import tiny_tokenizer

DOMAINS = [
    "sums",
    "words",
    "words",
    "other",
    "sums",
    "other",
    "words",
    "sums",
    "words",
    "other",
    "words",
    "sums",
]
GROUPS = [0, 1, 1, 2, 0, 2, 3, 4, 3, 2, 1, 4]
# Groups are whole on a rank, and the first has none of "other".
SHARES = [[0, 1, 2, 4, 10], [3, 5, 6, 7, 8, 9, 11]]
SETTINGS = [
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.reward_norm={mean_level: null, std_level: null}",
    "algorithm.reward_clip=null",
    "algorithm.domains={sums: {adv_estimator: grpo, scale_rewards: batch, use_kl_in_reward: true, "
    "kl_ctrl: {type: "
    "adaptive, kl_coef: 0.3, target_kl: 0.05, horizon: 100, mean: sequence}}, words: "
    "{adv_estimator: gae, "
    "reward_scale: 2, reward_shift: -0.5, reward_norm: {mean_level: running, std_level: running}, "
    "reward_clip: 1.2, "
    "length_weight: [1.5, 0.5], difficulty_mask: [0.2, 0.9]}}",
]
WHITENED = [
    *SETTINGS[:-1],
    SETTINGS[-1].replace(
        "reward_clip: 1.2", "use_kl_in_reward: true, whiten_rewards: true, mask_long_errors: 4"
    ),
]
PROCESSED = (
    *("reward_norm", "reward_clip", "kl_penalty", "reward_whitening", "sample_mask"),
    *("calculate_advantages", "sample_weights"),
)
COLUMNS = ("token_level_rewards", "advantages", "returns", "loss_mask")


def mixed_batch() -> Batch:
    """Rows of three domains in no order."""
    batch = toy_batch(seed=3, bs=len(DOMAINS))
    batch["domain"] = DOMAINS
    batch["group_index"] = torch.tensor(GROUPS)
    batch["episode_index"] = torch.arange(len(DOMAINS))
    batch["truncated"] = torch.zeros(len(DOMAINS), dtype=torch.bool)
    batch["finish_reason"] = ["stop"] * len(DOMAINS)
    batch["acc"] = (torch.arange(len(DOMAINS)) % 3 == 0).float()

    return batch.only([name for name in batch.names if name not in ("advantages", "returns")])


def process(
    batch: Batch, reduce: Collective, steps: int = 2, settings: Sequence[str] = SETTINGS
) -> tuple[Batch, dict[str, Any], dict[str, float]]:
    """The nodes of the pipeline that make advantages, several times over; the last batch, what they
    keep, and metrics of the last step."""
    config = load_config("rlvr", settings, complete=False).config
    nodes = [
        node
        for node in bind_graph(select_pipeline(config), config).nodes
        if node.node_id in PROCESSED
    ]

    state: dict[str, Any] = {node.node_id: {} for node in nodes}
    for step in range(steps):
        done = batch
        metrics = dict[str, float]()
        for each in compile_steps(nodes, {"reduce": reduce}):
            ctx = NodeContext(config, step, tiny_tokenizer(), state[each.node.node_id])
            done, (measured, _) = each(done, ctx)
            metrics |= measured

        state = json.loads(json.dumps(state))  # as a checkpoint keeps it

    return done, state, metrics


def _gap(found: Batch, wanted: Batch, name: str) -> float:
    return float((found[name] - wanted[name]).abs().max())


def main(rank: int, folder: Path) -> None:
    batch = mixed_batch()
    rows = SHARES[rank]
    whole, kept, measured = process(batch, OneRank())
    mine, own, metrics = process(batch.select(rows), TorchCollective())
    apart = {name: _gap(mine, whole.select(rows), name) for name in COLUMNS}
    whitened, _, _ = process(batch, OneRank(), settings=WHITENED)
    own_whitened, _, _ = process(batch.select(rows), TorchCollective(), settings=WHITENED)
    apart |= {
        f"{name}, whitened": _gap(own_whitened, whitened.select(rows), name) for name in COLUMNS
    }
    found = {
        "apart": apart,
        "kept": {**kept, "metrics": measured},
        "own": {**own, "metrics": metrics},
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
