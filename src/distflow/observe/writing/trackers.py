"""Sends metrics to trackers (console, TensorBoard, Weights & Biases and others), which can neither
slow nor end a run."""

import contextlib
import importlib.util
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from distflow.builtin_names import TRACKERS
from distflow.errors import UserError, hint
from distflow.import_target import load
from distflow.observe.crash_safe_files import encode, to_json, write_atomically

# Called once for each failing tracker, with the kind of the event ("warning") and a message.
OnFailure = Callable[[str, str], None]

_QUEUE_LENGTH = 256
_CLOSE_TIMEOUT_S = 30.0
_MAX_ROWS = 8
_MAX_CHARACTERS = 2000
_WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun")


class TrackerError(UserError):
    """`trainer.logger` names a tracker that does not exist or whose package is not installed."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is created for. config: the whole config as JSON. say: shows the user
    a line."""

    run_dir: Path
    project: str
    experiment: str
    config: dict[str, Any]
    say: Callable[[str], None] = lambda line: None

    def run_id(self, tracker: str, create: Callable[[], str] = lambda: os.urandom(8).hex()) -> str:
        """The tracker's run id, the same for every restart: created at the first start, stored in
        the run's folder."""
        file = self.run_dir / f"{tracker}.json"
        if not file.exists():
            write_atomically(file, encode({"id": create()}) + b"\n")
        return str(json.loads(file.read_bytes())["id"])


class Tracker(Protocol):
    """Receives copies of the metrics. Trackers in the table are created from a `TrackedRun`. One
    may also have `samples(step, rows)`, which takes a table of a few samples of a step (in each row
    the same columns, as texts)."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of one step under flat names; values may be NaN or infinite."""

    def close(self) -> None:
        """Finish sending."""


class Trackers:
    """All trackers of a run as one.

    Those of `remote` are built and used in one thread each: if one raises, hangs or is slow, only
    its own copies are lost, and `on_failure` is called once. Those of `local` are called directly.
    """

    def __init__(
        self,
        local: Sequence[Tracker] = (),
        remote: Mapping[str, Callable[[], Tracker]] | None = None,
        on_failure: OnFailure = lambda kind, message: None,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ):
        self._local = tuple(local)
        self._remote = [
            _TrackerThread(name, build, on_failure) for name, build in (remote or {}).items()
        ]
        self._close_timeout_s = close_timeout_s

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass a copy of the metrics to every tracker; never waits for a remote one."""
        copy = {name: float(value) for name, value in values.items()}
        for tracker in self._local:
            tracker.log(step, copy)
        self._send("log", step, copy)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Pass some of a step's samples to remote trackers: the best, the worst and those
        between."""
        if self._remote and rows:
            self._send("samples", step, _table(rows))

    def _send(self, name: str, *what: object) -> None:
        for thread in self._remote:
            thread.put(lambda tracker: getattr(tracker, name, lambda *_: None)(*what))

    def close(self) -> None:
        """Close all; those not done within `close_timeout_s` are abandoned and reported."""
        for tracker in self._local:
            tracker.close()
        deadline = time.monotonic() + self._close_timeout_s
        for thread in self._remote:
            thread.finish(deadline)


class _TrackerThread:
    """Consumes queued calls · waits for the queue · unblocked by the run or its end · makes
    them."""

    def __init__(self, name: str, build: Callable[[], Tracker], on_failure: OnFailure):
        self._name = name
        self._build = build
        self._on_failure = on_failure
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_QUEUE_LENGTH)
        self._has_reported = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._tell("is too slow: it gets only some of the steps")

    def finish(self, deadline: float) -> None:
        with contextlib.suppress(queue.Full):
            wait = 0.0
            if self._thread.is_alive():
                wait = max(deadline - time.monotonic(), 0.0)
            self._queue.put(None, timeout=wait)

        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._tell("did not finish in time and was abandoned")

    def _run(self) -> None:
        try:
            tracker = self._build()
        # a library's error in its own thread must not end the run
        except BaseException as error:
            self._tell(f"failed and is off ({type(error).__name__}: {error})")
            return

        is_open = True
        while is_open:
            call = self._queue.get()
            is_open = call is not None

            try:
                if call is None:
                    tracker.close()
                else:
                    call(tracker)
            except BaseException as error:
                self._tell(f"failed ({type(error).__name__}: {error})")

    def _tell(self, what: str) -> None:
        """Once."""
        if not self._has_reported:
            self._has_reported = True
            text = f"tracker {self._name} {what}; metrics.jsonl has everything"
            self._on_failure("warning", text)


_COLUMNS = (
    "uid",
    "domain",
    "prompt",
    "response",
    "ground_truth",
    "score",
    "response_length",
    "finish_reason",
)


