"""Folders and files that somebody handed over: looking at them runs none of their code, unless it
is asked for."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow import cli
from distflow.config import load_config
from distflow.launch.run_folders.export_checkpoint import write_config_of
from distflow.launch.user_code import named_code
from distflow.runtime.checkpoint.files import describe, read_manifest, write_manifest, write_part
from tests.e2e.runs import Playground
from tests.launch.run_folders.test_replay_nonfinite_update import make_bundle
from tests.user_code import forgotten

pytestmark = pytest.mark.slow
CHEAP = ("trust.check_rewards=false", "trainer.total_epochs=1", "actor_rollout_ref.rollout.n=2")


class Trap:
    """Code that leaves a file behind when it runs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "the code ran"
        self.code = f"open({str(self.file)!r}, 'w').close()\n"

    @property
    def sprung(self) -> bool:
        return self.file.exists()


@pytest.fixture
def trap(tmp_path):
    return Trap(tmp_path)


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=4)


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def bring_code(model: Path, code: str) -> None:
    """As a model folder that `transformers` would run code of."""
    classes = "class EvilConfig: pass\nclass EvilModel: pass\nclass EvilTokenizer: pass\n"
    (model / "evil.py").write_text(code + classes)
    edit_json(
        model / "config.json",
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
    )
    edit_json(
        model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]}
    )


def run_that_trusts(ground: Playground) -> Path:
    trusts = "actor_rollout_ref.model.trust_remote_code=true"
    status = cli.main(
        ["train", "grpo", *ground.overrides("run", *CHEAP, trusts, "trainer.save_freq=1")]
    )
    assert status == 0
    return ground.folder / "run"


def test_export_runs_no_code_of_the_model_unless_asked(ground, trap, capsys):
    run = run_that_trusts(ground)
    bring_code(ground.folder / "model", trap.code)
    command = ["export", str(run), "--to", str(ground.folder / "out")]
    capsys.readouterr()
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert not trap.sprung and not (ground.folder / "out").exists()

    model = ground.folder / "model"
    for named in (
        f"{model}/evil.py:EvilConfig",
        "evil.py:EvilModel",
        "evil.py:EvilTokenizer",
        "--trust-code",
    ):
        assert named in err

    cli.main([*command, "--trust-code"])
    assert trap.sprung and "evil.py:EvilConfig" in capsys.readouterr().out


