"""The report in a real Chromium: it draws, stays silent, asks for nothing, and hostile samples stay
text."""

import base64
import http.server
import io
import threading
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image

from distflow.observe.report.build import write_report
from distflow.observe.writing.run_folder import RunFolder

pytestmark = pytest.mark.slow

BLUE = (0x21, 0x66, 0xC4)
RED = (0xB3, 0x26, 0x1E)


@pytest.fixture
def leaks():
    """An address that hostile samples want loaded, and what was asked of it."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/leak", asked
    server.shutdown()
    server.server_close()


def picture(browser: Any, clip: dict[str, float]) -> Image.Image:
    """A screenshot."""
    options = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True}
    png = browser.call("Page.captureScreenshot", format="png", **options)["data"]
    return Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")


def count(image: Image.Image, color: tuple[int, int, int]) -> int:
    """Pixels within a little of a colour."""
    gaps = np.abs(np.asarray(image).astype(int) - color)
    return int((gaps < 24).all(axis=-1).sum())


def test_hostile_samples_stay_text_and_nothing_is_loaded(browser, make_run, leaks):
    address, asked = leaks
    report = write_report(make_run(leak=address))
    assert address in report.read_text(encoding="utf-8"), "the bait must be in the file"
    browser.open(report.as_uri())

    # Show every sample whole: the hostile texts are then all in the page.
    shown = browser.script(
        "(() => { for (const b of document.querySelectorAll('tbody .open')) b.click();"
        " document.querySelectorAll('details').forEach((d) => { d.open = true; });"
        " return document.querySelector('#samples tbody').textContent; })()"
    )
    assert "<script>document.documentElement.dataset.hacked" in shown and address in shown
    assert "U+202E" in shown and "U+001B" in shown and "\\ud800" in shown and "\u202e" not in shown
    browser.script("new Promise((done) => setTimeout(done, 300))")
    assert browser.script("document.documentElement.dataset.hacked") is None
    assert (
        browser.script("document.querySelectorAll('main img, main script, main link').length") == 0
    )
    assert browser.script("document.title") == "<b>tiny</b> & co · distflow report"
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert asked == []
    assert browser.complaints() == []


def test_the_policy_stops_a_script_and_a_request_that_got_into_the_page(browser, make_run, leaks):
    """The second line of defence; and proof that the checks above can see a failure."""
    address, asked = leaks
    report = write_report(make_run())
    bait = (
        f"<script>document.documentElement.dataset.hacked = 1</script><img src='{address}' "
        "onerror='hacked = 1'>"
    )
    text = report.read_text(encoding="utf-8", errors="surrogatepass")
    report.write_text(text.replace("</body>", bait + "</body>"), encoding="utf-8")
    browser.open(report.as_uri())
    assert browser.script("document.documentElement.dataset.hacked") is None and asked == []
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())
    report.write_text(
        f"<script>document.documentElement.dataset.hacked = 1</script><img src='{address}'>"
    )
    browser.open(report.as_uri())
    assert browser.script("document.documentElement.dataset.hacked") == "1" and asked == ["/leak"]


def test_every_chart_is_drawn_with_marks_for_what_is_not_finite(browser, make_run):
    browser.open(write_report(make_run()).as_uri(), height=3000)
    charts = browser.script(
        "[...document.querySelectorAll('#charts figure')].map((f) => { const b = "
        "f.querySelector('.plot')"
        ".getBoundingClientRect(); return [f.querySelector('h3').textContent, b.x, b.y, b.width, "
        "b.height]; })"
    )

    # with one for each question that has data, and none for what is constant
    assert len(charts) == 9

    blues = {}
    for question, x, y, width, height in charts:
        rows = picture(browser, {"x": x, "y": y, "width": width, "height": height})
        blues[question] = count(rows, BLUE)
        marked = question in (
            "How far is the policy from the reference?",
            "Are the gradients healthy?",
        )
        assert (count(rows, RED) > 10) == marked, question

    assert all(number > 60 for number in blues.values()), blues
    assert browser.complaints() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window_and_text_has_contrast(browser, make_run, width, theme):
    browser.open(write_report(make_run()).as_uri(), width=width, theme=theme)
    assert browser.script("document.documentElement.dataset.theme") == theme
    assert browser.script("document.documentElement.scrollWidth") <= width
    low = browser.script(CONTRAST)
    assert low == [], low
    assert browser.complaints() == []


# The WCAG contrast of every text against the nearest background below it; AA asks for 4.5.
CONTRAST = """
(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const low = new Set();
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length || node.disabled || node.closest('script')) continue;
    let below = node, back = [0, 0, 0, 0];
    while (below && (back = parse(getComputedStyle(below).backgroundColor))[3] === 0) below = below.parentElement;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(back)].sort((p, q) => q - p);
    if ((a + .05) / (b + .05) < 4.5) low.add(node.tagName + '.' + node.className + ' ' + node.textContent.slice(0, 30));
  }
  return [...low];
})()
"""  # noqa: E501


def test_groups_are_sorted_filtered_and_opened_by_keyboard(browser, make_run):
    browser.open(write_report(make_run()).as_uri())
    column = (
        "[...document.querySelectorAll('tr.sample td:nth-child({}) ')].map((c) => c.textContent)"
    )
    browser.script("document.querySelector('thead th:nth-child(5) button').focus()")
    for _ in range(2):
        press(browser, "Enter")
    lengths = [float(text) for text in browser.script(column.format(5)) if text != "–"]
    assert len(lengths) == 20 and lengths in (sorted(lengths), sorted(lengths, reverse=True))
    assert browser.script("document.querySelectorAll('th[aria-sort]').length") == 1
    type_in = (
        "(() => { const f = document.querySelector('.filters'); f.elements.text.value = 'the "
        "ANSWER is';"
        " f.elements.low.value = '0.5'; f.dispatchEvent(new Event('input')); })()"
    )
    browser.script(type_in)
    assert {text.strip("▸") for text in browser.script(column.format(3))} == {"0.5"}
    assert browser.script("document.querySelector('.count').textContent") == "1 to 12 of 12"
    browser.script("document.querySelector('tr.sample .open').focus()")
    press(browser, "Enter")
    responses = browser.script(
        "[...document.querySelectorAll('tr.more .one')].map((a) => a.textContent)"
    )

    # All responses of the group, each with its reward and its advantage.
    assert len(responses) == 4 and all(
        "reward " in text and "advantage " in text for text in responses
    )
    assert [text.split("the answer is ")[1] for text in responses] == ["12", "13", "14", "15"]
    browser.script("document.querySelector('.plot').focus()")
    press(browser, "Home")
    assert "step 0" in browser.script("document.querySelector('.chart .at').textContent")
    assert browser.complaints() == []


def press(browser: Any, key: str) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)


def test_the_images_of_a_prompt_are_drawn_beside_it(browser, tmp_path):
    paths = [f"{tmp_path}/data/images/{name}.png" for name in ("a", "gone")]
    with RunFolder(tmp_path, 0) as run:
        run.samples(
            1, [{"uid": "0-0", "prompt": "which?", "response": "r", "score": 1.0, "images": paths}]
        )

    (tmp_path / "data" / "images").mkdir(parents=True)
    Image.new("RGB", (28, 28), (230, 40, 40)).save(tmp_path / "data" / "images" / "a.png")
    browser.open(write_report(tmp_path).as_uri())
    browser.script("document.querySelector('tr.sample .open').click()")
    assert browser.script("document.querySelector('.images').textContent") == "[image 2: gone.png]"
    size = (
        "(() => { const { naturalWidth, naturalHeight } = document.querySelector('.images img'); "
    )
    size += "return [naturalWidth, naturalHeight]; })()"
    deadline = time.monotonic() + 60
    while browser.script(size) == [0, 0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert browser.script(size) == [28, 28]
    assert browser.complaints() == []
