"""Cards that models share, on the page: one bar each, moving; the queue; and why the sleepers sleep."""

from pathlib import Path
from typing import Any

import pytest

from actors.protocol import CardStatus, CardTenant, CardWait, DeviceNow, LastSleep, ReplicaState
from tests.browser.conftest import Stage, looking
from tests.browser.staged import CARD, GIB

pytestmark = pytest.mark.browser

SIZES = {1280: {"width": 1280, "height": 900}, 390: {"width": 390, "height": 844}}
STILL = {"viewport": SIZES[1280], "reduced_motion": "reduce"}
BUDGET = 126 * GIB
OTHERS = 3 * GIB
CHAT, CODE = "r1-distill-7b", "coder-3b"
RESIDUE = GIB // 2


def chat(held: int = 24, kv: int = 10, moving: bool = False) -> CardTenant:
    """In GiB."""
    return CardTenant(
        CHAT, "k3v9qh2m", held * GIB, RESIDUE, held > 0, kv * GIB, 40 * GIB, moving=moving
    )


def code(held: int = 0, kv: int = 0) -> CardTenant:
    return CardTenant(CODE, "p81xw0ce", held * GIB, RESIDUE, held > 0, kv * GIB, 20 * GIB)


def account(*tenants: CardTenant, waiting: tuple[CardWait, ...] = (), seen_s: float) -> CardStatus:
    held = sum(each.held + each.residue for each in tenants)
    return CardStatus("GPU", CARD, BUDGET, held, OTHERS, OTHERS, tenants, waiting, seen_s)


def tell(stage: Stage, card: CardStatus, **chat_says: Any) -> None:
    """By both replicas."""

    def say() -> None:
        stage.chat.say(card=card, **chat_says)
        stage.code.say(card=card)

    stage.run(say)


def asleep(stage: Stage) -> None:
    stage.run(lambda: stage.code.say(state=ReplicaState.ASLEEP, mapped_bytes=0))


def hang(stage: Stage, hangs: bool) -> None:
    """Both replicas: whether they answer nobody who asks how they are."""
    for model in (stage.chat, stage.code):
        stage.run(lambda model=model: setattr(model, "hang_status", hangs))  # type: ignore[misc]


def shares(page: Any, bar: int = 0) -> dict[str, float]:
    """Of each part with a width that part of its bar, by its label."""
    found: dict[str, float] = (
        page.locator("#shared .bar")
        .nth(bar)
        .evaluate(
            """bar => Object.fromEntries([...bar.children].map(part =>
            [part.title.split(": ").slice(0, -1).join(": "), part.offsetWidth / bar.offsetWidth]
        ).filter(([, share]) => share > 0))"""
        )
    )
    return found


def wait_for_share(page: Any, label: str, share: float) -> None:
    page.wait_for_function(
        """([label, share]) => [...document.querySelectorAll("#shared .bar > i")].some(part =>
            part.title.startsWith(label) &&
            Math.abs(part.offsetWidth / part.parentNode.offsetWidth - share) < 0.005)""",
        arg=[label, share],
        timeout=5000,
    )


def row(page: Any, model: str) -> Any:
    return page.locator("#shared .tenants li", has_text=model)


def test_bar_has_everybody_in_proportion_and_the_end_of_the_budget(
    stage: Stage, browser: Any
) -> None:
    asleep(stage)
    tell(stage, account(chat(), code(), seen_s=1.0))
    with looking(browser, stage.url, **STILL) as page:
        page.get_by_role("heading", name="Cards that models share").wait_for()
        expected = {
            f"{CHAT}: weights": 14 * GIB / CARD,
            f"{CHAT}: KV cache": 10 * GIB / CARD,
            f"{CHAT}: process": RESIDUE / CARD,
            f"{CODE}: process": RESIDUE / CARD,
            "other processes": OTHERS / CARD,
        }
        assert shares(page) == pytest.approx(expected, abs=0.002)
        mark = page.locator("#shared .limit").bounding_box()
        bar = page.locator("#shared .bar").bounding_box()
        assert (mark["x"] - bar["x"]) / bar["width"] == pytest.approx(BUDGET / CARD, abs=0.003)
        assert mark["height"] > bar["height"]
        told = page.locator("#shared .bar").get_attribute("aria-label")
        assert told.startswith(f"{CHAT}: weights 14.0 GiB, {CHAT}: KV cache 10.0 GiB, ")
        assert told.endswith("other processes 3.00 GiB, free 101 GiB, budget 126 GiB")
        page.get_by_text("25.0 GiB of 126 GiB in use, 101 GiB free").wait_for()
        assert "KV cache 10.0 GiB of 40.0 GiB" in row(page, CHAT).inner_text()
        assert "given back" not in row(page, CHAT).inner_text()
        stage.run(lambda: stage.chat.say(kv_given_back_bytes=3 * GIB))
        row(page, CHAT).get_by_text("KV cache given back 3.00 GiB").wait_for()
        assert page.get_by_role("heading", name="Device memory").is_hidden(), "it would be twice"


