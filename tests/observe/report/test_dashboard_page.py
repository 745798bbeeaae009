"""The pages of the dashboard in a real Chromium: drawn, silent, inert, followed live, and usable at
400 pixels."""

import time
from typing import Any
from urllib.parse import urlencode

import pytest

from distflow.commands.dashboard import PAGES
from distflow.observe.writing.run_folder import RunFolder
from tests.commands.test_dashboard import TOKEN, Client, serve
from tests.observe.conftest import write_asynchronous_run, write_run
from tests.observe.report.test_page import CONTRAST

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "tiny", leak="http://127.0.0.1:1/leak")
    write_asynchronous_run(folder / "asynchronous")
    with serve(folder) as found:
        yield found


def open_page(
    browser: Any, client: Client, page: str, width: int = 1280, theme: str = "light", **query: Any
) -> None:
    """Open a page and wait until its data are drawn."""
    path = "" if page == "runs" else page
    address = f"http://{client.host}/{path}?{urlencode({'token': TOKEN, **query}, doseq=True)}"
    browser.open(address, width=width, height=2500, theme=theme)
    wait(browser, "document.body?.getAttribute('aria-busy') === 'false'")

    if page == "samples":  # they are read in the background
        wait(
            browser,
            (
                "document.querySelector('tr.sample') && document.body?.getAttribute('aria-busy') "
                "=== 'false'"
            ),
        )


def wait(browser: Any, condition: str) -> None:
    deadline = time.monotonic() + 60
    while not browser.script(condition):
        assert time.monotonic() < deadline, (
            condition,
            browser.script("document.body.innerText"),
            browser.complaints(),
        )
        time.sleep(0.05)


RUNS = {"": [], "one": "asynchronous", "several": ["tiny", "asynchronous"]}
MORE = {
    "sample": {"run": "tiny", "uid": "203-1", "step": 2},
    "samples": {"run": "tiny"},
    "step": {"step": 5},
}


def query_of(page: Any) -> dict[str, Any]:
    return {"run": RUNS[page.of_run], **MORE.get(page.name, {})}


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_drawn_silent_and_within_the_window(browser, client, page, width, theme):
    open_page(browser, client, page.name, width, theme, **query_of(page))
    browser.script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    browser.script("document.querySelector('tr.sample .open')?.click()")
    wait(browser, "document.body?.getAttribute('aria-busy') === 'false'")
    assert browser.script("document.getElementById('said').textContent") == ""
    assert browser.complaints() == []
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked and all(url.startswith(f"http://{client.host}/") for url in asked)
    assert browser.script("document.documentElement.dataset.theme") == theme
    assert browser.script("document.documentElement.scrollWidth") <= width
    assert browser.script(CONTRAST) == []
    assert browser.script("document.title").startswith(page.question)
    assert page.question in browser.script("document.querySelector('header').textContent")
    assert browser.script("document.documentElement.dataset.hacked") is None
    assert len(browser.script("document.querySelector('main').innerText")) > 40


def test_a_step_appears_without_a_reload_and_the_zoom_stays(browser, tmp_path):
    with RunFolder(tmp_path / "run", 0) as run, serve(tmp_path) as client:
        for step in range(1, 9):
            run.metrics(
                step, "train", {"reward/mean_score": step / 10, "timing_s/step": 1.0 + step / 10}
            )

        open_page(browser, client, "overview", run="run")
        assert browser.script("charts[0].columns.x.at(-1)") == 8
        browser.script("charts[0].plot.setScale('x', { min: 2, max: 5 })")
        browser.script("document.documentElement.dataset.same = 1")
        run.metrics(9, "train", {"reward/mean_score": 0.9, "timing_s/step": 1.9})
        wait(browser, "charts[0].columns.x.at(-1) === 9")
        assert browser.script("document.documentElement.dataset.same") == "1"
        assert browser.script("[charts[0].plot.scales.x.min, charts[0].plot.scales.x.max]") == [
            2,
            5,
        ]
        assert browser.complaints() == []


def test_hostile_texts_stay_texts_on_every_page(browser, client):
    bait = "<script>document.documentElement.dataset.hacked"
    pages: tuple[tuple[str, dict[str, Any]], ...] = (
        ("samples", {}),
        ("overview", {}),
    )

    pages += (("sample", {"uid": "200-0", "step": 2}),)
    for page, query in pages:
        open_page(browser, client, page, run="tiny", **query)
        browser.script(
            "document.querySelectorAll('tbody .open').forEach((b) => b.click());"
            " document.querySelectorAll('details').forEach((d) => { d.open = true; })"
        )
        wait(browser, "document.body?.getAttribute('aria-busy') === 'false'")
        assert bait in browser.script("document.querySelector('main').textContent"), page
        assert browser.script("document.documentElement.dataset.hacked") is None
        assert (
            browser.script("document.querySelectorAll('main img, main script, main link').length")
            == 0
        )
        assert all(
            url.startswith((f"http://{client.host}/", "data:")) for url in browser.requests()
        )
        assert browser.complaints() == []


def test_a_server_that_ended_is_named(browser, tmp_path):
    with RunFolder(tmp_path / "run", 0) as run:
        run.metrics(1, "train", {"reward/mean_score": 0.5})
    with serve(tmp_path) as client:
        open_page(browser, client, "overview", run="run")
    wait(browser, "document.getElementById('said').textContent.includes('does not answer')")


def test_chosen_runs_are_compared(browser, client):
    open_page(browser, client, "runs")
    browser.script(
        "document.querySelectorAll('input[type=checkbox]').forEach((box) => box.click())"
    )
    browser.script(
        "[...document.querySelectorAll('a.button')].find((a) => a.textContent === 'compare "
        "2').click()"
    )
    wait(
        browser, "location.pathname === '/compare' && document.querySelector('#own table') !== null"
    )
    text = browser.script("document.querySelector('#own').textContent")
    assert "First difference" in text and browser.complaints() == []
