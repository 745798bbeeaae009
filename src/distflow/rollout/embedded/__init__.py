"""The embedded rollout engine: schedules, runs and samples in this process; on a device the host
launches asynchronous decode steps and reads their tokens later."""

from distflow.rollout.embedded.engine import EmbeddedEngine
