"""Tokens per second of a rollout inside a run against transformers' `generate` and vLLM on the CPU,
on the same work.

    make bench-peers
    python benchmarks/rollout.py [--rounds 3 --steps 4 --work fixed-1m long-1m fixed-10m long-10m]

Ours is what the steps of a `distflow train grpo` wait for their groups, as it ships: verdicts,
recording and checks included. The peers then get the prompts and the lengths that the run's answers
had, token for token, on the same model files, in processes of their own: `generate` in batches of
32, 64 and all requests; vLLM with as many sequences at a time as we have, on all cores or, as by
itself, on all but one. The first step of a run warms up, and for a peer some of the same work.
Before the rounds each setting of a peer is tried on one step, and those that lose clearly are not
run again; the output says which. Lengths are `fixed` at 64, or `long`: after each token an answer
ends with a chance of one in sixty-four, and at 512; eight answers share a prompt. `busy beside`:
cores that processes other than ours and the peer's kept busy meanwhile, in the worst round. A work
takes 5 to 8 minutes on two cores; name one at a time.

What profiling found (1 M parameters, 256 rows, 2 cores):
- A decode step by torch is some hundred operations of 5 to 20 µs each, so that a step of 1 to 16
  rows took 1 to 4.7 ms, two threads or one. As native code it is one call, 0.06 to 0.5 ms: every
  row is computed from embedding to
  logits by one thread, or, below 12 rows a thread, all threads share the columns of each product.
  256 rows take 3.8 instead of 9.8 ms at 64 tokens, and 14 instead of 29 at 512, where the memory's
  speed is what is left: fetching values while keys are read gained a third there. A rollout in a
  run: 1.1 → 0.65 s fixed, 2.5 to 3.0 → 1.0 to 1.2 s on long tails, of which half is the native step
  and a tenth the draw and what it hands on; the rest is Python, token by token.
- In bfloat16 the native step multiplies pairs of bfloat16 by one instruction (`bfloat16_matmul.h`):
  10 M take
  0.31 ms with one row, 4.9 with 64 and 19 with 256, by torch 3.8, 8.8 and 22. With weights widened
  to float32 as they are read it was 0.48, 9.7 and 36.
- Where there is AMX (Intel), one instruction multiplies tiles of 16 × 32 and 32 × 16, and oneDNN
  makes use of it for the peers: before we did they were ahead there, `generate` 1.3 times. 256 rows
  of 10 M 33.7 → 10.6 ms, 64 rows 8.2 →
  2.3; with one row weights from memory are all that counts. Then memory is what is waited for: of
  10.6 ms, 2 for weights, which 128 rows together halve, and 3.5 for keys and values, of 4.6 that
  attention takes. Values in bfloat16, which is what their product makes, and the next head's keys
  fetched meanwhile: 10.4 → 8.2 to 9.6 ms.
- Memory for keys and values that grew from 32 tokens to 96 was cleared and copied three times, a
  fifth of a rollout of 10 M: room for up to 128 from the start 1.31 → 1.06 s. In pages of 2 MiB:
  nothing at 10 M, a fifth lost at 1 M.
- By torch a decode step is to one half the linears, near the processor's peak, to a tenth the two
  batched products of attention, to a tenth the draw, and to a hundredth bookkeeping in Python; the
  rest is many small operations. With fewer than 32 rows, two thirds of the steps of a long tail,
  these are nearly all of it.
- Keys and values that lie together: over a window of a longer memory the batched products of
  attention take up to three times as long in bfloat16, and keys stored transposed up to three times
  as long from 256 tokens on. With that, the mask and the scaling inside the product, and growth
  that copies only who is left (page faults of a long-tail rollout 158,000 before, 20,000 after), a
  rollout takes 0.81 of the processor time (fixed), 0.79 (long tails), 0.83 (10 M, fixed); one
  decode step of 10 M at 300 tokens 0.45.
- All that was found on one thread. Two gain less: a decode step of 256 rows takes 15.7 ms on one
  and 10.3 on two, of 64 rows 3.9 on either, of 8 rows 1.9 and 1.3. Products of matrices so small
  are a third of the speed of large ones.
- A second pool of OpenMP threads, be it idle, makes libgomp put threads to sleep between two
  operations: the asyncio thread had one after the first rollout, and steps of few rows took 6.5
  instead of 2 ms. It computes on one core now.
- Tiles of rows while drawing: 0.2 of the time at a vocabulary of 151,936, bit for bit the same.
- In bfloat16 oneDNN brings each weight into a layout of its own before every product: a product of
  4 rows with 384 × 1,152 weights takes 0.065 ms, 0.030 where that layout is kept beside the weight
  (`weight_layout.py`), and of 256
  rows 0.62 and 0.54, the same bits. A decode step of 135 M: 0.72 of the time with 4 rows, 0.89 with
  64, 0.93 with 256; of 10 M 0.86 to 0.90 up to 64 rows. At 64 rows of 135 M products are six tenths
  of a step, at 310 GFLOP/s.
- The softmax of bfloat16 scores rounds once within its kernel; in and out of float32 it took two
  copies more, for the same bits.
- Nothing gained, left out: `rms_norm` of torch instead of the module's (2 % either way). A fused
  copy of the
  query, key, value and of the gate and up weights gains 3 % at 256 rows and 8 to 18 % below 64, and
  was left out: it would be a second set of weights to keep true. Laid together in memory, each
  parameter a view of its part, they need no copy; but to see in each step that nobody has laid one
  elsewhere, or hooked it, took all that was gained at 1 M.
- Half of the rows on a second Python thread, an OpenMP thread each: no faster than one thread
  alone, at 16 to 256 rows. The two hand the interpreter's lock to and fro at every operation; as
  two processes they do not slow each other.
- `torch.compile` of a step, sizes open: 48 s to compile; 0.5 to 0.7 of the time up to 16 rows, and
  1.5 to 10 times as long from 64 rows on, by attention's small products.
- An idle OpenMP pool of another thread costs 40 %: 25 k tokens/s alone, 15 k beside it. So the
  thread that trains decodes as well where the two take turns.
- Requests that differ in `max_tokens` only must still be drawn together: drawn apart, the long-tail
  work took 2.3 times as long.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from fairness import Beside, worth_it
from workload import WORKS, Work, ids_of, run_peer, train, write_work

from distflow.observe.run_reader import read_samples

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks/peers"
VLLM = ROOT / ".venv-vllm/bin/python"

Request = tuple[list[int], int]
"""Prompt ids, tokens wanted."""


def answered(run_dir: Path, step: int) -> list[Request]:
    return [
        (ids_of(sample["prompt"]), int(str(sample["response_length"])))
        for sample in read_samples(run_dir, step)
    ]


def generate(folder: Path, work: Work, steps: list[list[Request]], batch: int) -> list[float]:
    command = [sys.executable, str(PEERS / "hf_rollout.py"), str(folder)]
    seconds: list[float] = run_peer(
        command, folder, {"steps": steps, "dtype": work.shape.dtype, "batch": batch}
    )
    return seconds


def vllm(folder: Path, work: Work, steps: list[list[Request]], reserved: int) -> list[float]:
    """reserved: cores on which it does not compute; by itself it leaves one free."""
    command = ["env", "VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved}"]
    command += [str(VLLM), str(PEERS / "vllm_rollout.py"), str(folder)]
    seconds: list[float] = run_peer(command, folder, {"steps": steps, "dtype": work.shape.dtype})
    return seconds


def peers_of(
    work: Work,
) -> dict[str, dict[str, Callable[[Path, list[list[Request]]], list[float]]]]:
    """Of each peer its settings: what gives the seconds of each step."""
    batches = sorted({32, 64, work.prompts * 8})
    return {
        "generate": {
            f"generate, batch {batch}": lambda folder, steps, batch=batch: generate(
                folder, work, steps, batch
            )
            for batch in batches
        },
        "vLLM": {
            f"vLLM, {cores} cores reserved": lambda folder, steps, cores=cores: vllm(
                folder, work, steps, cores
            )
            for cores in (0, 1)
        },
    }


def ours(folder: Path, name: str, work: Work, num_steps: int) -> tuple[float, list[list[Request]]]:
    """Seconds of all steps but the first, and what was answered in each."""
    found = train(folder, name, work, num_steps)
    steps = [answered(folder / name, step) for step in range(2, num_steps + 1)]
    assert sum(length for step in steps for _, length in step) == sum(step.tokens for step in found)
    return sum(step.rollout for step in found), steps


def measure(name: str, work: Work, rounds: int, num_steps: int) -> None:
    rates: dict[str, list[float]] = defaultdict(list)
    beside: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_work(folder, work.shape)
        _, warm_up = ours(folder, "warm-up", work, 2)
        kept = {}
        for peer, settings in peers_of(work).items():
            taken = {setting: sum(run(folder, warm_up)) for setting, run in settings.items()}
            kept |= {setting: settings[setting] for setting in worth_it(f"{name}: {peer}", taken)}
        for index in range(rounds):
            others = Beside()
            seconds, steps = ours(folder, f"run{index}", work, num_steps)
            num_tokens = sum(length for step in steps for _, length in step)
            rates["distflow"].append(num_tokens / seconds)
            beside["distflow"].append(others.cores())
            for setting, run in kept.items():
                others = Beside()
                rates[setting].append(num_tokens / sum(run(folder, steps)))
                beside[setting].append(others.cores())
    mid = {who: statistics.median(found) for who, found in rates.items()}
    print(
        "| work | system | tokens/s | distflow's speed, of it | busy beside |\n"
        "|---|---|---|---|---|"
    )
    for who, found in rates.items():
        spread = f"{mid[who]:,.0f} ({min(found):,.0f}-{max(found):,.0f})"
        print(
            (
                f"| {name} | {who} | {spread} | {mid['distflow'] / mid[who]:.2f} | "
                f"{max(beside[who]):.2f} |"
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run; the first is not counted")
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=WORKS)
    arguments = parser.parse_args()
    if not VLLM.exists():
        raise SystemExit(f"{VLLM} is not there: run `make bench-peers` first")
    print(
        f"{os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}, {arguments.rounds} "
        "rounds\n"
    )
    for name in arguments.work:
        measure(name, WORKS[name], arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