def test_a_model_whose_code_is_not_needed_is_exported_without_it(ground, trap):
    assert cli.main(["train", "grpo", *ground.overrides("run", *CHEAP, "trainer.save_freq=1")]) == 0
    bring_code(ground.folder / "model", trap.code)
    assert cli.main(["export", str(ground.folder / "run"), "--to", str(ground.folder / "out")]) == 0
    assert not trap.sprung and not list((ground.folder / "out").glob("*.py"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_training_a_model_that_needs_its_code_names_it(ground, trap, capsys, file):
    model = ground.folder / "model"
    bring_code(model, trap.code)

    if file == "config.json":
        edit_json(model / file, model_type="evil", architectures=["EvilModel"])
    else:
        edit_json(model / file, tokenizer_class="EvilTokenizer")
        (model / "tokenizer.json").unlink()

    assert cli.main(["train", "grpo", *ground.overrides("run", *CHEAP)]) == 2
    err = capsys.readouterr().err
    assert not trap.sprung and f"{model}/evil.py:Evil" in err and "trust_remote_code" in err


def test_weights_of_a_model_are_no_program(ground, trap, capsys):
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (trap.code,)

    (ground.folder / "model" / "model.safetensors").unlink()
    (ground.folder / "model" / "pytorch_model.bin").write_bytes(
        pickle.dumps({"lm_head.weight": Evil()})
    )
    assert cli.main(["train", "grpo", *ground.overrides("run", *CHEAP)]) == 2
    assert not trap.sprung and "cannot be loaded" in capsys.readouterr().err


def test_a_kernel_of_the_hub_is_code(ground, capsys):
    edit_json(ground.folder / "model" / "config.json", attn_implementation="evil-org/kernel")
    assert cli.main(["train", "grpo", *ground.overrides("run", *CHEAP)]) == 2
    assert "'evil-org/kernel'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["script", "pickle"])
def test_a_folder_of_data_is_no_program(ground, trap, capsys, kind):
    folder = ground.folder / "handed"
    folder.mkdir()

    if kind == "script":
        (folder / "handed.py").write_text(trap.code)
    else:
        (folder / "rows.pkl").write_bytes(
            b"cbuiltins\nexec\n(V" + trap.code.strip().encode() + b"\ntR."
        )

    assert (
        cli.main(["train", "grpo", *ground.overrides("run", *CHEAP, f"data.train_files={folder}")])
        == 2
    )
    assert not trap.sprung and "data.train_files" in capsys.readouterr().err


def test_replay_imports_no_module_of_the_bundle_unless_asked(tmp_path, trap, monkeypatch, capsys):
    bundle = make_bundle(Playground(tmp_path), monkeypatch, "advantages", "grpo")
    module = tmp_path / "handed_over.py"
    module.write_text(trap.code)
    config = bundle / "config.yaml"
    config.write_text(config.read_text().replace("imports: []", f"imports: [{module}]"))
    capsys.readouterr()
    assert cli.main(["replay", str(bundle)]) == 2
    err = capsys.readouterr().err
    assert not trap.sprung and f"trainer.imports: {module}" in err and "--trust-code" in err
    assert cli.main(["replay", str(bundle), "--trust-code"]) == 0
    out = capsys.readouterr().out
    assert trap.sprung and out.index(f"trainer.imports: {module}") < out.index(
        "update of the actor"
    )


def test_replay_runs_no_code_of_the_model_unless_asked(tmp_path, trap, monkeypatch, capsys):
    trusts = "actor_rollout_ref.model.trust_remote_code=true"
    bundle = make_bundle(Playground(tmp_path), monkeypatch, "advantages", "grpo", trusts)
    bring_code(tmp_path / "model", trap.code)
    assert cli.main(["replay", str(bundle)]) == 2
    assert not trap.sprung and "evil.py:EvilModel" in capsys.readouterr().err


def edit_config(run: Path, **changes: Any) -> None:
    """Of the config in the run's checkpoint, by group; the manifest follows."""
    (folder,) = (run / "checkpoints").glob("step-*")
    content = json.loads((folder / "run.json").read_text())
    for group, values in changes.items():
        content["config"][group] |= values
    write_part(folder, "run", content)
    manifest = read_manifest(folder)
    write_manifest(
        folder, replace(manifest, files={name: describe(folder / name) for name in manifest.files})
    )


def test_eval_and_chat_run_no_code_of_a_run_unless_asked(ground, trap, capsys, monkeypatch):
    cheap = [
        each
        for each in ground.overrides("run", *CHEAP, "trainer.save_freq=1")
        if "custom" not in each
    ]
    assert cli.main(["train", "grpo", *cheap, "reward.functions={default: [length]}"]) == 0
    run = ground.folder / "run"
    rows = ground.folder / "rows.jsonl"
    evil = ground.folder / "evil.py"
    evaluate = ["eval", str(run), f"data.val_files={rows}", f"--to={ground.folder}/out"]
    evil.write_text(trap.code + "def compute_score(**_): return 0.0\n")

    judge = {
        "name": "judge",
        "options": {"model": "m", "base_url": "http://localhost:9/v1", "key_variable": "KEY"},
    }
    for changes, named in (
        ({"reward": {"functions": {"default": [judge]}}}, "judge at http://localhost:9/v1"),
        ({"trainer": {"imports": ["evil"]}}, "trainer.imports: evil"),
        ({"reward": {"functions": {"default": [{"name": f"{evil}:compute_score"}]}}}, evil),
    ):
        edit_config(run, **changes)
        assert cli.main(evaluate) == 2
        err = capsys.readouterr().err
        assert not trap.sprung and str(named) in err and "--trust-code" in err

    assert cli.main(["chat", str(run)]) == 2 and "trainer.imports: evil" in capsys.readouterr().err
    edit_config(run, trainer={"imports": []})
    assert cli.main([*evaluate, "--trust-code"]) == 0 and trap.sprung
    monkeypatch.setenv("SECRET", "secret of the user")
    edit_config(run, data={"system_prompt": "${oc.env:SECRET}", "prompt_format": "chat"})
    written = write_config_of(run, ground.folder / "c.yaml", print, trust_code=True)
    assert load_config(str(written), complete=False).config.data.system_prompt == "${oc.env:SECRET}"


GROUP = """
from dataclasses import dataclass
from distflow.config import register_config_group
{code}
@dataclass(frozen=True)
class Mine:
    size: int = 1
register_config_group("mine_{number}", Mine)
"""


@pytest.mark.parametrize("flag", ["--explain", "--graph", ""])
def test_to_look_at_a_config_runs_nothing_that_it_names(ground, trap, capsys, monkeypatch, flag):
    number = len(flag)
    config = ground.folder / "handed.yaml"
    module = f"groups_handed_{number}"
    monkeypatch.syspath_prepend(ground.folder)
    (ground.folder / f"{module}.py").write_text(GROUP.format(code=trap.code, number=number))
    group = f"mine_{number}: {{size: 2}}\n" if flag != "--graph" else ""
    config.write_text(f"defaults: [grpo, _self_]\ntrainer: {{imports: [{module}]}}\n{group}")
    command = [
        "config",
        str(config),
        *([flag] if flag else []),
        *(["trainer.seed"] if flag == "--explain" else []),
    ]
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert not trap.sprung and module in err and "--trust-code" in err
    with forgotten(module):
        assert cli.main([*command, "--trust-code"]) == 0
    assert trap.sprung


def test_verifiers_that_are_named_by_their_place_are_code_of_the_config(ground):
    file = ground.folder / "reward.py"
    more = "def {}(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    file.write_text(file.read_text() + more.format("own") + more.format("other"))
    one = f"{{a: {{train_files: {ground.folder}/rows.jsonl, reward: [math, '{file}:own']}}}}"
    by_function, _ = ground.spec("grpo", f"reward.functions={{default: ['{file}:other', custom]}}")
    no_default = ("data.train_files=[]", "~reward.functions", "custom_reward_function.path=null")
    by_domain, _ = ground.spec("rlvr", *no_default, f"data.domains={one}")
    assert f"reward.functions.default: {file}:other" in named_code(by_function)
    assert f"data.domains.a.reward: {file}:own" in named_code(by_domain)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("report", "."), 0),
        (("config", "grpo"), 0),
        (("export", ".", "--to", "out"), 2),
        (("eval", "."), 2),
    ],
)
def test_modules_in_the_folder_that_is_looked_at_stand_for_no_others(
    tmp_path, trap, command, status
):
    folder = tmp_path / "handed"
    (folder / "checkpoints").mkdir(parents=True)

    for name in (
        "torch",
        "transformers",
        "datasets",
        "yaml",
        "hydra",
        "omegaconf",
        "numpy",
        "safetensors",
    ):
        (folder / f"{name}.py").write_text(trap.code)

    (folder / "events.jsonl").write_text('{"kind": "start", "restart": 0}\n')
    (folder / "run.json").write_text('{"distflow": "0"}')
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "distflow", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done.stderr
    assert not trap.sprung and "Traceback" not in done.stderr
