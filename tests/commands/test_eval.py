"""`distflow eval`."""

from distflow.cli import main

SMALL = (
    "data.val_files=builtin:arithmetic-val",
    "data.val_max_samples=2",
)


def test_what_is_evaluated_is_not_said_to_be_trained_on(tmp_path, capsys):
    assert main(["eval", "examples/tiny.yaml", *SMALL, f"--to={tmp_path}/there"]) == 0
    said = capsys.readouterr().out
    assert "val_correct/all/mean" in said
    assert "warning" not in said
