"""A model in this process for scripts, in vLLM's names: `from serve_app import LLM, SamplingParams`.

No HTTP, no Ray. torch comes in when a model is made.
"""

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PlainValidator

from actors.checkpoints.plan import is_directory
from actors.checkpoints.source import DEFAULT_HUB, Hub, HubName
from actors.errors import InvalidRequest
from actors.protocol import (
    ChatPrompt,
    GenerateRequest,
    Prompt,
    Refusal,
    ReplicaState,
    SleepCommand,
    TokenEvent,
    TokenLogprob,
)
from actors.text.validation import MAX_LOGPROBS
from serve_app.config.errors import validate
from serve_app.config.model import ModelConfig
from serve_app.config.paths import with_files
from serve_app.openai.chat import ChatForm, Part
from serve_app.openai.fields import (
    MAX_COUNT,
    faults,
    parse_form,
    refuse_unknown,
    to_logit_bias,
    to_prompts,
)
from serve_app.openai.requests import Sampling, SleepForm
from serve_app.process.loop_thread import LoopThread
from serve_app.replica.in_process import replica_in_process

if TYPE_CHECKING:
    from actors.replica.streams import Prepared
    from serve_app.replica.core import Replica


class _Prompts(Part):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(to_prompts)]


def _to_biases(value: object) -> dict[int, float]:
    """As in JSON, whose keys are strings."""
    return to_logit_bias(
        {str(k): v for k, v in value.items()} if isinstance(value, dict) else value
    )


class SamplingParams(Sampling):
    """How to choose the next token. Names are vLLM's, limits those of the HTTP API.

    What is None of temperature, top_p, top_k, min_p and repetition_penalty is the checkpoint's default, as
    where no SamplingParams are given.
    """

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(default=16, ge=1, le=MAX_COUNT)  # None: what the context leaves
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    logit_bias: Annotated[dict[int, float], PlainValidator(_to_biases)] = Field(
        default_factory=dict
    )

    def __init__(self, **fields: Any) -> None:
        """Check them.

        Raises:
            InvalidRequest: naming what is wrong, and what was found.
            UnsupportedParameter: it cannot be honoured.
        """
        refuse_unknown(type(self), fields)
        given: dict[str, Any] = {
            k: _listed(v) for k, v in fields.items() if v is not None or k == "max_tokens"
        }
        with faults(given):
            super().__init__(**given)
        self.params(max_tokens=self.max_tokens, logprobs=self.logprobs)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the model's own distribution."""

    logprob: float
    rank: int | None  # 1 for the likeliest; None: it is not among those that were asked for
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", or "abort" after a sleep in mode abort
    stop_reason: str | int | None  # the stop string or token that ended it
    logprobs: list[dict[int, Logprob]] | None  # of each token: its own, and the likeliest
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt, and its continuations."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """One model in this process; awake when made. Any thread may call.

    It holds its memory until `shutdown`, the end of a `with` block, or the end of the process.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        hub: HubName = DEFAULT_HUB,
        revision: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        generation_config: Literal["auto", "none"] = "auto",
        engine: Mapping[str, Any] | None = None,
        sleep: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model from disk, downloading it first if it is not there.

        Args:
            model: a checkpoint directory, or `owner/name` on the hub.
            hub: where `model` is from if it is no directory here.
            dtype: of the weights; `auto` is the checkpoint's own.
            max_num_seqs: sequences computed in one step (`max_requests_per_batch`).
            max_num_batched_tokens: tokens computed in one step (`max_batch_tokens`).
            enforce_eager: without CUDA graphs and compiled layers.
            generation_config: whose sampling defaults hold: `auto` the checkpoint's, `none` OpenAI's.
            engine: any other setting of the engine, in the names of configuration files.
            sleep: likewise of sleeps. Unlike there, no idle time has the model sleep by itself.

        Raises:
            ConfigError: a setting is wrong.
            CheckpointMissing, DownloadError: there is no checkpoint to be had.
            ValueError: the model cannot be served, or not with these settings.
        """
        from actors.checkpoints.download import ensure_checkpoint  # the hubs' libraries

        source = {
            "hub": Hub.PATH if is_directory(str(model)) else hub,
            "id": str(model),
            "revision": revision,
        }
        chosen = {
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_requests_per_batch": max_num_seqs,
            "max_batch_tokens": max_num_batched_tokens,
            "prefix_caching": enable_prefix_caching,
            "use_cuda_graphs": not enforce_eager,
        }
        config = validate(
            ModelConfig,
            {
                "model_id": "model",  # nobody asks for it by name
                "source": source,
                "dtype": dtype,
                "generation_config": generation_config,
                "engine": {k: v for k, v in chosen.items() if v is not None} | dict(engine or {}),
                "sleep": {"idle_timeout_s": None} | dict(sleep or {}),
                "num_gpus": 1,  # if there is one
            },
        )
        # Here, where Ctrl-C breaks it off.
        checkpoint = ensure_checkpoint(with_files(config, Path.cwd()).source)
        self._ids = itertools.count()
        self._thread: LoopThread[Replica] = LoopThread(
            replica_in_process(config, checkpoint), "sleepserve-llm"
        )

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them together, waking the model first if it sleeps.

        Args:
            prompts: texts or token ids, one or several.

        Raises:
            InvalidRequest: a prompt or parameter is not for this model; nothing was generated.
            Unavailable: not now, for want of memory, say.
            ReplicaFailed: the model has failed, for good.
        """
        listed = _listed(prompts)
        if isinstance(listed, list) and not listed:
            return []
        return self._generate(parse_form(_Prompts, {"prompt": listed}).prompt, sampling_params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, by the model's chat template; raises as `generate`."""
        listed = _listed(messages)
        conversations = [listed]  # whatever else it is: the form refuses it
        if isinstance(listed, list) and listed and not isinstance(listed[0], Mapping):
            conversations = listed
        options = {
            "tools": list(tools) if isinstance(tools, Iterable) else tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": (
                dict(chat_template_kwargs)
                if isinstance(chat_template_kwargs, Mapping)
                else chat_template_kwargs
            ),
        }
        prompts = [
            parse_form(ChatForm, {"messages": each, **options}).prompt() for each in conversations
        ]
        return self._generate(prompts, sampling_params)

    def sleep(self, level: int = 1) -> None:
        """Give device memory back, after what is being generated; at level 2 the host's copy as well.

        Raises:
            DrainTimeout: that takes too long; the model is awake.
        """
        form = parse_form(SleepForm, {"level": level})
        self._thread.call(self._replica.sleep(SleepCommand(level=form.level)))

    def wake_up(self) -> None:
        """Bring the weights back, and check them.

        Raises:
            Unavailable: not now, for want of memory, say; it is still asleep.
            ReplicaFailed: they are not what they were.
        """
        self._thread.call(self._replica.wake_up())

    def is_sleeping(self) -> bool:
        return self._replica.lifecycle.state is ReplicaState.ASLEEP

    def shutdown(self) -> None:
        """Give everything back; what is being generated ends with an error. Idempotent.

        A device that does not answer keeps what it has until the end of the process, which does not wait for it
        and exits with 1. This returns within 60 s.
        """
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def _replica(self) -> "Replica":
        return self._thread.value

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None
    ) -> list[RequestOutput]:
        sampling = SamplingParams() if sampling is None else _one(sampling)
        params = sampling.params(max_tokens=sampling.max_tokens, logprobs=sampling.logprobs)
        # On this thread: the event loop is for those who are being served. All before the first is begun.
        prepared = [
            self._replica.runtime.prepare(
                GenerateRequest(str(next(self._ids)), prompt, params, n=sampling.n, stream=False)
            )
            for prompt in prompts
        ]
        return self._thread.call(self._answers(prepared))

    async def _answers(self, prepared: "Sequence[Prepared]") -> list[RequestOutput]:
        tasks = [asyncio.create_task(self._answer(each)) for each in prepared]
        try:
            return await asyncio.gather(*tasks)
        finally:  # one that fails, or an interrupted caller, ends them all
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prepared: "Prepared") -> RequestOutput:
        request, codec = prepared.request, self._replica.runtime.codec
        events: list[list[TokenEvent]] = [[] for _ in range(request.n)]
        async for event in self._replica.answer(prepared):
            if isinstance(event, Refusal):
                raise event.error
            events[event.index].append(event)
        text = request.prompt if isinstance(request.prompt, str) else None
        if isinstance(request.prompt, ChatPrompt):
            text = codec.detokenize(prepared.prompt_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(prepared.prompt_ids),
            outputs=[_completion(index, each) for index, each in enumerate(events)],
        )


