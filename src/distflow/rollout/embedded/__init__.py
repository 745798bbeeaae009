"""The embedded rollout engine: schedule, run, sample, in this process."""

from distflow.rollout.embedded.engine import EmbeddedEngine
