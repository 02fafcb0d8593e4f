"""The engine on CUDA: kernels, graphs, sleep in between; against a plain forward in float32."""

import copy
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import transformers as tf

from actors.engine import graphs
from actors.engine.config import EngineConfig
from actors.engine.engine import EngineOutput, TransformersEngine
from actors.engine.sampling import RawLogprob, SequenceSampling
from actors.engine.sampling_defaults import ResolvedSampling
from actors.engine.sizing import PREFILL_SIZES
from actors.memory.arena import DeviceArena

pytestmark = pytest.mark.gpu

VOCAB = 160
BASE = {
    "vocab_size": VOCAB,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def heads(num_q: int, num_kv: int, head_dim: int) -> dict[str, int]:
    return {
        "num_attention_heads": num_q,
        "num_key_value_heads": num_kv,
        "hidden_size": num_q * head_dim,
    }


MODELS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "qwen2, 64": lambda: tf.Qwen2Config(**BASE, **heads(4, 2, 64)),
    "llama, 7 x 128": lambda: tf.LlamaConfig(**BASE, **heads(7, 1, 128)),
    "gpt_neox, 80": lambda: tf.GPTNeoXConfig(**BASE, num_attention_heads=4, hidden_size=320),
    "phi3, 96": lambda: tf.Phi3Config(**BASE, **heads(4, 4, 96)),
    "qwen3, 256": lambda: tf.Qwen3Config(**BASE, **heads(4, 2, 64), head_dim=256),
    "qwen3_moe, 64": lambda: tf.Qwen3MoeConfig(
        **BASE,
        **heads(4, 2, 64),
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "gpt2, 64": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=256, n_layer=3, n_head=4, n_positions=1024, pad_token_id=0
    ),
    "mistral, window": lambda: tf.MistralConfig(**BASE, **heads(4, 2, 64), sliding_window=48),
    "gemma3, hybrid": lambda: tf.Gemma3TextConfig(
        **BASE, **heads(4, 2, 64), head_dim=64, sliding_window=48
    ),
    "gemma2, soft caps": lambda: tf.Gemma2Config(
        **BASE, **heads(4, 2, 64), head_dim=64, sliding_window=48
    ),
}
# Experts of float16 cannot be captured.
DTYPES = {"qwen3_moe, 64": torch.bfloat16}
IN_PAGES = [name for name in MODELS if name.split(",")[0] not in ("mistral", "gemma3", "gemma2")]
LIMITS = EngineConfig(page_size=16, num_blocks=256, max_batch_tokens=128, max_requests_per_batch=5)
LENGTHS = (1, 7, 40, 150, 300, 16, 33)


class PoisonedDriver:
    """Device memory that is all NaN whenever it was mapped anew."""

    device = torch.device("cuda", 0)
    granularity = 512

    def __init__(self) -> None:
        self._ranges: dict[int, torch.Tensor] = {}

    def reserve(self, size: int) -> int:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._ranges[memory.data_ptr()] = memory
        return memory.data_ptr()

    def map(self, address: int, size: int) -> None:
        self._ranges[address].fill_(255)

    def unmap(self, address: int, size: int) -> None:
        self._ranges[address].fill_(255)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return self._ranges[address][:size]


