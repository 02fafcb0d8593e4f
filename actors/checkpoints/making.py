"""Checkpoints with random weights, in Hugging Face's layout: to try, test and measure without a download.

The same shape, options and seed give the same bytes, whatever device filled them in: a value is a hash
of its position, computed in integers, so that CPU and CUDA agree.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from actors.checkpoints.chatml import SPECIAL_TOKENS, byte_level, for_transformers
from actors.checkpoints.quantizing import quantised, write_index
from actors.checkpoints.recipes import RECIPE_FILE, DtypeName, ShapeName
from actors.checkpoints.writing import whole_directory, write_shard
from actors.quantization.formats import QuantizeName
from actors.quantization.making import Quantizer, is_quantized, quantizer

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all

RECIPE_VERSION = 1  # counts changes of the bytes that a recipe gives

_BASE_VOCAB_SIZE = 1024  # 256 bytes, the merges, the special tokens

# Spread of the weights. Linear maps amplify a little, so that every layer has its say; logits have a
# standard deviation of 4, so that the greedy token stands out from the second by far more than rounding.
_LINEAR_GAIN = 1.4
_LOGIT_STD = 4.0
_QUIET_SCALE = 0.25  # of the rows of tokens that are to come up rarely
_NORM_STD = 0.1  # around 1: swapped norms are to show in the output

_SHARD_BYTES = 4 * 1024**3
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # cache-sized; launch-cost-sized


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2 model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = _BASE_VOCAB_SIZE
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    dtype: DtypeName = "float32"
    # Single bytes come up rarely; else the output has broken characters, too.
    readable: bool = False


SHAPES: dict[ShapeName, Shape] = {
    "demo": Shape(384, 1280, 6, 6, 2, readable=True),
    "tiny": Shape(128, 256, 4, 4, 2),
    # config.json of deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B and -7B
    "deepseek-r1-distill-qwen-1.5b": Shape(
        1536, 8960, 28, 12, 2, 151936, max_position_embeddings=131072, dtype="bfloat16"
    ),
    "deepseek-r1-distill-qwen-7b": Shape(
        3584, 18944, 28, 28, 4, 152064, max_position_embeddings=131072, dtype="bfloat16"
    ),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything the bytes of a checkpoint follow from."""

    shape: ShapeName
    dtype: DtypeName
    seed: int
    tied: bool
    shards: int
    version: int = RECIPE_VERSION
    quantize: QuantizeName | None = None

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def write_checkpoint(
    directory: Path,
    shape: ShapeName,
    *,
    dtype: DtypeName | None = None,
    seed: int = 0,
    tied: bool = False,
    shards: int | None = None,
    quantize: QuantizeName | None = None,
    force: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> Path:
    """Write a random checkpoint, unless the directory holds the very same one already.

    It is written beside `directory` and renamed when complete. One shard at a time is in memory.

    Args:
        directory: where to; parents are made.
        shape: which sizes.
        dtype: of the weights; when absent the shape's own, or what such quantised checkpoints have.
        seed: another seed, other weights.
        tied: whether the output head shares the embedding's weights.
        shards: number of safetensors files at most; as many as keep each below 4 GiB when absent.
        quantize: how to quantise the projections, see `actors.quantization.making`; not at all when absent.
        force: write in any case, also over files that this function did not write.
        on_progress: told after every tensor.

    Returns:
        `directory`.

    Raises:
        ValueError: the name of the shape or of the recipe is unknown, or `directory` has something else in it.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; choose one of {', '.join(get_args(ShapeName))}")
    quantizing = None if quantize is None else quantizer(quantize)
    dtype = dtype or (SHAPES[shape].dtype if quantizing is None else quantizing.dtype)
    config = _config(SHAPES[shape], dtype, tied)
    tensors = _tensor_shapes(config)
    if shards is None:
        shards = math.ceil(_total_bytes(tensors, dtype) / _SHARD_BYTES)
    recipe = Recipe(shape, dtype, seed, tied, shards, quantize=quantize)
    if not force:
        if _is_complete(directory, recipe):
            return directory
        if (name := _foreign(directory)) is not None:
            raise ValueError(
                f"{directory} has files that are not ours, as {name}; --force replaces them"
            )

    with whole_directory(directory) as partial:
        _write_tokenizer(partial, config.vocab_size)
        config.save_pretrained(partial)
        if quantizing is not None:
            _add_to_config(partial, quantizing.config)
        _generation_config(config).save_pretrained(partial)
        _write_weights(partial, tensors, recipe, quantizing, on_progress)
        _write_recipe(partial, recipe)
    return directory


def _config(shape: Shape, dtype: DtypeName, tied: bool) -> Qwen2Config:
    end_of_text, _, im_end = _special_ids(shape.vocab_size)
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
        tie_word_embeddings=tied,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
    )


def _add_to_config(directory: Path, quantization: dict[str, Any]) -> None:
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": quantization}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _generation_config(config: Qwen2Config) -> GenerationConfig:
    return GenerationConfig(
        eos_token_id=[config.eos_token_id, config.pad_token_id], pad_token_id=config.pad_token_id
    )


def _tensor_shapes(config: Qwen2Config) -> dict[str, torch.Size]:
    """Names and shapes of the parameters, in forward order, each tied one once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _total_bytes(tensors: dict[str, torch.Size], dtype: DtypeName) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return sum(size.numel() for size in tensors.values()) * itemsize


# --- what is there already ---


def _is_complete(directory: Path, recipe: Recipe) -> bool:
    try:
        record = json.loads((directory / RECIPE_FILE).read_text())
        sizes = {name: (directory / name).stat().st_size for name in record["files"]}
        return bool(record["recipe"] == recipe.record() and record["files"] == sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _foreign(directory: Path) -> str | None:
    """What is in the way of a new checkpoint and not in the record of one that was made here."""
    if not directory.exists():
        return None
    if not directory.is_dir():
        return directory.name
    ours = {RECIPE_FILE, *_recorded(directory)}
    return min((path.name for path in directory.iterdir() if path.name not in ours), default=None)


def _recorded(directory: Path) -> list[str]:
    """Names of the files that were made with the record beside them; none if it cannot be read."""
    try:
        return [str(name) for name in json.loads((directory / RECIPE_FILE).read_text())["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write_recipe(directory: Path, recipe: Recipe) -> None:
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    record = {"recipe": recipe.record(), "files": files}
    (directory / RECIPE_FILE).write_text(json.dumps(record, indent=2) + "\n")


# --- tokenizer ---


def _special_ids(vocab_size: int) -> tuple[int, int, int]:
    return vocab_size - 3, vocab_size - 2, vocab_size - 1


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE trained on the text beside this file; every id of the model has a token."""
    trained = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=_BASE_VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).with_name("tokenizer_corpus.txt").read_text(encoding="utf-8")
    trained.train_from_iterator(text.splitlines(keepends=True), trainer)

    state = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = state["vocab"]
    _fill(vocab, vocab_size - len(SPECIAL_TOKENS))
    merges = [(left, right) for left, right in state["merges"]]
    tokenizer = byte_level(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    for_transformers(tokenizer).save_pretrained(directory)


def _fill(vocab: dict[str, int], size: int) -> None:
    """Add words that no merge leads to, so that a large random model says only what can be read."""
    number = 0
    while len(vocab) < size:
        number += 1
        vocab.setdefault(f"Ġ{_letters(number)}", len(vocab))  # Ġ is byte-level's space


def _letters(number: int) -> str:
    word = ""
    while number:
        number, digit = divmod(number - 1, 26)
        word = chr(ord("a") + digit) + word
    return word


# --- weights ---


def _write_weights(
    directory: Path,
    tensors: dict[str, torch.Size],
    recipe: Recipe,
    quantizing: Quantizer | None,
    on_progress: Progress,
) -> None:
    total = _total_bytes(tensors, recipe.dtype)
    shards = list(_split(tensors, recipe.shards))
    weight_map: dict[str, str] = {}
    done = stored = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        shard: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = _random_tensor(name, tensors[name], recipe)
            done += tensor.nbytes
            if quantizing is not None and is_quantized(name):
                shard.update(quantised(name.removesuffix(".weight"), tensor, quantizing))
            else:
                shard[name] = tensor
            on_progress(done, total)
        write_shard(shard, directory / file)
        stored += sum(tensor.nbytes for tensor in shard.values())
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        write_index(directory, weight_map, stored)


def _split(tensors: dict[str, torch.Size], shards: int) -> Iterator[list[str]]:
    """Names of the tensors of each shard: of about the same size, in order, none empty."""
    total = sum(size.numel() for size in tensors.values())
    groups: dict[int, list[str]] = {}
    start = 0
    for name, size in tensors.items():
        groups.setdefault(start * shards // total, []).append(name)
        start += size.numel()
    yield from groups.values()


def _random_tensor(name: str, size: torch.Size, recipe: Recipe) -> torch.Tensor:
    mean, std = _distribution(name, size)
    salt = hashlib.sha256(f"{recipe.seed}:{name}".encode()).digest()
    tensor = torch.empty(size, dtype=getattr(torch, recipe.dtype))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _fill_normal(
        tensor.view(-1), int.from_bytes(salt[:8], "little", signed=True), mean, std, device
    )
    if name.endswith(("lm_head.weight", "embed_tokens.weight")):
        tensor[-len(SPECIAL_TOKENS) :] *= _QUIET_SCALE  # generation ends rarely, but may
        if SHAPES[recipe.shape].readable:
            tensor[:256] *= _QUIET_SCALE  # the bytes are the first tokens
    return tensor


def _distribution(name: str, size: torch.Size) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's values."""
    if "norm" in name:
        return 1.0, _NORM_STD
    if name.endswith(("lm_head.weight", "embed_tokens.weight")):
        return 0.0, _LOGIT_STD / math.sqrt(size[-1])
    if name.endswith(".bias"):
        return 0.0, _NORM_STD
    return 0.0, _LINEAR_GAIN / math.sqrt(size[-1])


def _fill_normal(flat: torch.Tensor, salt: int, mean: float, std: float, device: str) -> None:
    """Fill with values close to normally distributed: sums of the four 16-bit parts of a hash.

    Integer arithmetic up to one multiplication and addition in float32, so that every device gives
    the same bytes.
    """
    scale = std / math.sqrt(4 * (65536**2 - 1) / 12)
    step = _CHUNK_ELEMENTS[device]
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        bits = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=device)
        _hash(bits.add_(salt))
        total = bits & 0xFFFF
        for shift in (16, 32, 48):
            total += (bits >> shift) & 0xFFFF
        values = (total - 2 * 65535).to(torch.float32)
        chunk.copy_(values.mul_(scale).add_(mean))


def _hash(bits: torch.Tensor) -> None:
    """Scramble 64-bit integers in place: one splitmix64 generator per element, seeded with it."""
    bits.mul_(-0x61C8864680B583EB)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        # torch shifts the sign in, splitmix64 shifts zeros in.
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
