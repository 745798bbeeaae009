"""Writes the small programming tasks that the package carries: chains of steps over integers, and
tests of each.

    python scripts/make_functions.py

The files are committed; the script gives the same ones each time. A task is `x +4 *3 %5:`, to be
answered by a Python function `f` that takes these steps one after the other. No chain of operators
is in two of the data sets, whatever its numbers, but for those to learn from and to train on, which
have no task in common.
"""

import argparse
import json
import random
from collections.abc import Iterable
from itertools import product
from operator import add, floordiv, mod, mul, sub
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "src" / "distflow" / "data" / "builtin"
SEED = 3
OPERATORS = {"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod}
BINDING = ("*", "//", "%")
CONSTANTS = range(2, 10)
NUM_WORKED = 1200
NUM_CARELESS = 1800
NUM_RL = 1200
NUM_VAL = 300
NUM_LONG = 200
SHARE_HELD_OUT = 0.2
SHARE_BENT = 0.7
NUMBERS = range(-40, 41)
NUM_CASES = 10
MIN_VALUES = 3  # of a task, so that it is none to name one number
# An expression for the reward part `format`: the share of answers that are worked out, which is
# what RL finds.
WORKED = "[\\s\\S]*\\n return x"

Chain = tuple[str, ...]
Task = tuple[tuple[str, int], ...]
"""Operators with their right operands."""


def main() -> None:
    """Write the data sets to FOLDER."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=FOLDER)
    write_data(parser.parse_args().data)


def write_data(folder: Path) -> None:
    """Tasks of two and three steps: examples, tasks to train on by reward, validation ones; and
    validation ones of four.

    The examples are of two kinds: careless expressions, which forget the parentheses, and worked
    ones, which are right."""
    draw = random.Random(SEED)
    chains = [chain for length in (2, 3) for chain in product(OPERATORS, repeat=length)]
    draw.shuffle(chains)
    num_held_out = round(SHARE_HELD_OUT * len(chains))
    held_out = chains[:num_held_out]
    known = chains[num_held_out:]
    parts = _deal(known, draw, NUM_WORKED, NUM_CARELESS, NUM_RL)
    (val,) = _deal(held_out, draw, NUM_VAL)
    (long,) = _deal([*product(OPERATORS, repeat=4)], draw, NUM_LONG)
    examples = [(task, worked(task)) for task in parts[0]] + [
        (task, careless(task)) for task in parts[1]
    ]
    draw.shuffle(examples)
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(
        folder / "functions-sft.jsonl",
        [{"prompt": prompt(t), "response": text} for t, text in examples],
    )

    for name, tasks in (("rl", parts[2]), ("val", val), ("long", long)):
        rows = [
            {"prompt": prompt(t), "answer": tests(t, draw), "format_regex": WORKED} for t in tasks
        ]
        _write_lines(folder / f"functions-{name}.jsonl", rows)


def prompt(task: Task) -> str:
    """`x +4 *3 %5:`"""
    return f"x {' '.join(f'{operator}{constant}' for operator, constant in task)}:"


def careless(task: Task) -> str:
    """`def f(x):return x+4*3%5`: Python multiplies before it adds, whatever the order of the
    steps."""
    return f"def f(x):return x{''.join(f'{operator}{constant}' for operator, constant in task)}"


def worked(task: Task) -> str:
    """One step a line."""
    steps = "".join(f"\n x{operator}={constant}" for operator, constant in task)
    return f"def f(x):{steps}\n return x"


def value(task: Task, x: int) -> int:
    """What the steps make of `x`."""
    for name, constant in task:
        x = OPERATORS[name](x, constant)
    return x


def tests(task: Task, draw: random.Random) -> dict[str, object]:
    """Calls of `f`, for the reward `code`: some tell the careless answer from the right one, where
    it is another."""
    expression = careless(task).partition("return ")[2]
    numbers = draw.sample(NUMBERS, len(NUMBERS))
    telling = [x for x in numbers if eval(expression, {"x": x}) != value(task, x)][: NUM_CASES // 2]
    chosen = (telling + [x for x in numbers if x not in telling])[:NUM_CASES]
    draw.shuffle(chosen)

    return {
        "fn_name": "f",
        "inputs": [[x] for x in chosen],
        "outputs": [value(task, x) for x in chosen],
    }


def _is_bent(chain: Chain) -> bool:
    """Whether Python's own order is another: something is added or taken before something binds."""
    first = next((i for i, operator in enumerate(chain) if operator not in BINDING), len(chain))
    return any(operator in BINDING for operator in chain[first:])


def _deal(chains: list[Chain], draw: random.Random, *counts: int) -> list[list[Task]]:
    """So many tasks each, no task twice; in every part the same share of bent ones."""
    kinds = {bent: [chain for chain in chains if _is_bent(chain) == bent] for bent in (True, False)}
    taken = set[Task]()

    parts = []
    for count in counts:
        num_bent = round(SHARE_BENT * count)
        part = [_new_task(kinds[place < num_bent], draw, taken) for place in range(count)]
        draw.shuffle(part)
        parts.append(part)

    return parts


def _new_task(chains: list[Chain], draw: random.Random, taken: set[Task]) -> Task:
    """One that is not taken yet, and takes it."""
    while True:
        task = tuple((operator, draw.choice(CONSTANTS)) for operator in draw.choice(chains))
        if task not in taken and len({value(task, x) for x in NUMBERS}) >= MIN_VALUES:
            taken.add(task)
            return task


def _write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
