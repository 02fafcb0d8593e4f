"""`sleepserve eval` as a user has it, the module's door of the runtime, and a server to speak to."""

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
import torch
import uvicorn
from typer.testing import CliRunner, Result

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.sizes import image_sizes
from actors.errors import InvalidRequest, ReplicaFailed, Unavailable, WeightsCorrupted
from actors.image import packer
from actors.protocol import ReplicaStatus, SleepCommand
from actors.quantization.formats import QuantizeName
from docs.results.report.page import as_markdown, sections_of
from serve_app.bench.eval.evaluate import Passage, evaluate, start
from serve_app.bench.eval.in_process import InProcessTarget
from serve_app.bench.eval.over_http import over_http
from serve_app.bench.eval.perplexity import greedy_choices, log_likelihood
from serve_app.bench.eval.verdict import Plan, Report, Slept
from serve_app.bench.http.client import Client, RequestRecord
from serve_app.cli.main import app
from serve_app.config.http import HttpSettings
from serve_app.config.keys import read_keys
from serve_app.front.app import build_asgi
from tests.conftest import PROJECT
from tests.fakes import FakeModel
from tests.integration.runtime_harness import Harness, load, run
from tests.unit.serve_app.bench.our_front import OurFront

PROMPT = "The future of artificial intelligence is"
SHORT = "It was the best of times, it was the worst of times."


