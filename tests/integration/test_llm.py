"""`from serve_app import LLM`, on the tiny checkpoint and on the CPU."""

import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.errors import ContextLengthExceeded, InvalidRequest, ShuttingDown
from actors.image.image import WeightImage
from actors.worker.model_memory import ModelMemory
from serve_app import LLM, SamplingParams
from serve_app.replica import in_process
from tests.integration.runtime_harness import ENGINE, PROMPTS, Harness, run

ENGINE_KEYS = ENGINE.model_dump(exclude_unset=True) | {"device": "cpu", "max_model_len": 512}
HELLO = {"role": "user", "content": "hello"}
GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=20)
EXIT_S = 90  # of a whole script, on a machine that has other things to do


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()
    with LLM(tiny_checkpoint, engine=ENGINE_KEYS) as llm:
        yield llm
    # A worker sets these for its process.
    torch.set_num_threads(threads)
    sys.setswitchinterval(switch_interval_s)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path, image: WeightImage) -> list[list[int]]:
    """What the runtime generates."""
    found = []

    async def scenario(h: Harness) -> None:
        found.extend([await h.tokens(prompt) for prompt in PROMPTS])

    run(tiny_checkpoint, image, scenario)
    return found


def tokens(llm: LLM) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, GREEDY)]


def test_greedy_answers_are_the_runtime_s_before_and_after_each_sleep(
    llm: LLM, expected: list[list[int]]
) -> None:
    assert tokens(llm) == expected
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping()
        llm.wake_up()
        assert not llm.is_sleeping()
        assert tokens(llm) == expected


def test_generating_wakes(llm: LLM, expected: list[list[int]]) -> None:
    llm.sleep()
    assert tokens(llm) == expected
    assert not llm.is_sleeping()


def test_outputs_tell_what_was_asked_and_what_came_of_it(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4, logprobs=2, ignore_eos=True)
    first, second = llm.generate(["one", "one two"], params)
    assert (first.prompt, second.prompt) == ("one", "one two")
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)
    assert [each.index for each in first.outputs] == [0, 1, 2]
    for output in first.outputs:
        assert (len(output.token_ids), output.finish_reason) == (4, "length")
        assert output.logprobs is not None
        assert [token in found for token, found in zip(output.token_ids, output.logprobs)]  # noqa: B905
        assert all(len(found) in (2, 3) for found in output.logprobs)
    (again,) = llm.generate([first.prompt_token_ids], params)
    assert again.prompt is None
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in first.outputs]


def test_prompts_may_be_one_several_or_none(llm: LLM) -> None:
    (text,) = llm.generate("one", GREEDY)
    (ids,) = llm.generate(text.prompt_token_ids, GREEDY)
    assert ids.outputs == text.outputs
    assert llm.generate([]) == []


def test_conversations_are_answered_by_the_chat_template(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, GREEDY)
    assert one.prompt is not None
    assert "hello" in one.prompt
    two = llm.chat([hello, [*hello, {"role": "assistant", "content": "hi"}, *hello]], GREEDY)
    assert two[0].outputs == one.outputs
    assert len(two[1].prompt_token_ids) > len(one.prompt_token_ids)
    with pytest.raises(InvalidRequest, match="role"):
        llm.chat([{"role": "nobody", "content": "hello"}])


def test_bad_request_is_refused_by_name_and_wakes_nobody(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(InvalidRequest, match="stop_token_ids holds"):
        llm.generate(["fine", "fine"], SamplingParams(stop_token_ids=[10**6]))
    with pytest.raises(ContextLengthExceeded):
        llm.generate("one", SamplingParams(max_tokens=5000))
    with pytest.raises(InvalidRequest, match="prompt must be"):
        llm.generate(["text", 5])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="level must be at most 2"):
        llm.sleep(3)
    assert llm.is_sleeping()


@pytest.mark.parametrize(
    "prompts", [np.array([1, 2]), [np.array([1, 2])], {"prompt": "one"}, 5, None]
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(prompts)


@pytest.mark.parametrize(
    "messages", [HELLO, [[HELLO], HELLO], np.array([HELLO, HELLO]), {1}, 5, None, "hello", []]
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": 5}, "tools must be an array"),
        ({"tools": {"type": "function"}}, "tools must have"),
        ({"chat_template_kwargs": ["thinking"]}, "chat_template_kwargs must be an object"),
    ],
)
def test_wrong_option_of_a_chat_is_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.chat([HELLO], **options)


@pytest.mark.parametrize("params", [[GREEDY, GREEDY], [], {"max_tokens": 1}, {}, "greedy"])
def test_sampling_parameters_are_one_object_for_all(llm: LLM, params: Any) -> None:
    found = type(params).__name__
    with pytest.raises(InvalidRequest, match=f"one SamplingParams for all prompts, found {found}"):
        llm.generate(["one", "two"], params)
    with pytest.raises(InvalidRequest, match="sampling_params must be"):
        llm.chat([HELLO], params)


def test_threads_share_one_model(llm: LLM, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda prompt: llm.generate(prompt, GREEDY), PROMPTS))
    assert [answer.outputs[0].token_ids for (answer,) in answers] == expected


