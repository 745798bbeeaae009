"""Writes TensorBoard event files with the package `tensorboard` alone: neither TensorFlow nor torch is loaded."""

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from distflow.observe.writing.trackers import TrackedRun


class TensorBoardTracker:
    """One scalar per metric name; `tensorboard --logdir RUN/tensorboard` shows them."""

    def __init__(self, run: TrackedRun):
        folder = run.run_dir / "tensorboard"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one event with all scalars, and flush it so that a running TensorBoard sees it."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
