"""MBPP's tasks with one of their tests in the prompt, which names the function: the others stay
hidden."""

import json
from collections.abc import Iterator
from pathlib import Path


def rows() -> Iterator[dict[str, object]]:
    """From mbpp.jsonl in the current folder."""
    for line in Path("mbpp.jsonl").read_text("utf-8").rstrip("\n").split("\n"):
        row = json.loads(line)
        prompt = f"{row['text']} Your function must pass this test:\n{row['test_list'][0]}"
        yield {**row, "prompt": prompt, "recorded": row["code"]}
