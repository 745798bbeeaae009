"""A server of OpenEnv with a hunt for a number: `python openenv_server.py PORT KIND`. KIND: text or
fields."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Bet(Action):
    number: int
    stake: float = 1.0


class Answer(Observation):
    said: str = ""
    left: int | None = None


class Hunt(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, hint=""):
        self._wanted = seed % 10
        self._left = 3
        return Answer(said=f"guess {hint}".strip())

    def step(self, action, timeout_s=None):
        number = int(action.guess) if isinstance(action, Guess) else action.number
        stake = getattr(action, "stake", 1.0)
        self._left = self._left - 1
        if number == 66:
            raise RuntimeError("the engine is on fire")
        if number == self._wanted:
            return Answer(said="yes", reward=stake, done=True)

        said = "lower" if number > self._wanted else "higher"
        return Answer(
            said=said, left=self._left if isinstance(action, Bet) else None, done=self._left == 0
        )

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    made = create_app(
        Hunt, {"text": Guess, "fields": Bet}[sys.argv[2]], Answer, max_concurrent_envs=64
    )
    uvicorn.run(made, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
