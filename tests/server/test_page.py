"""The page in a real browser: chat, hover, keyboard, reset, and what axe-core says of it.

Needs a Chromium; without one these tests are skipped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from tests.server.running import Running, running

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

expect = playwright.expect
expect.set_options(timeout=30_000)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
PEOPLE = "Anna is 31 years old. Ben is 45 years old. Carl is 60 years old.\n" * 10


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(num_blocks=512) as served:
        yield served


def open_page(browser, served: Running, **options: object):  # type: ignore[no-untyped-def]
    page = browser.new_page(**options)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(served.url) else problems.append(asked.url),
    )
    page.goto(served.url)
    page.wait_for_selector("#connection.live")
    return page, problems


def say(page, text: str) -> str:  # type: ignore[no-untyped-def]
    """Send a message; what its reply cost."""
    said = page.locator(".cost").count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.locator(".cost").nth(said).wait_for()
    cost: str = page.locator(".cost").last.text_content()
    return cost


def test_a_chat_shows_what_was_cached_and_the_map_shows_where(browser, served) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(browser, served)
    first = say(page, PEOPLE + "How old is Ben?")
    assert first.startswith("0 of ")
    assert "45" in page.locator(".turn.reply").last.text_content()
    second = say(page, "How old is Anna?")
    cached, total = (int(word.replace(",", "")) for word in second.split()[:3:2])
    assert cached > 150 and total - cached < 40
    expect(page.locator("#tree")).to_contain_text("Anna is 31")
    expect(page.locator("#requests tr")).to_have_count(2)
    expect(page.locator("#hit-rate")).to_contain_text("%")
    # The first cell is a block of the document: pointed at, it says so; so do the arrow keys.
    page.locator("#pool").hover(position={"x": 3, "y": 3})
    expect(page.locator("#block")).to_contain_text("tokens: ")
    page.locator("#pool").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block")).to_contain_text("Block 1:")
    expect(page.locator("#block")).to_contain_text("tokens: ")
    page.get_by_role("button", name="Forget everything cached").click()
    expect(page.locator("#pool-counts")).to_contain_text("0 cached")
    assert say(page, "How old is Carl?").startswith("0 of ")
    assert problems == []
    page.close()


def test_a_reply_can_be_stopped(browser, served) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(browser, served)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=route.request.post_data[:-1] + ',"ignore_eos":true,"max_tokens":5000}'
        ),
    )
    page.fill("#message", "Go on and on")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.reply")).to_have_text(re.compile(r"\S+\s+\S+"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".cost")).to_contain_text("stopped")
    page.close()
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 820, 390])
def test_nothing_hinders_anybody(browser, served, scheme: str, width: int) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(
        browser, served, color_scheme=scheme, viewport={"width": width, "height": 900}
    )
    say(page, "How old is Ben?")
    page.locator("#requests tr").first.wait_for()
    results = axe.Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    wide = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert not wide and problems == []
    page.close()
