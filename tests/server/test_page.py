"""The page in a real browser: chat, hover, keyboard, reset, and accessibility by axe-core.

Needs a Chromium; without one these tests are skipped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import httpx
import pytest

from headstart.server.keys import KeyFolder
from tests.engine.tiny_llm import draft_always
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
    page.on("console", lambda log: problems.append(log.text) if log.type == "error" else None)
    page.on(
        "request",
        lambda sent: None if sent.url.startswith(served.url) else problems.append(sent.url),
    )
    page.goto(served.url)
    page.wait_for_selector("#connection.live")
    return page, problems


def say(page, text: str) -> str:  # type: ignore[no-untyped-def]
    """Send a message; return the displayed cost of its reply."""
    count = page.locator(".cost").count()
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.locator(".cost").nth(count).wait_for()
    cost: str = page.locator(".cost").last.text_content()
    return cost


def test_a_chat_shows_cached_tokens_and_the_map_their_blocks(browser, served) -> None:  # type: ignore[no-untyped-def]
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
    # The first cell is a block of the document, which hovering and the arrow keys show.
    page.locator("#pool").hover(position={"x": 3, "y": 3})
    expect(page.locator("#block")).to_contain_text("tokens: ")
    page.locator("#pool").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block")).to_contain_text("Block 1:")
    expect(page.locator("#block")).to_contain_text("tokens: ")
    forget = page.get_by_role("button", name="Empty the cache")
    dialogs: list[str] = []
    page.once("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    forget.click()
    page.once("dialog", lambda dialog: dialog.accept())
    assert int(say(page, "How old is Anna?").split()[0]) > cached  # nothing was removed
    forget.click()
    expect(page.locator("#pool-counts")).to_contain_text("0 cached")
    assert "computed again" in dialogs[0]
    assert say(page, "How old is Carl?").startswith("0 of ")
    assert problems == []
    page.close()


def test_the_page_offers_an_example(browser) -> None:  # type: ignore[no-untyped-def]
    """New users send a small model questions that it cannot answer."""
    with running(name="headstart-tiny", num_blocks=512) as alone:
        page, problems = open_page(browser, alone)
        expect(page.locator("#small")).to_be_visible()
        for age, reused in ((45, False), (52, True), (19, True)):
            page.get_by_role("button", name="Try an example").click()
            expect(page.locator("#message")).to_be_focused()
            cost = say(page, page.locator("#message").input_value())
            assert str(age) in page.locator(".turn.reply").last.text_content()
            assert (int(cost.split()[0]) > 60) == reused
            question = page.locator(".turn.user").last
            assert (
                question.evaluate("one => one.scrollHeight - one.clientHeight - one.scrollTop") < 2
            )
        page.close()
        assert problems == []


def test_a_large_pool_does_not_look_empty(browser) -> None:  # type: ignore[no-untyped-def]
    """Regression: its few used blocks were two dots of four pixels among 8,192."""
    with running(num_blocks=65_536, block_size=1) as large:  # which takes little memory
        page, problems = open_page(browser, large)
        say(page, PEOPLE)
        expect(page.locator("#tree")).to_contain_text("Anna is 31")
        expect(page.locator("#undrawn")).to_have_text("and 61,440 empty blocks more")
        assert page.evaluate("document.getElementById('pool').clientHeight") > 100
        expect(page.locator("#pool-counts")).to_contain_text("a square is 8 blocks")
        expect(page.locator("#pool-counts")).to_contain_text(" 0 held")  # hovering shows that state
        page.locator("#pool").hover(position={"x": 3, "y": 3})
        expect(page.locator("#block")).to_contain_text("Blocks 0 to 7: cached; block 0 has 1 token")
        page.close()
        assert problems == []


def test_a_bubble_shows_the_progress_of_its_prompt(browser) -> None:  # type: ignore[no-untyped-def]
    with running(num_blocks=512, max_num_batched_tokens=16) as slow:
        page, problems = open_page(browser, slow, viewport={"width": 1024, "height": 800})
        expect(page.locator("#tree")).to_contain_text("send a message")
        page.fill("#message", PEOPLE * 20 + "How old is Ben?")
        page.press("#message", "Enter")
        expect(page.locator("#running")).to_have_text("1")
        progress = re.compile(r"reading [\d,]+ of [\d,]+ tokens")
        expect(page.locator(".turn.reply")).to_have_text(progress)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".cost")).to_have_text("stopped")
        expect(page.locator(".turn.reply")).not_to_contain_text("reading")
        for table in page.locator(".scroll").all():  # at this width no column is cut
            assert table.evaluate("part => part.scrollWidth <= part.clientWidth")
        page.close()
        assert problems == []


def start_long_reply(page) -> None:  # type: ignore[no-untyped-def]
    """Send a message with a long answer by the button, and wait for the first words."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=route.request.post_data[:-1] + ',"ignore_eos":true,"max_tokens":5000}'
        ),
    )
    page.fill("#message", "Go on and on")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.reply")).to_have_text(re.compile(r"\S+\s+\S+"))


