"""An engine whose decode step never returns: one message in time, the stacks, and the process ends
all the same."""

import time

import pytest

from tests.e2e.cli_runs import CliRun, children_of, is_alive
from tests.e2e.runs import Playground
from tests.patience import wait_until

# A pipeline of the user's, whose file makes the engine's step hang after it has drawn some tokens.
HANGS = """
import time
from distflow.pipelines.grpo import grpo_pipeline as make
from distflow.models.cached_decoder import DecoderView
from distflow.rollout.hf_engine import _Draw
from tests.sparse_params import one_fast_in

decode, draw, steps = DecoderView.decode, _Draw.__call__, [0]


def count():
    steps[0] += 1
    while steps[0] > 12:
        time.sleep(EACH_S)


def decode_and_hang(self, *work):
    count()
    return decode(self, *work)


def draw_and_hang(self, input_ids, scores):
    count()
    return draw(self, input_ids, scores)


DecoderView.decode, _Draw.__call__ = decode_and_hang, draw_and_hang
"""


@pytest.mark.parametrize("command", ["train", pytest.param("eval", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("engine", "each_s"),
    [
        ("embedded", 0.05),
        pytest.param("embedded", 600, marks=pytest.mark.slow),
        pytest.param("hf", 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_in_time_and_names_the_engine(tmp_path, engine, each_s, command):
    """Also where it hangs outside of Python code, which nothing interrupts."""
    ground = Playground(tmp_path, num_rows=8)
    (tmp_path / "hangs.py").write_text(HANGS.replace("EACH_S", str(each_s)))
    keys = (
        *("trust.check_rewards=false", "trainer.total_epochs=50"),
        f"dag.pipeline={tmp_path}/hangs.py:make",
        *(f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.rollout.timeout_s=2"),
        f"data.val_files={tmp_path}/rows.jsonl",
    )
    run = CliRun(tmp_path / "log", [command, "grpo", *ground.overrides("run", *keys)])

    children: list[int] = []
    while run.running:
        children += children_of(run.pid)
        time.sleep(0.05)

    said = run.said()
    assert run.status() == 1, said
    assert (
        "Engine hangs: it was asked for " in said
        and "of row " in said
        and "for 2 s has neither" in said
    ), said
    stacks = said if command == "eval" else (tmp_path / "run" / "stacks.txt").read_text()
    assert "hangs.py" in stacks and "in count" in stacks
    assert "Traceback" not in said and said.count("distflow: ") == 1
    wait_until(lambda: not any(map(is_alive, children)), "all children of the run have ended", 10)
