"""What a plan says of runs on up to 4,096 devices, by simulation with the scheduler of a run, and
what the code of the coordinator takes there.

    python benchmarks/plan_scale.py [scaling asynchrony prediction failures coordinator command]

The model is Qwen2.5-7B on H100s (`planning/devices.toml` and `planning/model_shapes.toml` name the
sources of their figures; the shares of the peak are those of `planning/step_times.py`). Nothing
here was measured on such devices.

    scaling      strong (1,024 prompts, 8 responses each) and weak (one prompt a device), generation
    and training on
                 separate halves at staleness 1
    asynchrony   64 devices: the best of three splits at each staleness against the synchronous run
    on shared devices,
                 by the width of lognormal responses
    prediction   the step that a plan predicts beside the simulated one, for 64 devices
    failures     time lost to failures and checkpoints by the interval between checkpoints, with the
    intervals of Young
                 (1974) and Daly (2006). A device fails every 50,700 hours: Llama 3
                 (arXiv:2407.21783, section 3.3.4) had 419 unexpected interruptions in 54 days on
                 16,384 GPUs
    coordinator  seconds of the calls that workers make to the sample queue, on this machine, by
    number of workers; in
                 all: each puts one group and asks twice, as a put wakes one worker that waits
    command      processor time of `distflow plan` in a process of its own
"""

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from simulated_run import Costs, Setup, SimulatedRun, lognormal, setup_of, simulate

from distflow.config.keys.schema import with_values
from distflow.launch.plan_data import data_plan
from distflow.launch.plans.run_planner import RunPlanner
from distflow.planning.lengths import Lengths
from distflow.planning.predicted_run import PredictedRun, RunFacts, predict
from distflow.scheduling.data_plan import DataPlan, Frequency

MODEL = [
    "actor_rollout_ref.model.path=qwen2.5-7b",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
]
MODEL += [
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.rollout.max_num_seqs=64",
]
MODEL += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480", "reward.num_workers=4096"]
HOURS_OF_A_DEVICE = 54 * 24 * 16384 / 419


