"""How fast the dashboard answers:
`python benchmarks/dashboard.py [--steps 5000] [--sample-steps 1000] [--peers PY]`.

It writes a run of many steps and metrics and a run of many samples, starts `distflow dashboard` on
them, and measures the first page (what the overview draws its charts from, in a new server and
again), the samples sorted and filtered, and how long after its writing a step is in an answer. With
--peers, a Python that has the packages tensorboard and trackio, it measures these with the same
metrics: from the start of the server to the scalars that the first page asks for, the same again,
and from a new step on disk to its answer. All three are asked over HTTP, as their pages do.
"""

import argparse
import http.client
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from distflow.observe.writing.run_folder import RunFolder
from distflow.processes.descendants import descendants

_READS_AHEAD_S = 10
POLLED_S = 1.0
"""The page asks this often whether its run has gone on."""


def write_metrics(folder: Path, num_steps: int, num_metrics: int) -> None:
    draw = random.Random(0)
    names = [
        "reward/mean_score",
        "actor/entropy",
        "actor/grad_norm",
        "timing_s/step",
        "timing_s/rollout",
    ]
    names += ["throughput/tokens_per_s", "actor/kl_loss", "rollout/avg_response_length"]
    names += [f"group{i % 20}/metric{i}" for i in range(num_metrics - len(names))]

    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {"experiment": "many metrics", "total_steps": num_steps})
        for step in range(1, num_steps + 1):
            run.metrics(
                step,
                "train",
                {
                    name: math.sin(step / 500 + i) + draw.gauss(2, 0.1)
                    for i, name in enumerate(names)
                },
            )


def write_samples(folder: Path, num_steps: int, num_samples: int) -> None:
    draw = random.Random(0)
    words = [
        f"{draw.choice('bcdfgklmnprst')}{draw.choice('aeiou')}{draw.choice('lmnrst')}"
        for _ in range(2000)
    ]
    texts = [" ".join(draw.choices(words, k=400)) for _ in range(500)]

    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {"experiment": "many samples", "total_steps": num_steps})
        for step in range(1, num_steps + 1):
            run.metrics(step, "train", {"reward/mean_score": step / num_steps})
            run.samples(step, [_sample(draw, texts, step, i) for i in range(num_samples)])
            run.sample_writer.finish()  # it would lose what comes faster than the disk takes it


