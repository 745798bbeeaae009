"""Functions by name: the forms of a name, and what is said where it leads to nothing."""

import multiprocessing
import os
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from distflow.errors import hint, nearest
from distflow.import_target import (
    LoadError,
    load,
    load_function,
    load_module,
)

SOURCE = """
from dataclasses import dataclass
calls = []

def first(): return "first"

@dataclass
class Judge:
    scale: float = 2.0
    def judge(self): return self.scale

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_file.py").write_text(SOURCE)
    return tmp_path / "my_file.py"


def test_the_next_process_sees_a_file_of_equal_size_and_time(file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (3, 4):
        file.write_text(f"number = {value}")
        os.utime(file, (1e9, 1e9))
        module = load_module(str(file))
        assert module.number == value
        monkeypatch.delitem(sys.modules, module.__name__)

    assert list(file.parent.iterdir()) == [file]


def test_a_file_is_loaded_once(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load_function(f"{file}:first")() == "first"
    assert load_function("my_file.py:first") is load_function(f"{file}:first")
    assert load_function(f"{file}:Judge.judge")() == 2.0
    assert load(f"{file}:number") == 3


def test_two_files_of_one_name_are_two_modules(file, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "my_file.py").write_text("def first(): return 'other'\n")
    assert load_function(f"{file}:first")() == "first"
    assert load_function(f"{tmp_path / 'other' / 'my_file.py'}:first")() == "other"


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", ["my_file.py", "mine v1.2 größe%.py"])
def test_what_a_file_defines_can_be_sent_to_processes(tmp_path, start, name):
    (tmp_path / name).write_text(SOURCE)
    judge = load(f"{tmp_path / name}:Judge")
    assert isinstance(judge, type)

    context = multiprocessing.get_context(start)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(judge(3.0).judge).result() == 3.0
        assert pool.submit(load_function(f"{tmp_path / name}:first")).result() == "first"

    assert pickle.loads(pickle.dumps(judge)) is judge


def test_a_file_that_raised_is_loaded_anew(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("value = {}['lost']\n")
    with pytest.raises(LoadError, match=r"KeyError: 'lost' \(at mended\.py:1\)"):
        load(f"{file}:value")
    file.write_text("value = 1  # now it is there\n")
    assert load(f"{file}:value") == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{file}:frist", "did you mean 'first'?"),
        ("{file}:number", "cannot be called"),
        ("{file}:Judge", "is a class"),
        ("{file}:Judge.jugde", "'Judge' has no 'jugde'; did you mean 'judge'?"),
        ("no/such/file.py:first", "there is no file 'no/such/file.py'"),
        ("qqqqqq:loads", "there is no module 'qqqqqq'"),
        ("json:", "names no function"),
        ("loads", "names no function"),
    ],
)
def test_what_is_not_there(file, path, said):
    with pytest.raises(LoadError) as caught:
        load_function(path.format(file=file))
    assert said in str(caught.value)


def test_a_module_that_raises_is_told_with_its_kind_and_line(tmp_path):
    (tmp_path / "torn.py").write_text("def f(:\n")
    with pytest.raises(LoadError, match=r"torn\.py.*SyntaxError"):
        load_module(str(tmp_path / "torn.py"))


def test_the_nearest_name_is_found_whatever_its_case_and_nothing_below_a_floor():
    known = ["actor_train", "Rollout", "reward"]
    assert nearest("actr_train", known) == "actor_train"
    assert nearest("rolout", known) == "Rollout"
    assert nearest("qqq", known) == nearest("x", []) == ""


def test_a_hint_names_the_nearest_else_what_there_is():
    assert hint("rewrd", ["reward", "rollout"]) == "; did you mean 'reward'?"
    assert hint("qqq", ["b", "a"]) == "; known: a, b"
    assert hint("qqq", [f"name_{i:02d}" for i in range(20)]).endswith("name_11, ...")
    assert hint("qqq", []) == ""
