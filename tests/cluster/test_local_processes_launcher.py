"""Several processes of this machine without Ray: the results of one process, and what becomes of
them when they die."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from distflow.cluster.local_processes_launcher import launch_processes
from distflow.cluster.remote_calls import WorkerDied
from distflow.errors import UserError
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.fault_injection import Fault
from distflow.runtime.spec import LaunchOptions
from tests.cluster import leftovers
from tests.cluster.distance import distance
from tests.cluster.test_supervisor import STEPS, check_same_figures, check_whole, validating
from tests.e2e.runs import Playground, Run, notes
from tests.ledger_audit import verify
from tests.models.families import FAMILIES
from tests.patience import wait_until
from tests.sparse_params import BY_HAND, one_fast_in

TWO = "trainer.n_gpus_per_node=2"
SHARDS = ("actor_rollout_ref.actor.strategy=fsdp", TWO, "trust.check_freq=1")
LAYERS = ("trainer.allocation='embedded:d2|fsdp:d1t2'",)
ROWS = ("trainer.allocation='embedded:d2|fsdp:d1c2'", "trust.check_freq=1")
SFT = (
    "data.response_key=answer",
    "~reward.functions",
    "~reward.num_workers",
    "~custom_reward_function.path",
    "~actor_rollout_ref.rollout.n",
)
WITHIN_S = 600


@pytest.fixture(scope="module")
def ground(tmp_path_factory, fault_plan):
    return Playground(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(ground):
    return ground.run("grpo", *STEPS, *validating(ground), name="alone")


def run(ground: Playground, *keys: str, name: str, callbacks: Callbacks = Callbacks()) -> Run:  # noqa: B008
    config, spec = ground.spec("grpo", *STEPS, *keys, name=name)
    return Run(
        ground.folder / name, config, launch_processes(spec, LaunchOptions(callbacks=callbacks))
    )


def workers(root: int) -> list[int]:
    return leftovers.named("from distflow.cluster.local_processes_launcher import main", root)


@pytest.fixture(scope="module")
def told():
    """What callbacks of the run `two` were told."""
    return []


@pytest.fixture(scope="module")
def two(ground, told):
    callbacks = Callbacks(
        on_step=lambda step, metrics: told.append(f"step {step}"),
        on_save=lambda step, path: told.append(f"saved {path.name}"),
    )
    return run(ground, *validating(ground), TWO, name="two", callbacks=callbacks)


@pytest.mark.slow
def test_two_processes_end_where_one_does(alone, two, told):
    check_whole(two, alone)
    assert sorted(told) == [
        "saved step-000002",
        "saved step-000004",
        "step 1",
        "step 2",
        "step 3",
        "step 4",
    ]
    verify(two.folder / "ledger.jsonl")
    assert not workers(os.getpid())
    assert {name for name in os.listdir(two.folder) if name.startswith(".")} == {
        ".distflow-run",
        ".writer",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *one_fast_in(2, [("layers", LAYERS), ("shards", SHARDS)], unpack=True, others=BY_HAND),
        ("rows", ROWS),
    ],
)
def test_weights_spread_over_two_processes_end_where_one_does(ground, alone, name, keys):
    found = run(ground, *validating(ground), *keys, name=name)
    check_same_figures(found, alone)
    assert found.notes("warning") == alone.notes("warning")


@pytest.mark.slow
def test_processes_with_different_experts_end_where_one_does(tmp_path):
    ground = Playground(tmp_path, "qwen3_moe", **FAMILIES["qwen3_moe"].changes)
    hf = "actor_rollout_ref.rollout.name=hf"
    alone = ground.run("grpo", *STEPS, hf, name="alone")
    found = run(ground, "trainer.allocation='hf:d2|fsdp:d2e2'", name="experts")
    check_same_figures(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "allocation", "keys"),
    [
        ("ppo", "embedded:d2|fsdp:d1c2|fsdp[critic]:d1c2", ()),
        ("gspo", "embedded:d4|fsdp:d2c2", ("actor_rollout_ref.actor.use_kl_loss=true",)),
        ("sft", "fsdp:d1c2", SFT),
    ],
)
def test_ranks_that_divide_rows_end_where_one_does(tmp_path, preset, allocation, keys):
    """Values, log-probs of the reference, ratios of whole sequences, and given responses."""
    ground = Playground(tmp_path)
    keys = (*STEPS, "trust.check_freq=1", *keys)
    alone = ground.run(preset, *keys, name="alone")
    config, spec = ground.spec(preset, *keys, f"trainer.allocation='{allocation}'", name="rows")
    outcome = launch_processes(spec, LaunchOptions())
    check_same_figures(Run(ground.folder / "rows", config, outcome), alone)


@pytest.mark.slow
@pytest.mark.faults
def test_a_process_that_is_killed_ends_the_run_and_resumed_it_ends_with_the_same_bits(
    ground, two, plan
):
    plan(Fault("train.update", rank=1, call=3))
    keys = (*validating(ground), TWO)
    with pytest.raises(WorkerDied) as told:
        run(ground, *keys, name="killed")
    assert "worker 1 of 2, which generates and trains, has died" in str(told.value)
    assert "SIGKILL" in str(told.value) and "resumes from step-000002" in str(told.value)
    folder = ground.folder / "killed"
    assert not workers(os.getpid())
    assert notes(folder, "end") == ["the run failed"] and notes(folder, "error")
    resumed = run(ground, *keys, name="killed")
    verify(folder / "ledger.jsonl")
    assert resumed.outcome.steps == 4 and distance(resumed.weights(4), two.weights(4)) == 0


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("number", one_fast_in(2, [signal.SIGINT, signal.SIGKILL], others=BY_HAND))
def test_a_signal_to_the_command_ends_all_and_the_first_saves(tmp_path, number):
    """Where there is no Ray to import."""
    ground = Playground(tmp_path)
    (tmp_path / "without" / "ray").mkdir(parents=True)
    (tmp_path / "without" / "ray" / "__init__.py").write_text(
        "raise ImportError('there is none')\n"
    )
    arguments = ground.overrides(
        "run", TWO, "trainer.total_training_steps=5000", "trainer.save_freq=2"
    )
    command = [sys.executable, "-m", "distflow", "train", "grpo", *arguments]

    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "without")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as driver:
        held = list[int]()

        def strike() -> None:
            wait_until(
                lambda: (tmp_path / "run" / "checkpoints" / "step-000002").exists(), "a checkpoint"
            )
            held.extend(workers(driver.pid))
            os.killpg(driver.pid, number)

        threading.Thread(target=strike, daemon=True).start()
        out, _ = driver.communicate(timeout=WITHIN_S)

    assert len(held) == 2, out
    wait_until(lambda: not any(map(leftovers._lives, held)), "no process is left")

    if number == signal.SIGINT:
        assert driver.returncode == 128 + number, out
        assert notes(tmp_path / "run", "end") == ["the run stopped"]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            ("trainer.allocation='embedded[rollout]:d1+torch[actor]:d1'",),
            r"join .*trainer\.allocation",
        ),
        (
            ("trainer.n_gpus_per_node=1000", "trainer.device=cpu"),
            "1000 workers on CPUs, .* machine",
        ),
        (
            ("trainer.n_gpus_per_node=1000", "trainer.device=cuda"),
            r"1000 GPU\(s\) on 1 machine",
        ),
    ],
)
def test_what_they_cannot_do_is_refused(ground, keys, why):
    with pytest.raises(UserError, match=why):
        ground.spec("grpo", *keys, name="refused")