@dataclass
class Harness:
    engine: TransformersEngine
    model: tf.PreTrainedModel
    reference: tf.PreTrainedModel  # the same weights in float32
    plain: tf.PreTrainedModel  # and in half precision, as transformers runs them
    arena: DeviceArena
    outputs: "queue.Queue[EngineOutput]"
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[RawLogprob]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 40, **sampling: object) -> str:
        name = f"s{len(self.prompts)}"
        params = ResolvedSampling(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
        self.prompts[name], self.tokens[name], self.logprobs[name] = prompt, [], []
        self.running.add(name)
        self.engine.submit(name, SequenceSampling(params, prompt, params.seed or 0))
        return name

    def step(self) -> None:
        """Take one output."""
        output = self.outputs.get(timeout=60)
        assert output.error is None, output.error
        if output.sequence_id not in self.running:
            return
        self.tokens[output.sequence_id] += output.token_ids
        self.logprobs[output.sequence_id] += output.logprobs or ()
        if output.finish is not None:
            self.running.remove(output.sequence_id)

    def cancel(self, name: str) -> None:
        self.running.remove(name)
        self.engine.cancel(name)

    def finish(self) -> None:
        while self.running:
            self.step()

    def scores(self, name: str, model: tf.PreTrainedModel | None = None) -> torch.Tensor:
        """A model's (the reference's) logits for each token that the engine gave, given those before."""
        ids = torch.tensor([[*self.prompts[name], *self.tokens[name]]], device="cuda")
        with torch.no_grad():
            logits = (model or self.reference)(ids, use_cache=False).logits[0].float()
        return logits[len(self.prompts[name]) - 1 : -1]

    def check_greedy(self, *names: str) -> None:
        """Every token is the reference's, but for ties within half precision's rounding.

        Whoever takes the best of scores that are wrong by e at most takes one that is 2e behind at
        most. e is what half precision costs transformers' own forward over the same tokens; twice
        that is granted, because kernels that sum in another order round differently. So is twice as
        often another token as that forward's, where it is not the reference's in 3 of 200.
        """
        equal = plain_equal = total = 0
        worst = worst_error = 0.0
        for name in names or self.tokens:
            if not self.tokens[name]:
                continue  # cancelled before its first
            scores = self.scores(name)
            plain = self.scores(name, self.plain)
            error = float((plain - scores).abs().max())
            plain_equal += int((plain.argmax(-1) == scores.argmax(-1)).sum())
            chosen = torch.tensor(self.tokens[name], device="cuda")
            behind = scores.amax(-1) - scores.gather(1, chosen[:, None])[:, 0]
            assert float(behind.max()) <= 2 * (2 * error), name
            equal += int((behind == 0).sum())
            total += len(chosen)
            worst, worst_error = max(worst, float(behind.max())), max(worst_error, error)
        print(
            f"{equal}/{total} equal, transformers' own {plain_equal}; "
            f"behind by {worst:.4f}, rounding {worst_error:.4f}"
        )
        granted = max(1, 0.03 * total, 2 * (total - plain_equal))
        assert total - equal <= granted, f"{equal} of {total} tokens equal, {plain_equal} by then"

    def compile(self) -> None:
        """Compiled in the background, put to use between two steps."""
        assert self.engine.compiles
        self.engine.compile()
        self.engine.pause()
        self.engine.drop_kv()
        self.engine.use_compiled()
        self.engine.prepare_wake()
        self.engine.resume()

    def lose_and_restore(self) -> None:
        """What a sleep does: everything on the device is gone, then the weights are there again."""
        self.engine.pause()
        self.engine.drop_kv()
        kept = [parameter.detach().cpu() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)
            self.arena.unmap()
            self.arena.map()
            for parameter, old in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(old)
        self.engine.prepare_wake()
        torch.cuda.synchronize()
        self.engine.resume()


def route_by_token(model: tf.PreTrainedModel) -> None:
    """Let each token's embedding choose its experts, by far.

    A rounding may turn a tie between experts into another expert, and then the scores are anything:
    of this model's logits bfloat16 moves most by 0.06, and some by 1.6.
    """
    count = model.config.num_experts
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for row in model.get_input_embeddings().weight:  # nothing below writes to these dimensions
            row[:count] = 0.1 * torch.randperm(count, generator=random)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight[:count] = 0
            layer.mlp.experts.down_proj[:, :count] = 0
            layer.mlp.gate.weight.zero_()[:, :count] = torch.eye(count).roll(number, 0)


@contextmanager
def running(
    config: tf.PreTrainedConfig, limits: EngineConfig, dtype: torch.dtype = torch.float16
) -> Iterator[Harness]:
    config.initializer_range = 0.1  # wide enough that the winner is clear
    torch.manual_seed(0)
    reference = tf.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    if hasattr(config, "num_experts"):
        route_by_token(reference)
    with torch.no_grad():
        for ours, exact in zip(model.parameters(), reference.parameters(), strict=True):
            ours.copy_(exact)
            exact.copy_(ours)
    model.cuda()
    reference.cuda()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    arenas: list[DeviceArena] = []
    outputs: queue.Queue[EngineOutput] = queue.Queue()

    def kv_arena(parts: Sequence[int]) -> DeviceArena:
        arenas.append(DeviceArena(PoisonedDriver(), parts))  # type: ignore[arg-type]
        arenas[0].map()
        return arenas[0]

    def sink(step: Sequence[EngineOutput]) -> None:
        for output in step:
            outputs.put(output)

    engine = TransformersEngine(model, limits, kv_arena, sink)
    try:
        engine.pause()
        engine.warm_up()
        engine.prepare_wake()
        engine.resume()
        yield Harness(engine, model, reference, plain, arenas[0], outputs)
    finally:
        engine.stop()


def prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB, (n,), generator=random).tolist()) for n in lengths]


