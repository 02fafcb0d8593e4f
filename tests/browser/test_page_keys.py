"""The page of a server with keys: it asks for one, and with it shows and does what it always does."""

from typing import Any

import pytest

from serve_app.config.keys import read_keys
from tests.browser.conftest import Stage

pytestmark = pytest.mark.browser

ADMIN = "admin-key-1234567890"


def test_page_asks_for_the_key_and_goes_live_with_it(browser: Any) -> None:
    stage = Stage(read_keys(None, None, {"SLEEPSERVE_ADMIN_KEYS": ADMIN}))
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(stage.url)
        page.locator("#key[open]").wait_for()
        assert page.get_by_role("article").count() == 0, "nothing is shown without a key"
        page.get_by_label("Admin key").fill(ADMIN)
        page.keyboard.press("Enter")
        page.locator("#link[data-link=live]").wait_for()
        page.get_by_role("button", name="Sleep: coder-3b", exact=True).click()
        card = page.get_by_role("article", name="model coder-3b")
        card.locator(".pill", has_text="asleep").wait_for()
    finally:
        context.close()
        stage.close()
