"""`distflow dashboard`: a real server over folders of runs, asked by a plain HTTP client."""

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import torch

from distflow.cli import main
from distflow.commands import dashboard_page_data
from distflow.commands.arguments import listen
from distflow.commands.dashboard import PAGES, make_server
from distflow.commands.dashboard_page_data import Dashboard
from distflow.data.batch import Batch
from distflow.observe.crash_safe_files import encode
from distflow.observe.writing.run_folder import RunFolder, claimed
from distflow.runtime.saved_groups import TOKEN_TEXTS, keep_groups
from tests.observe.conftest import HOSTILE, write_asynchronous_run, write_run

pytest.importorskip("duckdb", reason="the dashboard's samples need DuckDB (extra ui)")


TOKEN = "a-token"


class Client:
    """Asks a server for paths, as the scripts of its pages do."""

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self.port = port
        self.host = f"127.0.0.1:{port}"
        self.headers = {"Host": self.host, "Authorization": f"Bearer {token}"}

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers={**self.headers, **headers})
        answer = connection.getresponse()
        found = (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read().decode(),
        )
        connection.close()

        return found

    def part(self, name: str, **query: Any) -> Any:
        status, _, text = self.ask(f"/api/{name}?{urlencode(query, doseq=True)}")
        assert status == 200, text
        return json.loads(text)


@contextmanager
def serve(folder: Path, host: str = "127.0.0.1") -> Iterator[Client]:
    listening = listen("127.0.0.1", 0)
    dashboard = Dashboard(folder)
    server = make_server(dashboard, host, TOKEN)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()

    try:
        yield Client(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "project" / "tiny")
    write_asynchronous_run(folder / "project" / "asynchronous")
    return folder


@pytest.fixture(scope="module")
def client(runs):
    with serve(runs) as found:
        yield found


TINY = "project/tiny"


def port_and_token(line: str) -> tuple[int, str]:
    """Of the address that the command prints."""
    found = re.match(r"http://127[.]0[.]0[.]1:(\d+)/[?]token=(\S+)", line)
    assert found is not None, line
    return int(found[1]), found[2]


def test_the_command_prints_its_address_serves_and_ends_by_ctrl_c(runs):
    command = [sys.executable, "-m", "distflow", "dashboard", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(3)]
            port, token = port_and_token(lines[1])
            assert f"ssh -L {port}:127.0.0.1:{port} " in lines[2]
            status, _, text = Client(port, token).ask("/")
            assert status == 200 and "distflow dashboard" in text
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_a_folder_that_is_not_there_and_a_port_in_use_are_named(tmp_path, capsys):
    assert main(["dashboard", str(tmp_path / "nothing")]) == 2
    assert "nothing: name the folder that contains the runs" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", str(tmp_path), "--port", str(port)]) == 2
        assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err


def test_without_starlette_a_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["dashboard", str(tmp_path)]) == 2
    assert "pip install 'distflow[ui]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ({"Host": "evil.example"}, 421, "'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:80"}, 421, "does not answer under the name"),
        ({"Origin": "http://evil.example"}, 403, "does not answer pages of 'http://evil.example'"),
        ({"Origin": "null"}, 403, "does not answer pages of 'null'"),
        ({"Host": "localhost:1234"}, 200, ""),
        ({"Host": "[::1]:1234"}, 200, ""),
    ],
)
def test_foreign_hosts_and_origins_are_refused(client, headers, status, text):
    found, _, said = client.ask("/api/runs", **headers)
    assert found == status and text in said


def test_only_get_is_answered_and_every_answer_forbids_foreign_content(client):
    for method in ("POST", "PUT", "DELETE"):
        assert client.ask("/api/runs", method)[0] == 405

    for path in ("/", "/api/runs", "/static/dom.js", "/nothing", f"/overview?run={TINY}"):
        _, headers, text = client.ask(path)
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'self';" in policy
            and "unsafe" not in policy
        )
        assert (
            headers["x-content-type-options"] == "nosniff"
            and "access-control-allow-origin" not in headers
        )
        assert "<style" not in text and "<script>" not in text