def test_a_reply_can_be_stopped(browser, served) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(browser, served)
    start_long_reply(page)
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    stop = page.get_by_role("button", name="Stop")
    expect(stop).to_be_focused()
    page.fill("#message", "What is next?")
    page.press("#message", "Enter")
    expect(page.locator(".turn.user")).to_have_count(1)
    stop.click()
    expect(page.locator(".cost")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#message")).to_have_value("What is next?")
    page.close()
    assert problems == []


def test_a_new_chat_ends_a_reply_and_forgets_it(browser, served) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(browser, served)
    start_long_reply(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
    page.unroute("**/v1/chat/completions")
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    say(page, "How old is Ben?")
    assert not any("on and on" in body for body in bodies)
    page.close()
    assert problems == []


def test_an_insufficient_key_is_explained(browser, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Regression: the dialog stayed unchanged, and the page looked disconnected."""
    keys = KeyFolder(tmp_path / "keys")
    key = keys.add("research")
    with running(num_blocks=64, api_keys=True, keys_folder=str(tmp_path / "keys")) as served:
        page = browser.new_page()
        page.goto(served.url)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-trouble")).to_contain_text("key")
        page.fill("#key", key)
        page.press("#key", "Enter")
        expect(page.locator("#connection")).to_contain_text("--admin")
        for part in ("#numbers", "#pool", "#tree", "#requests", "#missed", "#owners"):
            expect(page.locator(part)).to_be_hidden()  # they would always be empty
        expect(page.locator("#ask")).to_be_visible()
        expect(page.locator("#advice")).to_contain_text("Nothing yet")
        page.close()


def test_advice_shows_its_prompts_and_is_removed_by_a_reset(browser) -> None:  # type: ignore[no-untyped-def]
    """Regression: advice stayed after a reset, and did not show the start of the prompts."""
    with running(num_blocks=512) as alone:
        page, problems = open_page(browser, alone)
        for minute in (10, 11, 12):
            page.get_by_text("New chat").click()
            say(page, f"It is 10:{minute}. {PEOPLE}")
        expect(page.locator("#advice")).to_contain_text("a date or time")
        expect(page.locator("#advice")).to_contain_text("difference follows “<|user|>It is 10:1”")
        page.once("dialog", lambda dialog: dialog.accept())
        page.locator("#reset").click()
        expect(page.locator("#pool-counts")).to_contain_text("0 cached")
        expect(page.locator("#advice")).to_contain_text("Nothing yet.")
        page.close()
        assert problems == []


def test_one_block_is_shown_in_the_singular(browser) -> None:  # type: ignore[no-untyped-def]
    with running(num_blocks=512) as alone:
        page, problems = open_page(browser, alone)
        say(page, "Eh?")
        expect(page.locator("#tree .count")).to_have_text("1 block")
        page.close()
        assert problems == []


CUT = """() => [...document.querySelectorAll("main *")].filter((one) => {
  const style = getComputedStyle(one);
  return style.display !== "inline" && one.clientWidth && one.scrollWidth > one.clientWidth + 1;
}).map((one) => one.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [1440, 390])
def test_the_reference_loads_nothing_from_other_servers(browser, served, width: int) -> None:  # type: ignore[no-untyped-def]
    page = browser.new_page(viewport={"width": width, "height": 900})
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("console", lambda log: urls.append(log.text) if log.type == "error" else None)
    answer = page.goto(f"{served.url}/docs")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert all(url.startswith(served.url) for url in urls)
    for path in served.app.openapi()["paths"]:
        expect(page.locator("h2", has_text=f" {path}").first).to_be_visible()
    page.locator("a[href='#schema-ChatCompletionRequest']").first.click()
    expect(page.locator("#schema-ChatCompletionRequest")).to_contain_text("no_store")
    results = axe.Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    page.close()


def test_the_reference_sends_requests(browser, tmp_path) -> None:  # type: ignore[no-untyped-def]
    keys = KeyFolder(tmp_path / "keys")
    key = keys.add("research", admin=True)
    with running(num_blocks=64, api_keys=True, keys_folder=str(tmp_path / "keys")) as served:
        page = browser.new_page()
        page.goto(f"{served.url}/docs")
        chat = page.locator("section[id='post-/v1/chat/completions']")
        chat.locator("summary").click()
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator("output")).to_contain_text("401")
        expect(chat.locator("pre")).to_contain_text("authentication_error")
        page.fill("#key", key)
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator("output")).to_have_text(re.compile(r"200 OK · application/json"))
        expect(chat.locator("pre")).to_contain_text('"finish_reason": "stop"')
        body = chat.locator("textarea")
        body.fill(body.input_value().replace("{", '{"stream": true,', 1))
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator("output")).to_contain_text("text/event-stream")
        expect(chat.locator("pre")).to_contain_text("data: [DONE]")
        live = page.locator("section[id='get-/cache/live']")  # which never ends
        live.locator("summary").click()
        live.get_by_role("button", name="Send").click()
        expect(live.locator("pre")).to_contain_text("data: {")
        live.get_by_role("button", name="Stop").click()
        expect(live.locator("output")).to_contain_text("stopped")
        results = axe.Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        page.goto(served.url)  # the tab stores the key
        page.wait_for_selector("#connection.live")
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 820, 390])
def test_the_page_is_accessible_and_fits(browser, served, scheme: str, width: int) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(
        browser, served, color_scheme=scheme, viewport={"width": width, "height": 900}
    )
    say(page, "How old is Ben?")
    page.locator("#requests tr").first.wait_for()
    results = axe.Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    wide = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert not wide and problems == []
    for kind in ("warm", "cold"):  # a time and its word are in one line, with nothing after them
        label = page.locator("#first span", has_text=kind)
        assert label.evaluate("one => one.getClientRects().length") == 1
        assert re.fullmatch(rf"(–|[\d.]+ m?s) {kind}", label.text_content())
    if width == 390:
        assert page.evaluate(CUT) == []
    page.close()


