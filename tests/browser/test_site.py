"""The documentation's site in a real Chromium: what fits, what its search finds, its two looks."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pytest

from tests.awaiting import PATIENCE_SECONDS
from tests.chromium import SCREENSHOTS, screenshot
from tests.repository.test_site_pages import NAVIGATION
from tests.runs import REPOSITORY
from tests.tiers import tiered

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SOURCE = "https://example.org/braid"
PICTURED = ("", "troubleshooting/", "coming-from/verl/", "how-to/size-a-run/", "reference/stages/")
# What a new user types, and the page that must come first.
SEARCHES = {
    "OOM": "troubleshooting/",
    "out of memory": "troubleshooting/",
    "expert not learning": "troubleshooting/",
    "hang": "troubleshooting/",
    "LoRA": "not-supported/",
    "multi-turn": "not-supported/",
    "glossary": "glossary/",
    "install": "install/",
    "migrate from verl": "coming-from/verl/",
    "TRL": "coming-from/trl/",
    "how many GPUs": "how-to/size-a-run/",
}
Look = Literal["light", "dark"]
WIDTH = "document.documentElement.scrollWidth"
# The page's script may listen only after the text is there: the event is repeated.
FOUND = """() => {
  document.querySelector('.md-search__input').dispatchEvent(new KeyboardEvent('keyup'));
  return /matching/.test(document.querySelector('.md-search-result__meta').innerText);
}"""
# The blocks of code whose lines do not fit.
CUT = """() => [...document.querySelectorAll('.md-typeset pre > code')]
  .filter((code) => code.scrollWidth > code.clientWidth + 1)
  .map((code) => code.innerText.slice(0, 80))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """The handler of a directory's files, without a line of log for each."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built site's address: its search needs a server."""
    directory = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": SOURCE}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def opened(browser: Browser, width: int, look: Look) -> Page:
    """Return a new page of this width, whose system is light or dark."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=look)
    return context.new_page()


@pytest.mark.parametrize("width", tiered([1280, 390], [1280]))
def test_no_page_is_wider_than_the_window_and_no_code_is_cut(
    width: int, site: str, browser: Browser
) -> None:
    page = opened(browser, width, "light")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    wide, cut = [], []
    for name in NAVIGATION:
        page.goto(site + name.removesuffix("index.md").replace(".md", "/"))
        wide += [name] * (page.evaluate(WIDTH) > width)
        cut += [(name, text) for text in page.evaluate(CUT)] if width == 1280 else []
    assert (wide, cut) == ([], [])
    assert [url for url in asked if not url.startswith((site, "blob:", "data:"))] == []


def test_a_search_finds_the_page_that_a_new_user_means(site: str, browser: Browser) -> None:
    page = opened(browser, 1280, "light")
    found = {}
    for text in SEARCHES:
        page.goto(site)
        page.locator(".md-search__input").fill(text)
        page.wait_for_function(FOUND, timeout=1000 * PATIENCE_SECONDS)
        first = page.locator(".md-search-result__item a").first.get_attribute("href") or ""
        found[text] = first.removeprefix(site).split("?")[0].split("#")[0]
    assert found == SEARCHES


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_has_its_look_its_neighbours_and_its_source(
    look: Look, width: int, site: str, browser: Browser
) -> None:
    page = opened(browser, width, look)
    for name in PICTURED:
        page.goto(site + name)
        title = name.strip("/").replace("/", "-") or "home"
        screenshot(page, f"{title}-{look}-{width}", SCREENSHOTS / "site")
        shade = "slate" if look == "dark" else "default"
        assert page.locator("body").get_attribute("data-md-color-scheme") == shade
        assert page.locator(".md-footer__link--next").count() == 1
        assert page.locator(".md-footer__link--prev").count() == (name != "")
        assert page.locator(f"a.md-source[href='{SOURCE}']").count()
    toggles = page.locator("label[for^='__palette_']")
    assert toggles.count() == 2