def come_and_go(h: Harness) -> None:
    """More sequences than a batch has rows, of mixed lengths, joining, leaving and cancelled."""
    first = [h.submit(p, 20 + 9 * i) for i, p in enumerate(prompts(0))]
    for _ in range(30):
        h.step()
    if first[4] in h.running:
        h.cancel(first[4])
    for i, prompt in enumerate(prompts(1)):
        h.submit(prompt, 45 - 5 * i)
        for _ in range(7):
            h.step()
    h.finish()


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    replays, original = [0], torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        original(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", replay)
        yield replays


@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_that_of_a_plain_forward(name: str, use_graphs: bool) -> None:
    limits = LIMITS.model_copy(update={"use_cuda_graphs": use_graphs})
    dtype = DTYPES.get(name, torch.float16)
    with running(MODELS[name](), limits, dtype) as h, counted_replays() as replays:
        come_and_go(h)
        h.check_greedy()
        assert (replays[0] > 0) == (use_graphs and name in IN_PAGES)


def test_experts_that_cannot_be_captured_run_without_graphs() -> None:
    with running(MODELS["qwen3_moe, 64"](), LIMITS) as h, counted_replays() as replays:
        come_and_go(h)
        h.check_greedy()
        assert replays[0] == 0


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_first_batch_after_a_wake_does_not_queue_behind_the_weights(use_async: bool) -> None:
    """What the device copies from pinned memory arrives in order; the batch's inputs come last."""
    host = torch.empty(2**32, dtype=torch.uint8, pin_memory=True)  # 80 ms of a fast link
    target, beside = torch.empty_like(host, device="cuda"), torch.cuda.Stream()
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h:
        h.submit((5, 6, 7), 4)
        h.finish()
        for number in range(3):
            h.engine.pause()
            h.engine.prepare_wake()
            copied = torch.cuda.Event()
            with torch.cuda.stream(beside):
                target.copy_(host, non_blocking=True)
                copied.record(beside)
            h.submit((8 + number, 9, 10), 1)
            h.engine.resume()
            h.finish()
            assert not copied.query()
            copied.synchronize()
        h.check_greedy()


def test_prompts_of_many_lengths_in_one_batch() -> None:
    """Prefills that are replayed, padded, and those that are too long for it."""
    limits = EngineConfig(num_blocks=64, max_batch_tokens=4096, max_requests_per_batch=16)
    longest = PREFILL_SIZES[-1]
    lengths_of_batches: list[tuple[int, ...]] = [(1,), (15,), (16,), (17,), (3, 4, 5), (100, 156)]
    lengths_of_batches += [(256,), (257,), (900,), (1000, 900), (longest,), (longest + 1,)]
    config = MODELS["qwen2, 64"]()
    config.max_position_embeddings = 2 * longest
    with running(config, limits) as h, counted_replays() as replays:
        h.engine.pause()
        h.engine.resume()
        h.submit((5, 6, 7), 1)
        h.finish()
        for lengths in lengths_of_batches:
            before = replays[0]
            for prompt in prompts(sum(lengths), lengths):
                h.submit(prompt, 1)
            h.finish()
            if len(lengths) == 1:
                assert replays[0] - before == (lengths[0] <= longest)
        h.check_greedy()


def test_bfloat16_and_large_pages() -> None:
    limits = EngineConfig(num_blocks=16, max_batch_tokens=512, max_requests_per_batch=8)
    with running(MODELS["qwen2, 64"](), limits, torch.bfloat16) as h:
        come_and_go(h)
        names = list(h.tokens)
        equal = sum(
            int((h.scores(n).argmax(-1).cpu() == torch.tensor(h.tokens[n])).sum()) for n in names
        )
        assert equal >= 0.93 * sum(len(h.tokens[n]) for n in names)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_cancelled_in_the_step_that_fills_a_page(use_async: bool) -> None:
    """The batch in flight holds sequences that have no blocks any more."""
    limits = LIMITS.model_copy(
        update={"use_async_batching": use_async, "max_requests_per_batch": 2 * LIMITS.page_size}
    )
    with running(MODELS["qwen2, 64"](), limits) as h:
        stays = h.submit((5, 6, 7), 400)
        for number in range(8):
            # In every step one of them fills a page.
            leaving = [h.submit(p, 60) for p in prompts(number, tuple(range(17, 33)))]
            while not all(len(h.tokens[name]) > 2 for name in leaving):
                h.step()
            for name in leaving:
                h.cancel(name)
        assert stays in h.running, "all were cancelled while it ran"
        h.finish()
        assert len(h.tokens[stays]) == 400
        h.check_greedy(stays)


def test_nothing_is_captured_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(MODELS["qwen2, 64"](), LIMITS) as h:

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("captured in the middle of serving")

        monkeypatch.setattr(torch.cuda, "graph", refuse)
        come_and_go(h)
        h.check_greedy()


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_sequences_and_graphs_survive_losing_everything(use_async: bool) -> None:
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["llama, 7 x 128"](), limits) as h, counted_replays() as replays:
        for prompt in prompts(0):
            h.submit(prompt, 80)
        for _ in range(5):
            for _ in range(37):
                h.step()
            h.lose_and_restore()
        before = replays[0]
        h.finish()
        assert replays[0] > before
        assert all(len(tokens) == 80 for tokens in h.tokens.values())
        h.check_greedy()


