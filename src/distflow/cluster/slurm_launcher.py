"""The Slurm launcher: submits a job that starts Ray on its nodes and trains with the Ray
launcher."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from distflow.errors import UserError
from distflow.launch.run_end import done_before
from distflow.launch.run_start import starting
from distflow.observe.crash_safe_files import write_atomically
from distflow.processes.survivors import without_mark
from distflow.runtime.spec import LAUNCH_DEFAULTS, LaunchOptions, Outcome, Spec


def launch_slurm(spec: Spec, options: LaunchOptions = LAUNCH_DEFAULTS) -> Outcome | None:
    """See `Launch`. The job runs it; this checks that it can start, and has steps left."""
    if options.embedded:
        raise UserError(
            "trainer.launcher=slurm submits a command: use `distflow train`, not Python"
        )
    if (sbatch := shutil.which("sbatch")) is None:
        raise UserError(
            "trainer.launcher=slurm: no sbatch is on the PATH: submit on a machine with Slurm"
        )

    with starting(spec, options.allow_change) as start:
        if done := done_before(spec, start, options.say):
            return done
        path = spec.run_dir.absolute() / "slurm.sbatch"
        write_atomically(path, _script(spec).encode())

    submitted = subprocess.run(
        [sbatch, "--parsable", str(path)],
        env=without_mark(os.environ),  # the job has this environment, and outlives this command
        capture_output=True,
        text=True,
    )
    if submitted.returncode:
        raise UserError(f"sbatch rejected {path}: {submitted.stderr.strip()}")

    job = submitted.stdout.strip().partition(";")[0]
    options.say(f"submitted as job {job}: {path}")
    log = shlex.quote(str(path.with_name(f"slurm-{job}.out")))
    options.say(f"to follow it: tail -F {log}; to cancel it: scancel {job}")

    return None


def _script(spec: Spec) -> str:
    """The job script, with the command that started this process."""
    filled = {
        "OPTIONS": "\n".join(f"#SBATCH {shlex.quote(option)}" for option in _options(spec)),
        "PYTHON": shlex.quote(sys.executable),
        "FOLDER": shlex.quote(str(spec.run_dir.absolute())),
        "WORDS": shlex.join(shlex.split(str(spec.description["command"]))[1:]),
    }
    template = Path(__file__).with_suffix(".sbatch").read_text("utf-8")

    return re.sub("@([A-Z]+)@", lambda found: filled[found[1]], template)


def _options(spec: Spec) -> list[str]:
    """Options of sbatch, the user's last. Raises UserError for an option that contains a line
    break."""
    trainer = spec.config.trainer
    slurm = spec.config.trainer.slurm
    output = f"{spec.run_dir.absolute()}/slurm-".replace("%", "%%") + "%j.out"

    options = [
        *(
            f"--job-name={trainer.experiment_name}",
            f"--chdir={Path.cwd()}",
            f"--output={output}",
            "--open-mode=append",
        ),
        # s before the end
        *(f"--nodes={trainer.nnodes}", "--ntasks-per-node=1", "--requeue", "--signal=B:USR1@600"),
        *([] if trainer.device == "cpu" else [f"--gpus-per-node={trainer.n_gpus_per_node}"]),
        f"--cpus-per-task={slurm.cpus_per_node}" if slurm.cpus_per_node else "--exclusive",
        *(
            f"--{name}={value}"
            for name in ("partition", "account", "time")
            if (value := getattr(slurm, name))
        ),
        *slurm.args,
    ]
    if broken := [option for option in options if not option.isprintable()]:
        raise UserError(
            f"trainer.launcher=slurm: {broken[0]!r} has characters not allowed in options of sbatch"
        )

    return options
