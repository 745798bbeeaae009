"""Which part of an answer is its program."""

import time

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
    assert find_program(answer, ["h"]) == find_program(answer) == "print(f())"


DOCUMENTED = (
    'def f():\n    """It is:\n\n    ```python\n    f()\n    ```\n\n    ```\n    3\n    ```\n'
    '    """\n    return 3'
)


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fence_within_a_docstring_ends_no_block(fence):
    answer = f"So:\n{fence}python\n{DOCUMENTED}\n{fence}\ndone.\n```text\n3\n```"
    assert find_program(answer) == DOCUMENTED
    assert find_program(f"```python\n{DOCUMENTED}") == DOCUMENTED


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
