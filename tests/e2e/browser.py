"""Headless Chromium for tests of the playground, and for its picture in the README.

    python -m tests.e2e.browser http://127.0.0.1:8000 docs/playground.png "How do I sort a list in Python?"

asks a running server and saves what the page shows.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
ANSWER_TIMEOUT_MS = 60_000


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=ARGUMENTS, timeout=60_000)
        try:
            yield browser
        finally:
            browser.close()


def ask(page: Page, question: str) -> None:
    """Types a question, sends it and waits until the answer is complete."""
    answers = page.locator(".message.assistant .stats").count()
    page.fill("#prompt", question)
    page.click("#send")
    page.locator(".message.assistant .stats").nth(answers).wait_for(timeout=ANSWER_TIMEOUT_MS)


def take_picture(url: str, path: Path, questions: list[str], *, max_tokens: int = 160, seed: int = 7) -> None:
    """Saves the page as it looks after the questions are answered."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1180, "height": 760}, color_scheme="light")
        page.goto(url)
        page.fill("#max_tokens", str(max_tokens))
        page.fill("#seed", str(seed))
        for question in questions:
            ask(page, question)
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=path)


if __name__ == "__main__":
    take_picture(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
