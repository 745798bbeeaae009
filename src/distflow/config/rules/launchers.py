"""Rules of launchers: which of their options have an effect, and what others see of them."""

import re

from distflow.config.keys.schema import Config
from distflow.config.rules import ACTOR, Finding, Findings
from distflow.config.rules.idle_options import find_idle

_LAUNCHER = "trainer.launcher"
_OF_SEVERAL_MACHINES = (
    "trainer.nnodes",
    "trainer.devices",
    "trainer.worker_roles",
    "trainer.worker_cpus",
    "trainer.worker_memory_mb",
    "trainer.worker_env",
    "trainer.max_held_mb",
    "dag.apportion_strategy",
    "dag.model_sizes",
    "dag.consider_node_cohesion",
    "dag.consider_node_load",
    "reward.num_actors",
    f"{ACTOR}.weight_update_mode",
)
_OF_SLURM = (
    "trainer.slurm.partition",
    "trainer.slurm.account",
    "trainer.slurm.time",
    "trainer.slurm.cpus_per_node",
    "trainer.slurm.args",
)
_LOOKS_SECRET = re.compile(
    r"token|secret|password|passwd|credential|api_?key|access_?key", re.IGNORECASE
)


def several_machines(config: Config) -> Findings:
    """Workers differ, and machines are several, only with a launcher that can do this."""
    if config.trainer.launcher not in ("ray", "slurm"):
        why = "the local launcher starts identical processes on one machine"
        yield from find_idle(config, _LAUNCHER, "ray", why, *_OF_SEVERAL_MACHINES)


def restarts(config: Config) -> Findings:
    """Processes are restarted by a launcher that can do this."""
    if config.trainer.launcher not in ("ray", "slurm"):
        why = (
            "the local launcher does not restart processes (the same command resumes); a Slurm "
            "job is requeued"
        )
        yield from find_idle(config, _LAUNCHER, "ray", why, "trainer.max_restarts")


def slurm_job(config: Config) -> Findings:
    """Options of a Slurm job need one."""
    if config.trainer.launcher not in ("slurm", "ray"):
        yield from find_idle(config, _LAUNCHER, "slurm", "there is no Slurm job", *_OF_SLURM)


def no_secrets(config: Config) -> Findings:
    """The config contains no secrets: the run's folder and Ray's tables show it."""
    roles = config.trainer.worker_roles.values()
    of_roles = (("trainer.worker_roles", own.get("worker_env", {})) for own in roles)
    for key, env in (("trainer.worker_env", config.trainer.worker_env), *of_roles):
        for name in filter(_LOOKS_SECRET.search, env):
            yield Finding(
                (key,),
                f"{name} looks like a secret, which would be visible in Ray and in the run's "
                "folder",
                "set it in the environment of the command, or of Ray on each machine",
            )


RULES = (several_machines, restarts, slurm_job, no_secrets)
