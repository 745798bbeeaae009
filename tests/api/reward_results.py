"""Reward functions that are passed from Python. A file without torch: reward processes import
it."""

import os
import time
from pathlib import Path

HELD = "DISTFLOW_TEST_VERDICT_HELD"


def digits(solution_str: str, ground_truth: str) -> float:
    return sum(letter.isdigit() for letter in solution_str) / 4


def slow(solution_str: str, ground_truth: str) -> float:
    """Of the first prompt: not before the file that `HELD` names is there."""
    while ground_truth == "2" and not Path(os.environ[HELD]).exists():
        time.sleep(0.02)
    return 1.0


def lengths(solution_str: str, ground_truth: str) -> dict:
    return {
        "score": len(solution_str) / 8 + (solution_str == ground_truth),
        "acc": solution_str == ground_truth,
    }
