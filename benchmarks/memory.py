"""Peak memory and time of the loss head, forward and backward, against full logits in float32.

    python benchmarks/memory.py [--vocabulary 151936 --width 64 --tokens 1024 2048 4096]

Each row is a process of its own, whose highest resident memory counts, less what it holds before
the head runs. Ours is `token_log_probs`, which every scoring and training pass calls; the peer is
`log_softmax` of all logits at once and a gather, as the published formula reads. Both end in the
same backward pass of the mean log-prob with the entropy, which is what an entropy term needs, and
must agree to 1e-4 in loss and 1e-5 in the gradient of the hidden states.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from distflow.models.log_probs import token_log_probs


def full_logits(
    head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = head(hidden).float().log_softmax(-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def chunks(
    head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropy = token_log_probs(head, hidden, targets, vocabulary=head.out_features)  # type: ignore[arg-type]
    assert entropy is not None
    return log_probs, entropy


WAYS = {"full logits": full_logits, "distflow": chunks}


def measure(way: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """Inside the process that is measured."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    head.weight.grad = torch.zeros_like(head.weight)
    hidden.grad = torch.zeros_like(hidden)
    WAYS[way](head, hidden[:1], targets[:1])[0].sum().backward()  # libraries are loaded
    head.weight.grad.zero_()
    hidden.grad.zero_()
    before = _peak_bytes()
    start = time.perf_counter()
    log_probs, entropy = WAYS[way](head, hidden, targets)
    loss = -(log_probs + 0.01 * entropy).mean()
    loss.backward()
    seconds = time.perf_counter() - start

    return {
        "bytes": _peak_bytes() - before,
        "seconds": seconds,
        "loss": float(loss.detach()),
        "grad": float(hidden.grad.norm()),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_process(way: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--inside", way, str(tokens), str(vocabulary), str(width)]
    found: dict[str, float] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)

    arguments = parser.parse_args()
    if arguments.inside:
        way, *sizes = arguments.inside
        print(json.dumps(measure(way, *(int(size) for size in sizes))))
        return

    print(
        "| tokens | full logits, MiB | s | distflow, MiB | s | memory, of full |\n"
        "|---|---|---|---|---|---|"
    )

    for tokens in arguments.tokens:
        full, ours = (
            in_process(way, tokens, arguments.vocabulary, arguments.width) for way in WAYS
        )
        assert abs(full["loss"] - ours["loss"]) < 1e-4 and abs(full["grad"] - ours["grad"]) < 1e-5
        cells = [f"{one['bytes'] / 2**20:,.0f} | {one['seconds']:.1f}" for one in (full, ours)]
        print(
            f"| {tokens} | {cells[0]} | {cells[1]} | {ours['bytes'] / full['bytes']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
