"""A reward is tried on right and wrong answers: planted faults of each kind are counted, and
nothing else is."""

import asyncio

import pytest

from distflow.builtin_names import REWARDS
from distflow.config.keys.reward import RewardPart
from distflow.errors import UserError
from distflow.rewards.pool.domain_pools import Patience, RewardSettings
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_check import (
    FORMS,
    HOSTILE_KIND,
    WARNING,
    CheckResult,
    Row,
    are_same,
    call_first,
    check_reward,
    right_responses,
    wrong_responses,
)
from tests.patience import at_some_deadline

ROWS = [
    Row(f"rows:{number}", "default", answer, {})
    for number, answer in enumerate(("128", "-7", "2.5", "1,000"))
]


def tried(target: str, rows: list[Row] = ROWS, timeout_s: float = 20.0) -> CheckResult:
    pool = RewardPool(PoolSettings({"it": target}, num_workers=2, timeout_s=timeout_s))
    try:
        return asyncio.run(check_reward(pool, "it", rows, 2))
    finally:
        pool.close()


def faults(result: CheckResult) -> dict[str, tuple[int, int, int]]:
    counts = {
        name: (len(kind.wrong), len(kind.errors), len(kind.timeouts))
        for name, kind in result.kinds.items()
    }
    return {name: found for name, found in counts.items() if any(found)}


@pytest.mark.parametrize("name", ["math", "exact_match"])
def test_a_built_in_has_no_fault(name):
    result = tried(REWARDS[name].target)
    assert faults(result) == {} and result.num_faults == 0 and result.answers == 4
    read = set(FORMS) if name == "math" else {"box", "hashes", "alone"}
    assert set(result.forms()) == read
    asked = {name: result.kinds[name].asked for name in ("right answer", "a digit changed")}
    assert set(asked.values()) == {4 * len(read)}
    assert len(result.seconds) >= sum(kind.asked for kind in result.kinds.values())


def test_a_reward_that_hangs_ends_the_check_after_a_few_calls(tmp_path):
    """Two hundred rows in six forms, each for its deadline, would take minutes."""
    (tmp_path / "hangs.py").write_text(
        "import time\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    return 1.0 if solution_str == ground_truth else time.sleep(600)\n"
    )
    rows = [Row(f"rows:{number}", "default", str(number), {}) for number in range(200)]
    result = tried(f"{tmp_path / 'hangs.py'}:compute_score", rows, timeout_s=0.3)
    assert (
        result.hangs
        and sum(len(kind.timeouts) for kind in result.kinds.values()) == result.num_hangs <= 5
    )


def test_the_faults_of_a_reward_are_counted_by_kind(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import time\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    if len(solution_str) > 1_000_000: time.sleep(600)\n"
        "    if '\\x00' in solution_str: raise KeyError('nul')\n"
        "    return float(ground_truth in solution_str and ground_truth != '2.5')\n"
    )

    def check(deadline_s: float) -> None:
        found = faults(tried(f"{tmp_path / 'bad.py'}:compute_score", timeout_s=deadline_s))

        # three of four answers are found in each of five forms, wherever they stand
        assert found.pop("right answer") == (5, 0, 0)
        assert found.pop("both answers") == (30, 0, 0) and found.pop(
            "answer named, another given"
        ) == (15, 0, 0)
        assert found.pop("another sign") == (10, 0, 0), "-7 is not in 7"
        assert found.pop("a digit more") == (15, 0, 0)
        assert found.pop(HOSTILE_KIND) == (0, 1, 1)
        assert found == {}

    at_some_deadline(check, 1.0, 10.0)


def test_a_reward_that_is_never_or_always_right(tmp_path):
    (tmp_path / "constant.py").write_text(
        "def never(solution_str):\n    return 0.9\ndef always(solution_str):\n"
        "    return {'score': -1.0, 'acc': 1.0}\n"
    )
    never, always = (tried(f"{tmp_path / 'constant.py'}:{name}") for name in ("never", "always"))
    assert never.forms() == [] and faults(never) == {"right answer": (4, 0, 0)}
    assert all(
        len(kind.wrong) == kind.asked
        for name, kind in always.kinds.items()
        if name != "right answer"
    )


