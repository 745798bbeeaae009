"""Seconds of a whole GRPO step against TRL's `GRPOTrainer`, on the same model, prompts, lengths and
verdicts.

    make bench-peers
    python benchmarks/train_step.py [--rounds 3 --steps 6 --work fixed-1m long-1m fixed-10m
    long-10m] [--vllm]

Ours is a `distflow train grpo` as it ships, with its threads, verifiers, checks and recording; TRL
runs in an environment of its own. With `--vllm` both generate by vLLM, ours by its server, TRL in
the trainer's process. Each run is a process of its own, and the two take turns. The first two steps
of a run warm up.
TRL is tried at each division of the step's 256 answers into micro-batches that is named below, and
the best of these again over tcmalloc where that is found; settings that lose clearly are not run
again, which the output says, and the fastest of what is left counts. On `long` lengths an answer
ends after every token with the same chance, so that step and step differ; both then do about the
same number of tokens, which is printed, and the ratio is of seconds a token. `busy beside`: cores
that processes other than ours and TRL's kept busy meanwhile, in the worst round. Name one work at a
time: 3 rounds take 5 minutes at 1 M on two cores, with `--steps 4` 9 at 10 M, and 25 on long tails.

What profiling found (one thread, processor time of an update of 64 answers of 80 tokens):
- 10 M, bfloat16: products of matrices are six tenths of it, at the speed of the processor. The CPU
  kernel of attention in bfloat16 took 1.0 s backward where that of float32 takes 0.24 s, copies
  included: backward 2.65 → 1.77 s.
- Micro-batches of 16,384 tokens make matrices of more than 32 MiB, which the allocator gets from
  the kernel each time: 100 to 225 thousand page faults an update at 1 M (0.2 of 2.3 s), a million
  at 10 M (1 to 4.7 of 11 to 15 s). Of 4,096 there are none, and smaller ones gain no more: they are
  the default on a CPU.
- 8 answers to a prompt of 16 tokens carry it 8 times: computed once, it leaves 0.825 of the tokens.
  Update of 256 answers 2.04 → 1.81 s at 1 M, 10.3 → 8.5 s at 10 M. What is left at 1 M: products of
  matrices 0.60, attention 0.14, softmax of the head 0.03, products of elements, norms, rotations,
  copies the rest; AdamW 3 ms.
- The loss head by autograd's formulas took 0.72 s forward and backward at 1 M; with one matrix
  kept, and written in blocks that stay in the cache, 0.38 s. Half of what the softmax took of that
  were passes over a block: a floor under the log-probs in place of a search for −inf, one `addcmul`
  in place of four, 24 → 12 ms for 3,277 tokens.
- oneDNN's float32 products are 8 to 20 % faster forward and for the inputs' gradient than those
  that torch takes here (MKL on an AMD processor; 95 to 108 against 70 to 96 GFLOP/s), and slower
  for the weights' gradient: called where they gain they saved 5 % of an update at 1 M, 3 % on long
  tails, whose micro-batches have a new size each time.
  Left alone: too little for an operator of torch that is no public one.
- With two threads attention was what gained least: torch's fused CPU kernel over answers of 80
  tokens 1.3 times, over 512 tokens 2 times. Batched products in blocks that stay in the cache
  (`models/packed_attention.py`), on rows that are gathered head by head, gain 1.9 times and leave a
  third of the page faults. Update of 256 answers at 1 M, two threads
  1.04 → 0.93 s, one 1.66 → 1.59 s; long tails 1.51 → 1.42 s, 2.29 → 2.25 s; 10 M 6.2 → 5.8 s, one
  thread as before. With copies between token by token and head by head, in the blocks or around
  them, nothing was left of it.
- What an update at 1 M takes with two threads now: products of matrices 0.57 of 0.95 s, at 190 of
  the 200 to 220 GFLOP/s that this processor has, attention 0.12, products of elements 0.06, the
  head's softmax 0.03, the rest in many small parts. The products alone are a floor of 0.45 s under
  it in float32.
- Micro-batches side by side, each on a thread of its own, gained 3 %: the threads share the memory.
  Micro-batches of 1,024 and 2,048 tokens are no faster than those of 4,096. Huge pages for the
  allocator (`glibc.malloc.hugetlb`) gained 3 % before; convolutions of 1 × 1, a public way to
  oneDNN, are no faster than MKL.
- Long tails before there was native code: rollout 1.6 to 2.0 s, update 1.3 to 1.6 s of a step of
  3.2 s. Torch's fused kernel over the seventh of the answers that are longer than 128 tokens took
  0.26 s, at 16 to 21 GFLOP/s; batched products gained 1.1 to 1.5 times up to 384 tokens and nothing
  at 512. The rollout's tail was small operations, which two threads hardly halve.
- Attention as native code, in float32 also for models in bfloat16: sequences where they lie,
  without padding, without copies of what they share, and no matrix kept for the way back. Four
  layers of one micro-batch, two threads: forward 17 → 7 ms and backward 33 → 23 ms on fixed
  lengths, 42 → 8 and 72 → 25 ms on long tails. An update of 256 answers there 1.7 → 1.2 s, on fixed
  lengths 1.5 → 1.3 s.
- A gated MLP as native code, forward and backward, gained 10 % alone and nothing that could be told
  in a run; the head's softmax as native code would save 10 ms of a step.
- What is not arithmetic, at 1 M: 32 groups became columns in 46 ms, now 24 (lists by NumPy, no mask
  where nothing is padded), and 256 verdicts took as long as the looks at their sockets, each of
  which gives up the interpreter's lock.
- Norms and gated units as one operation each, in blocks, gained nothing, whatever they gain alone:
  alone it is page faults of freshly mapped memory that they save, and a process that trains has its
  memory already.
- A whole layer but for attention as two operations does gain, in float32
  (`models/packed_forward.py`): 72 rows go from norm to residual while they are in the cache, and
  products of our own reach 340 of 350 GFLOP/s there, where those of MKL had 300 (Intel). Four
  layers of 1 M, 256 answers, two threads: 0.74 → 0.53 s on long tails, 0.78 → 0.55 s on fixed
  lengths, no page faults in place of 6 to 20 thousand. At 384 × 1152 it is 1.05 to 1.1 times as
  fast in 0.6 of the memory, at 576 × 1536 as fast, at 896 × 4864 0.7: what a thread works with has
  left its cache.
- In bfloat16 with AMX products are a third of an update of 10 M (0.85 of 2.5 s), attention a sixth,
  and what stands between them half: norms, rotations, gates, casts, some forty operations a layer.
  As one call each, with products of queries, keys and values side by side: 2.5 → 1.85 s, 1.5 → 1.1
  GB; by AVX512-BF16 7.4 → 6.7 s; 135 M 10.9 → 9.0 s. Left alone: the weights' gradients, for which
  oneDNN takes twice as long as for the inputs', for its operand is transposed. Transposing
  beforehand takes what it gains.
- A head is one or two lines of memory in a row of many: half the time of attention's backward pass
  at 10 M outside of its products was waiting for these. Asked for as a block of queries begins 8.9
  → 7.1 ms a layer; one block earlier gained nothing.
- In `x / (1 + e^-x)` GCC computes the case of the bound, x / (1 + e^88), beside all others; that is
  a number so small that an Intel processor takes a hundred times as long: 2 of 8 ms of a layer, in
  decode steps as well. Exponentials are a loop of their own now, of whole vectors (of half ones
  before, 5 % of an update).
- Log-probs that are written over their logits save 3 % and a matrix of that size.
- A larger layer in float32 (`fixed-25m`) by torch's products, with native code between them: 512 ×
  8 4.9 → 4.3 s,
  1024 × 4 8.1 → 7.4 s, in 0.8 of the memory. Products are eight tenths of it, at the speed of the
  processor.
- glibc gave the end of the heap back behind every micro-batch: kept, a step takes 6 % less at 25 M,
  1 to 5 % at 10 M, 2 % on long tails. Never asking the kernel for single blocks (`M_MMAP_MAX`)
  gains nothing beyond.
- Longest sequences first, blocks of 36 to 96 rows, products cut in depth: nothing. Blocks of 144
  rows lose 5 %. Each micro-batch costs 6 ms whatever its size, as by torch; micro-batches of 8,192
  tokens gain 5 % at 1 M. They
  are not the default, for what matrices above 32 MiB cost.
"""

