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
    """Part of the score for a digit and for the length, so that the first responses, which are
    random, differ in score; `acc` says whether the response is correct."""
    given = solution_str.strip()
    right = given == ground_truth

    score = 0.7 * given.startswith(ground_truth)
    if given[:1].isdigit():
        score += 0.1
    if len(given) == len(ground_truth):
        score += 0.2

    return {{"score": score, "acc": right}}
'''
FILES = {"problems": "problems.jsonl", "validation": "validation.jsonl", "reward": "reward.py"}
NUM_VALIDATION = 20


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="folder to write into; it must be empty or not exist"
    )


def run_new(arguments: argparse.Namespace) -> int:
    """Write a config, a reward function and problems that are ready to train."""
    folder = empty_folder(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)

    problems = []
    for a in range(10):
        for b in range(10):
            problems.append({"prompt": f"max {a} {b}:", "answer": str(max(a, b))})

    Random(0).shuffle(problems)
    validation = problems[:NUM_VALIDATION]
    for name, rows in (("problems", problems[NUM_VALIDATION:]), ("validation", validation)):
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
