"""`examples/rlvr_three.yaml` at a small size: rows of its three domains in their data sets' forms,
and a tiny model.

Each row's `recorded` is a right answer and a wrong one, for `examples/recorded_responses.yaml`.
"""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distflow.scheduling.ledger import timeline
from tests.tiny_models import write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"

MATH = [
    {
        "question": f"Ann has {n} coins and finds {n + 2}. How many?",
        "answer": f"She has {n}+{n + 2}=<<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2}.\n#### {2 * n + 2}",
        "recorded": [f"It is \\boxed{{{2 * n + 2}}}.", f"It is \\boxed{{{2 * n + 3}}}."],
    }
    for n in range(8)
]
CODE = [
    {
        "text": f"Write a function to {what}.",
        "code": f"def {name}(x):\n    return {body}",
        "test_list": [f"assert {name}({x}) == {value}" for x, value in cases],
    }
    for name, what, body, cases in (
        ("double", "double a number", "2 * x", ((1, 2), (-3, -6), (0, 0))),
        ("last", "find the last item", "x[-1]", (([1, 2], 2), ("'ab'", "'b'"))),
        ("squares", "square all", "[y * y for y in x]", (([1, 2], [1, 4]), ([], []))),
    )
]
INSTRUCTIONS = [
    {
        "prompt": "Name rivers without commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 3, "relation": "at least"}],
        "recorded": ["Rhine Elbe Weser", "Rhine, Elbe"],
    },
    {
        "prompt": "Write in capitals.",
        "instruction_id_list": ["change_case:english_capital"],
        "kwargs": [{}],
        "recorded": ["THIS IS WRITTEN IN CAPITALS", "this is not"],
    },
]


def write(folder: Path) -> None:
    """The files that the example reads from the current folder, the examples, and a model."""
    write_tiny_model(folder / "model")
    for name, rows in (
        ("gsm8k_train", MATH),
        ("gsm8k_test", MATH),
        ("mbpp", CODE),
        ("ifeval", INSTRUCTIONS),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    shutil.copytree(EXAMPLES, folder / "examples")


def small(run_dir: Path, *more: str) -> list[str]:
    """Keys for 4 prompts a step: 2 of math, 1 of code, 1 of instructions."""
    return [
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.model.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=300",
        "data.max_response_length=60",
        "data.num_loader_workers=0",
        "reward.num_workers=1",
        "reward.domains.code.num_workers=1",
        "trainer.num_threads=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={run_dir}",
        *more,
    ]


def shares(run_dir: Path) -> Sequence[Counter[Any]]:
    """Groups of each domain by step, from the ledger alone."""
    domains: dict[int, str] = {}
    steps = []
    for _, record in timeline(run_dir / "ledger.jsonl"):
        if record["kind"] == "issued":
            domains[record["group_id"]] = record["domain"]
        if record["kind"] == "consumed":
            steps.append(Counter(domains[prompt_group] for prompt_group in record["group_ids"]))

    return steps
