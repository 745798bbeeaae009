"""A run's folder as a short training run leaves it, with hostile samples among the rest; and a real
browser."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from distflow.observe.writing.run_folder import RunFolder, Span

HOSTILE = (
    "<script>document.documentElement.dataset.hacked = 1</script>",
    "<img src=x onerror=\"document.documentElement.dataset.hacked=1\"><img src='LEAK'>",
    (
        "</script><script>document.documentElement.dataset.hacked = 1</script><link rel=stylesheet "
        "href='LEAK'>"
    ),
    "<!--<script>",
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "invoice\u202egnp.exe",
    "$title ${data} {{7*7}}",
    "a lone \ud800 surrogate and a NUL \x00",
    "line\u2028separator\r\nand more",
    "",
    "x" * 1_000_000,
    "javascript:alert(1)",
)


def write_run(folder: Path, leak: str = "http://127.0.0.1:1/leak", num_steps: int = 12) -> Path:
    """60 % of 20 problems are learned over the run; one gradient norm is NaN, one KL infinite."""
    with RunFolder(folder, 0) as run:
        change = {
            "key": HOSTILE[0],
            "before": HOSTILE[1].replace("LEAK", leak),
            "now": HOSTILE[5],
            "where": HOSTILE[4],
        }
        facts = {"experiment": "<b>tiny</b> & co", "model": "tiny", "config": {"seed": 1}}
        run.write_json(
            "run.json",
            {**facts, "preset": HOSTILE[0], "changed": [change], "total_steps": num_steps},
        )
        run.write_text("config.yaml", "trainer:\n  seed: 1\n")
        run.write_json("plan.json", {"nodes": _nodes(HOSTILE[1].replace("LEAK", leak))})
        _validate(run, 0, 4)

        end = math.inf
        for step in range(1, num_steps + 1):
            end = _spans(run, end)
            run.metrics(step, "train", _metrics(step, num_steps))
            run.samples(step, [_sample(step, i, leak) for i in range(len(HOSTILE) + 4)])

        _validate(run, num_steps, 16)
        run.event(
            "warning",
            "<script>document.documentElement.dataset.hacked = 1</script> is slow",
            step=3,
        )
        run.event("end", "all steps done", status="finished")

    return folder


def _nodes(name: str) -> list[dict[str, Any]]:
    """rollout → judge → train, rollout → train, and a node with a hostile name beside the judge."""
    node = {
        "role": "",
        "plane": "training",
        "phase": "train_step",
        "engines": [],
        "reads": [],
        "writes": [],
    }
    return [
        {**node, "name": "rollout", "plane": "rollout", "deps": []},
        {**node, "name": "judge", "plane": "rollout", "deps": ["rollout"], "writes": [HOSTILE[0]]},
        {**node, "name": name, "deps": ["rollout"], "reads": [HOSTILE[1]]},
        {**node, "name": "train", "deps": ["judge", "rollout", name], "engines": ["actor"]},
    ]


def _spans(run: RunFolder, before: float) -> float:
    """Of a step of one second that ends now; on a busy machine of more, since `before`. Returns
    their end."""
    now = time.time()
    run.span("training", Span(min(now - 0.9, before), now - 0.4, "phase", "rollout"))
    run.span("training", Span(now - 0.4, now - 0.15, "phase", "train_step"))
    run.span("training", Span(now - 0.9, now - 0.4, "wait", HOSTILE[0]))
    for i in range(6):
        run.span("rollout", Span(now - 0.9, now - 0.5 + i / 100, "group", "complete"))
    return now - 0.15


def _metrics(step: int, num_steps: int) -> dict[str, float]:
    return {
        "reward/mean_score": step / num_steps,
        "actor/kl_loss": math.inf if step == 5 else 0.01 * step,
        "actor/entropy": 2.0 - step / num_steps,
        "actor/grad_norm": math.nan if step == 3 else 0.5,
        "actor/pg_clipfrac": 0.1,
        "reward/frac_reward_zero_std": 1 - step / num_steps,
        "memory/process/peak": 2.0**30 * (1 + step / num_steps),
        "rollout/avg_response_length": 10.0 + step,
        "timing_s/rollout": 0.5 + (0.1 if step % 2 else -0.1),
        "timing_s/train_step": 0.25 - (0.1 if step % 2 else -0.1),
        "timing_s/other": 0.25,
        "timing_s/step": 1.0,
        "throughput/tokens_per_s": 1000.0,
        '<img src=x onerror="document.documentElement.dataset.hacked=1">/"quoted"': 1.0,
    }


def _sample(step: int, i: int, leak: str) -> dict[str, Any]:
    text = HOSTILE[i].replace("LEAK", leak) if i < len(HOSTILE) else f"the answer is {i}"
    return {
        "uid": f"{step}0{i // 4}-{i % 4}",
        "prompt": HOSTILE[i // 4].replace("LEAK", leak) if i // 4 % 2 else f"question {i // 4}",
        "response": text,
        "ground_truth": str(i),
        "score": 0.0 if i == 3 else float(i % 2),
        "reward_parts": {text[:40]: float(i % 2)},
        "errors": ["math: out of time"] if i == 3 else [],
        "advantage": math.nan if i == 4 else i - 8.0,
        "prompt_length": 3,
        "response_length": 5 + i,
        "finish_reason": "stop",
        "versions": [step - 1],
    }


def _validate(run: RunFolder, step: int, num_right: int) -> None:
    rows = [
        {
            "prompt": f"problem {i}",
            "response": f"answer {i} of {step}",
            "ground_truth": i,
            "score": float(i < num_right),
        }
        for i in range(20)
    ]
    run.samples(step, rows, "val")
    run.metrics(step, "val", {"val_correct/all/mean": num_right / 20})


def write_asynchronous_run(
    folder: Path, num_steps: int = 12, groups: int = 2, slow: float = 0.5
) -> Path:
    """Steps of a second from time 1000 on, and a validation. The trainer waits for `slow` of each;
    a step's groups are begun two steps before it, and done half a step before it. Training is
    decoded throughout."""
    with RunFolder(folder, 0) as run:
        for step in range(num_steps):
            t = 1000.0 + step
            run.span(
                "training", Span(t, t + slow, "wait", f"step {step + 1}", step + 1, on="rollout")
            )
            run.span("training", Span(t, t + slow, "phase", "rollout", step + 1))
            run.span("training", Span(t + slow, t + 0.9, "phase", "train_step", step + 1))
            run.span("training", Span(t + 0.9, t + 1.0, "phase", "update_weights", step + 1))

            for prompt_group in range(step * groups, (step + 1) * groups):
                begun = max(step - 2, 0)
                run.span(
                    "rollout",
                    Span(
                        1000.0 + begun, t - 0.5, "group", "complete", step + 1, prompt_group, begun
                    ),
                )

            run.span("engine", Span(t, t + 1.0, "decode", "train", step + 1, version=step))

            # while groups run
            run.span("rollout", Span(t, t + 0.4, "wait", "capacity", step + 1, on="training"))

        end = 1000.0 + num_steps
        run.span("training", Span(end, end + 0.5, "phase", "eval", num_steps + 1))
        run.span("engine", Span(end, end + 0.5, "decode", "eval", num_steps + 1, version=num_steps))

    for name, lines in (
        ("ledger", [_consumed(step, groups) for step in range(num_steps)]),
        (
            "metrics",
            [_timed(step, 1000.0 + step, 1.0) for step in range(1, num_steps)]
            + [_timed(num_steps, end + 0.5, 1.5)],
        ),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return folder


def _consumed(step: int, groups: int) -> dict[str, Any]:
    return {
        "kind": "consumed",
        "step": step + 1,
        "group_ids": list(range(step * groups, (step + 1) * groups)),
    }


def _timed(step: int, end: float, seconds: float) -> dict[str, Any]:
    stale = min(step - 1, 2)
    values = {
        "timing_s/step": seconds,
        "async/version_diff/mean": stale,
        "async/version_diff/max": stale,
    }
    return {"step": step, "t": end, "restart": 0, "kind": "train", "m": values}


@pytest.fixture
def make_run(tmp_path):
    """Writes a run's folder, see `write_run`."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)


class Browser:
    """A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

    def __init__(self, binary: str, profile: Path):
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()

        def connect() -> None:
            commands = os.dup(read_commands)
            answers = os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        self._process = subprocess.Popen(
            [binary, *arguments, f"--user-data-dir={profile}"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self._target: str | None = None
        self.events: list[dict[str, Any]] = []

    def open(self, url: str, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Load a page in a new tab of this size in place of the last one, and wait until it is
        loaded."""
        self._session = None
        last = self._target
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if last:
            self.call("Target.closeTarget", targetId=last)
        self.events = []
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._receive()
        self.script(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def script(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors, warnings and messages that the page left on the console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [
            json.dumps(event["params"]) for event in self.events if event.get("method") in kinds
        ]

    def requests(self) -> list[str]:
        """The addresses of everything that the page asked for."""
        sent = [
            event["params"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [params["request"]["url"] for params in sent]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile goes to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._commands, data) :]
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer

        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data

        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    binary = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if binary is None:
        pytest.skip("wants Chromium (Debian: apt-get install chromium)")
    started = Browser(binary, tmp_path_factory.mktemp("browser"))
    yield started
    started.close()