def _table(rows: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Rows with evenly spaced scores, the best first; long texts are cut in the middle."""

    def best_first(row: Mapping[str, object]) -> float:
        score = row.get("score")
        return -score if isinstance(score, float) else 0.0

    known = sorted(rows, key=best_first)
    number = min(len(known), _MAX_ROWS)

    table = []
    for place in range(number):
        row = known[place * (len(known) - 1) // max(number - 1, 1)]
        texts = {name: "" if row.get(name) is None else str(row[name]) for name in _COLUMNS}
        table.append({name: _cut(text) for name, text in texts.items()})

    return table


def _cut(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    half = _MAX_CHARACTERS // 2
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:half]} … {text[-half:]}"


def check_trackers(names: Sequence[str]) -> None:
    """Raises TrackerError for an unknown name in `trainer.logger`, and for one whose package is not
    installed."""
    for name in names:
        if name not in TRACKERS:
            raise TrackerError(
                f"trainer.logger names {name!r}, which is not a tracker (metrics.jsonl is always "
                f"written){hint(name, TRACKERS)}"
            )

        package = TRACKERS[name].package
        if package and importlib.util.find_spec(package) is None:
            raise TrackerError(
                f"trainer.logger names {name!r}, but the package {package} is not installed: pip "
                f"install 'distflow[{name}]', or remove it from trainer.logger"
            )


def open_trackers(
    names: Sequence[str],
    run: TrackedRun,
    *,
    local: Mapping[str, Any],
    on_failure: OnFailure,
) -> Trackers:
    """The trackers of `trainer.logger`: those of `local`, which the run already has, and others
    from the table.

    Raises TrackerError as `check_trackers` does.
    """
    check_trackers(names)
    chosen_names = list(dict.fromkeys(names))

    remote = dict[str, Callable[[], Tracker]]()
    for name in chosen_names:
        if name not in local and TRACKERS[name].target:
            remote[name] = partial(_build, TRACKERS[name].target, run)

    return Trackers([local[name] for name in chosen_names if name in local], remote, on_failure)


def _build(target: str, run: TrackedRun) -> Tracker:
    as_json = {name: to_json(value) for name, value in run.config.items()}
    return cast(Callable[[TrackedRun], Tracker], load(target))(replace(run, config=as_json))


class TensorBoardTracker:
    """One scalar per metric name; `tensorboard --logdir RUN/tensorboard` shows them. Only the
    package `tensorboard` writes event files: neither TensorFlow nor torch is loaded."""

    def __init__(self, run: TrackedRun):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.run_dir / "tensorboard"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one event with all scalars, and flush it so that a running TensorBoard sees it."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(
            step, [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )

    def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Show them as JSON; indented, nothing in it is markup."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        lines = json.dumps(list(rows), indent=1).splitlines()
        text = "\n".join(f"    {line}" for line in lines)
        self._add(step, text_pb("samples", text).value)

    def _add(self, step: int, values: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _TrackerRun:
    """The base of trackers whose run takes the metrics of a step, and is finished."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run: queued metrics are sent or written."""
        self._run.finish()


class WandbTracker(_TrackerRun):
    """One run of Weights & Biases for each run folder, which a resumed run continues; offline,
    `wandb sync` uploads it.

    The environment variable WANDB_MODE decides (`online`, `offline`, `disabled`); without it the
    run is online if there is an API key and offline otherwise: it never asks for one.
    """

    def __init__(self, run: TrackedRun):
        import wandb

        mode: Any = os.environ.get("WANDB_MODE")
        if mode not in _WANDB_MODES:
            mode = "offline"
            if wandb.login(verify=False, prompt=False):
                mode = "online"

            if mode == "offline":
                run.say(
                    "wandb has no API key (`wandb login`): its run is offline, and `wandb sync` "
                    "uploads it later"
                )

        self._run = wandb.init(
            dir=str(run.run_dir),
            project=run.project,
            name=run.experiment,
            id=run.run_id("wandb"),
            resume="allow",
            config=run.config,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all metrics against `step`, which may repeat (training, validation) or go back (a
        resume)."""
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        import wandb

        table = wandb.Table(
            columns=list(_COLUMNS), data=[[row[name] for name in _COLUMNS] for row in rows]
        )
        self._run.log({"samples": table, "step": step})


class TrackioTracker(_TrackerRun):
    """One run of Trackio for each run folder, which a resumed run continues. It is on this machine
    (`trackio show`), unless Trackio's environment variables name a Space or a server."""

    def __init__(self, run: TrackedRun):
        import trackio

        self._run = trackio.init(
            run.project,
            f"{run.experiment}-{run.run_id('trackio')[:6]}",
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


class MlflowTracker:
    """One run of MLflow for each run folder, which a resumed run continues. Without
    MLFLOW_TRACKING_URI it is in the folder:
    `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient

        is_local, folder = not os.environ.get("MLFLOW_TRACKING_URI"), run.run_dir.absolute()
        self._client = client = MlflowClient(f"sqlite:///{folder}/mlflow.db" if is_local else None)

        def create() -> str:
            found = client.get_experiment_by_name(run.project)
            artifacts = None
            if is_local:
                artifacts = (folder / "mlartifacts").as_uri()

            if found:
                experiment = found.experiment_id
            else:
                experiment = client.create_experiment(run.project, artifacts)

            created: str = client.create_run(experiment, run_name=run.experiment).info.run_id
            client.log_dict(created, run.config, "config.json")
            return created

        self._id = run.run_id("mlflow", create)
        client.update_run(self._id, "RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all metrics of a step; MLflow allows no `@` in a name, and 1,000 at once."""
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        metrics = [
            Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics[first : first + 1000])

    def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
        """Add them to the artifacts."""
        self._client.log_dict(self._id, list(rows), f"samples/{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabTracker(_TrackerRun):
    """One run of SwanLab. Its environment variable SWANLAB_MODE decides where; without it the run
    is online if there is an API key, where a resumed run continues it, and offline otherwise: it
    never asks for one."""

    def __init__(self, run: TrackedRun):
        import swanlab

        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        mode = os.environ.get("SWANLAB_MODE") or ("online" if settings.api_key else "offline")
        if mode == "online":
            known = {"id": run.run_id("swanlab"), "resume": "allow"}
        else:
            known = {}

        self._run = swanlab.init(
            log_dir=str(run.run_dir / "swanlog"),
            mode=mode,
            project=run.project,
            name=run.experiment,
            config=run.config,
            settings=settings,
            **known,
        )
