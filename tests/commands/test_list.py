"""`distflow list` knows presets and models; `distflow runs` the runs of a folder."""

import re

from distflow.cli import main


def test_presets_and_models_are_listed(capsys):
    assert main(["list", "presets"]) == 0
    presets = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert presets["sft"] == "Supervised fine-tuning on given responses" and "grpo" in presets
    assert main(["list", "models"]) == 0
    assert re.search(r"builtin:tiny-arithmetic .*init=random", capsys.readouterr().out)
    assert main(["runs", "no/such/folder"]) == 2


def test_runs_below_a_folder_called_earlier_are_listed_and_earlier_ones_of_a_run_are_not(
    tmp_path, capsys
):
    runs = tmp_path / "earlier" / "runs"
    for folder in (runs / "grpo", runs / "grpo" / "earlier" / "1"):
        folder.mkdir(parents=True)
        (folder / "events.jsonl").touch()

    assert main(["runs", str(runs)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{runs}/grpo ")
