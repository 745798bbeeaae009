"""The embedded rollout engine: schedules, runs and samples in this process."""

from distflow.rollout.embedded.engine import EmbeddedEngine
