"""What of a replica can be had without Serve."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol import ChatPrompt, GenerateRequest, Prompt, SamplingParams
from serve_app.deployment import ModelReplica


class Runtime:
    def prepare(self, request: GenerateRequest) -> Any:
        return threading.current_thread().name


@pytest.mark.parametrize(
    ("prompt", "thread"),
    [
        ("short", "MainThread"),
        ((1,) * 100, "MainThread"),
        ("long " * 10_000, "long-prompts"),
        ((1,) * 100_000, "long-prompts"),
        (ChatPrompt(({"role": "user", "content": "hi"},)), "MainThread"),
        (ChatPrompt(({"role": "user", "content": "hi " * 10_000},)), "long-prompts"),
        (ChatPrompt(({"role": "user", "content": "hi"},), ({"a": "b" * 20_000},)), "long-prompts"),
    ],
)
def test_long_prompts_are_read_beside_the_event_loop(prompt: Prompt, thread: str) -> None:
    reading = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
    replica: Any = SimpleNamespace(_runtime=Runtime(), _reading=reading)
    request = GenerateRequest("r", prompt, SamplingParams())
    assert str(asyncio.run(ModelReplica._prepare(replica, request))).startswith(thread)
