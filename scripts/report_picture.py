"""The picture of a report in the README:
`python scripts/report_picture.py runs/quickstart/grpo/report.html`.

Needs Chromium and Pillow, which nothing else here does.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "report.png"
SIZE = (1200, 1480)
NUM_COLOURS = 128
CHROMIUM = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
    f"--window-size={SIZE[0]},{SIZE[1]}",
)


def main(report: str) -> None:
    """Take a screenshot of the report's top, with few colours, so that it is small."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        own = (f"--user-data-dir={folder}/profile", f"--screenshot={shot}")
        subprocess.run(
            [*CHROMIUM, *own, Path(report).resolve().as_uri()], check=True, capture_output=True
        )
        PICTURE.parent.mkdir(exist_ok=True)
        Image.open(shot).convert("RGB").quantize(NUM_COLOURS).save(PICTURE, optimize=True)

    print(f"{PICTURE}: {PICTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1])