def test_bar_moves_as_models_sleep_and_wake(stage: Stage, browser: Any) -> None:
    asleep(stage)
    tell(stage, account(chat(), code(), seen_s=1.0))
    with looking(browser, stage.url, **STILL) as page:
        wait_for_share(page, f"{CHAT}: weights", 14 * GIB / CARD)
        tell(stage, account(chat(moving=True), code(), seen_s=2.0))
        page.locator("#shared .bar > [data-moving]").first.wait_for(state="attached")

        slept = LastSleep("room", CODE, 12.0)
        now = account(chat(held=0, kv=0), code(held=12, kv=6), seen_s=3.0)
        tell(stage, now, state=ReplicaState.ASLEEP, last_sleep=slept)
        stage.run(lambda: stage.code.say(state=ReplicaState.AWAKE))
        wait_for_share(page, f"{CHAT}: weights", 0)
        wait_for_share(page, f"{CODE}: KV cache", 6 * GIB / CARD)
        row(page, CHAT).locator(".pill", has_text="asleep").wait_for()
        row(page, CHAT).get_by_text("idle, for coder-3b, 12 s ago").wait_for()
        row(page, CODE).get_by_text("weights 6.00 GiB · KV cache 6.00 GiB of 20.0 GiB").wait_for()
        assert page.locator("#shared .bar > [data-moving]").count() == 0


@pytest.mark.parametrize(
    ("slept", "told"),
    [
        (LastSleep("idle", "", 3.0), "idle, 3 s ago"),
        (LastSleep("command", "", 3.0), "asked to, 3 s ago"),
        (LastSleep("preempted", CODE, 3.0), "preempted, for coder-3b, 3 s ago"),
    ],
)
def test_why_somebody_sleeps_is_said_in_words(
    stage: Stage, browser: Any, slept: LastSleep, told: str
) -> None:
    now = account(chat(held=0, kv=0), code(held=12, kv=6), seen_s=1.0)
    tell(stage, now, state=ReplicaState.ASLEEP, last_sleep=slept)
    with looking(browser, stage.url) as page:
        row(page, CHAT).get_by_text(told).wait_for()


def test_queue_is_shown_while_somebody_waits(stage: Stage, browser: Any) -> None:
    asleep(stage)
    tell(stage, account(chat(), code(), seen_s=1.0))
    with looking(browser, stage.url) as page:
        page.get_by_text("Nobody waits for room.").wait_for()
        why = f"{CHAT} may have to make room"
        wait = CardWait(CODE, "p81xw0ce", 12 * GIB, 3.0, 30.0, why, 4.5)
        tell(stage, account(chat(), code(), waiting=(wait,), seen_s=2.0))
        page.get_by_text("1 model waits for room:").wait_for()
        (item,) = page.locator("#shared ol[aria-label=Queue] li").all()
        item.get_by_text("3 s of 30 s, for 12.0 GiB").wait_for()
        item.get_by_text(f"{why} in 4 s").wait_for()
        hang(stage, True)  # the page's clock goes on by itself
        item.get_by_text(f"{why} in 3 s").wait_for()
        hang(stage, False)
        tell(stage, account(chat(), code(), seen_s=3.0))
        page.get_by_text("Nobody waits for room.").wait_for()
        assert item.count() == 0


def test_every_card_has_its_bar_by_its_newest_account(stage: Stage, browser: Any) -> None:
    other = DeviceNow("GPU-77", "NVIDIA H200 NVL", CARD, CARD, 0)
    stage.run(lambda: stage.chat.say(card=account(chat(), seen_s=9.0)))
    stage.run(lambda: stage.code.say(card=account(chat(held=30), code(), seen_s=5.0)))
    with looking(browser, stage.url, **STILL) as page:
        wait_for_share(page, f"{CHAT}: weights", 14 * GIB / CARD)
        assert page.locator("#shared .bar").count() == 1
        stage.run(lambda: stage.code.say(card=account(chat(held=30), code(), seen_s=10.0)))
        wait_for_share(page, f"{CHAT}: weights", 20 * GIB / CARD)

        stage.run(lambda: stage.code.say(device=other, card=account(code(held=40), seen_s=1.0)))
        page.locator("#shared .bar").nth(1).wait_for()
        assert page.locator("#shared h3").all_inner_texts() == ["NVIDIA H200", "NVIDIA H200 NVL"]
        assert f"{CODE}: weights" not in shares(page, 0)
        assert shares(page, 1)[f"{CODE}: weights"] == pytest.approx(40 * GIB / CARD, abs=0.002)


def test_without_a_shared_card_there_is_none(stage: Stage, browser: Any) -> None:
    with looking(browser, stage.url) as page:
        page.get_by_role("heading", name="Device memory").wait_for()
        assert page.get_by_role("heading", name="Cards that models share").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_it_fits_and_names_can_be_read(
    stage: Stage, browser: Any, shots: Path, width: int, scheme: str
) -> None:
    waits = (CardWait(CODE, "p81xw0ce", 12 * GIB, 3.0, 30.0, f"{CHAT} may have to make room", 4.5),)
    asleep(stage)
    stage.run(lambda: stage.code.say(last_sleep=LastSleep("preempted", CHAT, 12.0)))
    tell(stage, account(chat(), code(), waiting=waits, seen_s=1.0))
    options = {"viewport": SIZES[width], "color_scheme": scheme, "reduced_motion": "reduce"}
    with looking(browser, stage.url, **options) as page:
        page.get_by_text("1 model waits for room:").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=shots / f"shared_{width}_{scheme}.png")
        for place in range(32):
            page.locator("#shared .bar > i").first.evaluate(
                "(part, place) => part.style.setProperty('--hue', place * 137.5 % 360)", place
            )
            assert contrast(page) >= 4.5, f"white on the colour of model {place}"


def contrast(page: Any) -> float:
    """By WCAG 2, of white on the first part; a canvas knows what a colour is in sRGB."""
    found: float = page.locator("#shared .bar > i").first.evaluate(
        """part => {
            const canvas = document.createElement("canvas").getContext("2d");
            canvas.fillStyle = getComputedStyle(part).backgroundColor;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(each => each / 255)
                .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
            return 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05);
        }"""
    )
    return found
