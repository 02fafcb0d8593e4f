"""The benchmarks of one model, on a CPU: what their numbers must be to each other, not how large."""

import asyncio
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from actors.checkpoints.making import write_checkpoint
from actors.holder.obtain import load_from_disk
from actors.image.packer import image_key
from docs.results.packing import one_round
from docs.results.packing import tables as packing_tables
from docs.results.pages.bench import PagesBench, with_page_size
from docs.results.pages.bench import Plan as PagesPlan
from docs.results.pages.bench import tables as pages_tables
from docs.results.report.page import write
from docs.results.throughput.bench import SAMPLING, ThroughputBench
from docs.results.throughput.bench import Plan as ThroughputPlan
from docs.results.throughput.bench import tables as throughput_tables
from docs.results.timeline.bench import Plan as TimelinePlan
from docs.results.timeline.bench import TimelineBench
from docs.results.timeline.bench import tables as timeline_tables
from serve_app.bench import baselines
from serve_app.bench.baselines import BASELINES, Make
from serve_app.bench.figures import as_text
from serve_app.bench.load import STAGES, LoadBench
from serve_app.bench.load import Plan as LoadPlan
from serve_app.bench.local import LinkProbe, Subject, subject_of
from serve_app.bench.soak import Plan as SoakPlan
from serve_app.bench.soak import SoakBench
from serve_app.bench.soak import tables as soak_tables
from serve_app.bench.wake import Plan, WakeBench
from serve_app.bench.wake_report import tables
from serve_app.cli.main import app

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ENGINE = {
    "device": "cpu",
    "num_blocks": 32,
    "max_batch_tokens": 256,
    "max_requests_per_batch": 8,
    "cpu_threads": 1,
}
STORE = pytest.mark.parametrize("local_ray", [2**28], indirect=True)
CPU = torch.device("cpu")


@pytest.fixture
def subject(tiny_checkpoint: Path) -> Subject:
    return subject_of(tiny_checkpoint, ENGINE, {"page_size": 32})


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def by_name(result: dict[str, Any], prompt_tokens: int = 7) -> dict[str, dict[str, Any]]:
    rows = (row for row in result["rows"] if row["prompt_tokens"] == prompt_tokens)
    return {row["variant"]: row for row in rows}


