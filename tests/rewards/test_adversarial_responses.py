"""Responses that do no work: which are tried, and what a run is told of a reward function that pays
for them."""

import asyncio
from pathlib import Path

import pytest

from distflow.config.keys.reward import RewardPart
from distflow.rewards.adversarial_responses import (
    PROBE,
    Bounds,
    cheap_responses,
    find_cheap,
    notes_of,
)
from distflow.rewards.pool.domain_pools import Patience, RewardSettings
from distflow.rewards.pool.faulty_test_functions import probe_target
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_check import Row
from distflow.rewards.router import RewardRouter

ROWS = [
    Row(f"rows:{n}", "default", answer, {}, None, f"What is {answer} - 1 + 1?")
    for n, answer in enumerate(("128", "-7", "25", "1000"))
]
PATIENT = Bounds(60.0, 60.0, 60.0)
TESTS = ["assert all(map(f, [1, 2]))"]
GAMED = {
    "empty response": "return 1.0",
    "echo of the prompt": "return float('What is' in solution_str)",
    "all numbers of a range": "return float(str(int(ground_truth) % 100) in solution_str)",
    "value of any type": "return float(solution_str == 'True')",
    "form without content": r"return float('\\boxed{}' in solution_str)",
    "text of the reward's source": "return float('well done' in solution_str)",
    "tag of its own": "return float('<verdict>' in solution_str)",
}


def found_in(code: str, folder: Path, rows: list[Row] = ROWS, network: bool = True) -> list[str]:
    (folder / "own.py").write_text(code)
    return found_by(f"{folder / 'own.py'}:compute_score", rows, network)


def found_by(target: str, rows: list[Row] = ROWS, network: bool = True) -> list[str]:
    pool = RewardPool(PoolSettings({PROBE: probe_target(target, network)}, 1, 60.0))
    try:
        return asyncio.run(find_cheap(pool, rows))
    finally:
        pool.close()


@pytest.mark.parametrize("kind", GAMED)
def test_a_reward_that_pays_for_no_work_is_found(kind: str, tmp_path: Path) -> None:
    lines = found_in(
        f"def compute_score(solution_str, ground_truth):\n    {GAMED[kind]}\n", tmp_path
    )
    assert any(kind in line for line in lines) or (
        kind == "tag of its own" and "<verdict>" in lines[0]
    )
    assert all(line.startswith("rows:") and "got 1" in line for line in lines)


def test_a_reward_that_pays_for_what_a_pattern_finds_is_found(tmp_path: Path) -> None:
    body = "return len(re.findall(r'Step \\d', solution_str)) / 3"
    (line,) = found_in(
        f"import re\ndef compute_score(solution_str, ground_truth):\n    {body}\n",
        tmp_path,
        ROWS[:1],
    )
    assert "text of the reward's source" in line and "Step 1 Step 1" in line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math.reward:compute_result", "text_rewards:exact_match"])
def test_a_built_in_pays_for_no_such_response(name: str) -> None:
    assert (
        found_by(
            f"distflow.rewards.{name}", [row._replace(prompt="How many are there?") for row in ROWS]
        )
        == []
    )


