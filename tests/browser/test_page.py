"""The status page in a real browser: what it shows, and that it says so without colour."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from actors.errors import DeviceMemoryShort
from actors.protocol import HeldImage, ScheduleStatus
from tests.browser.conftest import GIB, Stage, looking
from tests.e2e.conftest import config_with
from tests.e2e.serve_process import ServeProcess

pytestmark = pytest.mark.browser

SIZES = {1280: {"width": 1280, "height": 900}, 390: {"width": 390, "height": 844}}


def card(page: Any, model: str) -> Any:
    return page.get_by_role("article", name=f"model {model}")


def shows(page: Any, model: str, state: str, within_s: float = 10) -> None:
    pill = card(page, model).locator(".pill", has_text=re.compile(rf"^{state}$"))
    pill.wait_for(timeout=1000 * within_s)


def press(page: Any, order: str, model: str) -> None:
    card(page, model).get_by_role("button", name=f"{order}: {model}", exact=True).click()


def no_wider_than_screen(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_every_state_can_be_seen(
    stage: Stage, browser: Any, shots: Path, width: int, scheme: str
) -> None:
    stage.run(lambda: stage.code.age(112))

    def shoot(page: Any, name: str) -> None:
        no_wider_than_screen(page)
        page.screenshot(path=shots / f"{name}_{width}_{scheme}.png", full_page=True)

    options = {"viewport": SIZES[width], "color_scheme": scheme, "reduced_motion": "reduce"}
    with looking(browser, stage.url, **options) as page:
        shows(page, "coder-3b", "awake")
        page.get_by_text(re.compile(r"sleeps in 3:0\d")).wait_for()
        shoot(page, "awake")
        hours = ScheduleStatus("awake", time.time() + 3 * 3600 + 90)
        said = {"idle_timeout_s": None, "idle_timeout_from": "schedule", "schedule": hours}
        stage.run(lambda: stage.code.say(**said))
        page.get_by_text("idle; stays awake for 3 h 1 m (schedule)").wait_for()
        stage.run(lambda: stage.code.say(idle_timeout_from="pin"))
        page.get_by_text("idle; stays awake (pin)").wait_for()
        stage.run(lambda: stage.code.say(idle_timeout_s=300.0, idle_timeout_from="idle_timeout_s"))

        for _ in range(4):  # so that the diagrams have something to show
            press(page, "Sleep", "r1-distill-7b")
            shows(page, "r1-distill-7b", "asleep")
            press(page, "Wake", "r1-distill-7b")
            shows(page, "r1-distill-7b", "awake")

        stage.run(stage.chat.may_settle.clear)
        press(page, "Sleep", "r1-distill-7b")
        shows(page, "r1-distill-7b", "draining")
        stage.run(stage.chat.may_settle.set)
        shows(page, "r1-distill-7b", "asleep")
        page.get_by_text("a request wakes it, from host memory").wait_for()
        page.locator(".bar [data-kind=ghost]").wait_for(state="attached")
        shoot(page, "asleep")

        stage.run(stage.chat.may_settle.clear)
        page.get_by_role("button", name="Send", exact=True).click()
        shows(page, "r1-distill-7b", "waking")
        page.get_by_text("1 request waiting", exact=False).first.wait_for()
        shoot(page, "waking")
        stage.run(stage.chat.may_settle.set)
        page.get_by_role("region", name="Answer").get_by_text("do not need.").wait_for()
        shows(page, "r1-distill-7b", "awake")

        why = "WorkerLost: the process that computes for this replica has ended"
        stage.run(lambda: stage.code.lose_worker(why))
        shows(page, "coder-3b", "restarting")
        page.get_by_text("its worker failed, another is starting").wait_for()
        shoot(page, "restarting")
        stage.run(stage.code.have_another_worker)
        shows(page, "coder-3b", "awake")
        page.get_by_text("Worker 4713, after 1 restart").wait_for()

        why = "ReplicaFailed: 5 workers in a row have failed before they served"
        stage.run(lambda: stage.code.fail(why))
        shows(page, "coder-3b", "failed")
        page.get_by_text("Ray Serve replaces it").wait_for()
        shoot(page, "failed")


def test_sleep_and_wake_happen_while_watched(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        press(page, "Sleep", "coder-3b")
        shows(page, "coder-3b", "asleep")
        press(page, "Wake", "coder-3b")
        shows(page, "coder-3b", "awake")
        events = page.get_by_role("list").and_(page.locator("#log"))
        words = events.locator(".pill").all_inner_texts()
        assert words[0] == "awake"
        assert "asleep" in words
        assert page.locator("#timeline .lane [data-state=asleep]").count() == 1
        page.locator(".wake .facts").get_by_text("ms").first.wait_for()
    (command, tags) = stage.code.orders
    assert (command.hold, tags) == (False, ())


def test_text_streams_and_a_sleeping_model_wakes_for_it(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        press(page, "Sleep", "r1-distill-7b")
        shows(page, "r1-distill-7b", "asleep")
        stage.run(lambda: setattr(stage.chat, "token_gap_s", 0.2))
        page.get_by_label("Prompt").fill("Say something")
        page.keyboard.press("Control+Enter")
        answer = page.get_by_role("region", name="Answer")
        answer.get_by_text("Cats are").wait_for()
        assert "do not need." not in answer.inner_text()  # it came in parts
        page.get_by_role("button", name="Stop").click()
        page.get_by_text(re.compile(r"First token after .* with a wake.*stopped")).wait_for()
        page.locator("#play-send:enabled").wait_for()
    assert len(stage.chat.requests) == 1


def test_hold_is_said_in_words(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        press(page, "Hold asleep", "coder-3b")
        shows(page, "coder-3b", "asleep, held")
        page.get_by_text("held: only Wake ends it").wait_for()


def test_sleeper_without_a_process_says_so(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        press(page, "Sleep", "coder-3b")
        page.get_by_text("a request wakes it, from host memory").wait_for()
        stage.run(lambda: stage.code.say(deep=True, worker_process_id=0))
        shows(page, "coder-3b", "asleep, deep")
        page.get_by_text(
            "its process has ended: a request starts another, from host memory"
        ).wait_for()


def test_refused_order_is_told(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url, expect="status of 503") as page:
        page.route(
            "**/wake_up",
            lambda route: route.fulfill(
                status=503, json={"error": {"message": "4 GiB are missing on the card"}}
            ),
        )
        press(page, "Sleep", "coder-3b")
        shows(page, "coder-3b", "asleep")
        press(page, "Wake", "coder-3b")
        page.get_by_text("4 GiB are missing on the card").wait_for()


def test_401_says_what_is_missing_and_the_key_is_sent(stage: Stage, browser: Any) -> None:
    sent: list[str | None] = []

    def guard(route: Any) -> None:
        sent.append(route.request.headers.get("authorization"))
        if sent[-1] == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no"}})

    with looking(browser, stage.url, expect="status of 401") as page:
        page.route("**/sleep", guard)
        press(page, "Sleep", "coder-3b")
        page.get_by_text("Needs the admin key").wait_for()
        page.get_by_label("Admin key").fill("sesame")
        page.keyboard.press("Enter")
        press(page, "Sleep", "coder-3b")
        shows(page, "coder-3b", "asleep")
        page.reload()
        page.locator("#link[data-link=live]").wait_for()
        assert page.locator("#key-label").inner_text() == "Admin key set"
    assert sent == [None, "Bearer sesame"]


def test_silent_model_does_not_hold_up_the_other(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        shows(page, "coder-3b", "awake")
        stage.run(lambda: setattr(stage.code, "hang_status", True))
        shows(page, "coder-3b", "no answer")
        press(page, "Sleep", "r1-distill-7b")
        shows(page, "r1-distill-7b", "asleep")
        stage.run(lambda: setattr(stage.code, "hang_status", False))
        shows(page, "coder-3b", "awake")


def test_keyboard_reaches_everything(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        shows(page, "coder-3b", "awake")
        reached = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "document.activeElement.ariaLabel || document.activeElement.id "
                    "|| document.activeElement.innerText || document.activeElement.name"
                )
            )
        for wanted in (
            "To the models",
            "Sleep: coder-3b",
            "Hold asleep: coder-3b",
            "play-prompt",
            "play-model",
            "play-send",
            "span",
        ):
            assert wanted in reached, reached
        page.get_by_role("button", name="Sleep: coder-3b", exact=True).focus()
        page.keyboard.press("Enter")
        shows(page, "coder-3b", "asleep")
        focused = page.evaluate("document.activeElement.ariaLabel")
        assert focused == "Sleep: coder-3b"  # what changed around it took nothing away


def test_page_returns_after_the_front_was_away(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url, expect="ERR_FAILED") as page:
        shows(page, "coder-3b", "awake")
        page.route("**/status/events", lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # connects anew
        page.locator("#link[data-link=lost]").wait_for(timeout=10000)
        page.unroute("**/status/events")
        page.locator("#link[data-link=live]").wait_for(timeout=20000)


def test_hidden_page_asks_for_nothing_whatever_it_was_waiting_for(
    stage: Stage, browser: Any
) -> None:
    with looking(browser, stage.url, expect="ERR_FAILED") as page:
        shows(page, "coder-3b", "awake")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.route("**/status/events", lambda route: route.abort())
        hide(page, True)
        hide(page, False)
        page.locator("#link[data-link=lost]").wait_for(timeout=10000)
        hide(page, True)
        asked.clear()
        page.unroute("**/status/events")
        page.wait_for_timeout(4000)  # longer than it pauses at most
        assert asked == []
        hide(page, False)
        page.locator("#link[data-link=live]").wait_for()


def hide(page: Any, is_hidden: bool) -> None:
    """As another tab in front of it does."""
    page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def test_images_of_one_name_have_a_row_each(stage: Stage, browser: Any) -> None:
    stage.images = [
        HeldImage(f"/models/qwen@4f1c/{dtype}", size * GIB, 30, 18.3, 1, False, "disk")
        for dtype, size in (("float32", 12), ("bfloat16", 6))
    ]
    with looking(browser, stage.url) as page:
        rows = page.locator("#host ul.parts > li", has_text="image of qwen")
        rows.first.wait_for()
        for pause_s in (0.4, 0.3):  # no more of them as it draws again
            stage.run(lambda pause_s=pause_s: stage.code.age(pause_s))  # type: ignore[misc]
            page.wait_for_timeout(1500)
            sizes = [re.findall(r"[\d.]+ GiB", text) for text in rows.all_inner_texts()]
            assert sizes == [["12.0 GiB"], ["6.00 GiB"]]


def test_events_are_those_of_the_front_that_answers(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        shows(page, "coder-3b", "awake")
        entry = {"model": "coder-3b", "replica": "p81xw0ce", "state": "awake", "reason": "start"}
        for at, state in ((1000.0, "failed"), (2000.0, "asleep")):
            history = {"0": {**entry, "at": at, "state": state, "seconds": None, "missed": 0}}
            page.evaluate(
                """async (history) => {
                    const { updateLog } = await import("./page/timeline.js");
                    updateLog({ history });
                }""",
                history,
            )
            assert page.locator("#log .pill").all_inner_texts() == [state]


def test_failed_wake_reason_is_shown(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        reason = f"could not wake: {DeviceMemoryShort('3 GiB are free, 12 are needed')}"
        press(page, "Sleep", "coder-3b")
        shows(page, "coder-3b", "asleep")
        stage.run(lambda: stage.code.say(reason=reason))
        card(page, "coder-3b").get_by_text("3 GiB are free, 12 are needed").wait_for()


def test_real_server(browser: Any, tiny_checkpoint: Path) -> None:
    """`serve run` with the tiny model on this CPU, its replica slept and woken from the page."""
    server = ServeProcess(config_with("tiny_cpu.yaml", sleep={"idle_timeout_s": 600}))
    try:
        server.wait_until_ready(240)
        with looking(browser, server.url + "/") as page:
            shows(page, "tiny", "awake")
            page.get_by_text(re.compile(r"sleeps in \d+:\d\d")).wait_for()
            press(page, "Sleep", "tiny")
            shows(page, "tiny", "asleep", within_s=60)
            page.get_by_text("image of tiny, used by 1 replica").wait_for()
            page.locator("#play-send").click()
            told = page.get_by_text(re.compile(r"First token after .*, with a wake · \d+ tokens"))
            told.wait_for(timeout=60_000)
            shows(page, "tiny", "awake")
            assert page.get_by_role("region", name="Answer").inner_text()
            pills = page.locator("#log .pill").all_inner_texts()
            assert pills[0] == "awake"
            assert "asleep" in pills
    finally:
        leftovers = server.interrupt()
        server.remove_files()
        leftovers.check()