@pytest.mark.parametrize(
    "run",
    [
        "../project/tiny",
        "project/../project/tiny",
        "/etc",
        "project",
        "",
        "nothing",
        "a\0b",
        "project/tiny/samples",
    ],
)
def test_only_runs_below_the_folder_are_shown(client, run):
    status, _, text = client.ask(f"/api/top?{urlencode({'run': run})}")
    assert status == 400 and "There is no run" in json.loads(text)["error"]
    status, _, text = client.ask(f"/overview?{urlencode({'run': run})}")
    assert status == 400 and "There is no run" in text


@pytest.mark.parametrize(
    "path",
    ["/static/../build.py", "/static/%2e%2e%2fbuild.py", "/../../etc/passwd", "/api/nothing"],
)
def test_a_path_that_is_no_page_is_named(client, path):
    status, _, text = client.ask(path)
    assert status in (400, 404) and ("There is no page" in text or "not a part of any page" in text)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_address_with_the_token_leaves_it_in_a_cookie_of_the_port(runs, host):
    with serve(runs, host) as client:
        nothing = {"Authorization": ""}
        assert (
            client.ask("/api/runs", **nothing)[0]
            == client.ask("/?token=wrong", **nothing)[0]
            == 401
        )
        status, headers, _ = client.ask("/overview?run=a%26b&token=a-token", **nothing)
        assert status == 303 and headers["location"] == "/overview?run=a%26b"
        assert (
            client.ask("//evil.example?token=a-token", **nothing)[1]["location"] == "/evil.example"
        )
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        kept = {**nothing, "Cookie": f"other=1; {cookie.partition(';')[0]}"}
        assert client.ask("/api/runs", **kept)[0] == 200
        assert client.ask("/api/runs", Host="127.0.0.1:1", **kept)[0] == 401
        assert client.ask("/api/runs", Host="evil.example", **kept)[0] == 421


def test_what_takes_more_than_reading_wants_the_token_of_the_page(client):
    """An image, a form or a link of any page sends the cookie at most."""
    path = f"/api/samples?run={TINY}"
    _, headers, _ = client.ask("/?token=a-token", Authorization="")
    kept = {"Authorization": "", "Cookie": headers["set-cookie"].partition(";")[0]}
    assert client.ask(path, **kept)[0] == 401
    assert client.ask(f"{path}&token=a-token", Authorization="")[0] == 401
    own = {**kept, **{"Authorization": client.headers["Authorization"]}}

    for site in ("cross-site", "same-site"):
        link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert client.ask(path, **own, **{"Sec-Fetch-Site": site})[0] == 403
        assert client.ask(path, **own, **link, **{"Sec-Fetch-Site": site})[0] == 403
        assert client.ask("/", **kept, **link, **{"Sec-Fetch-Site": site})[0] == 200
        assert (
            client.ask("/", **kept, **{"Sec-Fetch-Site": site, "Sec-Fetch-Dest": "image"})[0] == 403
        )

    # The page of a run without measured steps says so; nothing refuses the question.
    assert client.ask(path, **own, **{"Sec-Fetch-Site": "same-origin"})[0] in (200, 400)
    assert json.dumps(TOKEN) in client.ask("/", **kept)[2].partition('id="data">')[2]


def test_runs_are_listed_the_last_written_first(client):
    found = client.part("runs")
    assert {row["run"] for row in found["runs"]} == {TINY, "project/asynchronous"} and found[
        "total"
    ] == 2
    tiny = next(row for row in found["runs"] if row["run"] == TINY)
    assert (tiny["step"], tiny["total"], tiny["state"], tiny["accuracy"]) == (
        12,
        12,
        "finished",
        0.8,
    )
    assert tiny["rewards"] == [step / 12 for step in range(1, 13)] and tiny["problems"] == 1