def test_a_large_row_is_tried_with_one_response_of_each_kind(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    code = f"""def compute_score(solution_str, ground_truth):
    with open("{calls}", "a") as file:
        file.write("x")
    return 1.0
"""
    large = [ROWS[0]._replace(extra_info={f"column {n}": n for n in range(20_000)})]
    numbers = []
    found = []
    for rows in (ROWS[:1], large):
        calls.write_text("")
        found.append(len(found_in(code, tmp_path, rows)))
        numbers.append(len(calls.read_text()))
    assert found[0] == found[1] and 3 * numbers[1] < numbers[0]


@pytest.mark.slow
def test_choices_and_what_is_no_number_are_tried(tmp_path: Path) -> None:
    row = ROWS[0]._replace(ground_truth="C", prompt="Which is right?")
    (line,) = found_in(
        (
            "def compute_score(solution_str, ground_truth):\n"
            "    return float(ground_truth in solution_str)\n"
        ),
        tmp_path,
        [row],
    )
    assert "all choices" in line
    near = "return float(not abs(float(solution_str.split()[-1]) - float(ground_truth)) > 1e-6)"
    body = f"    try:\n        {near}\n    except (ValueError, IndexError):\n        return 0.0\n"
    code = f"def compute_score(solution_str, ground_truth):\n{body}"
    lines = found_in(code, tmp_path)
    assert any("value of any type" in line and "nan', got 1" in line for line in lines)
    assert found_by("distflow.rewards.math.reward:compute_result", [row]) == []


def test_a_score_like_that_of_the_answer_counts_whatever_it_is(tmp_path: Path) -> None:
    code = (
        "def compute_score(solution_str, ground_truth):\n"
        "    return 0.5 * (ground_truth in solution_str)\n"
    )
    lines = found_in(code, tmp_path)
    assert any(
        "all numbers of a range" in line and "got 0.5, the row's answer 0.5" in line
        for line in lines
    )
    assert not any("value of any type" in line for line in lines)


def test_programs_that_compute_nothing(tmp_path: Path) -> None:
    row = Row("rows:1", "default", TESTS, {}, "def f(x): return x", "Write f.")
    tried = [text for kind, text in cheap_responses(row) if kind == "program that computes nothing"]
    assert "```python\ndef f(*args, **kwargs): raise StopIteration\n```" in tried
    assert any("return True" in text for text in tried) and any(
        "raise ZeroDivisionError" in text for text in tried
    )
    code = "def compute_score(solution_str):\n    return float('StopIteration' in solution_str)\n"
    (line,) = found_in(code, tmp_path, [row])
    assert "raise StopIteration" in line
    streams = row._replace(ground_truth={"inputs": ["1"], "outputs": ["2"]})
    assert "```python\nprint(input())\n```" in [text for _, text in cheap_responses(streams)]


def test_what_says_the_answer_is_not_cheap() -> None:
    row = Row("rows:1", "default", "0", {}, None, "What is 1 - 0")
    texts = [text for _, text in cheap_responses(row)]
    assert (
        "0" not in texts
        and r"So it is \boxed{0}." not in texts
        and row.prompt not in texts
        and "1" in texts
    )


def notes(
    folder: Path, code: str, name: str = "custom", weight: float = 1.0, bounds: Bounds = PATIENT
) -> list[tuple[str, str]]:
    (folder / "own.py").write_text(code)
    functions = {"default": [RewardPart(name, weight)]}
    settings = RewardSettings(
        functions, Patience(20.0, 1), custom=(str(folder / "own.py"), "compute_score")
    )
    with RewardRouter(settings, 100) as router:
        return asyncio.run(notes_of(router, settings, ROWS, bounds))


STATEFUL = """
calls = []
def compute_score(solution_str):
    calls.append(1)
    return float(len(calls))
"""


def test_a_run_is_told_in_one_warning_and_its_own_process_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STATEFUL)
    functions = {"default": [RewardPart("custom")]}
    settings = RewardSettings(
        functions, Patience(20.0, 1), custom=(str(tmp_path / "own.py"), "compute_score")
    )
    with RewardRouter(settings, 100) as router:
        ((kind, message),) = asyncio.run(notes_of(router, settings, ROWS, PATIENT))
        pool = router.pools.of("default")
        arguments = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}
        # the first call that it sees
        assert asyncio.run(pool.call("custom", arguments)).value == 1.0
    assert kind == "warning" and message.startswith(
        "reward function 'custom' (domain 'default') scores responses"
    )
    assert "\n  rows:" in message


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "without a network"),
        (
            "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')",
            "without a network",
        ),
        ("import time; time.sleep(600)", "no score within"),
    ],
)
def test_what_asks_an_endpoint_or_is_slow_is_not_tried(tmp_path: Path, body: str, why: str) -> None:
    code = f"def compute_score(solution_str):\n    {body}\n    return 1.0\n"
    ((kind, message),) = notes(
        tmp_path, code, bounds=PATIENT._replace(first_s=1.0) if "sleep" in body else PATIENT
    )
    assert kind == "info" and why in message and "is not tried" in message


def test_what_compares_with_no_answer_is_not_tried(tmp_path: Path) -> None:
    never = "def compute_score(solution_str):\n    return 0.0\n"
    assert notes(tmp_path, never, "format") == notes(tmp_path, "raise KeyError", "length") == []
    assert (
        notes(tmp_path, "def compute_score(solution_str):\n    return 1\n", weight=0.0)
        == notes(tmp_path, never)
        == []
    )


@pytest.mark.parametrize(
    "head", ["async def compute_score(solution_str)", "def compute_score(solution_strs)"]
)
def test_async_and_batched_functions_are_tried_too(tmp_path: Path, head: str) -> None:
    returned = "[1.0] * len(solution_strs)" if "strs" in head else "{'score': 0.0, 'acc': 1.0}"
    ((kind, message),) = notes(tmp_path, f"{head}:\n    return {returned}\n")
    assert kind == "warning" and "empty response" in message
