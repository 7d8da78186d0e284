"""Make the picture of docs/bench.md: the upper part of a report of `./everbatch bench served`, as a browser shows it.

.venv/bin/python -m tools.draw_bench bench-served/served.json [docs/bench-report.png]
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.served import report

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "bench-report.png"
WIDTH, HEIGHT = 1240, 960


def draw(results: Path, picture: Path) -> None:
    """Write the picture. Ends the program in one sentence where there is no browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium; apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        page_file = Path(scratch) / "report.html"
        page_file.write_text(report.html_of(json.loads(results.read_text())))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(page_file.as_uri())
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python -m tools.draw_bench RESULTS.json [PICTURE.png]")
    draw(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else PICTURE)
