"""What a run has imported when its first token is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each takes a tenth of a second or more, and nothing that a plain run does needs it.
HEAVY = (
    "bitsandbytes",
    "datasets",
    "gguf",
    "matplotlib",
    "pandas",
    "peft",
    "scipy",
    "sklearn",
    "tensorboard",
    "wandb",
)

SCRIPT = f"""
import sys
from distflow import cli
from distflow.runtime.rollout_loop.rollout_client import RolloutClient
generate = RolloutClient.generate
async def looking(self, request):
    if not looking.asked:
        looking.asked = True
        print("HEAVY", *(name for name in {HEAVY!r} if name in sys.modules))
    return await generate(self, request)
looking.asked = False
RolloutClient.generate = looking
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_what_the_first_token_needs_not_is_not_imported_before_it(tmp_path: Path) -> None:
    overrides = (
        "trainer.total_training_steps=1",
        "trust.check_freq=0",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        "train",
        str(ROOT / "examples" / "tiny.yaml"),
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("HEAVY")] == ["HEAVY"]