import argparse
import math
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from fairness import Beside, tcmalloc, worth_it
from workload import WORKS, Work, run_peer, train, write_work

ROOT = Path(__file__).resolve().parents[1]
TRL = ROOT / ".peers" / "trl" / "bin" / "python"
BY_VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.python={ROOT / '.venv-vllm' / 'bin' / 'python'}",
)
MICRO_BATCHES = (256, 64, 32)
TRIED_STEPS = 3


Run = tuple[float, float]
"""Mean seconds a step, mean tokens a step."""


@dataclass(frozen=True)
class Setting:
    """Of TRL. preload: the allocator's library, or none. vllm: it generates, on the trainer's
    device."""

    micro_batch: int
    preload: str = ""
    vllm: bool = False

    def __str__(self) -> str:
        added = (", tcmalloc" if self.preload else "") + (", vLLM" if self.vllm else "")
        return f"micro-batches of {self.micro_batch}{added}"


def ours(folder: Path, name: str, work: Work, steps: int, options: Sequence[str] = ()) -> Run:
    found = train(folder, name, work, steps, *options)[1:]
    return _measured([step.seconds for step in found], [step.tokens for step in found])


def trl(folder: Path, work: Work, steps: int, setting: Setting) -> Run:
    wanted = {
        "prompts": work.prompts,
        "steps": steps,
        "longest": work.longest,
        "bfloat16": work.shape.dtype == "bfloat16",
        "micro_batch": setting.micro_batch,
        "on_gpu": torch.cuda.is_available(),
        "vllm": setting.vllm,
    }
    command = ["env", f"LD_PRELOAD={setting.preload}"] if setting.preload else []
    command += [str(TRL), str(ROOT / "benchmarks/peers/trl_steps.py"), str(folder)]
    found: list[dict[str, float]] = run_peer(command, folder, wanted)[1:]
    return _measured([step["seconds"] for step in found], [step["tokens"] for step in found])


