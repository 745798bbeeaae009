"""Which part of an answer is its program."""

import time
from typing import Any

import pytest

from distflow.rewards.code.reward import find_program

F = "def f(): pass"
G = "def g(): pass"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (f"So:\n```python\n{F}\n```\nDone.", F),
        (f"```py\n{F}\n```", F),
        (f"```Python title=a.py\n{F}\n```", F),
        (f"~~~python3\n{F}\n~~~", F),
        (f"````python\n{F}\n```\n````", f"{F}\n```"),
        (f"1. so\n   ```python\n   {F}\n     x\n   ```", f"{F}\n  x"),
        (f"```python\n{F}\n```\nthen\n```python\n{G}\n```", G),  # the last
        (f"```python\n{F}\n```\ncalled as\n```\nf()\n```", F),  # the one that is marked
        (f"```\n{F}\n```\nprints\n```text\n3\n```", F),  # the one without a mark
        (f"```bash\npip\n```\n```\n{F}\n```", F),
        (f"```python\n{F}", F),  # never closed
        ("```python\n```", ""),
        (F, F),  # no fence: the whole
        (f"<think>\n```python\n{G}\n```\n</think>\n{F}", f"\n{F}"),
        ("```cpp\nint main();\n```", None),
        ("", ""),
    ],
)
def test_the_program(answer, program):
    assert find_program(answer) == program


def test_a_block_that_defines_what_is_asked_for_comes_before_a_later_one():
    answer = f"```python\n{F}\n```\nFor example:\n```python\nprint(f())\n```"
    assert find_program(answer, ["f"]) == F
    assert find_program(answer, ["h"]) == find_program(answer) == f"{F}\nprint(f())"


DOCUMENTED = (
    'def f():\n    """It is:\n\n    ```python\n    f()\n    ```\n\n    ```\n    3\n    ```\n'
    '    """\n    return 3'
)
IN_QUOTES = """def f():
    '''
```
f()
```
    '''
    return "```"
"""
UNCLOSED = 'def g():\n    """Never closed.'
QUOTES = [
    "def f():\n    # it's\n    x = '\\'\"\"\"'",
    "x = \"'''\"",
    "x = r'''\n```\n'''",
    '"""It\'s # so"""\nx = 1',
]


@pytest.mark.parametrize("program", [DOCUMENTED, "\n".join([DOCUMENTED] * 9), IN_QUOTES, *QUOTES])
@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fence_within_a_docstring_ends_no_block(program, fence):
    answer = f'So:\n{fence}python\n{program}\n{fence}\nIt\'s """ done.\n```text\n3\n```'
    assert find_program(answer) == program


def test_a_docstring_that_never_ends_ends_with_its_block():
    assert find_program(f"```python\n{UNCLOSED}\n```\nbetter:\n```python\n{F}\n```") == F
    assert (
        find_program(f"```python\n{UNCLOSED}\n```\nbetter:\n```python\n{DOCUMENTED}\n```")
        == DOCUMENTED
    )
    assert find_program(f"```python\n{UNCLOSED}\n```\nThat is all.") == UNCLOSED
    assert find_program(f"```python\n{F}\n    ```\nThat is all.") == F
    assert find_program(f"```python\n{DOCUMENTED}") == DOCUMENTED


MAIN = "def f(x):\n    return helper(x)"