@pytest.fixture
def no_recompiles() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("no_recompiles")
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_compiled_layers_take_over_in_the_middle(
    name: str, use_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MANY", 100)  # so that prefills without a graph are compiled, too
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    dtype = DTYPES.get(name, torch.float16)
    with running(MODELS[name](), limits, dtype) as h, counted_replays() as replays:
        for prompt in prompts(0):
            h.submit(prompt, 60)
        for _ in range(50):
            h.step()
        h.compile()
        torch.compiler.set_stance("fail_on_recompile")
        before = replays[0]
        come_and_go(h)
        h.lose_and_restore()
        come_and_go(h)
        assert replays[0] > before
        h.check_greedy()


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_first_batch_after_a_wake_runs_module_by_module(use_async: bool) -> None:
    """A graph has no hooks that could hold it until its weights are there."""
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h, counted_replays() as replays:
        ran: list[int] = []
        h.model.model.layers[1].register_forward_pre_hook(lambda *_: ran.append(replays[0]))
        h.submit((7,), 1)  # a prompt that a decode step's graph would do for
        h.finish()
        assert ran[0] == 0
        ran.clear()
        h.submit((7,), 1)
        h.submit(prompts(3)[2], 1)
        h.finish()
        assert not ran, "short prompts are replayed otherwise"
        h.engine.pause()
        h.engine.prepare_wake()
        h.engine.resume()
        h.submit(prompts(3)[2], 3)
        h.finish()
        assert len(ran) == 1
        h.check_greedy()


@contextmanager
def recorded_logits() -> Iterator[list[torch.Tensor]]:
    """Of each batch, in order."""
    found: list[torch.Tensor] = []
    original = graphs.GraphRunner._sample_tokens

    def sample(runner: graphs.GraphRunner, logits_BV: torch.Tensor, *args: object) -> None:
        found.append(logits_BV.clone())
        original(runner, logits_BV, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.GraphRunner, "_sample_tokens", sample)
        yield found


@pytest.mark.usefixtures("no_recompiles")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_first_batch_after_a_wake_rounds_like_those_before(name: str, compiled: bool) -> None:
    """It runs without a graph; the same prompt has to come to the same logits to the last bit."""
    with running(MODELS[name](), LIMITS, DTYPES.get(name, torch.float16)) as h:
        h.submit((5, 6, 7), 3)
        h.finish()
        if compiled:
            h.compile()
            h.submit((5, 6, 7), 3)
            h.finish()
        for length in (7, 33, 100):
            logits = []
            for wakes in (False, True, False):
                h.engine.pause()
                h.engine.drop_kv()
                if wakes:
                    h.engine.prepare_wake()
                h.engine.resume()
                with recorded_logits() as found:
                    h.submit(prompts(length, (length,))[0], 4)
                    h.finish()
                torch.cuda.synchronize()
                logits.append(found)
            assert [len(found) for found in logits] == [len(logits[0])] * 3
            for replayed, gated, again in zip(*logits, strict=True):
                assert torch.equal(replayed, gated)
                assert torch.equal(replayed, again)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_first_token_waits_for_no_second_batch(use_async: bool) -> None:
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h:
        steps = 0
        launch = h.engine._manager._generation_step

        def count() -> None:
            nonlocal steps
            launch()
            steps += 1

        seen: list[int] = []
        deliver = h.engine._manager.output_router._sink

        def sink(outputs: Sequence[EngineOutput]) -> None:
            seen.append(steps)
            deliver(outputs)

        h.engine._manager._generation_step = count
        h.engine._manager.output_router._sink = sink
        h.submit(prompts(0)[2], 5)
        h.finish()
        assert seen[0] == 1


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_batch_with_wishes_of_every_kind(use_async: bool) -> None:
    """Log-probabilities, penalties, bias and sampling beside greedy sequences, all on graphs."""
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h, counted_replays() as replays:
        a, b, c, d, e = prompts(2, (9, 30, 5, 60, 12))
        greedy = [h.submit(a), h.submit(b)]
        listed = h.submit(c, logprobs=3)
        frequent = h.submit(d, frequency_penalty=1.5)
        biased = h.submit(e, 6, logit_bias={77: 100.0})
        h.finish()
        sampled = [h.submit(a, temperature=1.0, top_p=0.9, seed=s) for s in (3, 3, 4)]
        h.finish()
        assert replays[0] > 0
        h.check_greedy(*greedy, listed)
        assert h.tokens[biased] == [77] * 6
        assert h.tokens[sampled[0]] == h.tokens[sampled[1]] != h.tokens[sampled[2]]
        exact = h.scores(listed).log_softmax(-1)
        assert [entry.token_id for entry in h.logprobs[listed]] == h.tokens[listed]
        for row, entry in enumerate(h.logprobs[listed]):
            assert abs(entry.logprob - float(exact[row, entry.token_id])) < 0.05
            assert len(entry.top) == 3
        scores = h.scores(frequent)
        for row, token in enumerate(h.tokens[frequent]):
            for earlier in h.tokens[frequent][:row]:
                scores[row, earlier] -= 1.5
            behind = float(scores[row].max() - scores[row, token])
            assert behind < 0.05 * float(scores[row].std()), row
