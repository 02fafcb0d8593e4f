"""What docs/results/serve makes of logs, rounds and settings; the server itself is in tests/e2e."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from docs.results.report.page import as_markdown, sections_of
from docs.results.serve.__main__ import app
from docs.results.serve.bench import Served
from docs.results.serve.log import first_since, steps_since, transfers
from docs.results.serve.phases import Plan, throughput_of
from docs.results.serve.tables import tables
from serve_app.bench.figures import as_text
from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.run import Round
from serve_app.bench.http.workload import Load
from serve_app.config.files import AppArgs
from tests.conftest import PROJECT

LOG = """\
2026-11-21 10:00:01,500 INFO worker.py:1 -- Started a local Ray instance.
(ServeReplica:weights pid=7) INFO 2026-11-21 10:00:04,000 weights -- load_model key:x: loading /c
(ServeReplica:llm pid=8) INFO 2026-11-21 10:00:07,250 llm -- m: waking -> awake (3 ms)
(ServeReplica:llm pid=8) INFO 2026-11-21 10:00:07,000 llm -- m: asleep -> waking (a request)
(ServeReplica:llm pid=8) INFO 2026-11-21 10:00:07,260 llm -- m: restored 2000 bytes in 4.5 ms
a line without a time: asleep -> waking
(ServeReplica:llm pid=8) INFO 2026-11-21 10:00:20,000 llm -- m: asleep -> waking (a request)
(ServeReplica:llm pid=8) INFO 2026-11-21 10:00:20,100 llm -- m: restored 1000 bytes in 2.0 ms
"""
STARTED_S = datetime(2026, 11, 21, 10).timestamp()


def test_steps_are_the_first_lines_since_then_by_their_own_times() -> None:
    assert steps_since(LOG, STARTED_S) == pytest.approx(
        {"Ray runs": 1.5, "holder begins to load": 4.0, "wake begins": 7.0, "awake": 7.25}
    )
    assert list(steps_since(LOG, STARTED_S))[-2:] == ["wake begins", "awake"]
    assert steps_since(LOG, STARTED_S + 10) == pytest.approx({"wake begins": 10.0})


def test_line_that_is_not_there_has_no_time() -> None:
    assert first_since(LOG, re.compile("compiled"), STARTED_S) is None
    assert first_since(LOG, re.compile("bytes in 2.0 ms"), STARTED_S) == pytest.approx(20.1)


def test_transfers_are_bytes_and_seconds() -> None:
    assert transfers(LOG) == [(2000, 0.0045), (1000, 0.002)]


# --- throughput ---


def round_of(number: int, count: int, *, token_s: float, finished: bool = True) -> Round:
    """So many answers of 5 tokens, at once; the first token after 1 s."""
    end_s = 1 + 4 * token_s
    records = [
        RequestRecord(number, 0, i, 0.0, end_s, 1.0, (1.0, end_s), 10, 5, 200) for i in range(count)
    ]
    load = Load(concurrency=count, requests=count)
    return Round(number, load, 1, 0.0, records=records, finished=finished)


def test_round_that_warms_up_and_one_that_was_broken_off_do_not_count() -> None:
    found = throughput_of(
        [
            round_of(0, 2, token_s=100.0),
            round_of(1, 2, token_s=0.25),
            round_of(2, 2, token_s=1.0),
            round_of(3, 2, token_s=50.0, finished=False),
            round_of(4, 8, token_s=1.0),
        ],
        [({"proxy": 1.0}, {"proxy": 1.0 + seconds}) for seconds in (9.0, 2.0, 4.0)],
    )
    assert list(found) == ["2"]
    assert found["2"]["tokens_per_event"]["median"] == 2.5
    assert found["2"]["proxy_event_s"]["max"] == 4.0 / 4
    assert found["2"]["tokens_per_s"]["max"] == 10 / 2.0
    assert found["2"]["tokens_per_s"]["min"] == 10 / 5.0
    assert found["2"]["tpot_p50_s"]["median"] == 0.625
    assert found["2"]["ttft_p50_s"]["max"] == 1.0


def test_plan_warms_up_once_for_each_number_of_requests() -> None:
    loads = Plan(concurrency=(1, 256), requests_per_stream=3).loads()
    assert [load.concurrency for load in loads] == [1, 1, 1, 1, 256, 256, 256]
    assert {load.requests for load in loads} == {3, 768}


# --- what is served ---


def served(checkpoint: Path, **keys: Any) -> Served:
    return Served.of(checkpoint, keys, serve_config=PROJECT / "serve_config.yaml")


def test_model_is_one_replica_that_never_sleeps_by_itself(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    found = served(tmp_path, autoscaling={"max_replicas": 4}, sleep={"keep_layers": 2}, num_gpus=1)
    assert found.store_bytes == 1100 + 2**29
    config = yaml.safe_load(found.config)
    assert found.config.count("port: 8000") == 1
    assert {a["name"] for a in config["applications"]} == {"weights", "llm"}
    for application in config["applications"]:
        (model,) = AppArgs.model_validate({"models": application["args"]["models"]}).models
        assert (model.num_replicas, model.autoscaling, model.num_gpus) == (1, None, 1)
        assert (model.sleep.idle_timeout_s, model.sleep.keep_layers) == (None, 2)
        assert model.source.id == str(tmp_path)


def test_wrong_key_and_wrong_file_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="blocks"):
        served(tmp_path, engine={"blocks": 1})
    other = tmp_path / "other.yaml"
    other.write_text("applications: 3")
    with pytest.raises(ValueError, match=r"other\.yaml is no serve_config"):
        Served.of(tmp_path, {}, serve_config=other)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "lunch"], "--only takes start, latency"),
        (["--warm-when", "("], "--warm-when ("),
        (["--engine", "num_blocks"], "--engine takes KEY=VALUE"),
        (["--engine", "blocks=1"], "blocks"),
        (["--config", "no.yaml"], "no.yaml"),
        (["--json", "no/such/dir/x"], "No such file"),
    ],
)
def test_wrong_usage_exits_2(
    arguments: list[str], told: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docs.results.serve.bench.ServeProcess", None)  # none is started
    result = CliRunner().invoke(app, [str(tiny_checkpoint), *arguments])
    assert result.exit_code == 2, result.output
    assert told in result.stderr


# --- how it is told ---


def spread_of(value: float) -> dict[str, float]:
    return dict.fromkeys(("min", "median", "p90", "p99", "max"), value)


RESULT: dict[str, Any] = {
    "checkpoint": "m7",
    "complete": False,
    "start": {
        "seconds_to_first_token": 40.5,
        "seconds_to_warm": None,
        "steps": {"Ray runs": 3.25, "awake": 39.0},
        "weights_from": "image",
        "weights_bytes": 2**30,
        "kv_bytes": 2**29,
    },
    "latency": {
        "ttft_awake_s": spread_of(0.02),
        "cycles": 3,
        "ttft_asleep_s": spread_of(0.3),
        "sleep_s": spread_of(0.01),
        "wrong": 0,
        "failed": "TimeoutError: longer than 60 s",
    },
    "throughput": {
        "64": {
            "tokens_per_s": spread_of(900.0),
            "ttft_p50_s": spread_of(0.1),
            "tpot_p50_s": spread_of(0.005),
        }
    },
    "memory": {"none": {"refusals": [{"status": 503, "retry_after": "1"}], "same_answer": False}},
    "skipped": {"redeploy": "the time was up"},
    "left_processes": [],
}


def test_report_tells_figures_failures_and_what_is_missing() -> None:
    text = "\n".join(as_text(tables(RESULT)))
    for told in (
        "Ray runs                 3.25",
        "first token             40.50",
        "TTFT asleep    300.0 ms",
        "0 in 3 cycles",
        "64                   900.0  900.0  900.0        100.0          5.0",
        "latency FAILED",
        "TimeoutError: longer than 60 s",
        "503, Retry-After 1; afterwards ANOTHER ANSWER",
        "skipped, the time was up",
        "this is what was measured",
    ):
        assert told in text, f"{told}\n---\n{text}"


def test_page_is_made_of_the_same_tables() -> None:
    (section,) = sections_of([json.loads(json.dumps(RESULT))], lambda name, result: b"")
    text = as_markdown([section])
    assert section.title == "Behind serve run: m7"
    assert "1.000 GiB" in text
    assert "| first token | 40.50 |" in text
