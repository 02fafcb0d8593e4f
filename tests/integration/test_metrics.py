"""A tiny model asked, put to sleep and woken: the counts are exactly what was done."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from actors.observer import WakeCause
from actors.protocol import GenerateRequest, SamplingParams, SleepCommand, SleepMode
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from serve_app.front.metrics_page import ModelMetrics, render
from serve_app.front.peers import Totals
from serve_app.metrics.instruments import Instruments, gauges, saved_bytes
from serve_app.metrics.tally import Tally
from serve_app.models.model_client import Scrape
from tests.integration.runtime_harness import Harness, LastWorker, harness, load


class Replica:
    """Lifecycle, runtime and instruments, put together as `ModelReplica` does."""

    def __init__(self, h: Harness, instruments: Instruments) -> None:
        self.runtime, self.instruments = h.runtime, instruments
        self.lifecycle = Lifecycle(
            LastWorker(h.runtime),
            SleepConfig(),
            time.monotonic,
            "test",
            self.changed,
            observer=instruments,
        )
        self.totals = Totals()

    def changed(self) -> None:
        self.instruments.saves(saved_bytes(self.lifecycle, self.runtime))

    async def ask(self, prompt: str, *, leave_after: int | None = None, **sampling: object) -> int:
        """One request, whose client may leave; returns the tokens of its prompt."""
        n = sampling.pop("n", 1)
        params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
        prepared = self.runtime.prepare(GenerateRequest("r", prompt, params, n=n))  # type: ignore[arg-type]
        seen = 0
        async with (
            self.lifecycle.serving("r"),
            aclosing(self.runtime.generate(prepared)) as events,  # type: ignore[type-var]
        ):
            async for event in events:
                seen += len(event.token_ids)
                if leave_after is not None and seen >= leave_after:
                    break
        return len(prepared.prompt_ids)

    def scrape(self) -> dict[str, float]:
        """Every sample as its name and own labels, sums and gauges alike."""
        self.changed()
        now = gauges(self.lifecycle, self.runtime, waits_for_card=False)
        found = self.instruments.snapshot("replica-0", self.lifecycle.state, now)
        model = ModelMetrics("tiny", self.totals.update([found]), Scrape([found]))
        samples = {}
        for family in text_string_to_metric_families(render([model]).decode()):
            for sample in family.samples:
                own = {k: v for k, v in sample.labels.items() if k not in ("engine", "replica")}
                assert own.pop("model_name") == "tiny"
                labels = ",".join(f"{name}={value}" for name, value in sorted(own.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples


def nonzero(samples: dict[str, float], *kinds: str) -> dict[str, float]:
    """The samples of these metrics that are not 0, without their buckets."""
    return {
        name: value
        for name, value in samples.items()
        if value and name.startswith(kinds) and "_bucket" not in name
    }


def test_counts_are_exactly_what_was_done(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        instruments = Instruments(Tally(), time.monotonic)
        image = load(tiny_checkpoint)
        async with (
            asyncio.timeout(60),
            harness(tiny_checkpoint, image, awake=False, observer=instruments) as h,
        ):
            replica = Replica(h, instruments)
            await replica.lifecycle.wake_up("start", WakeCause.START)
            await h.runtime.settled()

            lengths = [3, 5, 8, 13]
            prompts = await asyncio.gather(
                *(replica.ask(f"Prompt {n}", max_tokens=n, ignore_eos=True) for n in lengths)
            )
            three = await replica.ask("Three", max_tokens=4, ignore_eos=True, n=3)
            awake = replica.scrape()
            counted = nonzero(awake, "vllm:prompt_t", "vllm:gen", "vllm:request_success")
            assert counted == {
                "vllm:prompt_tokens_total": sum(prompts) + 3 * three,
                "vllm:generation_tokens_total": sum(lengths) + 12,
                "vllm:request_success_total{finished_reason=length}": 7,
            }
            for name in (
                "time_to_first_token_seconds",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_inference_time_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
            ):
                assert awake[f"vllm:{name}_count"] == 7, name
                assert awake[f"vllm:{name}_sum"] > 0, name
            assert awake["vllm:request_generation_tokens_sum"] == sum(lengths) + 12
            assert awake["vllm:request_generation_tokens_bucket{le=5.0}"] == 5
            assert awake["vllm:request_prompt_tokens_sum"] == sum(prompts) + 3 * three
            # One for each token after the first: nothing was read twice, nothing left out.
            assert awake["vllm:inter_token_latency_seconds_count"] == sum(lengths) + 12 - 7
            mapped = h.worker.memory.mapped_bytes
            image = h.worker.memory.image
            assert image is not None
            assert nonzero(awake, "sleepserve_image_bytes") == {
                "sleepserve_image_bytes{kind=host}": image.manifest.stored_bytes,
                "sleepserve_image_bytes{kind=device}": h.worker.memory.weights_bytes,
            }
            assert awake["sleepserve_device_memory_bytes{kind=mapped}"] == mapped
            assert nonzero(awake, "sleepserve_device_saved", "vllm:engine") == {
                "vllm:engine_sleep_state{sleep_state=awake}": 1
            }

            await replica.lifecycle.sleep(SleepCommand(level=2))
            slept_s = time.monotonic()
            asleep = replica.scrape()
            assert asleep["vllm:engine_sleep_state{sleep_state=discard_all}"] == 1
            assert asleep["vllm:engine_sleep_state{sleep_state=awake}"] == 0
            assert nonzero(asleep, "sleepserve_image_bytes") == {}
            assert asleep["sleepserve_device_saved_bytes"] == mapped
            await replica.ask("wakes it", max_tokens=2, ignore_eos=True)
            await h.runtime.settled()
            woken_s = time.monotonic()
            await replica.ask("leaves", max_tokens=100, ignore_eos=True, leave_after=2)
            await h.until_free()

            async def aborted() -> None:
                await replica.ask("aborted", max_tokens=100, ignore_eos=True)

            running = asyncio.create_task(aborted())
            while not h.worker.engine_stats().running:
                await asyncio.sleep(0)
            await replica.lifecycle.sleep(SleepCommand(level=1, mode=SleepMode.ABORT))
            await running

            after = replica.scrape()
            assert nonzero(after, "vllm:request_success") == {
                "vllm:request_success_total{finished_reason=length}": 8,
                "vllm:request_success_total{finished_reason=abort}": 2,
            }
            assert nonzero(
                after, "sleepserve_wakes", "sleepserve_sleeps", "sleepserve_wake_checks"
            ) == {
                "sleepserve_wakes_total{cause=start,result=ok}": 1,
                "sleepserve_wakes_total{cause=request,result=ok}": 1,
                "sleepserve_sleeps_total{cause=command,level=1}": 1,
                "sleepserve_sleeps_total{cause=command,level=2}": 1,
                "sleepserve_wake_checks_total{result=intact}": 2,
            }
            assert after["sleepserve_wake_seconds_count"] == 2
            assert after["sleepserve_wake_wait_seconds_count"] == 1
            assert after["sleepserve_wake_wait_seconds_sum"] > 0
            phases = {
                phase: after[f"sleepserve_wake_phase_seconds_count{{phase={phase}}}"]
                for phase in ("image", "map", "copy", "check")
            }
            assert phases == {"image": 1, "map": 2, "copy": 2, "check": 2}
            assert after["sleepserve_restored_bytes_total"] == 2 * h.worker.memory.weights_bytes
            saved = after["sleepserve_device_saved_byte_seconds_total"]
            assert 0 < saved < mapped * (woken_s - slept_s) + mapped * (time.monotonic() - woken_s)
            assert after["vllm:engine_sleep_state{sleep_state=weights_offloaded}"] == 1
            falling = {
                name: (awake[name], after[name])
                for name in awake
                if name.partition("{")[0].endswith(("_total", "_sum", "_count", "_bucket"))
                and after[name] < awake[name]
            }
            assert falling == {}

    asyncio.run(scenario())