def settings_of_trl(name: str, folder: Path, work: Work, vllm: bool = False) -> list[Setting]:
    """Those that are worth their time, best first."""

    def cost(setting: Setting) -> float:
        try:
            seconds, tokens = trl(folder, work, TRIED_STEPS, setting)
        except SystemExit as failed:  # such as for want of memory
            print(
                f"{name}: TRL, {setting} failed: {str(failed).strip().splitlines()[-1]}", flush=True
            )
            return math.inf
        return seconds / tokens

    taken = {
        setting: cost(setting) for setting in (Setting(size, vllm=vllm) for size in MICRO_BATCHES)
    }
    faster = min(taken, key=lambda setting: taken[setting])
    library = tcmalloc(ROOT / ".peers")
    if torch.cuda.is_available() and not vllm:
        if subprocess.run([TRL, "-c", "import vllm"], capture_output=True).returncode:
            print(f"{TRL} has no vLLM: TRL generates by transformers", flush=True)
        else:
            by_vllm = replace(faster, vllm=True)
            taken[by_vllm] = cost(by_vllm)
    elif library is None:
        print("tcmalloc was not found: TRL runs without", flush=True)
    else:
        preloaded = replace(faster, preload=library)
        taken[preloaded] = cost(preloaded)
    ran = {str(setting): seconds for setting, seconds in taken.items() if seconds < math.inf}
    if not ran:
        raise SystemExit(f"{name}: TRL runs with none of its settings")
    kept = worth_it(f"{name}: TRL", ran)
    return [setting for told in kept for setting in taken if str(setting) == told]


def _measured(seconds: Sequence[float], tokens: Sequence[float]) -> Run:
    """On long lengths a step's seconds follow its tokens, so that means belong together."""
    return statistics.mean(seconds), statistics.mean(tokens)


def measure(name: str, work: Work, rounds: int, steps: int, vllm: bool) -> None:
    found: dict[str, list[Run]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)

    def take(who: str, run: Callable[[], Run]) -> None:
        others = Beside()
        found[who].append(run())
        beside[who].append(others.cores())

    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_work(folder, work.shape)
        settings = settings_of_trl(name, folder, work, vllm)
        for index in range(rounds):
            take(
                "distflow",
                partial(ours, folder, f"run{index}", work, steps, BY_VLLM if vllm else ()),
            )
            for setting in settings:
                take(f"TRL, {setting}", partial(trl, folder, work, steps, setting))
    per_token = {
        who: statistics.median(seconds / tokens for seconds, tokens in runs)
        for who, runs in found.items()
    }
    best = min(cost for who, cost in per_token.items() if who != "distflow")
    print(
        "| work | system | s a step | tokens a step | speed, of TRL's best | busy beside |\n"
        "|---|---|---|---|---|---|"
    )
    for who, runs in found.items():
        seconds = sorted(seconds for seconds, _ in runs)
        tokens = statistics.mean(tokens for _, tokens in runs)
        spread = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f}-{seconds[-1]:.2f})"
        cells = f"{tokens:,.0f} | {best / per_token[who]:.2f} | {max(beside[who]):.2f}"
        print(f"| {name} | {who} | {spread} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=6, help="of a run; the first two are not counted"
    )
    parser.add_argument("--work", nargs="+", default=list(WORKS)[:4], choices=WORKS)
    parser.add_argument("--vllm", action="store_true", help="both generate by vLLM")
    arguments = parser.parse_args()
    if not TRL.exists():
        raise SystemExit(f"{TRL} is not there: run `make bench-peers` first")
    print(
        f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {arguments.rounds} "
        "rounds\n"
    )
    for name in arguments.work:
        measure(name, WORKS[name], arguments.rounds, arguments.steps, arguments.vllm)


if __name__ == "__main__":
    main()
