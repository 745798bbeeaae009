"""Reward functions of a notebook or a script judge in processes of their own as if they had a
file."""

import asyncio
import functools
import threading

import pytest

from distflow.errors import UserError
from distflow.import_target import LoadError, read_pickled
from distflow.rewards.function_loading import (
    fingerprint_function,
    fingerprint_target,
    write_function,
)
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import Error, RewardResult, Score

# As a notebook has it: functions of `__main__`, with what they refer to there.
CELLS = """
import dataclasses, enum, functools, math, re
import numpy as np

BONUS = 0.25
PATTERN = re.compile(r"\\d+")
TABLE = np.array([1.0, 2.0])

class Kind(enum.Enum):
    A = 1

@dataclasses.dataclass
class Judge:
    weight: float
    def __call__(self, solution_str):
        return self.weight * helper(solution_str)
    def judge(self, solution_str):
        return self.weight + Kind.A.value

def helper(text):
    return other(text[1:]) if len(text) > 2 else float(len(text))

def other(text):
    return helper(text)

@functools.cache
def client():
    return {"made": len(TABLE)}

def closure(weight):
    def inner(solution_str, ground_truth):
        return weight * float(solution_str == ground_truth)
    return inner

def shouted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) * 2
    return wrapper

def plain(solution_str, ground_truth):
    return {"score": BONUS * bool(PATTERN.search(solution_str)) + math.sqrt(4), "acc": solution_str == ground_truth}

@shouted
def decorated(solution_str):
    return 1.5

def with_numpy(solution_str):
    return TABLE.sum()

def with_a_client(solution_str):
    return client()["made"]

async def waiting(solution_str):
    import asyncio
    await asyncio.sleep(0)
    return 0.5

def batched(solution_strs, ground_truths):
    best = max(map(len, solution_strs))
    return [float(len(text) == best) for text in solution_strs]

def raising(solution_str):
    return {}["what is missing"]
"""  # noqa: E501
FUNCTIONS = {
    "plain": ("plain", 2.25),
    "decorated": ("decorated", 3.0),
    "a lambda": ("lambda solution_str: len(solution_str) / 8", 0.25),
    "a closure": ("closure(0.75)", 0.0),
    "an object": ("Judge(0.5)", 1.0),
    "a method": ("Judge(0.5).judge", 1.5),
    "a partial": ("functools.partial(lambda solution_str, k: k, k=2)", 2.0),
    "numpy": ("with_numpy", 3.0),
    "a cached client": ("with_a_client", 2.0),
    "async": ("waiting", 0.5),
    "batched": ("batched", 1.0),
    "of a module": (
        "__import__('distflow.rewards.text_rewards').rewards.text_rewards.exact_match",
        0.0,
    ),
}
ASKED = {"data_source": "d", "solution_str": "12", "ground_truth": "g", "extra_info": {}}


def cells() -> dict:
    namespace: dict = {"__name__": "__main__"}
    exec(CELLS, namespace)
    return namespace


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    namespace = cells()

    targets = {}
    for name, (code, _) in [*FUNCTIONS.items(), ("raising", ("raising", 0.0))]:
        file = folder / f"{name}.pkl"
        function = eval(code, namespace)
        write_function(function, fingerprint_function(function), file)
        targets[name] = f"{file}:{name}"

    pool = RewardPool(PoolSettings(targets, num_workers=1, timeout_s=20.0))
    yield pool
    pool.close()


def judge(pool: RewardPool, name: str) -> RewardResult:
    return asyncio.run(pool.call(name, ASKED))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_kind_of_function_gives_its_score(pool, name):
    reward_result = judge(pool, name)
    assert isinstance(reward_result, Score), reward_result
    assert reward_result.value == FUNCTIONS[name][1]


def test_what_it_raises_is_an_error_as_of_a_file(pool):
    reward_result = judge(pool, "raising")
    assert (
        isinstance(reward_result, Error) and "KeyError: 'what is missing'" in reward_result.reason
    )


def test_what_cannot_be_sent_is_named(tmp_path):
    namespace = cells() | {"lock": threading.Lock()}
    exec("def locked(solution_str):\n    with lock:\n        return 1.0", namespace)
    with pytest.raises(UserError, match="locked.*lock.*functools.cache"):
        write_function(namespace["locked"], "", tmp_path / "reward.pkl")
    assert not (tmp_path / "reward.pkl").exists()


@pytest.mark.parametrize("data", [b"", b"distflow reward abc\n", b"distflow reward abc\ngarbage"])
def test_a_file_that_is_none_is_the_users_error(data, tmp_path):
    (tmp_path / "reward.pkl").write_bytes(data)
    with pytest.raises(LoadError, match=r"reward\.pkl' .* read "):
        read_pickled(tmp_path / "reward.pkl")


SAME = """
def helper(x):
    return x + 1

def reward(solution_str, scale=2):
    return helper(len(solution_str)) * LIMIT
"""


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (("", ""), True),
        (("def helper", "# a remark\n\ndef helper"), True),
        (("x + 1", "x + 2"), False),
        (("helper(len(solution_str))", "len(solution_str)"), False),
        (("scale=2", "scale=3"), False),
        (("LIMIT = 1", "LIMIT = 2"), False),
    ],
)
def test_a_fingerprint_follows_the_code_and_its_constants(change, is_same):
    def fingerprint(source: str, cell: str) -> str:
        namespace: dict = {"__name__": "__main__"}
        exec(compile(source, cell, "exec"), namespace)
        return fingerprint_function(namespace["reward"])

    source = "LIMIT = 1\n" + SAME
    assert (
        fingerprint(source, "/tmp/1.py") == fingerprint(source.replace(*change), "/tmp/2.py")
    ) is is_same


def test_the_fingerprint_of_a_file_is_read_without_running_it(tmp_path):
    function = functools.partial(max, 1)
    write_function(function, "abc", tmp_path / "reward.pkl")
    assert fingerprint_target(f"{tmp_path / 'reward.pkl'}:max") == "abc"
    (tmp_path / "reward.py").write_text("raise RuntimeError")
    one = fingerprint_target(f"{tmp_path / 'reward.py'}:f")
    (tmp_path / "reward.py").write_text("raise ValueError")
    assert one and fingerprint_target(f"{tmp_path / 'reward.py'}:f") not in ("", one)
    assert (
        fingerprint_target("no_such_module:f") == fingerprint_target(f"{tmp_path}/no.pkl:f") == ""
    )
    assert fingerprint_target("distflow.rewards.math.reward:compute_score") != ""
