"""User code that owns processes and threads: it passes the trial, the run trains on what it
computes and ends by itself or by Ctrl-C with the right status, and nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from distflow.observe.run_reader import read_metrics
from tests.e2e.runs import Playground
from tests.ledger_audit import verify
from tests.patience import is_running, wait_until

pytestmark = pytest.mark.slow

OWN = '''
import asyncio, json, multiprocessing, os, subprocess, sys, threading, time, urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache

KIND, _, START = os.environ["KIND"].partition("-")
context = multiprocessing.get_context(START or None)

def graded(text):
    return sum(map(ord, text)) % 7 / 6

def forever():
    while True:
        time.sleep(1)

def serve(asked, answers):
    while True:
        answers.put(graded(asked.get()))

PIPED = """
import sys
for line in sys.stdin:
    print(sum(map(ord, line[:-1])) % 7 / 6, flush=True)
"""

class Executor:
    def __init__(self):
        self.pool = ProcessPoolExecutor(2, mp_context=context)

    def __call__(self, text):
        return self.pool.submit(graded, text).result()

class Hung(Executor):
    def __init__(self):
        super().__init__()
        self.pool.submit(forever)

class Pool:
    def __init__(self):
        self.pool = context.Pool(2)

    def __call__(self, text):
        return self.pool.apply(graded, (text,))

class Process:
    def __init__(self):
        self.asked, self.answers = context.Queue(), context.Queue()
        context.Process(target=serve, args=(self.asked, self.answers)).start()
        context.Process(target=forever, daemon=True).start()

    def __call__(self, text):
        self.asked.put(text)
        return self.answers.get()

class Popen:
    def __init__(self):
        subprocess.Popen(["sleep", "600"])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", PIPED], text=True, start_new_session=True, **pipes)

    def __call__(self, text):
        self.process.stdin.write(text.replace("\\n", " ") + "\\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

class Threads:
    def __init__(self):
        self.pool = ThreadPoolExecutor(2)
        self.pool.submit(forever)
        threading.Thread(target=forever).start()

    def __call__(self, text):
        return self.pool.submit(graded, text).result()

KINDS = {"executor": Executor, "hung": Hung, "pool": Pool, "process": Process, "popen": Popen, "threads": Threads}
owned = cache(KINDS.get(KIND, Pool))
lock = threading.Lock()
if KIND == "imported":
    owned()

def score(text):
    with lock:
        return owned()(text)

async def flow(chat, row):
    reply = await chat.ask(row.prompt, max_tokens=4)
    return await asyncio.get_running_loop().run_in_executor(None, score, reply.text)

async def blocking(chat, row):
    return score((await chat.ask(row.prompt, max_tokens=4)).text)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return score(solution_str)

def strike():
    """Kill the process that forks those of episodes, which is the grandparent of this one."""
    wanted = os.environ.get("STRIKE")
    try:
        wanted and os.close(os.open(os.path.dirname(__file__) + "/struck", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        wanted = wanted if wanted == "always" else None
    if wanted:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"/proc/{os.getppid()}/stat") as file:
            os.kill(int(file.read().rpartition(")")[2].split()[1]), 9)
        forever()

def agent(prompt, base_url, api_key):
    strike()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}).encode()
    head = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, head))
    return score(json.load(reply)["choices"][0]["message"]["content"] or "")

class Game:
    def reset(self, seed=None, options=None):
        return "a", {}

    def step(self, action):
        strike()
        return "b", score(str(action)), True, False, {}
'''  # noqa: E501
ROLLOUT = "actor_rollout_ref.rollout.workflow"
KINDS = (
    "executor",
    "hung",
    "pool",
    "imported",
    "process",
    "popen",
    "threads",
    "executor-spawn",
    "pool-forkserver",
)
PLACES = ("workflow", "blocking workflow", "reward", "agent", "environment")


class UsersRun:
    """One `distflow train` in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        place: str,
        steps: int,
        strike: str = "",
        more: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        ground = Playground(folder, num_rows=8)
        (folder / "own.py").write_text(OWN)
        own = f"{folder}/own.py"
        keys = {
            "workflow": (f"{ROLLOUT}={own}:flow",),
            "blocking workflow": (f"{ROLLOUT}={own}:blocking",),
            "agent": (
                f"{ROLLOUT}=agent",
                f"{ROLLOUT}_kwargs={{function: {own}:agent}}",
                "data.max_prompt_length=64",
            ),
            "environment": (f"{ROLLOUT}=environment", f"{ROLLOUT}_kwargs={{env: {own}:Game}}"),
            "reward": (f"custom_reward_function.path={own}",),
        }[place]
        more += (
            f"trainer.total_training_steps={steps}",
            "data.train_batch_size=2",
            "trainer.total_epochs=10000",
        )

        given = ground.overrides(
            "run", *more, *keys, "actor_rollout_ref.actor.ppo_mini_batch_size=2"
        )
        given = [key for key in given if not key.startswith("trust.check_rewards")]
        if place != "reward":
            given = [
                key for key in given if not key.startswith(("reward.", "custom_reward_function."))
            ]

        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distflow", "train", "grpo", *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KIND": kind, "MARK": self._mark, "STRIKE": strike},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def num_steps(self) -> int:
        try:
            return sum(record.kind == "train" for record in read_metrics(self.folder / "run"))
        except (OSError, ValueError):
            return 0

    def status(self, within_s: float = 300.0) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end: {self.said()[-3000:]}")

    def left(self) -> list[int]:
        """Processes that it started and that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                marked = (
                    entry.name.isdigit()
                    and f"MARK={self._mark}".encode() in (entry / "environ").read_bytes()
                )
            except OSError:
                continue

            if marked and is_running(int(entry.name)):
                found.append(int(entry.name))

        return found

    def close(self) -> None:
        for pid in [self.process.pid, *self.left()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def check(self, steps: int) -> None:
        assert self.num_steps() >= steps, self.said()[-3000:]
        errors = [r.values.get("reward/error_rate", 0.0) for r in read_metrics(self.folder / "run")]
        assert not any(errors), self.said()[-3000:]
        assert "tried on the first row" not in self.said(), self.said()[-3000:]
        assert "Traceback" not in self.said(), self.said()[-3000:]
        wait_until(lambda: not self.left(), "nothing of it is left", within_s=20.0)


def in_places(first: int) -> list[tuple[str, str]]:
    """Each kind in one place, and each place with one kind or more."""
    places = list(PLACES)
    return [(kind, places[-number % len(places)]) for number, kind in enumerate(KINDS, first)]


@pytest.mark.parametrize(("kind", "place"), in_places(0))
def test_it_trains_and_ends(tmp_path, kind, place):
    run = UsersRun(tmp_path, kind, place, steps=2)
    try:
        assert run.status() == 0, run.said()[-3000:]
        run.check(2)
    finally:
        run.close()


@pytest.mark.parametrize(("kind", "place"), in_places(2))
def test_ctrl_c_ends_it(tmp_path, kind, place):
    run = UsersRun(tmp_path, kind, place, steps=10_000)
    try:
        wait_until(
            lambda: run.num_steps() or run.process.poll() is not None, "a step", within_s=300.0
        )
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.status() == 130, run.said()[-3000:]
        run.check(1)
    finally:
        run.close()


@pytest.mark.parametrize(("kind", "pause_s"), [("hung", 0.0005), ("process", 0.01), ("hung", 0.4)])
def test_a_second_ctrl_c_leaves_nothing(tmp_path, kind, pause_s):
    """Many in a row, or the second when the run has saved and Python ends."""
    run = UsersRun(tmp_path, kind, "workflow", steps=10_000)
    try:
        wait_until(
            lambda: run.num_steps() or run.process.poll() is not None, "a step", within_s=300.0
        )

        while run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGINT)
            time.sleep(pause_s)

        assert run.status() == 130
        wait_until(lambda: not run.left(), "nothing of it is left", within_s=20.0)
    finally:
        run.close()


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.alone)])
@pytest.mark.parametrize("kind", ["hung", "process", "executor-spawn"])
def test_workers_in_other_processes_leave_nothing(tmp_path, launcher, kind):
    more = (f"trainer.launcher={launcher}", "trainer.n_gpus_per_node=2")
    run = UsersRun(tmp_path, kind, "workflow", steps=2, more=more)
    try:
        assert run.status() == 0, run.said()[-3000:]
        run.check(2)
    finally:
        run.close()


@pytest.mark.parametrize("place", ["agent", "environment"])
def test_episodes_of_a_killed_server_are_issued_again(tmp_path, place):
    run = UsersRun(tmp_path, "popen", place, steps=3, strike="once")
    try:
        assert run.status() == 0, run.said()[-3000:]
        assert (tmp_path / "struck").exists() and "was killed by SIGKILL" in run.said()
        run.check(3)
        verify(tmp_path / "run" / "ledger.jsonl")
        issued = [
            r
            for r in map(json.loads, (tmp_path / "run" / "ledger.jsonl").open())
            if r["kind"] == "issued"
        ]
        again = [
            number for number, times in Counter(r["group_id"] for r in issued).items() if times > 1
        ]
        assert again and len({r["group_id"] for r in issued}) == 6, (
            "each group once, and the lost ones again"
        )
    finally:
        run.close()
