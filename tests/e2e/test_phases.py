"""The phases of a step add up to the time between two steps, taken by a clock of the test's own,
whatever is slow."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.launch.one_process_launcher import launch_local
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.checkpoint import checkpoint_store as checkpoint
from distflow.runtime.spec import LaunchOptions
from tests.e2e.runs import REWARD, Playground, Run

SLOW_S = 0.3
SLOW_REWARD = REWARD.replace(
    "    return", f"    __import__('time').sleep({SLOW_S} / 16)\n    return"
)


def timed(
    ground: Playground, preset: str, *overrides: str, on_step: Callable[[], None] = lambda: None
) -> list[dict[str, float]]:
    """The phases of each step behind the first; and `clock`, what passed between the ends of two
    steps."""
    ends: list[float] = []

    def hear(step: int, metrics: dict[str, float]) -> None:
        ends.append(time.perf_counter())
        on_step()

    validates = (
        "trainer.test_freq=1",
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=3",
    )
    config, spec = ground.spec(preset, "trainer.total_training_steps=4", *validates, *overrides)
    run = Run(
        ground.folder / "run",
        config,
        launch_local(spec, LaunchOptions(callbacks=Callbacks(on_step=hear))),
    )
    steps = [
        {
            name.removeprefix("timing_s/"): value
            for name, value in metrics.items()
            if name.startswith("timing_s/")
        }
        for metrics in run.metrics()
    ]
    clocks = [end - start for start, end in zip(ends, ends[1:], strict=False)]

    return [{**step, "clock": clock} for step, clock in zip(steps[1:], clocks, strict=True)]


def sleeping(function: Callable[..., None]) -> Callable[..., None]:
    def sleep(folder: Path, name: str, part: object) -> None:
        if name == "actor":
            time.sleep(SLOW_S)
        function(folder, name, part)

    return sleep


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "slow", "keys"),
    [
        ("grpo", "callbacks", ()),
        ("grpo", "rollout", ("reward.num_workers=1",)),
        ("ppo", "save", ("trainer.save_freq=1", "trainer.logger=[console,tensorboard]")),
        ("grpo", "callbacks", ("async.max_staleness=1",)),
    ],
)
def test_named_phases_add_up_to_the_clock(tmp_path, monkeypatch, preset, slow, keys):
    """Each with something slow, which a phase that is left out would not have, in whatever step.
    What a busy machine adds between two phases it does not add to each step. A save is written
    while the next step runs, and the save behind that waits for what is left."""
    ground = Playground(tmp_path)
    if slow == "rollout":
        ground.write_reward(SLOW_REWARD)
    if slow == "save":
        monkeypatch.setattr(checkpoint, "write_part", sleeping(checkpoint.write_part))
    pause = (lambda: time.sleep(SLOW_S)) if slow == "callbacks" else (lambda: None)
    left_out = list[bool]()
    beside_the_clock = list[bool]()
    steps = timed(ground, preset, *keys, "trust.check_freq=0", on_step=pause)
    if slow == "save":
        assert steps[0]["clock"] + steps[1].get("save_wait", 0.0) >= SLOW_S

    for step in steps:
        assert slow == "save" or step[slow] >= SLOW_S
        named = sum(
            seconds for name, seconds in step.items() if name not in ("step", "other", "clock")
        )
        assert named + step["other"] == pytest.approx(step["step"], rel=1e-6)
        left_out.append(named != pytest.approx(step["step"], rel=0.03, abs=0.03))

        # less what is recorded before `on_step`
        beside_the_clock.append(step["step"] != pytest.approx(step["clock"], abs=SLOW_S / 3))

    assert not all(left_out) and not all(beside_the_clock)
