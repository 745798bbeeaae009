"""Rules of launchers: which of their options have an effect, and what others see of them."""

import re

from distflow.config.keys.schema import Config
from distflow.config.rules import Finding, Findings

_LOOKS_SECRET = re.compile(
    r"token|secret|password|passwd|credential|api_?key|access_?key", re.IGNORECASE
)


def several_machines(config: Config) -> Findings:
    """Machines are several only with a launcher that starts processes on all of them."""
    if config.trainer.launcher == "local" and config.trainer.nnodes > 1:
        yield Finding(
            ("trainer.nnodes", "trainer.launcher"),
            "the local launcher starts processes on one machine",
            "set trainer.launcher=ray, or remove it",
        )


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


RULES = (several_machines, no_secrets)