def test_a_run_without_an_end_is_running_or_has_crashed(tmp_path):
    write = (
        "import sys, time; from pathlib import Path; from distflow.observe.writing.run_folder "
        "import RunFolder\n"
    )
    write += "with RunFolder(Path(sys.argv[1]), 0) as run:\n run.event('start', 'started')\n"
    write += (
        " run.metrics(1, 'train', {'a': 1.0})\n run.flush()\n print(flush=True)\n time.sleep(600)"
    )

    command = [sys.executable, "-c", write, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer, serve(tmp_path) as client:
        assert writer.stdout is not None and writer.stdout.readline()

        def states() -> set[str]:
            (row,) = client.part("runs")["runs"]
            found = {client.part(part, run="run")["status"]["word"] for part in ("state", "top")}
            return {row["state"], *found}

        assert states() == {"running"}
        writer.kill()
        writer.wait()
        assert states() == {"crashed"}
        (tmp_path / "run" / ".writer").write_text("pid 7 on elsewhere since today")
        assert states() == {"no end yet"}


def test_the_folder_of_a_refused_start_is_no_run(tmp_path):
    refused = tmp_path / "runs" / "refused"
    with claimed(refused):
        (refused / "data").mkdir()
    assert Dashboard(tmp_path).answer("runs", [], {})["runs"] == []

    claim = f"from pathlib import Path; claim = claimed(Path({str(refused)!r})); claim.__enter__()"
    code = f"from {claimed.__module__} import claimed; {claim}; print(flush=True); input()"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as starting:
        assert starting.stdout is not None and starting.stdout.readline()
        (row,) = Dashboard(tmp_path).answer("runs", [], {})["runs"]
        assert row["run"] == "runs/refused"
        starting.kill()


def test_a_run_without_an_end_is_read_again_only_if_its_files_changed(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "run", 0) as run:
        run.event("start", "started")
    dashboard = Dashboard(tmp_path)
    (row,) = dashboard.answer("runs", [], {})["runs"]
    assert row["state"] == "crashed"
    monkeypatch.setattr(dashboard_page_data, "run_row", pytest.fail)
    assert dashboard.answer("runs", [], {})["runs"] == [row]


def test_the_dashboard_of_one_run_is_that_of_its_folder(runs):
    with serve(runs / TINY) as client:
        (row,) = client.part("runs")["runs"]
        assert client.part("top", run=row["run"])["title"] == "<b>tiny</b> & co"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_served_with_its_question(client, page):
    run = {"": [], "one": [TINY], "several": [TINY, "project/asynchronous"]}[page.of_run]
    name = page.name if page.of_run else ""
    status, headers, text = client.ask(f"/{name}?{urlencode({'run': run}, doseq=True)}")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert json.dumps(page.question) in text.partition('id="data">')[2]
    if page.of_run:
        assert client.ask(f"/{name}")[0] == 400


def test_numbers_that_are_not_finite_are_marked_and_never_0(client):
    series = client.part("curves", run=TINY)["series"]
    at = series["x"].index(5)
    assert (
        series["y"]["actor/kl_loss"][at] == "Infinity" and series["y"]["actor/kl_loss"][0] is None
    )
    assert "NaN" in series["y"]["actor/grad_norm"]


def test_what_a_step_adds_is_shown_and_changes_the_version(tmp_path):
    with RunFolder(tmp_path / "run", 0) as run, serve(tmp_path) as client:
        run.metrics(1, "train", {"reward/mean_score": 0.25, "timing_s/step": 1.0})
        first = client.part("state", run="run")["version"]
        assert client.part("curves", run="run")["series"]["x"] == [1]
        run.metrics(2, "train", {"reward/mean_score": 0.5, "timing_s/step": 1.0})

        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            # killed within a line
            file.write('{"step": 3, "t": 1.0, "restart": 0, "kind": "train", "m": {"reward')

        assert client.part("state", run="run")["version"] != first
        series = client.part("curves", run="run")["series"]
        assert series["x"] == [1, 2] and series["y"]["reward/mean_score"] == [0.25, 0.5]
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('/mean_score": 0.75}}\n')
        assert client.part("curves", run="run")["series"]["x"] == [1, 2, 3]


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_asking_for_everything_changes_nothing_of_a_run(tmp_path):
    write_run(tmp_path / "a")
    write_asynchronous_run(tmp_path / "b")
    before = hashes(tmp_path)

    with serve(tmp_path) as client:
        for name in (
            "top",
            "judged",
            "learned",
            "setup",
            "time",
            "curves",
            "samples",
        ):
            client.part(name, run="a")

        client.part("step", run="b", step=3)
        client.part("compare", run=["a", "b"])

    assert hashes(tmp_path) == before and before


def test_samples_are_those_of_a_report_or_all_of_one_step(client):
    found = client.part("samples", run=TINY)
    assert (found["num_files"], found["all_files"]) == (14, 14)
    assert found["num_responses"] == 12 * 16 + 40
    assert found["places"][0] == "train 12"
    steps = {group["step"] for group in found["groups"] if group["split"] == "train"}
    assert steps == set(range(1, 13))
    of_step = client.part("samples", run=TINY, step="train 3")
    assert [group["step"] for group in of_step["groups"]] == [3] * 4
    assert of_step["places"] == found["places"]

    for step in ("x", "train -1", "train 1e300"):
        status, _, text = client.ask(f"/api/samples?run={TINY}&step={quote(step)}")
        assert status == 400
        assert "is not a whole number" in json.loads(text)["error"]


def test_a_group_opens_whole_and_its_samples_have_their_uids(client):
    shown = client.part("samples", run=TINY, step="train 2")["groups"]
    group = client.part("group", run=TINY, step=2, split="train", place=3)
    assert len(shown) == 4 and [response["uid"] for response in group["responses"]] == [
        f"203-{i}" for i in range(4)
    ]
    sample = client.part("sample", run=TINY, uid="203-1", step=2)
    assert (
        sample["group"]["responses"][0]["response"] == "the answer is 13"
        and len(sample["others"]) == 4
    )
    assert sample["tokens"] == []
    status, _, text = client.ask(f"/api/sample?run={TINY}&uid=9-9")
    assert status == 400 and "has no sample 9-9" in json.loads(text)["error"]


def test_the_tokens_of_a_sample_have_what_was_saved_of_them(tmp_path):
    batch = Batch(torch.tensor([1, 1]), torch.tensor([2, 1]))
    batch["uid"] = ["0-0", "0-1"]
    batch["group_index"] = torch.tensor([0, 0])
    batch["response_ids"] = torch.tensor([[5, 6], [7, 0]])
    batch["response_mask"] = torch.ones(2, 2)
    batch["old_log_probs"] = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    batch["rollout_log_probs"] = torch.tensor([[-1.5, -2.0], [-3.0, 0.0]])

    with RunFolder(tmp_path / "run", 0) as run:
        run.samples(
            1, [{"uid": f"0-{i}", "prompt": "p", "response": "r", "score": 1.0} for i in range(2)]
        )

    batch["agent"] = ["policy", "solver"]
    batch["forks"] = [[["checker", 1]], []]
    batch["owners"] = [[["policy", 1], ["tool", 1]], [["policy", 1]]]
    batch["conversation"] = [
        [{"agent": "checker", "text": ""}, {"agent": "writer", "text": ""}],
        [],
    ]
    keep_groups(tmp_path / "run", 1, batch)
    shown = ("id", "log_prob", "difference", "trained", "text", "owner")

    def tokens(client: Client, uid: str) -> list[tuple[Any, ...]]:
        found = client.part("sample", run="run", uid=uid, step=1)["tokens"]
        return [tuple(token[name] for name in shown) for token in found]

    with serve(tmp_path) as client:
        assert tokens(client, "0-1") == [(7, -3.0, 0.0, 1, None, "solver: policy")]
        texts = ["", "", "", "", "", "<b>", HOSTILE[4]]
        (tmp_path / "run" / "tokens" / TOKEN_TEXTS).write_bytes(encode({"texts": texts}))
        assert tokens(client, "0-0") == [
            (5, -1.5, 0.5, 1, "<b>", "writer: policy"),
            (6, -2.0, 0.0, 1, HOSTILE[4], "checker: tool"),
        ]
        assert tokens(client, "0-1")[0][4] is None, "the vocabulary ends before it"


def test_a_killed_server_leaves_nothing_behind(tmp_path):
    write_run(tmp_path / "runs" / "run")
    before = hashes(tmp_path / "runs")
    (tmp_path / "tmp").mkdir()

    command = [sys.executable, "-m", "distflow", "dashboard", str(tmp_path / "runs"), "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        client = Client(*port_and_token(server.stdout.readline()))
        assert client.part("samples", run="run")["groups"]
        server.kill()

    assert hashes(tmp_path / "runs") == before and [*(tmp_path / "tmp").iterdir()] == []
