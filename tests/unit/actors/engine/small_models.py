"""Small models on the CPU: their greedy tokens by the engine, and by a plain forward."""

import copy
import queue
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
import transformers as tf

from actors.engine.config import EngineConfig
from actors.engine.engine import TransformersEngine
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import SequenceSampling
from actors.image.decoder_layers import decoder_layers
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.text.sampling_defaults import ResolvedSampling

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TIE = 1e-4  # of the best two logits: rounding decides


def build(
    config: tf.PreTrainedConfig, dtype: torch.dtype = torch.float32, device: str = "meta"
) -> tf.PreTrainedModel:
    """A model with random weights; on meta without any."""
    with torch.device(device):
        return tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)


class OnCuda:
    """A model on meta that says it is on CUDA."""

    device = torch.device("cuda")

    def __init__(self, model: tf.PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def randomise(model: tf.PreTrainedModel) -> None:
    """Weights wide enough that answers are not one token over and over."""
    torch.manual_seed(0)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.2)
        elif not weights.any():  # a bias; of others ones are a start
            torch.nn.init.normal_(weights, std=0.05)


def lay_side_by_side(model: tf.PreTrainedModel) -> None:
    """Weights and biases of layers in one piece of memory, matrices first, as in an image."""
    for _, layer in decoder_layers(model):
        slots = [
            (module, name, parameter)
            for module in layer.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        slots.sort(key=lambda slot: slot[2].dim() <= 1)
        values = torch.cat([parameter.detach().reshape(-1) for _, _, parameter in slots])
        sizes = [parameter.numel() for _, _, parameter in slots]
        for (module, name, parameter), view in zip(slots, values.split(sizes), strict=True):
            placed = torch.nn.Parameter(view.view(parameter.shape), requires_grad=False)
            module._parameters[name] = placed


def steps(model: tf.PreTrainedModel, prompt: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Greedy tokens without any cache, each with the lead of its logit over the next; no end."""
    ids = list(prompt)
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        ids.append(int(logits.argmax()))
        yield ids[-1], best - second


def plain(model: tf.PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens without any cache."""
    found = list(islice(steps(model, prompt), count))
    assert min(lead for _, lead in found) > _TIE, "a tie: choose another seed"
    return [token for token, _ in found]


def generate(
    model: tf.PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    count: int,
    max_model_len: int | None = None,
) -> list[list[int]]:
    """The same by the engine, all prompts together."""
    outputs: queue.Queue[EngineOutput] = queue.Queue()

    def kv_arena(parts: Sequence[int]) -> DeviceArena:
        arena = DeviceArena(CpuDriver(), parts)
        arena.map()
        return arena

    limits = EngineConfig(
        page_size=8,
        num_blocks=64,
        max_batch_tokens=24,  # less than the longest prompt
        max_requests_per_batch=4,
        max_model_len=max_model_len,
    )
    engine = TransformersEngine(
        model, limits, kv_arena, lambda step: [outputs.put(output) for output in step]
    )
    params = ResolvedSampling(temperature=0.0, max_tokens=count)
    tokens: dict[str, list[int]] = {}
    try:
        for i, prompt in enumerate(prompts):
            tokens[str(i)] = []
            engine.submit(str(i), SequenceSampling(params, prompt, 0))
        running = len(prompts)
        while running:
            output = outputs.get(timeout=30)
            assert output.error is None
            tokens[output.sequence_id] += output.token_ids
            running -= output.finish is not None
    finally:
        engine.stop()
    return list(tokens.values())