def test_a_request_is_shown_by_its_id(browser, served) -> None:  # type: ignore[no-untyped-def]
    """Regression: a completion was named by the number of its prompt, 0."""
    page, problems = open_page(browser, served)
    body = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 1}
    name = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["id"]
    short = name.removeprefix("cmpl-")[:8]
    rows = page.locator("#requests tr td:first-child")
    expect(rows.filter(has_text=re.compile(rf"^{short}$"))).to_have_count(1)
    expect(rows.filter(has_text=re.compile(rf"^{short}, prompt 2$"))).to_have_count(1)
    assert problems == []
    page.close()


def test_a_chat_that_starts_warm_shows_its_savings(browser, served) -> None:  # type: ignore[no-untyped-def]
    """Regression: a chat without cold prompts had no time to compare with."""
    for head in ("It is early. ", "It is late. "):
        body = {"model": "tiny", "messages": [{"role": "user", "content": head + PEOPLE}]}
        httpx.post(f"{served.url}/v1/chat/completions", json={**body, "max_tokens": 1}, timeout=60)
    page, problems = open_page(browser, served)
    expect(page.locator("#rates polyline")).to_have_count(1)
    assert "saved about" in say(page, "It is late. " + PEOPLE)
    assert problems == []
    page.close()


def test_accepted_drafts_are_shown(browser) -> None:  # type: ignore[no-untyped-def]
    with running(num_blocks=512, speculation=15) as drafting:
        draft_always(drafting.llm)
        page, problems = open_page(browser, drafting)
        costs = []
        for _ in range(2):
            costs.append(say(page, PEOPLE + "How old is Ben?"))
            page.get_by_role("button", name="New chat").click()
        assert re.search(r"· \d+ of \d+ tokens drafted", costs[1])
        expect(page.locator("#accepted")).to_have_text(re.compile(r"\d+"))
        expect(page.locator("#drafted")).to_have_text(re.compile(r"of \d+ drafted tokens accepted"))
        assert problems == []
        page.close()


SAVED = """async () => {
    const main = document.querySelector('script[type="module"]').src;
    const { savedSeconds } = await import(new URL("chart.js", main));
    const cold = [{ tokens: 100, seconds: 1 }, { tokens: 1000, seconds: 2 }];
    const known = [90, 900, 2000].map((cached) => savedSeconds(cached, cold));
    return [savedSeconds(900, []), savedSeconds(900, cold.slice(1)), ...known];
}"""


def test_savings_are_bounded_by_the_time_of_cold_prompts(browser, served) -> None:  # type: ignore[no-untyped-def]
    page, problems = open_page(browser, served)
    saved = page.evaluate(SAVED)
    assert saved == [None, None, 90 * 3 / 1100, pytest.approx(2), pytest.approx(6000 / 1100)]
    assert problems == []
    page.close()


def test_running_requests_are_listed(browser, served) -> None:  # type: ignore[no-untyped-def]
    """Regression: only their number was shown, not the progress of each."""
    page, problems = open_page(browser, served)
    expect(page.locator("#batch")).to_have_text("none")
    body = {"model": "tiny", "prompt": PEOPLE, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json={**body, "stream": True}, timeout=60
    ) as answer:
        parts = answer.iter_bytes()
        next(parts)
        cells = page.locator("#batch tr").first.locator("td")
        expect(cells).to_have_count(4)
        expect(cells.nth(1)).to_have_text(re.compile(r"^(\d+) of \1$"))
    expect(page.locator("#batch")).to_have_text("none")
    assert problems == []
    page.close()


def test_an_administrator_sees_the_owners_of_blocks(browser, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Regression: owners were shown by salt, and looked alike."""
    keys = KeyFolder(tmp_path / "keys")
    key = keys.add("research", group="lab", admin=True)
    with running(num_blocks=64, api_keys=True, keys_folder=str(tmp_path / "keys")) as served:
        page = browser.new_page()
        page.goto(served.url)
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.wait_for_selector("#connection.live")
        say(page, "How old is Ben?")
        expect(page.locator("#owners dt")).to_have_text("group lab")
        page.close()
