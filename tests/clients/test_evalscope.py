"""evalscope perf without a network, on a model that is put to sleep again and again."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

REQUESTS = 60
SLEEP_EVERY_S = 3.0


class Sandman(threading.Thread):
    """Puts the model to sleep every few seconds, once its requests have ended."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self.times = 0
        self.failures: list[str] = []
        self._server = server
        self._ended = threading.Event()

    def run(self) -> None:
        with httpx2.Client(base_url=self._server, timeout=60) as http:
            while not self._ended.wait(SLEEP_EVERY_S):
                answer = http.post("/sleep")
                self.times += 1
                if answer.status_code != 200:
                    self.failures.append(answer.text)

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.mark.parametrize("stream", [False, True])
def test_perf_while_the_model_sleeps(server: str, tmp_path: Path, stream: bool) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Tell me about the number {i}, please.\n" for i in range(REQUESTS)))
    command = [str(Path(sys.executable).with_name("evalscope")), "perf"]
    command += ["--url", f"{server}/v1/chat/completions", "--api", "openai", "--model", "Qwen"]
    command += ["--dataset", "line_by_line", "--dataset-path", str(prompts)]
    command += ["--max-tokens", "16", "--min-tokens", "16", "-n", str(REQUESTS)]
    command += ["--rate", "3", "--parallel", "4"]
    command += ["--outputs-dir", str(tmp_path), "--no-timestamp", "--name", "out"]
    command += ["--stream"] if stream else ["--no-stream"]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    sandman = Sandman(server)
    sandman.start()
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | offline,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        sandman.end()
    assert done.returncode == 0, done.stdout + done.stderr
    assert sandman.times >= 3
    assert sandman.failures == []
    assert totals(tmp_path) == {"succeeded": REQUESTS, "failed": 0}


def totals(folder: Path) -> dict[str, Any]:
    (summary,) = folder.rglob("benchmark_summary.json")
    found = json.loads(summary.read_text())
    return {"succeeded": found["Success Requests"], "failed": found["Failed Requests"]}
