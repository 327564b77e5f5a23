"""The pictures of docs/how-to/read-a-run.md: `make pictures` keeps what these tests have drawn."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline import cli
from pipeline.commands.support.runs import read_run
from pipeline.report.screens.overview import LookApp
from pipeline.run.directory import RunDirectory
from tests.browser.reported_run import EXPERT, write_reported
from tests.chromium import SCREENSHOTS, opened, screenshot, visit
from tests.pipeline.test_screens import settled
from tests.runs import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {
    "verdict": "verdict",
    "curves": "curves/experts.chain_sum",
    "samples": "samples/experts.chain_sum?order=flipped",
    "merge": "merge",
    "routing": "routing",
    "time": "time",
}
PICTURES = SCREENSHOTS / "docs"
SCREENS = {"look": None, "look-samples": EXPERT}


# Before any that need Chromium: while it runs, nothing else may use asyncio.
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where commands name the run alone
    run = write_reported(tmp_path / "runs" / "small")

    async def drawn() -> str:
        app = LookApp(read_run(RunDirectory(run.path)), SCREENS[name], lambda *_: [])
        async with app.run_test(size=(150, 32)) as pilot:
            await settled(pilot)
            return app.export_screenshot()

    # Without the addresses of its fonts: a page of the docs asks no other host for anything.
    text = re.sub(r"@font-face \{.*?\}", "", asyncio.run(drawn()), flags=re.DOTALL)
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{name}.svg").write_text(text)
    assert EXPERT in text
    assert str(tmp_path) not in text


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.html"
    assert cli.main(["report", "--demo", "--output", str(path)]) == 0
    return path


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_demo_is_drawn(name: str, demo: Path, browser: Browser) -> None:
    with opened(browser, demo) as page:
        visit(page, PAGES[name])
        assert page.locator("main").inner_text().strip()
        screenshot(page, name, PICTURES)


def test_the_docs_show_each_picture_that_is_kept() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "read-a-run.md").read_text()
    shown = set(re.findall(r"\(\.\./images/([\w.-]+)\)", text))
    kept = {path.name for path in (REPOSITORY / "docs" / "images").iterdir()}
    assert shown == kept
    assert {Path(each).stem for each in shown} <= {*PAGES, *SCREENS}
