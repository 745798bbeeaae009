"""Words of shell commands: variables that a line assigns literally, in one pass of bounded size."""

import pytest

from distflow.commands.migration.settings import Unread
from distflow.commands.migration.shell_commands import ShellScript, read_options
from distflow.errors import UserError


def last_words(text: str) -> list[str]:
    return ShellScript(text).commands[-1].words


WORDS = {
    "continued lines": ("x --a 1 \\\n  --b 2\n", ["x", "--a", "1", "--b", "2"]),
    "quotations": ("x 'a b' \"c d\" e\\ f $'It\\'s\\n'", ["x", "a b", "c d", "e f", "It's\n"]),
    "a quotation over lines": ("x 'a\nb'\n", ["x", "a\nb"]),
    "comments": ("x a#b  # 'c\n# \"d\n", ["x", "a#b"]),
    "redirections": ("x > l a 2>&1 &> 'm n' b < i", ["x", "a", "b"]),
    "variables": (
        'A=1\nexport B="2 3"\nx $A ${B} "$B" \'$B\' \\$A a$A',
        ["x", "1", "2", "3", "2 3", "$B", "$A", "a1"],
    ),
    "variables of variables, in order": ("A=1\nB=$A$A\nA=2\nx $B", ["x", "11"]),
    "otherwise": ("x ${A:-4} ${B-5}", ["x", "4", "5"]),
    "appended": ("A=1\nA+=2\nx $A", ["x", "12"]),
    "arrays": ("A=(\n  a 'b c'  # d\n)\nA+=(e)\nx \"${A[@]}\" f", ["x", "a", "b c", "e", "f"]),
    "eval": ('N=1\nA=(x \\$N)\neval "${A[@]}"', ["x", "1"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_those_of_the_shell(name: str) -> None:
    text, words = WORDS[name]
    assert last_words(text) == words


UNREAD = {
    "no such variable": ("x --a $A", "A"),
    "an option of the caller": ("x --a $1", "$1"),
    "a command's output": ("x --a $(date)", "shell"),
    "a nested output": ('x --a "$(dirname "$(pwd)")"', "shell"),
    "backticks": ("x --a `date`", "shell"),
    "a sum": ("x --a $((1 + 2))", "shell"),
    "a changed value": ("A=1\nx --a ${A%1}", "shell"),
    "a branch": ("A=1\nif true; then\n  A=2\nfi\nx --a $A", "line 3"),
    "a condition": ("A=1\nfalse && A=2\nx --a $A", "line 2"),
    "a loop": ("for A in 1 2; do\nx --a $A\ndone", "A"),
    "a value that is unread": ("A=$(date)\nB=b$A\nx --a $B", "shell"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_a_shell_would_compute_is_unread(name: str) -> None:
    text, said = UNREAD[name]
    script = ShellScript(text)
    (words,) = [command.words for command in script.commands if command.words[0] == "x"]
    ((key, value),) = [each for each in read_options(words[1:], script.read_value) if each[0]]
    assert key == "a" and isinstance(value, Unread) and said in value.why


def test_branches_are_named_by_their_lines() -> None:
    assert (
        ShellScript("a\nif b; then\n  c\nfi\nwhile d; do e; done\n")
        .remarks[0]
        .startswith("line 2 and 5: ")
    )


def test_options_and_words_that_are_none() -> None:
    words = ["w", "--a", "1", "-1", "--b-c=2", "--d", "-n", "3", "--e", "f.g=h", "+i.j=k"]
    found = list(read_options(words, ShellScript("").read_value))
    expected = [
        ("", "w"),
        ("a", [1, -1]),
        ("b_c", 2),
        ("d", True),
        ("", "-n"),
        ("", "3"),
        ("e", True),
    ]
    assert found == [*expected, ("f.g", "h"), ("i.j", "k")]


@pytest.mark.parametrize(
    "text",
    [
        "x=aaaaaaaaaa\n" + "x=$x$x\n" * 60,
        "x=aaaaaaaaaa\n" + "x+=$x\n" * 60,
        "A=(a b)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 60,
        "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60,
        "e='eval $e'\n" + "eval $e\n" * 100,
    ],
)
def test_a_text_that_doubles_stays_small(text: str) -> None:
    assert len(repr(ShellScript(f"{text}y $x ${{A[@]}}\n").commands)) < 10**5


def test_a_line_of_many_long_variables_is_refused() -> None:
    with pytest.raises(UserError, match="line 2"):
        ShellScript("x=" + "a" * 9000 + "\ny " + "$x" * 5000)


@pytest.mark.parametrize(
    "part", ["$(", "=(", "${", '"$(" ', "$'\\'", " #'", '=("a" ', "\\\n", "> ", "`"]
)
def test_a_repeated_beginning_takes_no_more_than_its_length(part: str) -> None:
    """Expressions that go back over the text would take hours."""
    text = "y " + part * (100_000 // len(part))
    try:
        ShellScript(text)
    except UserError as error:
        assert "line 1" in str(error)
