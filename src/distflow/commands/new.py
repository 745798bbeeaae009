"""`distflow new`: a folder to start from, with a config, a reward function and data."""

import argparse
import json
import shlex
from pathlib import Path
from random import Random

from distflow.observe.crash_safe_files import empty_folder
from distflow.observe.sanitized_output import escape_control

CONFIG = Path(__file__).with_name("new_config.yaml")
REWARD = '''\
"""Test it: distflow reward check {folder}/reward.py --data {folder}/problems.jsonl"""


def compute_score(solution_str, ground_truth):
    """The share of characters that are right; `acc` says whether the response is correct."""
    given = solution_str.strip()
    same = sum(a == b for a, b in zip(given, ground_truth))
    return {{"score": same / max(len(given), len(ground_truth)), "acc": given == ground_truth}}
'''
FILES = {"problems": "problems.jsonl", "validation": "validation.jsonl", "reward": "reward.py"}
NUM_VALIDATION = 100


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="folder to write into; it must be empty or not exist"
    )


def run_new(arguments: argparse.Namespace) -> int:
    """Write a config, a reward function and problems that are ready to train."""
    folder = empty_folder(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)

    sums = []
    for a in range(10, 50):
        for b in range(10, 50):
            sums.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})

    Random(0).shuffle(sums)
    for name, rows in (("problems", sums[NUM_VALIDATION:]), ("validation", sums[:NUM_VALIDATION])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(folder / file) for name, file in FILES.items()}
    texts = {"name": folder.resolve().name, **files}
    quoted = {key: json.dumps(text, ensure_ascii=False) for key, text in texts.items()}
    content = CONFIG.read_text("utf-8").format(folder=folder, **quoted)
    (folder / "config.yaml").write_text(content, "utf-8")
    (folder / "reward.py").write_text(REWARD.format(folder=folder))

    name = escape_control(str(folder), one_line=True)
    config = shlex.quote(f"{name}/config.yaml")
    reward = shlex.quote(f"{name}/reward.py")
    data = shlex.quote(f"{name}/problems.jsonl")
    print(f"{name}: config.yaml, reward.py, problems.jsonl, validation.jsonl")
    print(f"  distflow data check {config}")
    print(f"  distflow reward check {reward} --data {data}")
    print(f"  distflow train {config}")

    return 0