@pytest.fixture(scope="module")
def results_table(project: Path) -> Callable[[dict[str, Any]], str]:
    """The table of docs/benchmarks.md, of a result of `bench wake` and the recorded others."""
    spec = importlib.util.spec_from_file_location("t", project / "docs" / "results" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorded = module.recorded()
    return lambda wake: str(module.table(**recorded | {"wake": wake}))


@STORE
def test_wake_measures_each_variant_as_often_as_asked(
    local_ray: None,
    subject: Subject,
    results_table: Callable[[dict[str, Any]], str],
    tmp_path: Path,
) -> None:
    plan = Plan(
        variants=(
            *("pipelined", "compressed", "serial", "unpinned", "kept", "kept-2-last"),
            *("to", "fresh-load"),
        ),
        cycles=2,
        baseline_cycles=1,
        prompt_tokens=(7, 40),
        requests=2,
        pause_s=0,
    )
    bench = WakeBench(subject, plan)
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert result["complete"]
    assert result["wrong"] == 0
    assert result["compared"] == 2 * 2 * 7 + 2 * 2
    assert set(result["skipped"]) == {"compressed", "unpinned", "to"}
    assert result["skipped"]["compressed"] == "nothing of this image gets smaller"
    rows = by_name(result)
    kept = [f"kept-{n}" for n in (1, 2, 3, 4)]
    assert set(rows) == {"pipelined", "serial", *kept, "kept-2-last", "fresh-load"}
    assert set(by_name(result, 40)) == set(rows)
    assert {row["cycles"] for name, row in rows.items() if name != "fresh-load"} == {2}
    assert rows["fresh-load"]["cycles"] == 1
    assert rows["fresh-load"]["wrong"] == 0
    assert rows["pipelined"]["moved_bytes"]["median"] == result["weights_bytes"]
    moved = [rows[name]["moved_bytes"]["median"] for name in ("pipelined", *kept)]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 5
    assert moved[2] == rows["kept-2-last"]["moved_bytes"]["median"]
    for row in rows.values():
        times = row["ttft_asleep_s"]
        assert times["min"] <= times["median"] <= times["p90"] <= times["p99"] <= times["max"]
        assert row["share_of_link"] == pytest.approx(
            row["gb_per_s"]["median"] / result["pinned_gb_per_s"]
        )
    assert rows["serial"]["ttft_asleep_s"]["max"] == max(rows["serial"]["ttft_asleep_each_s"])
    page = write([result], tmp_path).read_text()
    assert {file.stem for file in tmp_path.glob("*.png")} == {
        f"wake_{name}" for name in ("ttft", "kept")
    }
    assert f"<td>{1e3 * rows['kept-4']['ttft_asleep_s']['median']:.1f}</td>" in page
    assert all(result[name] for name in ("device", "cpus", "cpu_ms", "torch", "ray", "command"))
    assert json.loads(json.dumps(result)) == result
    assert any(
        line.startswith("unpinned ") and "skipped, no CUDA device" in line
        for line in as_text(tables(result))
    )
    assert "first token of a sleeping replica" in results_table(result)


@STORE
def test_watched_wake_has_its_segments_and_the_memory_of_the_sleep(
    local_ray: None, subject: Subject, tmp_path: Path
) -> None:
    bench = TimelineBench(subject, TimelinePlan(pause_s=0))
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert result["complete"]
    assert_timeline_is_in_order(result)
    assert_memory_falls_asleep(result)
    (told,) = timeline_tables(result)
    assert [title for title, _ in told.rows] == [
        "A wake, segment by segment",
        "Memory over a sleep and a wake",
    ]
    write([result], tmp_path)
    assert {file.stem for file in tmp_path.glob("*.png")} == {
        "timeline_timeline",
        "timeline_memory",
    }


def assert_timeline_is_in_order(result: dict[str, Any]) -> None:
    found = result["timeline"]
    segments, marks_s = found["segments"], found["marks_s"]
    names = [segment["name"] for segment in segments]
    assert names == ["embedding", *(f"layer.{i}" for i in range(4)), "head"]
    assert sum(segment["bytes"] for segment in segments) == result["weights_bytes"]
    arrived_s = computed_s = marks_s["weights mapped"]
    for segment in segments:
        (begins_s, ends_s), compute_s = segment["copy_s"], segment["compute_s"]
        assert arrived_s <= begins_s < ends_s <= compute_s[0] < compute_s[1]
        assert computed_s <= compute_s[0]
        arrived_s, computed_s = ends_s, compute_s[1]
    assert arrived_s <= marks_s["engine resumed"]  # on a CPU, a wake returns when all is there
    assert computed_s <= marks_s["first token"]


def assert_memory_falls_asleep(result: dict[str, Any]) -> None:
    found = result["memory"]
    marks_s = list(found["marks_s"].values())
    assert found["at_s"] == sorted(found["at_s"])
    assert found["at_s"][0] <= marks_s[0]
    assert marks_s == sorted(marks_s)
    assert marks_s[-1] <= found["at_s"][-1]
    samples = list(zip(found["at_s"], found["used_bytes"], strict=True))
    # Between the marks of the sleep itself there may be none that is unlike its neighbours.
    asleep = min(used for at_s, used in samples if marks_s[0] <= at_s <= marks_s[-1])
    awake = [used for at_s, used in samples if at_s < marks_s[0]]
    assert awake[-1] - asleep > 0.8 * result["weights_bytes"]


@STORE
def test_wake_that_runs_out_of_time_tells_so(local_ray: None, subject: Subject) -> None:
    plan = Plan(variants=("pipelined", "fresh-load"), requests=0, pause_s=0, limit_s=0)
    bench = WakeBench(subject, plan)
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert not result["complete"]
    assert result["rows"] == []
    assert result["skipped"] == {"fresh-load": "the time was up"}
    assert "broken off" in "\n".join(as_text(tables(result)))


@STORE
def test_soak_counts_cycles_and_samples(local_ray: None, subject: Subject) -> None:
    bench = SoakBench(subject, SoakPlan(cycles=40, requests=2))
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert (result["complete"], result["cycles"], result["wrong"]) == (True, 40, 0)
    assert result["compared"] == 2 * 2
    assert [sample.cycle for sample in bench.samples] == [10, 20, 30, 40]
    assert result["trends"]["store_bytes"]["last"] >= 3_000_000
    assert result["samples"]["cycle"] == [10, 20, 30, 40]
    assert "file descriptors" in "\n".join(as_text(soak_tables(result)))


@pytest.fixture
def large_subject(tmp_path: Path) -> Subject:
    """With tensors that are worth compressing."""
    checkpoint = write_checkpoint(tmp_path / "demo", "demo", dtype="bfloat16")
    return subject_of(checkpoint, ENGINE, {"page_size": 32})


@STORE
def test_compressed_image_copies_less_and_says_the_same(
    local_ray: None, large_subject: Subject
) -> None:
    plan = Plan(variants=("pipelined", "compressed"), cycles=2, requests=2, pause_s=0)
    bench = WakeBench(large_subject, plan)
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert result["complete"]
    assert result["wrong"] == 0
    rows = by_name(result)
    assert rows["pipelined"]["moved_bytes"]["median"] == result["weights_bytes"]
    assert rows["compressed"]["moved_bytes"]["median"] == result["compressed_bytes"]
    assert result["compressed_bytes"] < 0.7 * result["weights_bytes"]
    assert 0 < result["decompressed_gb_per_s"]["min"] <= result["decompressed_gb_per_s"]["max"]
    text = "\n".join(as_text(tables(result)))
    assert "TTFT from the compressed image / (all bytes / that)" in text
    assert f"{result['compressed_bytes'] / result['weights_bytes']:.1%} of the bytes" in text


@STORE
def test_time_an_image_takes_to_be_made_and_compressed(
    local_ray: None, large_subject: Subject
) -> None:
    found = one_round(large_subject)
    assert 0 < found["compressed_bytes"] < 0.7 * found["raw_bytes"]
    assert min(found["raw_s"], found["compress_s"]) > 0
    (table,) = packing_tables({"rounds": [found]})
    assert table.rows[0][-1] == f"{1 + found['compress_s'] / found['raw_s']:.2f} x"


@STORE
def test_soak_of_a_compressed_image(local_ray: None, large_subject: Subject) -> None:
    bench = SoakBench(large_subject, SoakPlan(cycles=20, requests=2, compressed=True))
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert (result["complete"], result["cycles"], result["wrong"]) == (True, 20, 0)
    assert result["compared"] == 2


@STORE
def test_second_instance_loads_nothing(local_ray: None, subject: Subject) -> None:
    bench = LoadBench(subject, LoadPlan(replicas=2))
    asyncio.run(bench.run(silent))
    result = bench.result()
    first, second, alone = (result["instances"][n] for n in ("first", "second", "without holder"))
    assert (first["loads"], second["loads"]) == (1, 0)
    assert second["storage_bytes"] == 0
    assert [i["image_from"] for i in (first, second, alone)] == ["image", "image", "disk"]
    assert first["token"] == second["token"] == alone["token"]
    for found in (first, second, alone):
        assert list(found["stages"]) == list(STAGES)
        assert found["seconds"] == pytest.approx(sum(found["stages"].values()))
        assert found["up_seconds"] < found["seconds"]
        to_device = found["to_device"]
        obtained_s = to_device["read and pack"] + to_device["attach and check digests"]
        assert obtained_s == pytest.approx(found["stages"]["bytes"])
        assert min(to_device.values()) >= 0
        assert to_device["pin"] < found["stages"]["warm-up"]
        assert to_device["copy"] > 0
    assert second["stages"]["bytes"] < first["stages"]["bytes"]
    assert first["to_device"]["read and pack"] > 0
    assert second["to_device"]["read and pack"] == 0
    assert alone["to_device"]["attach and check digests"] == 0
    concurrent = result["concurrent"]
    assert (concurrent["replicas"], concurrent["loads"]) == (2, 1)
    assert concurrent["instances_storage_bytes"] <= 0.5 * result["file_bytes"]
    assert concurrent["image_from"] == ["image"]
    assert concurrent["same_token"]


@STORE
def test_pages_tell_waste_of_the_cache_and_rates(local_ray: None, subject: Subject) -> None:
    """The waste is what follows from whole pages; the last token of an answer is never stored."""
    roomy = with_page_size(subject, 64)
    assert roomy.engine.num_blocks == 16
    plan = PagesPlan(
        page_sizes=(16, 64),
        shapes=((21, 50), (16, 17)),
        requests=3,
        concurrency=(2,),
        prompt_tokens=40,
        answer_tokens=8,
        alike=32,
        rounds=1,
    )
    bench = PagesBench(subject, plan)
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert result["complete"]
    for size, found in result["pages"].items():
        page = int(size)
        assert found["num_blocks"] * page == 32 * 32
        for prompt, answer in plan.shapes:
            stored, waste = prompt + answer - 1, found["waste"][f"{prompt} + {answer}"]
            room = -(-stored // page) * page
            assert waste["sequences"] == 3
            assert (waste["allocated_slots"], waste["filled_slots"]) == (3 * room, 3 * stored)
            lengths = range(prompt, stored + 1)  # at the prompt's step, and each later one
            rooms = sum(-(-length // page) * page for length in lengths)
            assert waste["waste_at_the_end"] == pytest.approx(1 - stored / room)
            assert waste["waste_over_its_life"] == pytest.approx(1 - sum(lengths) / rooms)
        assert list(found["tokens_per_s"]) == ["2", "2, 32 alike"]
    text = "\n".join(as_text(pages_tables(result)))
    assert re.search("greedy answers that differ +none", text)
    (row,) = (line for line in text.splitlines() if line.startswith("64 "))
    assert row.split()[1:3] == ["16", f"{1 - 70 / 128:.1%}"]


def test_throughput_has_a_row_for_each_concurrency(subject: Subject) -> None:
    plan = ThroughputPlan(concurrency=(1, 4), prompt_tokens=8, answer_tokens=8)
    bench = ThroughputBench(subject, plan)
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert list(result["concurrency"]) == ["1", "4"]
    assert all(found["tokens_per_s"]["min"] > 0 for found in result["concurrency"].values())
    rows = [line.split() for line in as_text(throughput_tables(result))]
    assert [cells[0] for cells in rows[1:3]] == ["1", "4"]
    assert rows[2][1] == f"{result['concurrency']['4']['tokens_per_s']['median']:.0f}"


def test_throughput_compares_sampling_settings(subject: Subject) -> None:
    plan = ThroughputPlan(concurrency=(1,), prompt_tokens=8, answer_tokens=4, sampling=2)
    bench = ThroughputBench(subject, plan)
    asyncio.run(bench.run(silent))
    result = bench.result()
    assert set(result["sampling"]) == set(SAMPLING)
    assert result["sampling"]["plain"]["of_plain"] == 1
    rows = {
        cells[0]: cells for line in as_text(throughput_tables(result)) if (cells := line.split())
    }
    found = result["sampling"]["top_p"]
    assert rows["top_p"][1:] == [
        f"{found['tokens_per_s']['median']:.0f}",
        f"{found['of_plain']:.3f}",
    ]


@pytest.mark.parametrize("name", ["to", "dispatch-auto", "dispatch-balanced_low_0", "fresh-load"])
def test_baseline_gives_the_same_token_after_its_sleep(name: str, tiny_checkpoint: Path) -> None:
    make: Make = BASELINES[name]
    baseline = make(tiny_checkpoint, torch.float32, CPU)
    token = baseline.first_token((11, 22, 33))
    for _ in range(2):
        baseline.sleep()
        baseline.wake()
        assert baseline.first_token((11, 22, 33)) == token
    baseline.close()


def test_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines.util, "find_spec", lambda name: None)
    card = torch.device("cuda")
    assert baselines.why_not("memory-saver", card) == "torch-memory-saver is not installed"
    assert baselines.why_not("to", card) is None


def test_link_probe_measures_something() -> None:
    assert LinkProbe(CPU, size=2**20).gb_per_s() > 0


def test_subject_takes_settings_of_a_configuration(project: Path, tiny_checkpoint: Path) -> None:
    subject = subject_of(project / "configs" / "tiny_cpu.yaml", ENGINE, {"num_blocks": 7})
    assert subject.checkpoint == tiny_checkpoint
    assert (subject.engine.num_blocks, subject.engine.max_requests_per_batch) == (7, 8)
    assert subject.store_bytes > subject.file_bytes


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_object_store_of_a_subject_is_as_large_as_a_quantised_image_and_little_more(
    dtype: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", "tiny", quantize="gptq-4-128")
    file = tmp_path / "model.yaml"
    model = {"model_id": "m", "source": {"id": str(checkpoint)}, "dtype": dtype}
    file.write_text(json.dumps(model))
    subject = subject_of(file, ENGINE, {})
    image = load_from_disk(checkpoint, image_key(checkpoint, getattr(torch, dtype)))
    room = subject.store_bytes - 2**29
    assert image.layout.total_bytes < room < 1.2 * image.layout.total_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "faster"], "no variant faster"),
        (["--assert", "speed=1"], "--assert takes goals or NAME=MAX"),
        (["--assert", "wrong=few"], "--assert wrong takes a number, found few"),
        (["--engine", "num_blocks"], "--engine takes KEY=VALUE"),
        (
            ["--engine", "num_blocks=["],
            "--engine takes KEY=VALUE, the value in YAML; found num_blocks=[",
        ),
        (["--engine", "blocks=1"], "error: engine.blocks: unknown key; "),
        (
            ["--engine", "page_size=x"],
            "error: engine.page_size: expected a whole number, found 'x'",
        ),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(
    arguments: list[str], message: str, tiny_checkpoint: Path
) -> None:
    result = CliRunner().invoke(app, ["bench", "wake", str(tiny_checkpoint), *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.removeprefix("importing torch\n").count("\n") == 1


def test_directory_without_checkpoint_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "soak", str(tmp_path)])
    assert result.exit_code == 2
    assert "config.json" in result.output


def test_broken_off_run_tells_what_it_has(
    tiny_checkpoint: Path, project: Path, tmp_path: Path
) -> None:
    """By SIGTERM, which is turned into what Ctrl-C sends."""
    file = tmp_path / "wake.json"
    command = [sys.executable, "-m", "serve_app.cli.main", "bench", "wake", str(tiny_checkpoint)]
    command += ["--cycles", "100000", "--variants", "pipelined", "--pause-s", "0.01"]
    command += ["--requests", "0"]
    command += ["--json", str(file)]
    with subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        next(line for line in lines if "pipelined: " in line)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "broken off" in out
    result = json.loads(file.read_text())
    assert not result["complete"]
    assert result["rows"][0]["cycles"] >= 1
    page = write([result], tmp_path).read_text()
    assert "broken off" in page
    assert (tmp_path / "wake_ttft.png").exists()
