"""`trainer.launcher=slurm`: what is submitted, when the job is requeued, and the job itself on a
Ray of two nodes."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distflow
from distflow.cli import main
from distflow.cluster import slurm_launcher
from distflow.errors import UserError
from distflow.processes.survivors import MARK
from tests.e2e.runs import Playground, notes
from tests.ledger_audit import verify

NAME = 'it\'s 100% "mine" $HOME'
SBATCH = """
printf "%s\\n" "$@" > "$(dirname "$0")/submitted"
env > "$(dirname "$0")/environment"
echo "4711;here"
"""
# A job of two nodes, and its steps as processes of this one.
SCONTROL = (
    '[[ $1 == show ]] && printf "%s\\n" first second || echo "$@" >> "$(dirname "$0")/requeued"'
)
SRUN = 'while [[ $1 == -* ]]; do shift; done; exec "$@"'
# Python where Ray only pretends, and a run ends with STATUS: saved, asked to save by a signal, or
# neither.
PYTHON = """
case "$1 $2" in
    "-m ray.scripts.scripts")
        [[ $3 == health-check ]] && exit
        place="${!#}"
        stat -c '%a %n' "${place#--temp-dir=}" >> PLACES
        exec sleep 100 ;;
    "-m distflow")
        if [[ $STATUS == real ]]; then exec PYTHON "$@"; fi
        printf '%s\\n' "${@:3}" > WORDS
        while [[ $NODES && $(wc -l < PLACES) -lt $NODES ]]; do sleep 0.05; done
        trap 'wait=' TERM
        if [[ $SIGNAL ]]; then kill "-$SIGNAL" "$PPID"; while [[ $wait ]]; do sleep 0.05; done; fi
        if [[ $SAVES ]]; then mkdir -p FOLDER/checkpoints/one; touch FOLDER/checkpoints/one/manifest.json; fi
        exit "$STATUS" ;;
    "- 2") cat > /dev/null ;;
    *) echo token ;;