def test_the_rows_own_responses_stand_for_answers_that_are_no_text(tmp_path):
    (tmp_path / "tests.py").write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    return float(ground_truth['key'] in solution_str)\n"
    )
    rows = [
        Row(f"rows:{n}", "default", {"key": f"k{n}"}, {}, f"it is k{n}" if n else "no")
        for n in range(4)
    ]
    result = tried(f"{tmp_path / 'tests.py'}:compute_score", rows)
    assert result.forms() == ["own response"] and faults(result) == {"right answer": (1, 0, 0)}
    assert result.kinds["right answer"].wrong[0].origin == "rows:0"


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("0", {"a digit changed"}),
        ("12", {"a digit changed", "another sign", "a digit more"}),
        (r"\frac{1}{2}", set()),
    ],
)
def test_what_is_made_of_an_answer_is_wrong(answer, kinds):
    always = {"another row's answer", "both answers", "empty answer", "answer named, another given"}
    others = [answer, "0.50" if "frac" in answer else answer, "31"]
    made = list(wrong_responses(answer, others, "alone"))
    assert {response.kind for response in made} == kinds | always
    assert not any(are_same(answer, response.text) for response in made if response.kind in kinds)
    assert [response.text for response in made if response.kind == "another row's answer"] == ["31"]
    assert [response.is_right for response in right_responses(answer, "x")] == [True] * 6


FIRST_CALLS = {
    "return None": "it returned None",
    "return float('nan')": "it returned nan",
    "return 'good'": "it returned 'good'",
    "return solution_str.nothing": (
        "AttributeError: 'str' object has no attribute 'nothing' (at own.py:4)"
    ),
    "import json; json.loads('{')": "(at own.py:4)",
    "import time; time.sleep(1000)": "no score within 0.5 s (reward.timeout_s)",
    "return 1.0 if solution_str == ground_truth else None": (
        "response ('I do not know.'; its score should be 0)"
    ),
    "return 1.0 if solution_str == ground_truth else exit(1)": "a wrong response",
}


@pytest.mark.parametrize("line", FIRST_CALLS)
def test_a_first_call_without_a_score_is_reported(tmp_path, line):
    """With the function, its file and line, and the line of the user's code where a library
    raised."""
    (tmp_path / "own.py").write_text(f"\n\ndef judged(solution_str, ground_truth):\n    {line}\n")
    parts = {"default": (RewardPart("custom"), RewardPart("exact_match"))}
    settings = RewardSettings(
        parts,
        Patience(0.5 if "sleep" in line else 60.0, 1),
        custom=(f"{tmp_path}/own.py", "judged"),
    )
    with pytest.raises(UserError) as caught:
        call_first(settings, [Row("rows.jsonl:1", "algebra", "7", {})])
    said = str(caught.value)
    assert (
        FIRST_CALLS[line] in said
        and f"judged ({tmp_path}/own.py, line 3)" in said
        and "rows.jsonl:1" in said
    )
    assert "data.answer_key" not in said


def test_a_first_row_without_a_ground_truth_is_named_as_the_cause(tmp_path):
    (tmp_path / "own.py").write_text(
        "def judged(solution_str, ground_truth):\n    return len(ground_truth)\n"
    )
    settings = RewardSettings(
        {"default": (RewardPart("custom"),)},
        Patience(60.0, 1),
        custom=(f"{tmp_path}/own.py", "judged"),
    )
    with pytest.raises(UserError, match="data.answer_key"):
        call_first(settings, [Row("rows.jsonl:1", "default", None, {})])


def test_a_first_call_is_with_the_first_row_of_a_domain_and_its_ground_truth(tmp_path):
    (tmp_path / "own.py").write_text(
        "def judged(solution_str, ground_truth, prompt='', bonus=0.0):\n"
        "    open(__file__ + '.log', 'a').write(f'{prompt} {solution_str} {ground_truth} "
        "{bonus}\\n')\n"
        "    return float(solution_str == ground_truth)\n"
    )
    own = f"{tmp_path}/own.py:judged"
    parts = {"default": (RewardPart(own, options={"bonus": 0.5}),), "other": (RewardPart(own),)}
    rows = [("a", "default", "1"), ("b", "default", "2"), ("c", "other", "3")]
    call_first(
        RewardSettings(parts, Patience(60.0, 1)),
        [Row("rows.jsonl:1", domain, truth, {}, prompt=prompt) for prompt, domain, truth in rows],
    )
    assert sorted((tmp_path / "own.py.log").read_text().splitlines()) == [
        "a 1 1 0.5",
        "a I do not know. 1 0.5",
        "c 3 3 0.0",
        "c I do not know. 3 0.0",
    ]