def _listed(value: object) -> object:
    """Sequences as lists, which is what JSON has, and the checks of HTTP bodies want."""
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        return value
    return [_listed(each) for each in value]


def _one(sampling: object) -> SamplingParams:
    """What `sampling_params` is, if it is right: vLLM takes a list as well, one for each prompt.

    Raises:
        InvalidRequest: it is something else.
    """
    if isinstance(sampling, SamplingParams):
        return sampling
    found = type(sampling).__name__
    text = f"sampling_params must be one SamplingParams for all prompts, found {found}"
    raise InvalidRequest(text, "sampling_params")


def _completion(index: int, events: Sequence[TokenEvent]) -> CompletionOutput:
    logprobs = [each for event in events for each in event.logprobs or ()]
    wanted = any(event.logprobs is not None for event in events)
    last = events[-1]
    return CompletionOutput(
        index=index,
        text="".join(event.text for event in events),
        token_ids=[token_id for event in events for token_id in event.token_ids],
        finish_reason=None if last.finish_reason is None else str(last.finish_reason),
        stop_reason=last.stop_reason,
        logprobs=[_by_token(each) for each in logprobs] if wanted else None,
        cumulative_logprob=sum(each.logprob or 0.0 for each in logprobs) if wanted else None,
    )


def _by_token(found: TokenLogprob) -> dict[int, Logprob]:
    """Of the chosen token, and of the likeliest."""
    assert found.logprob is not None, "only the first token of a prompt has none"
    listed = {found.token_id: Logprob(found.logprob, None, found.token)}
    for rank, each in enumerate(found.top, 1):
        assert each.logprob is not None
        listed[each.token_id] = Logprob(each.logprob, rank, each.token)
    return listed
