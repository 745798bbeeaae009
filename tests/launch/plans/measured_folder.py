"""The folder of a run that was made with known rates."""

import json
from dataclasses import asdict
from pathlib import Path

from distflow.config import RunLimits, to_yaml
from distflow.launch.plans.measured_run import as_predicted
from distflow.launch.plans.run_planner import RunPlanner
from distflow.observe.sample_files import write_sample_file
from distflow.planning.lengths import Lengths
from distflow.planning.measured_rates import Rates
from distflow.planning.predicted_run import PredictedRun, RunFacts, predict

TINY = [
    "actor_rollout_ref.model.path=builtin:tiny-arithmetic",
    "actor_rollout_ref.model.init=random",
]
TINY += ["trainer.num_threads=1"]
KNOWN = Rates(
    generate=3.0, forward=0.5, update=0.5, sync=1.0, score=0.01, rest=2e-4, libraries=0.7e9
)


def write(folder: Path, *overrides: str, steps: int = 6) -> PredictedRun:
    """The folder of a run with these rates, whose responses have 10 tokens."""
    planner = RunPlanner("quickstart_grpo", [*TINY, *overrides], "cpu")
    given = RunFacts(RunLimits(2000), Lengths(6.0, (10.0,), 26), KNOWN)
    run = predict(planner.loaded.config, planner.pipeline, planner.shapes, planner.device, given)
    (folder / "spans").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(run.config))
    predicted = as_predicted(run, planner.device, planner.shapes)
    nodes = planner.pipeline.to_json()
    (folder / "plan.json").write_text(
        json.dumps({**asdict(run.plan), "nodes": nodes, "predicted": predicted})
    )
    files: dict[str, list[dict[str, object]]] = {
        "metrics": [],
        "spans/engine": [],
        "spans/reward": [],
    }
    timed = {name: value for name, value in run.phases.items() if name != "rest"}
    groups = run.config.data.train_batch_size
    workers = run.config.reward.num_workers

    for step in range(1, steps + 1):
        began = 1000 + (step - 1) * run.step_seconds
        end = began + run.times.generate()
        times = {"t0": began, "t1": end, "restart": 0, "step": step}
        files["spans/engine"].append(
            {**times, "kind": "decode", "what": "train", "version": step - 1}
        )

        for group in range(groups):
            scored = end + KNOWN.score * (1 + group // workers)
            files["spans/reward"].append(
                {**times, "t0": end, "t1": scored, "kind": "wait", "what": "scores"}
            )

        measured = {f"timing_s/{name}": seconds for name, seconds in timed.items()}
        measured |= {"timing_s/eval": 0.0, "memory/process/peak": run.fullest.peak}
        line = {
            "step": step,
            "t": began + run.step_seconds,
            "restart": 0,
            "kind": "train",
            "m": measured,
        }
        files["metrics"].append(line)
        rows = [{"prompt_length": 6, "response_length": 10, "restart": 0}] * 8
        write_sample_file(folder / f"samples/{step:06d}.parquet", rows, step, "train")

    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run
