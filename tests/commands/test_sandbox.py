"""`distflow sandbox run`: a program of a file, for people."""

from distflow.cli import main


def test_a_program_runs_and_its_end_is_reported(tmp_path, capfd):
    program = tmp_path / "program.py"
    given = tmp_path / "given.txt"
    program.write_text(
        "import sys\nprint(sys.stdin.read().upper(), '\\x1b[31m')\nprint('said', file=sys.stderr)"
    )
    given.write_text("hello")
    assert main(["sandbox", "run", str(program), "--stdin", str(given)]) == 0
    out, err = capfd.readouterr()
    assert out == "HELLO \\x1b[31m\n"
    said, last = err.splitlines()
    assert said == "said"
    assert last.startswith("ok: exit status 0 after 0.") and (
        "sandbox: namespaces" in last or "sandbox: floor" in last
    )


def test_one_that_fails_and_one_that_is_not_there(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text("import os\nos.fork()")
    assert main(["sandbox", "run", str(program)]) == 1
    err = capfd.readouterr().err
    assert "PermissionError" in err and "exit: exit status 1" in err
    assert main(["sandbox", "run", str(tmp_path / "no.py")]) == 2
    assert "no.py: there is no such file" in capfd.readouterr().err
    assert main(["sandbox", "run", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capfd.readouterr().err
