"""Words of commands, and the options among them."""

import pytest

from distflow.commands.migration.flags import read_options, split_commands
from distflow.commands.migration.settings import Unread
from distflow.errors import UserError

WORDS = {
    "continued lines": ("x --a 1 \\\n  --b 2\n", ["x", "--a", "1", "--b", "2"]),
    "quotations": ("x 'a b' \"c d\" e\\ f", ["x", "a b", "c d", "e f"]),
    "a quotation over lines": ("x 'a\nb'\n", ["x", "a\nb"]),
    "comments": ("x a#b  # 'c\n# \"d\n", ["x", "a#b"]),
    "redirections": ("x '> t' > l a 2>&1 &> m b >>n", ["x", "> t", "a", "b"]),
    "the last command": ("set -x; a && x b | tee c\n", ["tee", "c"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_those_of_the_last_command(name):
    text, words = WORDS[name]
    assert split_commands(text)[-1] == words


@pytest.mark.parametrize("word", ["$A", "${A:-1}", "$1", '"$(date)"', "`date`", "$((1+2))", "a$A"])
def test_what_a_shell_would_compute_is_unread(word):
    (words,) = split_commands(f"x --a {word}")
    ((key, value),) = [each for each in read_options(words[1:]) if each[0]]
    assert key == "a"
    assert isinstance(value, Unread)


def test_options_and_words_that_are_none():
    words = ["w", "--a", "1", "-1", "--b-c=2", "--d", "-n", "3", "--e", "f.g=h", "+i.j=k"]
    assert list(read_options(words)) == [
        ("", "w"),
        ("a", [1, -1]),
        ("b_c", 2),
        ("d", True),
        ("", "-n"),
        ("", "3"),
        ("e", True),
        ("f.g", "h"),
        ("i.j", "k"),
    ]


@pytest.mark.parametrize("part", ["$(", '"', "$'\\'", " #'", "\\\n", "> ", "`"])
def test_a_repeated_beginning_takes_no_more_than_its_length(part):
    """Expressions that go back over the text would take hours."""
    try:
        split_commands("y " + part * (100_000 // len(part)))
    except UserError as error:
        assert "quotation" in str(error)