@pytest.mark.parametrize(
    ("answer", "line", "notes"),
    [
        ("7", "return float(solution_str == ground_truth)", []),
        ("7", "return float(solution_str.endswith('{7}.'))", []),
        ("7", "return abs(len(solution_str) - 1) + 2", ["a score of 1 or more counts as correct"]),
        (
            "7",
            "return {'score': float(solution_str == ground_truth), 'acc': 2}",
            ["gives an acc of 2 for"],
        ),
        ({"tests": []}, "return 0.0", []),
    ],
)
def test_scores_that_are_odd_are_told(tmp_path, answer, line, notes):
    (tmp_path / "own.py").write_text(f"def judged(solution_str, ground_truth):\n    {line}\n")
    parts = {"default": (RewardPart(f"{tmp_path / 'own.py'}:judged"),)}
    said = call_first(
        RewardSettings(parts, Patience(60.0, 1)), [Row("rows.jsonl:1", "default", answer, {})]
    )
    assert bool(said) == bool(notes) and all(note in " ".join(said) for note in notes), said


READS = "import re; found = re.findall(r'-?[0-9.]+', solution_str.rstrip('.')) or ['']; "
SOLUTION = "She has 3 and 4.\nThat is <<3+4=7>>7\n#### 7"
NEVER_RIGHT = [
    (7, "return float(solution_str == ground_truth)", "7 (int)"),
    (7, READS + "return 0.1 * bool(found[-1]) + (found[-1] == ground_truth)", "7 (int)"),
    ("7", READS + "return float(found[-1] != '' and int(found[-1]) == ground_truth)", "'7' (str)"),
    (SOLUTION, READS + "return float(found[-1] == ground_truth)", "#### 7' (str)"),
    (["7"], READS + "return float(found[-1] == ground_truth)", "['7'] (list)"),
    ("7", "return float(solution_str == f'Answer -> {ground_truth}')", "'7' (str)"),
]


@pytest.mark.parametrize(("answer", "line", "said"), NEVER_RIGHT)
def test_answers_that_never_count_as_right_are_told_with_their_types(tmp_path, answer, line, said):
    (tmp_path / "own.py").write_text(f"def judged(solution_str, ground_truth):\n    {line}\n")
    target = f"{tmp_path / 'own.py'}:judged"
    rows = [Row(f"rows.jsonl:{number}", "default", answer, {}) for number in (1, 2)]
    found = call_first(RewardSettings({"default": (RewardPart(target),)}, Patience(60.0, 1)), rows)
    assert len(found) == 1 and found[0].startswith(WARNING) and said in found[0], found


LEGITIMATE = [
    ("7", "return float(len(solution_str) > 50)"),
    ("7", "return 0.5 * solution_str.count('<think>')"),
    ("7", "return -abs(len(solution_str) - 20) / 20"),
    ("7", "import re; found = re.search(r'<answer>(.*)</answer>', solution_str); return "
          "float(bool(found) and "
     "found[1] == ground_truth)"),
    ("7", "return 0.7 * (ground_truth in solution_str)"),
    ("7", "return -1.0 + (solution_str == ground_truth) * 1.5"),
    ("assert f(1) == 2", "return float('def f' in solution_str and ground_truth != '')"),
    ('{"inputs": ["1"], "outputs": ["2"]}', ("return float('def f' in solution_str and "
                                             "ground_truth != "
        "'')")),
    ("import json\nassert f(1) == 2\n", ("return float('def f' in solution_str and ground_truth != "
        "'')")),
    (None, "return float('7' in solution_str)"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "line"), LEGITIMATE)
def test_rewards_of_another_kind_are_not_accused(tmp_path, answer, line):
    (tmp_path / "own.py").write_text(f"def judged(solution_str, ground_truth):\n    {line}\n")
    parts = {"default": (RewardPart(f"{tmp_path / 'own.py'}:judged"),)}
    assert not call_first(
        RewardSettings(parts, Patience(60.0, 1)), [Row("rows.jsonl:1", "default", answer, {})]
    )


def test_a_slow_function_is_not_tried_for_long(tmp_path):
    (tmp_path / "own.py").write_text(
        "import time\n\ndef judged(solution_str, ground_truth):\n"
        "    open(__file__ + '.log', 'a').write('x')\n    time.sleep(1.2)\n    return 0.0\n"
    )
    parts = {"default": (RewardPart(f"{tmp_path / 'own.py'}:judged"),)}
    rows = [Row("rows.jsonl:1", "default", "7", {})] * 8
    assert not call_first(RewardSettings(parts, Patience(60.0, 1)), rows)
    assert len((tmp_path / "own.py.log").read_text()) < 10


def test_a_batched_function_is_called_with_two_responses(tmp_path):
    (tmp_path / "own.py").write_text(
        "def judged(solution_strs, ground_truths):\n    return [1.0]\n"
    )
    parts = {"default": (RewardPart(f"{tmp_path / 'own.py'}:judged"),)}

    with pytest.raises(UserError, match="1.*2 responses"):
        call_first(
            RewardSettings(parts, Patience(60.0, 1)), [Row("rows.jsonl:1", "default", "7", {})]
        )
