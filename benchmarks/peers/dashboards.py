"""Writes the metrics of a run's folder for another dashboard, then a step for each number on
standard input:
`python dashboards.py tensorboard|trackio METRICS.jsonl FOLDER`, in a Python that has both packages.

It answers each with a line when the step is on disk. Trackio takes its folder from TRACKIO_DIR.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Log = Callable[[int, Mapping[str, float]], None]


def tensorboard(folder: str) -> Log:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder, max_queue_size=1000)

    def log(step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        writer.flush()

    return log


def trackio(folder: str) -> Log:
    import trackio as package

    run = package.init("bench", "run", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def log(step: int, values: Mapping[str, float]) -> None:
        run.log(dict(values), step=step)

    return log


def main() -> None:
    name, metrics, folder = sys.argv[1:]
    log = {"tensorboard": tensorboard, "trackio": trackio}[name](folder)

    values = dict[str, float]()
    for line in Path(metrics).read_text("utf-8").rstrip("\n").split("\n"):
        record = json.loads(line)
        values = record["m"]
        log(record["step"], values)

    print("written", flush=True)
    for line in sys.stdin:
        log(int(line), values)
        print("written", flush=True)


if __name__ == "__main__":
    main()
