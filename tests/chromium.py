"""A real Chromium that the tests drive: Debian's package, by playwright, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.awaiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INSTALL_SECONDS = START_SECONDS = READY_SECONDS = PATIENCE_SECONDS
SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"


def _install() -> str:
    """Return the path of Chromium; skip the test where it is not there and cannot be installed."""
    if found := shutil.which("chromium"):
        return found
    if os.geteuid():
        pytest.skip("the report's tests need Chromium: apt-get install chromium")
    install = ["apt-get", "install", "-qq", "--no-install-recommends", "chromium"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options: dict[str, Any] = {"capture_output": True, "timeout": INSTALL_SECONDS}
    if subprocess.run(install, env=environment, **options).returncode:
        subprocess.run(["apt-get", "update", "-qq"], env=environment, **options)
        done = subprocess.run(install, env=environment, text=True, **options)
        if done.returncode:
            pytest.skip(f"Chromium is not here and apt-get cannot install it: {done.stderr}")
    return str(shutil.which("chromium"))


# Not for a session: while playwright runs, no other test of the process may use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, once for the tests of a file."""
    from playwright.sync_api import sync_playwright  # here, for the tests that need no browser

    path = _install()
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=1000 * START_SECONDS
        )
        yield found
        found.close()


@contextmanager
def opened(browser: Browser, report: Path, width: int = 1280, dark: bool = False) -> Iterator[Page]:
    """Yield the page of a report once it has drawn itself.

    Fails at the end where it has printed an error or asked for anything but itself.
    """
    context = browser.new_context(
        color_scheme="dark" if dark else "light",
        viewport={"width": width, "height": 900},
        offline=True,
    )
    page = context.new_page()
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=1000 * READY_SECONDS)
    yield page
    context.close()
    assert not errors
    assert [url for url in requests if not url.startswith("blob:")] == [report.as_uri()]


def visit(page: Page, address: str) -> None:
    """Go to a page of the report, and wait until its charts are drawn."""
    page.evaluate("address => { location.hash = address }", f"#/{address}")
    page.wait_for_function(
        "address => document.body.dataset.drawn === '#/' + address"
        " && [...document.querySelectorAll('figure')].every((each) => each.dataset.drawn)",
        arg=address,
    )


def screenshot(page: Page, name: str, directory: Path = SCREENSHOTS) -> None:
    """Keep a picture of the page, for who wants to see what the tests saw."""
    directory.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=directory / f"{name}.png")