@pytest.mark.parametrize(
    ("blocks", "names", "program"),
    [
        (["def helper(x): return 2 * x", MAIN], ["f"], [0, 1]),
        ([MAIN, "def helper(x): return 2 * x"], ["f"], [1, 0]),
        (["def helper(x): return twice(x)", "def twice(x): return 2 * x", MAIN], ["f"], [0, 1, 2]),
        (["import math", "def helper(x):\n    return math.sqrt(x)", MAIN], ["f"], [0, 1, 2]),
        (["from math import sqrt as helper", MAIN], ["f"], [0, 1]),
        # what both import
        (["import math\ndef helper(x): return math.pi", f"import math\n{MAIN}"], ["f"], [0, 1]),
        (["N = 2\ndef helper(x): return N * x", f"N = 3\n{MAIN}"], ["f"], [0, 1]),
        # a global of a helper with the name of a local variable
        (
            [
                "memo = {}\ndef helper(x): return memo",
                "def f(x):\n    memo = 1\n    return helper(x)",
            ],
            ["f"],
            [0, 1],
        ),
        (["@cache\ndef helper(x):\n    return 2 * x\n", MAIN], ["f"], [0, 1]),
        (["class helper:\n    pass", MAIN], ["f"], [0, 1]),
        (["CACHE: dict = {}\ndef helper(x):\n    return CACHE", MAIN], ["f"], [0, 1]),
        (["sys.setrecursionlimit(9)", "def helper(x): return 2 * x", MAIN], ["f"], [1, 2]),
        # the last one
        (["def helper(x): return 1", "def helper(x): return 2 * x", MAIN], ["f"], [1, 2]),
        (["def f(x): return 2", "def g(x): return f(x)"], ["f", "g"], [0, 1]),
        (["def helper(x): return 2 * x", "print(helper(int(input())))"], [], [0, 1]),
        (["def helper(n): return 2 * n", "n = int(input())\nprint(helper(n))"], [], [0, 1]),
        (["def unused(x): return 2 * x", MAIN], ["f"], [1]),
        ([MAIN, "helper = 3\nprint(f(3))"], ["f"], [0]),  # an example
        ([MAIN, "helper = f(3)"], ["f"], [0]),
        (["n = int(input())\nprint(n)", "def main():\n    n = 3\nmain()"], [], [1]),  # a draft
        (["n = int(input())", "def main():\n    n = 3\nmain()"], [], [1]),
        (
            ["import numpy as np\ndef g(): pass", "def f(x):\n    with x as y:\n        return y"],
            ["f"],
            [1],
        ),
        (
            ["def helper(x): return 2", "def f(x):\n    return helper(x)\ndef helper(x): return 3"],
            ["f"],
            [1],
        ),
        (["def f(x): return helper(x)", "def helper(x): return 2", MAIN], ["f"], [1, 2]),
        (["def f(x): return 3", "class Solution:\n    def f(self, x): return 2"], ["f"], [1]),
        (["def helper(x): return 2", "def f(x):\n    return x.helper"], ["f"], [1]),
    ],
)
def test_helpers_in_blocks_of_their_own_belong_to_the_program(blocks, names, program):
    answer = "\n\nthen\n\n".join(f"```python\n{block}\n```" for block in blocks)
    found = find_program(answer, names)
    assert found == "\n".join(blocks[i].strip("\n") for i in program)


@pytest.mark.parametrize(
    "example", ["print(helper(2))", "if __name__ == '__main__':\n    x = helper(2)\n    print(x)"]
)
def test_a_helper_may_come_with_an_example(example):
    helper = "def helper(x):\n    return 2 * x\n"
    answer = f"```python\n{helper}\n{example}\n```\nso\n```python\n{MAIN}\n```"
    program = find_program(answer, ["f"])
    assert program is not None and "helper(2)" not in program
    scope = dict[str, Any]()
    exec(program, scope)
    assert scope["f"](3) == 6


def test_a_program_in_a_block_of_markdown():
    assert find_program(f"````markdown\nIt is\n```python\n{F}\n```\n````") == F


SMALL_BLOCKS = [
    '```python\n"""\n```\n',
    "```python\ndef a(): b()\n```\n",
    "```\nx = '\n",
    '"""\n```\n',
    "x = '\\''",
]


@pytest.mark.parametrize(
    "piece", [*SMALL_BLOCKS, "```\n", "````md\n", "`", "\n", " ", "~~~", "```python\nx\n"]
)
def test_a_megabyte_is_read_at_once(piece):
    began = time.process_time()
    find_program(piece * (10**6 // len(piece)), ["f"])
    assert time.process_time() - began < 3.0
