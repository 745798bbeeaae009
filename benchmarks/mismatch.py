"""How far the rollout engine's log-probs lie from the trainer's, by precision, size of the model
and length of answers.

    python benchmarks/mismatch.py [--dtype float32 bfloat16] [--shape 128x4 384x6] [--tokens 64 512]

Each row is a `distflow train grpo` as it ships, two steps of 4 prompts × 8 answers of random
weights: `mismatch/*` of the run's own check, over all tokens, the second step's being of weights
that were trained. Weights are drawn ten times as wide as usual (a standard deviation of 0.2): with
0.02 all tokens are about equally likely, whatever is computed, and differences come out smaller
than they are in use. A run that its own checks stop says so, with what it measured before.

Beside it stands what the precision itself makes of that model: how far transformers' plain forward
of the first step's answers in that precision lies from the same in float64. Ends with status 1
where float32 differs by more than 1e-4 nats in any token, and by more than that. float16 is not
there: `actor_rollout_ref.model.dtype` takes float32 and bfloat16.

docs/tried.md lists what profiling found to gain nothing.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from workload import Shape, Work, ids_of, train, write_work

from distflow.observe.run_reader import read_metrics, read_samples

FLOAT32_BOUND = 1e-4
PROMPTS = 4


@dataclass(frozen=True)
class Row:
    """In nats. mean, most: of |Δ log-prob| of engine and trainer. own_mean, own_most: of the
    precision itself. entropy: of a token. stopped: what ended the run before its end, or
    nothing."""

    mean: float
    most: float
    own_mean: float
    own_most: float
    entropy: float
    stopped: str


def measure(shape: Shape, tokens: int, wider: float) -> Row:
    """wider: see `_sharpen`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_work(folder, shape, num_rows=64)
        _sharpen(folder / "model", wider)

        stopped = ""
        try:
            train(folder, "run", Work(shape, tokens, PROMPTS), 2, "trust.on_mismatch=warn")
        except SystemExit as error:
            stopped = next(line for line in str(error).splitlines() if line.startswith("distflow:"))

        steps = [record.values for record in read_metrics(folder / "run") if record.kind == "train"]
        if not steps:
            raise SystemExit(stopped)
        own = _own_error(folder, getattr(torch, shape.dtype))

    mean = sum(step["mismatch/mean_abs"] for step in steps) / len(steps)
    most = max(step["mismatch/max_abs"] for step in steps)
    return Row(mean, most, float(own.mean()), float(own.max()), steps[0]["actor/entropy"], stopped)


@torch.no_grad()
def _sharpen(folder: Path, wider: float) -> None:
    """All matrices of layers and head times `wider`; the channel of the bias keeps its size."""
    model = LlamaForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        for module in (*layer.self_attn.children(), *layer.mlp.children()):
            if hasattr(module, "weight"):
                module.weight.mul_(wider)

    model.lm_head.weight[:, 1:].mul_(wider)
    model.save_pretrained(folder)


def _own_error(folder: Path, dtype: torch.dtype) -> Tensor:
    """|Δ log-prob| of a plain forward in `dtype` and in float64, of the tokens of the first step's
    answers; of those that their texts show whole, as sharp weights draw the end now and then."""
    answers = [
        (ids_of(sample["prompt"]), ids_of(sample["response"]))
        for sample in read_samples(folder / "run", 1)
    ]
    longest = max(len(response) for _, response in answers)
    whole = [(prompt, response) for prompt, response in answers if len(response) == longest]
    ids, targets = (
        torch.tensor(rows) for rows in ([[*a, *b] for a, b in whole], [b for _, b in whole])
    )

    return (
        _log_probs(folder, ids, targets, dtype) - _log_probs(folder, ids, targets, torch.float64)
    ).abs()


@torch.no_grad()
def _log_probs(folder: Path, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 `(answers, tokens)`; the softmax is taken in float64."""
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype).eval()
    num_tokens = targets.shape[1]

    parts = []
    for own, wanted in zip(ids.split(4), targets.split(4), strict=True):
        logits = model(input_ids=own, use_cache=False).logits[:, -num_tokens - 1 : -1]
        parts.append(logits.double().log_softmax(-1).gather(-1, wanted[..., None])[..., 0])

    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--shape", nargs="+", default=["64x2", "128x4", "384x6"], help="hidden size x layers"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 512])
    parser.add_argument(
        "--wider",
        type=float,
        default=10.0,
        help="weights, in times of a standard deviation of 0.02",
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads\n")
    print(
        "| dtype | hidden × layers | tokens an answer | entropy, nats | mean | max | of the "
        "precision, mean | max |"
    )
    print("|---|---|---|---|---|---|---|---|")

    is_within = True
    for dtype in arguments.dtype:
        for named in arguments.shape:
            hidden, layers = map(int, named.split("x"))
            for tokens in arguments.tokens:
                row = measure(Shape(hidden, layers, dtype=dtype), tokens, arguments.wider)
                cells = f"{row.mean:.1e} | {row.most:.1e} | {row.own_mean:.1e} | {row.own_most:.1e}"
                print(
                    f"| {dtype} | {hidden} × {layers} | {tokens} | {row.entropy:.2f} | {cells} |",
                    flush=True,
                )
                if row.stopped:
                    print(f"the last run was stopped: {row.stopped}", flush=True)
                is_within = is_within and (
                    dtype != "float32" or row.most <= max(FLOAT32_BOUND, row.own_most)
                )

    raise SystemExit(0 if is_within else 1)


if __name__ == "__main__":
    main()