def evaluated(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def report_in(file: Path) -> Report:
    """The report, valid by its schema and by its types."""
    text = file.read_text()
    jsonschema.validate(json.loads(text), Report.model_json_schema())
    return Report.model_validate_json(text, strict=True)


@pytest.fixture(autouse=True)
def nothing_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has downloaded is not there."""
    monkeypatch.setenv("SLEEPSERVE_HOME", str(tmp_path / "nothing"))


@pytest.fixture
def passage(tmp_path: Path) -> Path:
    file = tmp_path / "short.txt"
    file.write_text(SHORT)
    return file


# --- the command, in process ---


def test_demo_model_passes(tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    demo = PROJECT / "configs" / "demo.yaml"
    result = evaluated(demo, "--cycles", "2", "--assert-ttft", "5", "--json", file)
    assert result.exit_code == 0, result.output
    for shown in ("TTFT from sleep", "wake call", "released", "alice.txt", "ok  tokens: 50 tokens"):
        assert shown in result.stdout
    assert "cycle 2 of 2" in result.stderr

    page = as_markdown(sections_of([json.loads(file.read_text())], lambda name, result: b""))
    assert "## Before and after a sleep: demo" in page
    assert "| TTFT from sleep |" in page

    report = report_in(file)
    assert report.passed
    assert report.plan.prompt == PROMPT
    assert report.plan.pause_s == 0.5
    assert report.about.weights_bytes is not None
    for cycle in report.cycles:
        assert cycle.slept is not None
        assert cycle.first is not None
        assert cycle.woke is not None
        assert cycle.slept.released_bytes > 0.9 * report.about.weights_bytes
        assert cycle.woke.reloaded_bytes > 0.9 * report.about.weights_bytes
        assert cycle.woke.copied_bytes == cycle.woke.checked_bytes == report.about.weights_bytes
        first = cycle.first
        parts = (first.tokenise_s, first.wake_call_s, first.first_token_s)
        assert sum(part for part in parts if part is not None) == pytest.approx(first.ttft_s)
        assert 0 < cycle.woke.link_s <= first.ttft_s
        assert len(first.answer.tokens) == 1


def test_level_2_and_kept_layers_pass(tiny_checkpoint: Path, tmp_path: Path, passage: Path) -> None:
    file = tmp_path / "eval.json"
    options = ("--text", passage, "--max-tokens", "8", "--ttft-tokens", "3", "--json", file)
    result = evaluated(tiny_checkpoint, "--level", "2", *options)
    assert result.exit_code == 0, result.output
    whole = report_in(file)
    result = evaluated(tiny_checkpoint, "--keep-layers", "2", *options)
    assert result.exit_code == 0, result.output
    kept = report_in(file)
    assert (whole.plan.level, kept.plan.level) == (2, 1)
    assert (whole.about.keep_layers, kept.about.keep_layers) == (0, 2)
    (one,), (other,) = whole.cycles, kept.cycles
    assert one.woke is not None
    assert other.woke is not None
    assert other.slept is not None
    assert other.slept.left is not None
    assert other.first is not None
    assert other.slept.left.kept_layers > 0
    assert other.woke.copied_bytes < one.woke.copied_bytes == whole.about.weights_bytes
    assert len(other.first.answer.tokens) == 3
    assert one.answer is not None
    assert other.answer is not None
    assert one.answer.tokens == other.answer.tokens


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("recipe", ["gptq-4-128-order", "ct-int8", "fp8-block"])
def test_perplexity_of_quantised_weights_is_the_same_to_the_last_bit_behind_a_sleep(
    recipe: QuantizeName, level: int, tmp_path: Path, passage: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / recipe, "tiny", quantize=recipe)
    file = tmp_path / "eval.json"
    options = ("--text", passage, "--max-tokens", "8", "--cycles", "2", "--json", file)
    result = evaluated(checkpoint, "--level", str(level), *options)
    assert result.exit_code == 0, result.output
    report = report_in(file)
    assert report.plan.level == level
    before = report.baseline.perplexity
    assert before is not None
    assert before.predicted_tokens > 8
    assert len(report.cycles) == 2
    for cycle in report.cycles:
        assert cycle.perplexity is not None
        assert cycle.perplexity.log_likelihood == before.log_likelihood
        assert cycle.woke is not None
        assert cycle.woke.copied_bytes == report.about.weights_bytes
    sizes = image_sizes(checkpoint, "auto")
    assert report.about.weights_bytes is not None
    assert 0 <= report.about.weights_bytes - sum(sizes.values()) < 0.01 * sum(sizes.values())


def corrupt(target: InProcessTarget) -> None:
    """Turn signs and exponents over in the bytes that the next wake copies for the first layer."""
    image = target.worker.memory.image
    assert image is not None
    index = next(i for i, s in enumerate(image.layout.segments) if s.name == "layer.0")
    payload = np.frombuffer(image.segment(index), np.uint8)
    wrong = np.ascontiguousarray(payload ^ np.uint8(0x80))
    ctypes.memmove(payload.ctypes.data, wrong.ctypes.data, wrong.nbytes)


def test_corrupted_image_fails_with_the_wrong_token_and_the_checksum(
    tiny_checkpoint: Path, tmp_path: Path, passage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fall_asleep = InProcessTarget.sleep
    sleeps: list[int] = []

    async def sleep(self: InProcessTarget, level: Literal[1, 2]) -> Slept:
        slept = await fall_asleep(self, level)
        sleeps.append(level)
        if len(sleeps) == 2:
            corrupt(self)
        return slept

    monkeypatch.setattr(InProcessTarget, "sleep", sleep)
    file = tmp_path / "eval.json"
    options = ("--cycles", "4", "--text", passage, "--json", file)
    result = evaluated(tiny_checkpoint, *options)
    assert result.exit_code == 1
    assert re.search(r"first wrong +token \d+, cycle 2", result.stdout)
    assert re.search(r"expected +'.*' \(id \d+\)", result.stdout)
    assert re.search(r"found +'.*' \(id \d+\)", result.stdout)
    assert "FAILED  checksum: cycle 2: segment layer.0 is not what was packed" in result.stdout
    report = report_in(file)
    assert [cycle.number for cycle in report.cycles] == [1, 2]
    found = report.cycles[1].difference
    assert found is not None
    assert report.baseline.answer is not None
    assert report.baseline.answer.tokens.id_at(found.position) == found.expected_id
    assert found.found_id != found.expected_id


# --- which text ---

FETCHED = "datasets/modelscope--wikitext/default/wikitext-103-v1/test-00000-of-00001.parquet"


def fetch(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a download leaves behind, but for the bytes."""
    monkeypatch.setenv("SLEEPSERVE_HOME", str(home))
    file = home / FETCHED
    file.parent.mkdir(parents=True)
    return file


def passage_of(*arguments: str | Path, json_file: Path) -> tuple[str, Result]:
    options = ("--max-tokens", "2", "--json", json_file)
    result = evaluated(*arguments, *options)
    assert result.exit_code == 0, result.output
    perplexity = report_in(json_file).baseline.perplexity
    assert perplexity is not None
    return perplexity.passage, result


def test_fetched_text_is_found_and_read(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = fetch(tmp_path, monkeypatch)
    rows = ["", " = Robert = \n", " Robert is an actor . \n"]
    parquet.write_table(pyarrow.table({"text": rows}), file)
    assert Passage.read(file).text == "".join(rows)
    found, _ = passage_of(tiny_checkpoint, json_file=tmp_path / "found.json")
    assert found == f"wikitext-103-v1, its first {len(''.join(rows))} characters"
    named, _ = passage_of(tiny_checkpoint, "--text", file, json_file=tmp_path / "named.json")
    assert named == file.name


def test_fetched_text_that_cannot_be_read_is_told(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fetch(tmp_path, monkeypatch)
    file.write_bytes(b"no Parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found, result = passage_of(tiny_checkpoint, json_file=tmp_path / "found.json")
    assert found == "alice.txt"
    assert "the text that is shipped is taken" in result.stderr
    result = evaluated(tiny_checkpoint, "--text", file)
    assert result.exit_code == 2
    assert "the extra `datasets`" in result.stderr


def test_file_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    other = tmp_path / "other.parquet"
    other.write_bytes(b"no Parquet")
    with pytest.raises(ValueError, match="no Parquet file with a column `text`"):
        Passage.read(other)
    parquet.write_table(pyarrow.table({"words": ["a"]}), other)
    with pytest.raises(ValueError, match="no Parquet file with a column `text`"):
        Passage.read(other)


def test_ttft_limit_fails_the_command(tiny_checkpoint: Path, passage: Path) -> None:
    options = ("--max-tokens", "2", "--text", passage, "--assert-ttft", "1e-6")
    result = evaluated(tiny_checkpoint, *options)
    assert result.exit_code == 1
    assert "FAILED  ttft: the worst is" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name either a MODEL"),
        (("configs/demo.yaml", "--url", "http://x"), "name either a MODEL"),
        (("no_such.yaml",), "no such file"),
        (("tests",), "no checkpoint in tests"),
        (("configs/demo.yaml", "--model", "x"), "--model goes with --url"),
        (("--url", "127.0.0.1:8000"), "--url begins with http"),
        (("--url", "http://x", "--keep-layers", "1"), "--keep-layers is for a MODEL"),
        (("--url", "http://x", "--text", "README.md"), "--text is for a MODEL"),
        (("checkpoints/tiny", "--json", "no/such/dir/x"), "no directory no/such/dir"),
        (("checkpoints/tiny", "--text", "missing.txt"), "missing.txt"),
        (("checkpoints/tiny", "--level", "3"), "--level"),
        (("checkpoints/tiny", "--assert-ttft", "0"), "--assert-ttft must be above 0"),
        (("checkpoints/tiny", "--prompt", ""), "the prompt has no tokens"),
        (("checkpoints/tiny", "--max-tokens", "99999"), "the limit is"),
    ],
)
def test_wrong_usage_is_told(
    arguments: Sequence[str], told: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("COLUMNS", "200")
    result = evaluated(*arguments)
    assert result.exit_code == 2, result.output
    assert told in result.stderr


def test_interrupt_shows_what_was_measured(
    tiny_checkpoint: Path, tmp_path: Path, passage: Path
) -> None:
    file = tmp_path / "eval.json"
    # A shell's background job, which a test run may be, ignores SIGINT, and so would its children.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from serve_app.cli.main import main; main()"
    )
    options = ["--cycles", "100000", "--text", str(passage), "--json", str(file)]
    with subprocess.Popen(
        [sys.executable, "-c", code, "eval", str(tiny_checkpoint), *options],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("cycle 3 of"):
                    break
            process.send_signal(signal.SIGINT)
            shown, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, told
    assert told.endswith("interrupted\n")
    assert "TTFT from sleep" in shown
    report = report_in(file)
    assert report.interrupted
    assert not report.passed
    assert len(report.cycles) >= 2


# --- the runtime's door to the module ---


def test_log_likelihood_is_that_of_the_reference_model(tiny_checkpoint: Path) -> None:
    reference = packer.load_reference(tiny_checkpoint, torch.float32)

    async def scenario(h: Harness) -> None:
        ids = h.runtime.codec.encode_prompt(SHORT)
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        expected = sum(float(logprobs[i, ids[i + 1]]) for i in range(len(ids) - 1))
        found = {await h.worker.with_model(lambda m: log_likelihood(m, ids)) for _ in range(3)}
        assert len(found) == 1
        assert found.pop() == pytest.approx(expected, rel=1e-6)
        answer = await h.tokens(PROMPT)
        prompt_ids = h.runtime.codec.encode_prompt(PROMPT)
        choices = await h.worker.with_model(lambda m: greedy_choices(m, prompt_ids, answer))
        assert list(choices) == answer

    run(tiny_checkpoint, load(tiny_checkpoint), scenario)


def test_work_on_the_module_delays_requests_and_changes_none(tiny_checkpoint: Path) -> None:
    async def scenario(h: Harness) -> None:
        expected = await h.tokens(PROMPT, max_tokens=60, ignore_eos=True)
        attention = await h.worker.with_model(lambda m: m.config._attn_implementation)
        generating = asyncio.create_task(h.tokens(PROMPT, max_tokens=60, ignore_eos=True))
        ids = h.runtime.codec.encode_prompt(SHORT)
        while not generating.done():
            await h.worker.with_model(lambda m: log_likelihood(m, ids))
        assert await generating == expected
        assert await h.worker.with_model(lambda m: m.config._attn_implementation) == attention

    run(tiny_checkpoint, load(tiny_checkpoint), scenario)


def test_work_on_the_module_that_raises_leaves_the_engine_running(tiny_checkpoint: Path) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(ZeroDivisionError):
            await h.worker.with_model(lambda m: 1 // 0)
        assert len(await h.tokens(PROMPT, ignore_eos=True)) == 20

    run(tiny_checkpoint, load(tiny_checkpoint), scenario)


def test_module_that_is_asleep_is_not_given_away(tiny_checkpoint: Path) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(Unavailable, match="asleep"):
            await h.worker.with_model(lambda m: m)
        await h.runtime.wake()
        assert await h.worker.with_model(lambda m: m.device.type) == "cpu"

    run(tiny_checkpoint, load(tiny_checkpoint), scenario, awake=False)


def test_module_of_a_replica_that_failed_can_be_looked_at(tiny_checkpoint: Path) -> None:
    async def scenario(h: Harness) -> None:
        ids = h.runtime.codec.encode_prompt(SHORT)
        before = await h.worker.with_model(lambda m: log_likelihood(m, ids))
        await h.runtime.sleep(1)
        image = h.worker.memory.image
        assert image is not None
        payload = np.frombuffer(image.segment(0), np.uint8)
        ctypes.memset(payload.ctypes.data, 0, payload.nbytes)
        await h.wake_that_fails()
        after = await h.worker.with_model(lambda m: log_likelihood(m, ids))
        with pytest.raises(WeightsCorrupted):
            await h.runtime.settled()  # the replica knows it a moment after the worker
        with pytest.raises(WeightsCorrupted):
            h.runtime.check_health()
        assert after != before

    run(tiny_checkpoint, load(tiny_checkpoint), scenario)


# --- over HTTP ---


@asynccontextmanager
async def server_of(**models: FakeModel) -> AsyncIterator[str]:
    config = uvicorn.Config(
        build_asgi(models, HttpSettings()), port=0, lifespan="off", ws="none", log_level="warning"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def over_http_report(
    model: FakeModel, name: str | None = None, login: str = "", **plan: Any
) -> Report:
    async def scenario() -> Report:
        async with (
            server_of(fake=model) as url,
            over_http(f"{url.replace('//', '//' + login)}/v1/", name) as target,
        ):
            report = start(target, Plan(prompt=PROMPT, **plan))
            await evaluate(target, report, None, lambda what, done, total: None)
            return report

    return asyncio.run(scenario())


def test_server_passes_and_is_asked_for_what_it_has() -> None:
    model = FakeModel()
    report = over_http_report(model, cycles=2, level=2)
    assert report.passed
    assert report.about.model == "fake"
    assert [order for order in model.orders if order != ()] == [SleepCommand(level=2)] * 2
    assert {(r.sampling.temperature, r.sampling.ignore_eos) for r in model.requests} == {(0, True)}
    assert [r.sampling.max_tokens for r in model.requests] == [1, 1, 50, 1, 50, 1, 50]
    (cycle, _) = report.cycles
    assert cycle.slept is not None
    assert cycle.first is not None
    assert cycle.answer is not None
    assert cycle.slept.released_bytes == 2048
    assert cycle.first.wake_call_s is None
    assert cycle.answer.tokens.texts == model.pieces
    assert cycle.answer.tokens.ids is None
    assert cycle.answer.prompt_tokens == 5
    assert report.baseline.perplexity is None


class Forgetful(FakeModel):
    """Says something else after a sleep."""

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        self.pieces = ("Hello", ";", " world")
        return await super().sleep(command)


def test_server_that_answers_otherwise_after_a_wake_fails() -> None:
    report = over_http_report(Forgetful(), ttft_tokens=3)
    found = report.cycles[0].difference
    assert found is not None
    assert (found.position, found.expected, found.found) == (1, ",", ";")
    assert found.before == "Hello"
    assert not report.passed


class Broken(FakeModel):
    """Its replica fails while it wakes."""

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        self.fail_first = ReplicaFailed("the replica cannot serve any more")
        return await super().sleep(command)


def test_server_whose_replica_fails_is_told() -> None:
    report = over_http_report(Broken())
    (failed,) = (check for check in report.checks if check.name == "cycles")
    assert not failed.passed
    assert "HTTP 500" in failed.told


def test_password_of_the_url_is_in_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    asked = Client.ask

    async def cut(self: Client, path: str, body: Mapping[str, Any]) -> RequestRecord:
        record = await asked(self, path, body)
        slept = any(order != () for order in model.orders)
        return replace(record, error="broken", message="it ended early") if slept else record

    monkeypatch.setattr(Client, "ask", cut)
    report = over_http_report(model, login="me:hunter2@")
    assert "it ended early" in str(report.cycles[0].failure)
    assert "hunter2" not in report.model_dump_json()
    assert report.about.where.startswith("http://***@127.0.0.1:")


def test_server_that_somebody_wakes_is_told() -> None:
    class Popular(FakeModel):
        async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
            await super().sleep(command)
            return await super().wake_up(())

    with pytest.raises(Unavailable, match="does it have other users"):
        over_http_report(Popular())


@pytest.mark.parametrize(("name", "told"), [("other", "no model other: fake"), (None, "more than")])
def test_server_without_that_model_is_told(name: str | None, told: str) -> None:
    async def scenario() -> None:
        models = {"fake": FakeModel()} if name else {"a": FakeModel("a"), "b": FakeModel("b")}
        async with server_of(**models) as url:
            with pytest.raises(InvalidRequest, match=told):
                async with over_http(url, name):
                    pass

    asyncio.run(scenario())


def test_server_that_is_not_there_is_told() -> None:
    result = evaluated("--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9" in result.stderr


def test_server_that_says_nothing_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.bench.eval.over_http._FIRST_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = evaluated("--url", url)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"error: {url}/v1/models did not answer within 0.1 s\n")


USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"


@pytest.fixture
def guarded() -> Iterator[OurFront]:
    keys = read_keys(None, None, {"SLEEPSERVE_API_KEYS": USER, "SLEEPSERVE_ADMIN_KEYS": ADMIN})
    with OurFront(keys, fake=FakeModel()) as front:
        yield front


@pytest.mark.parametrize("from_environment", [False, True])
def test_server_with_keys_is_given_one(
    guarded: OurFront, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, from_environment: bool
) -> None:
    monkeypatch.setenv("SLEEPSERVE_ADMIN_KEY", ADMIN if from_environment else USER)
    options = [] if from_environment else ["--api-key", ADMIN]
    file = tmp_path / "report.json"
    result = evaluated("--url", guarded.url, "--json", file, *options)
    assert result.exit_code == 0, result.output
    assert report_in(file).passed
    assert ADMIN not in result.output + file.read_text()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (None, "HTTP 401: this server needs a key"),
        ("wrong" * 5, "give an admin key with SLEEPSERVE_ADMIN_KEY or --api-key"),
        (USER, "HTTP 403: this route needs an admin key"),
    ],
)
def test_server_that_needs_another_key_is_told(
    guarded: OurFront, monkeypatch: pytest.MonkeyPatch, key: str | None, told: str
) -> None:
    monkeypatch.delenv("SLEEPSERVE_ADMIN_KEY", raising=False)
    result = evaluated("--url", guarded.url, *(["--api-key", key] if key else []))
    assert result.exit_code == 2
    assert told in result.stderr
    assert "--api-key" in result.stderr
