"""Seconds from the command to the first rollout token of a tiny model, against what torch and
transformers take alone.

    python benchmarks/startup.py [--rounds 5] [--against OTHER/src]
    python benchmarks/startup.py --rows 1000000 [--rounds 1]

Starts `distflow train examples/tiny.yaml` with answers of one token, and reads from the run's spans
when the first group was there, answered and judged; so each number is an upper bound. In turns with
it a bare interpreter imports torch and the classes of transformers that every model needs. The
smallest of the rounds count, and best their ratio: other load on the machine stretches both.
--against: the sources of another checkout, measured in the same rounds.
--rows: instead a JSONL file of so many rows, with data.lazy and without, and the largest process so
far.

docs/tried.md lists what profiling found to gain nothing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel"
)


def first_token_s(source: Path, *more: str) -> float:
    """Of a run of these sources. more: overrides."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"trainer.default_local_dir={folder}/run", "trainer.total_training_steps=1"]
        overrides += ["data.max_response_length=1", "trainer.save_freq=0", *more]
        command = [
            sys.executable,
            "-m",
            "distflow",
            "train",
            str(ROOT / "examples" / "tiny.yaml"),
            *overrides,
        ]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        began = time.time()
        subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
        lines = [
            line
            for file in Path(folder, "run", "spans").iterdir()
            for line in file.read_text("utf-8").split("\n")
        ]
        spans = [json.loads(line) for line in lines if line]
        return min(span["t1"] for span in spans if span["kind"] == "group") - began


def libraries_s() -> float:
    """Of a bare interpreter that imports them."""
    began = time.time()
    subprocess.run(
        [sys.executable, "-c", LIBRARIES], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )
    return time.time() - began


def with_rows(number: int, rounds: int) -> None:
    """Print the seconds with so many rows, each read when its group starts, or all at the start."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        with file.open("w") as lines:
            for row in range(number):
                lines.write(
                    f'{{"prompt": "{row % 90 + 10}+{row // 90 % 90 + 10}=", "answer": "0", "row": '
                    f"{row}}}\n"
                )

        for _ in range(rounds):
            for lazy in ("true", "false"):
                seconds = first_token_s(
                    ROOT / "src", f"data.train_files={file}", f"data.lazy={lazy}"
                )
                largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
                print(
                    f"{number:,} rows, data.lazy={lazy}: {seconds:.1f} s, {largest:.2f} GiB",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds to the first rollout token")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="the folder src of another checkout")
    parser.add_argument("--rows", type=int, help="rows of a data set to start with")
    arguments = parser.parse_args()
    if arguments.rows:
        with_rows(arguments.rows, arguments.rounds)
        return

    sources = {"this": ROOT / "src"} | (
        {"other": arguments.against.resolve()} if arguments.against else {}
    )
    taken: dict[str, list[float]] = {name: [] for name in ("libraries", *sources)}

    # the first fills the disk's cache and writes what is compiled
    for number in range(1 + arguments.rounds):
        round_s = {
            "libraries": libraries_s(),
            **{name: first_token_s(source) for name, source in sources.items()},
        }
        for name, seconds in round_s.items() if number else ():
            taken[name].append(seconds)
        print(
            f"round {number}: "
            + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in round_s.items()),
            flush=True,
        )

    least = {name: min(seconds) for name, seconds in taken.items()}
    for name, seconds in least.items():
        print(
            f"{name}: {seconds:.2f} s, {seconds / least['libraries']:.2f} times the libraries alone"
        )


if __name__ == "__main__":
    main()