def predicted(
    devices: int, prompts: int, generating: int, staleness: int, width: float, limit: int = 4096
) -> PredictedRun:
    """generating: devices that only generate; 0 for all, which then train too. width: of lognormal
    responses, which have a quarter of the limit on average before they are cut at it."""
    allocation = f"vllm[rollout]:d{devices}|fsdp[actor]:d{devices}"
    if generating:
        allocation = f"vllm[rollout]:d{generating}+fsdp[actor]:d{devices - generating}"
    keys = [
        *MODEL,
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(1, prompts // 4)}",
        f"data.max_response_length={limit}",
        "data.max_prompt_length=1024",
        f"async.max_staleness={staleness}",
        f"trainer.allocation='{allocation}'",
        "trainer.save_freq=-1",
    ]
    planner = RunPlanner("async_grpo", keys, "h100", devices)
    lengths = Lengths(512, lognormal(limit / 4, width, limit), limit)
    known = RunFacts(planner.limits, lengths)

    return predict(planner.loaded.config, planner.pipeline, planner.shapes, planner.device, known)


def simulated(run: PredictedRun, steps: int) -> SimulatedRun:
    """The first steps of a run, with the scheduler and the data plan that it has."""
    config = with_values(run.config, {"trainer.total_training_steps": steps})
    plan = data_plan(config, {"": 10**5})
    return simulate(setup_of(run, plan, reward_workers=config.reward.num_workers))


def scaling() -> Iterator[str]:
    for name in ("strong", "weak"):
        yield (f"\n| {name}: devices | prompts | step, s | responses/s | of linear |")
        yield "|---|---|---|---|---|"

        first = 0.0
        for devices in (64, 256, 1024, 4096):
            prompts = 1024 if name == "strong" else devices
            run = predicted(devices, prompts, devices // 2, 1, 0.8)
            found = simulated(run, 6)
            speed = prompts * 8 / found.step_seconds
            first = first or speed / devices
            yield (
                f"| {devices:,} | {prompts:,} | {found.step_seconds:.1f} | {speed:,.0f} "
                f"| {speed / devices / first:.0%} |"
            )


def asynchrony() -> Iterator[str]:
    widths = (0, 0.5, 1, 1.5)
    ages = (1, 2, 4)
    yield (
        "\n| width of the lognormal | mean, longest | synchronous, s | "
        + " | ".join(f"η = {a}" for a in ages)
        + " |"
    )
    yield "|---|---|---|" + "---|" * len(ages)

    for width in widths:
        run = predicted(64, 128, 0, 0, width, 16384)
        base = simulated(run, 6).step_seconds
        lengths = run.lengths

        cells = []
        for age in ages:
            splits = (16, 32, 40)
            steps = []
            for split in splits:
                apart = predicted(64, 128, split, age, width, 16384)
                steps.append(simulated(apart, 6 + 2 * age).step_seconds)

            best = min(steps)
            cells.append(f"{base / best:.2f} × ({splits[steps.index(best)]})")

        yield (
            f"| {width} | {lengths.response:,.0f}, {lengths.end:,.0f} | {base:.0f} | "
            f"{' | '.join(cells)} |"
        )

    yield "\nspeed against the synchronous run; in brackets the devices of 64 that generate"


def prediction() -> Iterator[str]:
    yield "\n| width | devices that generate | staleness | predicted, s | simulated, s | |"
    yield "|---|---|---|---|---|---|"

    for width in (0, 0.8, 1.5):
        for split, age in ((0, 0), (32, 0), (32, 1), (32, 2), (32, 4), (48, 2), (16, 1)):
            run = predicted(64, 128, split, age, width, 16384)
            found = simulated(run, 6 + 2 * age).step_seconds
            miss = run.step_seconds / found - 1
            setting = f"{width} | {split or 'all 64'} | {age}"
            yield f"| {setting} | {run.step_seconds:.1f} | {found:.1f} | {miss:+.0%} |"


def failures() -> Iterator[str]:
    step = 60.0
    save = 60.0
    restart = 300.0
    yield (
        f"\nsteps of {step:.0f} s, checkpoints of {save:.0f} s, for which training waits, restarts "
        f"of {restart:.0f} s"
    )
    intervals = (5, 10, 20, 40, 80, 160)
    yield (
        "| devices | hours between failures | Young | Daly | "
        + " | ".join(f"{i} steps" for i in intervals)
        + " |"
    )
    yield "|---|---|---|---|" + "---|" * len(intervals)

    for devices in (4096, 16384):
        mtbf = HOURS_OF_A_DEVICE * 3600 / devices
        young = math.sqrt(2 * save * mtbf)
        ratio = math.sqrt(save / (2 * mtbf))
        daly = young * (1 + ratio / 3 + ratio**2 / 9) - save

        cells = []
        for interval in intervals:
            plan = DataPlan(10**5, 2, 1, None, 3_000, saves=Frequency(interval))
            costs = Costs(lambda *_: 0.0, lambda _: 0.0, lambda _: step, save=save, restart=restart)
            found = simulate(Setup(plan, costs, Lengths(1, (1.0,), 1), training_mtbf=mtbf))
            cells.append(f"{found.step_ends[-1] / (3_000 * step) - 1:.1%}")

        shown = f"{young / step:.0f} steps | {daly / step:.0f} steps"
        yield f"| {devices:,} | {mtbf / 3600:.1f} | {shown} | {' | '.join(cells)} |"


def coordinator() -> Iterator[str]:
    from distflow.observe.writing.timing import Waits
    from distflow.runtime.dp_groups import DpGroupShares
    from distflow.runtime.sample_queue.protocol import FinishedGroup
    from distflow.runtime.sample_queue.queue_base import SharedSampleQueue
    from distflow.scheduling.coordinator import Coordinator

    yield (
        "\n| workers, groups a step | ask, µs | put, µs | take and release, ms | a step in all, s |"
    )
    yield "|---|---|---|---|---|"

    for workers in (64, 512, 4096):
        plan = DataPlan(10**5, workers, 8, None, 6, max_staleness=1)
        queue = SharedSampleQueue[None](
            Coordinator(plan),
            Waits(),
            (DpGroupShares(),),
            [str(number) for number in range(workers)],
        )

        asked = put = taken = 0.0
        asks = 0
        for step in range(3):
            began = time.process_time()
            groups = []
            for worker in range(workers):
                groups += queue.groups_for(worker, step) or []
            asked = asked + time.process_time() - began
            asks = asks + workers
            began = time.process_time()
            for group in groups:
                queue.end_groups(FinishedGroup(group, None, 4096, group.version, num_bytes=10**5))
            put += (time.process_time() - began) / max(1, len(groups))
            began = time.process_time()
            assert queue.take_step(step, 0) is not None
            for worker in range(workers):
                queue._workers.ask(worker, step + 1)
            queue.release(step, 0, True)
            taken += time.process_time() - began

        ask = asked / asks
        yield (
            f"| {workers:,} | {1e6 * ask:.0f} | {1e6 * put / 3:.0f} | {1e3 * taken / 3:.1f} "
            f"| {workers * (put / 3 + 2 * ask) + taken / 3:,.2f} |"
        )


def command() -> Iterator[str]:
    words = ["plan", "async_grpo", *MODEL, "--device", "h100"]
    apart = ["--devices", "64", "trainer.allocation='vllm[rollout]:d32+fsdp:d32'"]
    cases = {"plan": apart}
    cases["auto, 64 devices"] = ["--devices", "64", "trainer.allocation=auto"]
    cases["auto, 1,024 devices"] = ["--devices", "1024", "trainer.allocation=auto"]

    for name, more in cases.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "distflow", *words, *more], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        yield f"{name}: {spent:.1f} s of processor time"


PARTS = {
    part.__name__: part
    for part in (scaling, asynchrony, prediction, failures, coordinator, command)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS))
    for chosen in parser.parse_args().parts:
        for line in PARTS[chosen]():
            print(line, flush=True)