esac
"""  # noqa: E501


class Slurm:
    """Its commands, first on the PATH, and a playground with a run to submit."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ground = Playground(folder)
        self.tools = folder / "tools"
        self.folder = folder / NAME
        self._monkeypatch = monkeypatch
        self.tools.mkdir()
        monkeypatch.setenv("PATH", f"{self.tools}:{os.environ['PATH']}")
        for name, code in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN}.items():
            self.tool(name, code)

    def tool(self, name: str, code: str) -> None:
        (self.tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (self.tools / name).chmod(0o755)

    def submit(self, *overrides: str) -> int:
        """The status of the command."""
        keys = (
            "trainer.launcher=slurm",
            "trainer.nnodes=2",
            f"trainer.default_local_dir={quoted(self.folder)}",
        )
        command = ["train", "grpo", *self.ground.overrides("unused", *keys, *overrides)]
        self._monkeypatch.setattr(sys, "argv", ["distflow", *command])

        return main(command)

    @property
    def script(self) -> Path:
        return self.folder / "slurm.sbatch"

    def options(self) -> list[str]:
        """As sbatch reads them."""
        lines = self.script.read_text().splitlines()
        return [
            word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]
        ]

    def pretend(self) -> Path:
        """Ray only pretends from now on. Returns where the words of the run are."""
        words = self.tools / "words"
        code = PYTHON.replace("PYTHON", shlex.quote(sys.executable)).replace(
            "WORDS", shlex.quote(str(words))
        )
        code = code.replace("PLACES", shlex.quote(str(self.tools / "places")))
        self.tool("python", code.replace("FOLDER", shlex.quote(str(self.folder))))
        python = shlex.quote(sys.executable)
        text = self.script.read_text()
        assert f"python={python} " in text
        self.script.write_text(
            text.replace(f"python={python} ", f"python={shlex.quote(str(self.tools / 'python'))} ")
        )

        return words

    def job(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the script as Slurm would on the first node."""
        own = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "ignored",
            "SLURM_CPUS_PER_TASK": "2",
        }
        return subprocess.run(
            ["bash", str(self.script)],
            cwd=self.ground.folder,
            env={
                **os.environ,
                "SIGNAL": "",
                "SAVES": "",
                "NODES": "",
                "wait": "yes",
                **own,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=500,
        )

    def requeued(self) -> list[str]:
        file = self.tools / "requeued"
        return file.read_text().split() if file.exists() else []


def quoted(value: object) -> str:
    """For Hydra."""
    return "'" + str(value).replace("'", r"\'") + "'"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return Slurm(tmp_path, monkeypatch)


def test_what_is_submitted(slurm, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    wanted = (
        "trainer.slurm.partition='big one'",
        "trainer.slurm.time=24:00:00",
        'trainer.slurm.args=["--qos=high"]',
    )
    wanted = (*wanted, "trainer.device=auto", "trainer.n_gpus_per_node=4", "trainer.max_restarts=2")
    assert slurm.submit(*wanted) == 0
    assert (slurm.tools / "submitted").read_text().splitlines() == ["--parsable", str(slurm.script)]
    environment = (slurm.tools / "environment").read_text()
    assert "WANDB_API_KEY=" in environment and MARK not in environment  # the job outlives us
    assert slurm.options() == [
        *("--job-name=grpo_training", f"--chdir={Path.cwd()}"),
        f'--output={tmp_path}/it\'s 100%% "mine" $HOME/slurm-%j.out',
        *(
            "--open-mode=append",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--requeue",
            "--signal=B:USR1@600",
        ),
        *(
            "--gpus-per-node=4",
            "--exclusive",
            "--partition=big one",
            "--time=24:00:00",
            "--qos=high",
        ),
    ]
    assert (
        "a-secret" not in slurm.script.read_text() and slurm.script.stat().st_mode & 0o777 == 0o600
    )
    said = capsys.readouterr().out
    assert f"submitted as job 4711: {slurm.script}" in said and "scancel 4711" in said
    assert shlex.quote(f"{slurm.folder}/slurm-4711.out") in said
    assert (
        slurm.submit(
            "trainer.device=cpu", "trainer.slurm.cpus_per_node=8", "trainer.slurm.account=me"
        )
        == 0
    )
    assert slurm.options()[8:] == ["--cpus-per-task=8", "--account=me"]


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="wants shellcheck (Debian: apt-get install shellcheck)",
)
def test_shellcheck_finds_nothing():
    script = Path(slurm_launcher.__file__).with_suffix(".sbatch")
    done = subprocess.run(["shellcheck", "-s", "bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_refused_before_anything_is_submitted(slurm, capsys):
    def refused(*overrides: str) -> str:
        assert slurm.submit(*overrides) == 2 and not (slurm.tools / "submitted").exists()
        return capsys.readouterr().err

    assert "characters not allowed in options of sbatch" in refused(
        'trainer.slurm.account="a\nrm -r /"'
    )
    assert "must resume from its own checkpoints" in refused(
        f"trainer.resume_mode={slurm.ground.folder}"
    )
    slurm.tool("sbatch", "echo 'invalid partition specified: no' >&2; exit 1")
    assert f"sbatch rejected {slurm.script}: invalid partition specified: no" in refused(
        "trainer.slurm.partition=no"
    )
    (slurm.tools / "sbatch").unlink()
    assert "no sbatch is on the PATH" in refused()
    with pytest.raises(UserError, match="slurm.* `distflow train`"):
        distflow.train("grpo", slurm.ground.overrides("python", "trainer.launcher=slurm"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "status", "is_requeued"),
    [
        ({"STATUS": "0", "SAVES": "yes"}, 0, False),
        ({"STATUS": "2", "SAVES": "yes"}, 2, False),
        ({"STATUS": "75", "SAVES": "yes"}, 75, True),
        ({"STATUS": "75"}, 75, False),
        ({"STATUS": "143", "SAVES": "yes", "SIGNAL": "USR1"}, 143, True),
        ({"STATUS": "143", "SIGNAL": "USR1"}, 143, False),
        ({"STATUS": "0", "SAVES": "yes", "SIGNAL": "USR1"}, 0, False),
        ({"STATUS": "143", "SAVES": "yes", "SIGNAL": "TERM"}, 143, False),
    ],
)
def test_the_job_is_requeued_after_a_loss_or_at_the_end_of_its_time_if_it_has_saved(
    slurm, behaviour, status, is_requeued
):
    assert slurm.submit() == 0
    words = slurm.pretend()
    done = slurm.job(**behaviour)
    assert done.returncode == status, done.stdout + done.stderr
    assert slurm.requeued() == (["requeue", str(os.getpid())] if is_requeued else [])
    assert words.read_text().splitlines() == [*sys.argv[1:], "trainer.launcher=ray"]
    assert not list(slurm.folder.glob(".ray-token*"))
    slurm.job(**behaviour, SLURM_RESTART_COUNT="1")
    assert words.read_text().splitlines() == [
        *sys.argv[1:],
        "trainer.launcher=ray",
        "--resume",
        "auto",
    ]


@pytest.mark.slow
def test_ray_has_a_private_folder_on_each_node_that_nobody_can_guess(slurm):
    assert slurm.submit() == 0
    slurm.pretend()

    for number in (1, 2):
        done = slurm.job(STATUS="0", NODES=str(2 * number))
        assert done.returncode == 0, done.stdout + done.stderr

    places = [line.split() for line in (slurm.tools / "places").read_text().splitlines()]
    assert [mode for mode, _ in places] == ["700"] * 4 and len({path for _, path in places}) == 4
    assert not any(Path(path).exists() or str(os.getpid()) in path for _, path in places)


@pytest.mark.slow
@pytest.mark.alone
def test_the_job_trains_on_two_nodes_and_leaves_nothing(slurm):
    pytest.importorskip("ray")
    before = set(Path("/tmp").glob("ray-*"))
    assert (
        slurm.submit(
            "trainer.device=cpu", "trainer.total_training_steps=2", "trainer.slurm.cpus_per_node=2"
        )
        == 0
    )
    done = slurm.job()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        notes(slurm.folder, "end") == ["the run finished"]
        and verify(slurm.folder / "ledger.jsonl").consumed == 8
    )
    assert not list(slurm.folder.glob(".ray-token*")) and not slurm.requeued()
    assert b"--temp-dir=/tmp/ray-" not in _command_lines()
    assert set(Path("/tmp").glob("ray-*")) <= before


def _command_lines() -> bytes:
    """Of all processes."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes())
            except OSError:
                continue  # it ended

    return b"\n".join(lines)
