"""How busy and how full a card was, as a driver's tool tells it that is not there."""

from pathlib import Path

import pytest

from serve_app.bench.card_use import card_use
from tests.e2e.serve_process import wait_until

CARD = "GPU-12345678-9abc-def0-1234-56789abcdef0"
SMI = """#!/bin/sh
[ "$1" = --id={card} ] && printf '40, 1000\\n[N/A], 1001\\n100, [N/A]\\n'
: > "{told}"
exec sleep 60
"""


def test_figures_are_there_when_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, told = tmp_path / "nvidia-smi", tmp_path / "told"
    tool.write_text(SMI.format(card=CARD, told=told))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with card_use(CARD) as use:
        wait_until(told.exists, 10, "the tool has not told anything")
    assert use.busy == [0.4, 1.0]
    assert use.used_bytes == [1000 * 2**20, 1001 * 2**20]


def test_a_cpu_has_none() -> None:
    with card_use("cpu of node 7") as use:
        pass
    assert not use.busy
    assert not use.used_bytes