def test_nothing_is_left_of_one_that_was_shut_down(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[ModelMemory] = []
    load_model = in_process.load_model

    async def noted(*args: Any, **options: Any) -> in_process.Loaded:
        loaded = await load_model(*args, **options)
        memories.append(loaded.halves.worker.memory)
        return loaded

    monkeypatch.setattr(in_process, "load_model", noted)
    before = {thread.name for thread in threading.enumerate() if not thread.daemon}
    llm = LLM(tiny_checkpoint, engine=ENGINE_KEYS)
    assert memories[0].mapped_bytes > 0
    llm.shutdown()
    llm.shutdown()
    assert memories[0].mapped_bytes == 0
    with pytest.raises(ShuttingDown):
        llm.generate("one")
    assert {thread.name for thread in threading.enumerate() if not thread.daemon} <= before


# --- scripts ---

SCRIPT = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this test was started from
from serve_app import LLM, SamplingParams
def make():
    return LLM({checkpoint!r}, engine={engine!r})
"""


@contextmanager
def script(body: str, checkpoint: Path, project: Path) -> Iterator[subprocess.Popen[str]]:
    head = SCRIPT.format(checkpoint=str(checkpoint), engine=ENGINE_KEYS)
    command = [sys.executable, "-c", head + textwrap.dedent(body)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=project, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow  # so does the example of the documentation
def test_script_ends_by_itself(tiny_checkpoint: Path, project: Path) -> None:
    body = "print(make().generate('one')[0].outputs[0].finish_reason)"
    with script(body, tiny_checkpoint, project) as process:
        out, err = process.communicate(timeout=EXIT_S)
    assert (process.returncode, out) == (0, "length\n"), err


@pytest.mark.slow
def test_script_ends_with_its_exception(tiny_checkpoint: Path, project: Path) -> None:
    with script("llm = make()\nraise OSError('mine')", tiny_checkpoint, project) as process:
        _, err = process.communicate(timeout=EXIT_S)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "OSError: mine"


WHOSE_CHILDREN_END = """
    import multiprocessing, os, sys, time
    from actors.errors import ShuttingDown
    def ask():
        for use in (lambda: llm.generate("one"), llm.sleep, llm.wake_up, llm.is_sleeping):
            try:
                use()
            except ShuttingDown as refused:
                assert "made in another process" in str(refused)
            else:
                raise AssertionError("it was not refused")
        llm.shutdown()
    with make() as llm:
        before = llm.generate("one")[0].outputs
        begun_s = time.monotonic()
        for work in (ask, int):
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join()
            print(child.exitcode)
        if (child := os.fork()) == 0:
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert time.monotonic() - begun_s < 30
        assert len(llm.generate("one")[0].outputs) == len(before)
    """


def test_forked_children_of_a_script_end_at_once_and_are_told(
    tiny_checkpoint: Path, project: Path
) -> None:
    with script(WHOSE_CHILDREN_END, tiny_checkpoint, project) as process:
        out, err = process.communicate(timeout=EXIT_S)
    assert (process.returncode, out) == (0, "0\n0\n0\n"), err


WHILE_GENERATING = """
    llm = make()
    print("now", flush=True)
    while True:
        llm.generate(["one", "two"], SamplingParams(max_tokens=400, ignore_eos=True))
    """
WHILE_BUILDING = """
    import time
    from actors.replica import in_process
    build = in_process.ModelWorker
    def slowly(*args):
        print("now", flush=True)
        time.sleep(1)
        return build(*args)
    in_process.ModelWorker = slowly
    make()
    """


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(WHILE_GENERATING, id="generating"),
        pytest.param(WHILE_BUILDING, id="building", marks=pytest.mark.slow),
    ],
)
def test_script_ends_at_ctrl_c(body: str, tiny_checkpoint: Path, project: Path) -> None:
    with script(body, tiny_checkpoint, project) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=EXIT_S)
    assert process.returncode in (1, -signal.SIGINT), err  # of `python -c`, and of a file
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback") == 1, err


WHOSE_STEP_HANGS = """
    import atexit, threading
    from actors.errors import ReplicaFailed
    from actors.worker import model_worker
    model_worker._CLOSE_TIMEOUT_S = 1
    built = model_worker.ModelWorker._build_engine
    workers = []
    def noted(worker, *args):
        workers.append(worker)
        return built(worker, *args)
    model_worker.ModelWorker._build_engine = noted
    llm = make()
    (worker,) = workers
    worker._engine._loop._pipeline.advance = lambda: threading.Event().wait()
    worker._watchdog.step.limit_s = {limit_s}
    atexit.register(print, "at exit")
    def ask():
        try:
            llm.generate("one")
        except ReplicaFailed as failed:
            print(failed)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    """


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param("llm.shutdown()", id="shut down"),
        pytest.param("", id="left open", marks=pytest.mark.slow),
    ],
)
def test_script_whose_device_hangs_ends(ends: str, tiny_checkpoint: Path, project: Path) -> None:
    """In a step, and in what the control thread does, for which Python would wait."""
    hangs = f"worker._control.submit(threading.Event().wait)\n{ends}"
    body = textwrap.dedent(WHOSE_STEP_HANGS.format(limit_s=60)) + hangs
    with script(body, tiny_checkpoint, project) as process:
        out, err = process.communicate(timeout=EXIT_S)
    assert process.returncode == 1, err
    assert out == "at exit\n"
    assert "this process ends without waiting: the device does not answer" in err


def test_failed_model_says_why(tiny_checkpoint: Path, project: Path) -> None:
    body = textwrap.dedent(WHOSE_STEP_HANGS.format(limit_s=0.5)) + "asking.join()\nask()"
    with script(body, tiny_checkpoint, project) as process:
        out, err = process.communicate(timeout=EXIT_S)
    *told, at_exit = out.splitlines()
    for each in told:
        assert "EngineDied: a step of the engine has not ended after" in each, err
        assert "Load the model in another process" in each
    assert (len(told), at_exit) == (2, "at exit")


def test_example_of_the_documentation_runs(project: Path) -> None:
    text = (project / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=EXIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") >= 3