def _sample(draw: random.Random, texts: list[str], step: int, i: int) -> dict[str, Any]:
    return {
        **{
            "uid": f"{step * 64 + i // 8}-{i % 8}",
            "prompt": texts[i // 8][:400],
            "response": draw.choice(texts),
        },
        **{
            "score": float(draw.random() < 0.5),
            "response_length": draw.randrange(10, 600),
            "ground_truth": str(i),
        },
        **{
            "domain": ("math", "code")[i // 8 % 2],
            "advantage": draw.gauss(0, 1),
            "finish_reason": "stop",
        },
    }


class Server(NamedTuple):
    ask: Callable[..., Any]
    pid: int

    def timed(self, call: Callable[[], Any]) -> str:
        """The seconds of a call, and of the processor in the server meanwhile, which another load
        changes less."""
        cpu = self._cpu_s()
        start = time.perf_counter()
        call()
        return f"{time.perf_counter() - start:.2f} s ({self._cpu_s() - cpu:.2f} s of the processor)"

    def since(self, start: float) -> str:
        """As `timed`, since the server was started."""
        return f"in {time.perf_counter() - start:.2f} s ({self._cpu_s():.2f} s of the processor)"

    def _cpu_s(self) -> float:
        stats = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            for pid in (self.pid, *(pid for pid, _ in descendants(self.pid)))
        ]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "distflow", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        address = urlsplit(process.stdout.readline().split()[0])
        port, headers = (
            address.port,
            {"Authorization": f"Bearer {address.query.removeprefix('token=')}"},
        )

        def ask(part: str, **query: Any) -> Any:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request(
                "GET", f"/api/{part}?{urlencode(query, doseq=True)}", headers=headers
            )
            text = connection.getresponse().read()
            return {**json.loads(text), "bytes": len(text)}

        while True:
            try:
                ask("runs")
                break
            except ConnectionError:
                time.sleep(0.05)

        try:
            yield Server(ask, process.pid)
        finally:
            process.terminate()


def first_page(ask: Callable[..., Any], run: str) -> None:
    """As a browser does: both parts at once."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda part: ask(part, run=run), ("top", "curves")))
    assert all("error" not in each for each in found), found


def measure_metrics(folder: Path, num_steps: int) -> None:
    with server(folder) as found:
        print(
            f"first page, in a new server: {found.timed(lambda: first_page(found.ask, 'metrics'))}"
        )

    with server(folder) as found:
        time.sleep(_READS_AHEAD_S)
        print(
            "first page, once it was read ahead: "
            f"{found.timed(lambda: first_page(found.ask, 'metrics'))}"
        )
        print(f"size of its curves: {found.ask('curves', run='metrics')['bytes'] / 1e6:.2f} MB")
        print(f"the doctor's sentences: {found.timed(lambda: found.ask('judged', run='metrics'))}")

        for i in range(1, 4):
            _write_step(folder, num_steps + i)
            after = found.timed(
                lambda: (found.ask("state", run="metrics"), first_page(found.ask, "metrics"))
            )
            print(f"a new step is answered after {after}; the page asks every {POLLED_S:g} s")


def _write_step(folder: Path, step: int) -> None:
    line = {
        "step": step,
        "t": time.time(),
        "restart": 0,
        "kind": "train",
        "m": {"actor/entropy": 1.0},
    }
    with (folder / "metrics" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


_SHOWN = 12
"""The metrics that a first page shows, of the peers that ask for each by itself."""


def measure_peers(python: str, folder: Path, num_steps: int) -> None:
    with (folder / "metrics" / "metrics.jsonl").open() as file:
        values = json.loads(file.readline())["m"]
    names = list(values)[:_SHOWN]
    start = time.perf_counter()

    with server(folder) as found:
        first_page(found.ask, "metrics")
        print(f"distflow: started, and the first page answered, {found.since(start)}", flush=True)

    servers = {
        "tensorboard": [
            "-m",
            "tensorboard.main",
            "--logdir",
            str(folder / "tensorboard"),
            "--port",
        ],
        "trackio": [
            "-c",
            "import sys, trackio; trackio.show(open_browser=False, server_port=int(sys.argv[1]))",
        ],
    }
    asks = {"tensorboard": partial(_tensorboard_step, names), "trackio": _trackio_step}

    for name, command in servers.items():
        (folder / name).mkdir()
        os.environ["TRACKIO_DIR"] = str(folder / name)

        with _writer(python, name, folder) as write, socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            free.close()
            start = time.perf_counter()

            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with subprocess.Popen([python, *command, str(port)], **quiet) as process:  # type: ignore[call-overload]
                try:
                    _measure_peer(
                        name,
                        Server(partial(asks[name], port), process.pid),
                        write,
                        start,
                        num_steps,
                    )
                finally:
                    process.terminate()


def _measure_peer(
    name: str, found: Server, write: Callable[[int], None], start: float, num_steps: int
) -> None:
    _wait_for_step(found, num_steps)
    print(f"{name}: started, and the first page answered, {found.since(start)}", flush=True)
    print(f"{name}: first page again: {found.timed(found.ask)}", flush=True)

    for step in range(num_steps + 1, num_steps + 4):
        write(step)
        print(
            (
                f"{name}: a new step is answered after "
                f"{found.timed(partial(_wait_for_step, found, step))}"
            ),
            flush=True,
        )


@contextmanager
def _writer(python: str, name: str, folder: Path) -> Iterator[Callable[[int], None]]:
    script = Path(__file__).parent / "peers" / "dashboards.py"
    command = [
        python,
        str(script),
        name,
        str(folder / "metrics" / "metrics.jsonl"),
        str(folder / name),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        written = iter(process.stdout)
        told = process.stdin

        def write(step: int) -> None:
            told.write(f"{step}\n")
            told.flush()
            next(line for line in written if line == "written\n")

        next(line for line in written if line == "written\n")
        yield write
        process.kill()


def _wait_for_step(found: Server, step: int) -> None:
    while True:
        try:
            if found.ask() >= step:
                return
        except (OSError, LookupError, ValueError):  # it starts, or has read nothing yet
            pass
        time.sleep(0.05)


def _tensorboard_step(names: list[str], port: int) -> int:
    """The last step in the scalars of the first page."""
    asked = json.dumps([{"plugin": "scalars", "tag": name} for name in names])
    form = f'--b\r\nContent-Disposition: form-data; name="requests"\r\n\r\n{asked}\r\n--b--\r\n'
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    head = {"Content-Type": "multipart/form-data; boundary=b"}
    connection.request("POST", "/data/plugin/timeseries/timeSeries", form.encode(), head)
    found = json.loads(connection.getresponse().read())
    return min(max(p["step"] for own in tag["runToSeries"].values() for p in own) for tag in found)


def _trackio_step(port: int) -> int:
    def ask(part: str, **query: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST", f"/api/{part}", json.dumps(query), {"Content-Type": "application/json"}
        )
        return json.loads(connection.getresponse().read())["data"]

    (run,) = ask("get_runs_for_project", project="bench")
    runs = [{"run": run["name"], "run_id": run["id"]}]
    (logs,) = ask("get_logs_batch", project="bench", runs=runs, scalar_only=True)
    return max(int(row["step"]) for row in logs["logs"])


def measure_samples(folder: Path) -> None:
    with server(folder) as found:
        ask = partial(found.ask, run="samples")
        print(f"groups of all steps, in a new server: {found.timed(lambda: ask('samples'))}")
        place = ask("samples")["places"][0]
        print(f"groups of one step: {found.timed(lambda: ask('samples', step=place))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--metrics", type=int, default=200)
    parser.add_argument("--sample-steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument(
        "--peers", metavar="PYTHON", help="that has the packages tensorboard and trackio"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        write_metrics(Path(name) / "metrics", options.steps, options.metrics)
        if options.peers:
            measure_peers(options.peers, Path(name), options.steps)
        measure_metrics(Path(name), options.steps)

        if options.sample_steps:
            write_samples(Path(name) / "samples", options.sample_steps, options.samples)
            measure_samples(Path(name))


if __name__ == "__main__":
    main()
