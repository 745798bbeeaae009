"""In a real kernel: the example notebook, and the interrupt button."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from distflow.api.load_run import load_run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow
pytest.importorskip("ipykernel", reason="wants ipykernel")
pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
from scripts.execute_notebook import LIMIT_S, NOTEBOOK, executed  # noqa: E402  wants them


def test_the_notebook_ships_with_the_outputs_of_its_run(tmp_path):
    run = executed(tmp_path)
    outputs = [output for cell in run.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = "".join(output["text"] for output in outputs if output.output_type == "stream")
    assert "step 10/10" in texts and "\x1b" not in texts and "Warning" not in texts
    (shown, metrics, samples, fates, report) = [
        output["data"] for output in outputs if "data" in output
    ]
    assert "finished, 10 steps" in shown["text/plain"]
    assert "reward/mean_score" in metrics["text/html"] and "digits" in samples["text/html"]
    assert "trained" in fates["text/html"]
    assert (tmp_path / "runs/notebook/digits/report.html").is_file() and "report.html" in report[
        "text/plain"
    ]
    shipped = nbformat.read(NOTEBOOK, as_version=4)
    assert [kinds_of(cell) for cell in shipped.cells] == [kinds_of(cell) for cell in run.cells]
    text = NOTEBOOK.read_text()
    assert len(text) < 50_000 and not re.search(
        r"(?<![\w.<])/(home|tmp|root|work|usr|var)/|20\d\d-\d\d-\d\d", text
    )


def kinds_of(cell: Any) -> tuple[str, list[list[str]]]:
    """The source of a cell, and of each output what it can be shown as."""
    outputs = cell.get("outputs", [])
    return cell.source, [sorted(output.get("data", [output.output_type])) for output in outputs]


CELL = """
import signal, distflow
before = signal.getsignal(signal.SIGINT)
run = distflow.train(
    {tiny!r},
    {{"trainer.default_local_dir": {folder!r}, "trainer.total_training_steps": 500, "trust.check_freq": 0}},
    data=[{{"prompt": "1+1=", "answer": "2"}}] * 8,
    reward=lambda solution_str: float(len(solution_str)),
)
print(run.status, signal.getsignal(signal.SIGINT) is before)
"""  # noqa: E501


@pytest.fixture
def kernel():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_the_interrupt_button_saves_and_the_kernel_lives_on(kernel, tmp_path):
    (manager, client), folder = kernel, tmp_path / "run"
    client.execute(CELL.format(tiny=str(ROOT / "examples" / "tiny.yaml"), folder=str(folder)))
    deadline = time.monotonic() + LIMIT_S

    while not (metrics := folder / "metrics.jsonl").is_file() or not metrics.stat().st_size:
        assert time.monotonic() < deadline and manager.is_alive()
        time.sleep(0.1)

    manager.interrupt_kernel()
    printed = ""
    while "stopped True" not in printed:
        message = client.get_iopub_msg(timeout=LIMIT_S)
        assert message["msg_type"] != "error", message["content"]
        printed += message["content"].get("text", "")

    assert "SIGINT: finishing this step, saving" in printed and "stopped True" in printed
    assert load_run(folder).status == "stopped" and load_run(folder).checkpoints
