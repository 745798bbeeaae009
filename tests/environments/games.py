"""Environments with gymnasium's interface, good ones and others."""

import os
import subprocess
import time
from pathlib import Path


class Hunt:
    """Guess a number from 0 to 9 that the seed gives."""

    def __init__(self, tries: int = 5) -> None:
        self.tries = tries

    def reset(self, *, seed=None, options=None):
        self.secret = seed % 10
        self.left = self.tries
        return f"guess ({options['hint']})" if options and "hint" in options else "guess", {}

    def step(self, action):
        self.left -= 1
        guess = int(action) if action.isdigit() else -1
        return (
            ("higher" if guess < self.secret else "lower"),
            float(guess == self.secret),
            guess == self.secret,
            self.left == 0,
            {},
        )


class OnlySeed(Hunt):
    """As the games of gem-llm."""

    def reset(self, seed=None):
        return super().reset(seed=seed)


class NoSeed(Hunt):
    """As the games of textworld."""

    def reset(self):
        return super().reset(seed=3)


class Discrete:
    n = 4

    def contains(self, action):
        return 0 <= action < 4


class Walk:
    """Numbers as actions and observations."""

    action_space = Discrete()

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return self.place, {}

    def step(self, action):
        self.place += action
        return {"place": self.place}, action / 2, self.place >= 5, False, {}

    def close(self):
        print("closed")


class Broken(Hunt):
    """Fails for every third seed."""

    def reset(self, *, seed=None, options=None):
        if seed % 3 == 0:
            raise RuntimeError("the board is broken")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        return "again", len(action) % 5 / 4, self.left == 1, False, {"left": self.left - 1}


class Endless(Walk):
    def step(self, action):
        return "on", 0.5, False, False, {}


class Bad:
    """Fails as `how` says; the file gets the id of a process that it starts."""

    def __init__(self, how: str, file: str = "") -> None:
        self.how = how
        if how == "not made":
            raise OSError("no board")
        if file:
            Path(file).write_text(str(subprocess.Popen(["sleep", "600"]).pid))

    def reset(self, *, seed=None, options=None):
        if self.how == "not reset":
            return "only an observation"
        if self.how == "object":
            return object(), {}
        return "go", {}

    def step(self, action):
        if self.how == "raises":
            raise RuntimeError("the board is broken")

        if self.how == "dies":
            os._exit(7)
        if self.how == "hangs":
            time.sleep(600)
        if self.how == "exits":
            raise SystemExit(1)
        if self.how == "shapes":
            self.steps = getattr(self, "steps", 0) + 1
            return [[0.5] * self.steps] * self.steps, 1.0, self.steps == 3, False, {}
        if self.how == "four":
            return "on", 0.0, False, {}
        if self.how == "no number":
            return "on", "much", False, False, {}

        return "on", float("nan" if self.how == "nan" else "inf"), False, False, {}

    def close(self):
        if self.how == "not closed":
            raise OSError("it does not close")


no_environment = 3
