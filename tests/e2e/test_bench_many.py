"""`sleepserve bench many`, which has a server of its own for each variant: half of configs/many.yaml."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.serve_process import PROJECT

pytestmark = pytest.mark.slow

AGENTS = "ABAACABC"  # who is asked after whom


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Four models, and a card with room for two."""
    found = yaml.safe_load((PROJECT / "configs" / "many.yaml").read_text())
    weights, llm = (application["args"] for application in found["applications"])
    checkpoint = str(PROJECT / "configs" / "demo" / "model")
    weights["models"] = llm["models"] = [
        model | {"source": {"id": checkpoint}, "image": {"compression": "on"}}
        for model in llm["models"][:4]
    ]
    llm["card"]["memory_budget"] = "67 MiB"
    file = tmp_path / "four.yaml"
    file.write_text(yaml.safe_dump(found))
    return file


def command(config: Path, *more: Any) -> list[str]:
    program = [sys.executable, "-m", "serve_app.cli.main", "bench", "many", str(config)]
    return [*program, *map(str, more)]


def trace_of(file: Path, apps: str, every_s: float) -> Path:
    rows = [f"{number * every_s},{app},20,8" for number, app in enumerate(apps)]
    file.write_text("\n".join(["arrival_s,app,prompt_tokens,output_tokens", *rows, ""]))
    return file


def test_ways_to_share_a_card_are_measured_beside_each_other(
    servers: Any, config: Path, tmp_path: Path
) -> None:
    servers.stop()
    file = tmp_path / "many.json"
    more = ["--duration", 10, "--max-prompt-tokens", 100, "--max-output-tokens", 16]
    run = subprocess.run(
        command(config, "--variants", "shared,static,restart", *more, "--json", file),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    result = json.loads(file.read_text())
    assert result["complete"]
    sent = result["sent"]
    assert sent["fit"] == 2
    assert set(sent["takes"]) == set(sent["of_models"])
    assert all(each["awake"] > each["residue"] >= 0 for each in sent["takes"].values())
    assert list(sent["of_models"]) == ["one", "two", "three", "four"]
    assert sent["capped"]["prompts"] > 0

    shared, static = result["variants"]["shared"], result["variants"]["static"]
    assert shared["requests"] == static["requests"] == sent["requests"]
    assert (shared["refused"], shared["failed_requests"], shared["wrong"]) == (0, 0, 0)
    assert shared["asked"] > 8
    assert shared["uncompressed"] == 0
    assert shared["wakes"] > 0
    assert shared["ttft_cold_s"]["count"] + shared["ttft_hot_s"]["count"] == sent["requests"]
    assert 0 < shared["waited_for_a_wake"] <= shared["ttft_cold_s"]["count"]
    assert shared["moved_bytes"] >= shared["wakes"] * 2**20
    # Those that do not fit are not served, and what fits never sleeps.
    assert static["refused"] == sent["of_models"]["three"] + sent["of_models"]["four"]
    assert (static["wakes"], static["wrong"], static["ttft_cold_s"]) == (0, 0, None)
    restart = result["variants"]["restart"]
    assert restart["requests"] == sent["requests"]
    assert restart["wakes"] > 0
    assert restart["wrong"] == 0
    # A process starts and imports torch, where otherwise bytes are copied.
    assert restart["ttft_cold_s"]["p50"] > 2 * shared["ttft_cold_s"]["p50"]
    for told in ("as configured", "first token within 0.5 s", "shortened"):
        assert told in run.stdout


def test_no_needless_swap_for_agents_and_an_interruption_keeps_what_was_measured(
    servers: Any, config: Path, tmp_path: Path
) -> None:
    """Two of the three fit: each model but the first is woken when it is asked for and asleep, no more."""
    servers.stop()
    file, trace = tmp_path / "many.json", trace_of(tmp_path / "agents.csv", AGENTS, 3.0)
    with subprocess.Popen(
        command(config, "--trace", trace, "--variants", "shared,lru", "--json", file),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as bench:
        assert bench.stderr is not None
        told = next(line for line in bench.stderr if line.startswith(("lru", "error")))
        assert told == "lru: starts\n"
        bench.send_signal(signal.SIGINT)
        stdout, _ = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "not complete; this is what was measured" in stdout
    result = json.loads(file.read_text())
    assert not result["complete"]
    shared = result["variants"]["shared"]
    assert (shared["requests"], shared["wrong"]) == (len(AGENTS), 0)
    # A and B stay while C is away; C takes B's place, and B takes C's, not that of A, who was just asked.
    assert shared["wakes"] <= 5
