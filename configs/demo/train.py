"""Trains the demo model: writes its corpus, its tokenizer and its weights, in a few minutes on one GPU.

python -m configs.demo.train --device cuda --limit-s 150
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from actors.checkpoints.chatml import END_OF_TEXT, IM_END
from configs.demo import corpus, tokenizer

# B rows of a batch, T tokens of a row, V vocabulary

OUT = Path(__file__).parent / "model"
SizeName = Literal["demo", "tiny"]
PROMPTS = (
    "The future of artificial intelligence is",
    "Once upon a time",
    "The capital of France is",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n",
)
_HELD_OUT_BLOCKS = 4  # the first ones, so that they are the same for every size of the corpus
_TOKENIZER_BLOCKS = 24
_WARM_UP_STEPS = 100
_LONG_FROM = 0.85  # of the schedule: from here on in rows as long as the model may be asked for
_LOG_STEPS = 20  # between two looks at the loss, for which the device has to be waited for
_EVALUATIONS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int


SIZES: dict[SizeName, Size] = {
    "demo": Size(2048, 256, 448, 6, 4, 2, 4096),
    "tiny": Size(512, 32, 64, 2, 2, 1, 256),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the weights follow from.

    Attributes:
        blocks: of corpus.BLOCK_DOCUMENTS documents.
        row_tokens: of a row, in the first part of the schedule.
        limit_s: seconds after which training ends, corpus included; the schedule follows.
        held_out_rows: of the held-out text, for the last figure.
    """

    size: SizeName = "demo"
    seed: int = 0
    device: str = "cpu"
    blocks: int = 800
    steps: int = 20_000
    limit_s: float = math.inf
    batch_tokens: int = 65_536
    row_tokens: int = 512
    learning_rate: float = 3e-3
    held_out_rows: int = 512
    workers: int = 1
    compile: bool = False


class Block(NamedTuple):
    """A block of the corpus: token ids, and how many each document has."""

    tokens: np.ndarray[Any, np.dtype[np.uint16]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    characters: int


class Text(NamedTuple):
    """Documents one after the other, each with an end-of-text token."""

    tokens: Tensor  # one after the other, int32
    starts: Tensor  # where documents begin
    characters: int

    @classmethod
    def of(cls, blocks: list[Block], device: str) -> "Text":
        tokens = np.concatenate([block.tokens for block in blocks]).astype(np.int32)
        lengths = np.concatenate([block.lengths for block in blocks])
        starts = torch.from_numpy(np.cumsum(lengths) - lengths)
        characters = sum(block.characters for block in blocks)
        return cls(torch.from_numpy(tokens).to(device), starts.to(device), characters)

    def rows(self, starts: Tensor, length: int) -> Tensor:
        """Token ids from each start on, `[B, length]`; the text is taken as a ring."""
        at = starts[:, None] + torch.arange(length, device=starts.device)
        return self.tokens[at % len(self.tokens)].long()


def main() -> None:
    cuda = torch.cuda.is_available()
    default = Options()
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the checkpoint")
    parser.add_argument("--size", choices=list(SIZES), default=default.size)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--blocks", type=int, default=default.blocks, help="of 500 documents")
    parser.add_argument("--steps", type=int, default=default.steps, help="at most")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds in all, about")
    parser.add_argument("--batch-tokens", type=int, default=default.batch_tokens)
    parser.add_argument("--row-tokens", type=int, default=default.row_tokens)
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--held-out-rows", type=int, default=default.held_out_rows)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    arguments = vars(parser.parse_args())
    out: Path = arguments.pop("out")
    if threads := arguments.pop("threads"):
        torch.set_num_threads(threads)
    train(Options(**arguments), out)


def train(options: Options, out: Path) -> dict[str, Any]:
    """Train a model and write its checkpoint and `training.json` into a folder.

    Returns:
        What `training.json` has.
    """
    begun_s = time.monotonic()
    console = Console()
    size = SIZES[options.size]
    console.print(f"writing {options.blocks * corpus.BLOCK_DOCUMENTS} documents")
    # From blocks that are trained on, too; before CUDA is touched, since the processes are forked.
    first = range(_HELD_OUT_BLOCKS, _HELD_OUT_BLOCKS + min(options.blocks, _TOKENIZER_BLOCKS))
    bpe = tokenizer.train(corpus.documents(options.seed, first), size.vocab_size)
    blocks = _encoded_blocks(bpe, options)
    held_out = Text.of(blocks[:_HELD_OUT_BLOCKS], options.device)
    text = Text.of(blocks[_HELD_OUT_BLOCKS:], options.device)
    written_s = time.monotonic() - begun_s
    console.print(f"{len(text.tokens)} tokens in {written_s:.1f} s")

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model: Any = Qwen2ForCausalLM(_config(size, bpe))
    model.to(options.device)
    result = _fit(model, text, held_out, options, begun_s, console)
    model.to(torch.bfloat16)
    model.eval()
    result["held_out_loss"] = _loss_of(model, held_out, options, options.held_out_rows)
    _save(model, bpe, out)
    record = {
        **result,
        "corpus": {
            "documents": len(text.starts),
            "tokens": len(text.tokens),
            "characters": text.characters,
            "seconds": round(written_s, 1),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "checkpoint_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "seconds": round(time.monotonic() - begun_s, 1),
        "options": asdict(options) | {"limit_s": _finite(options.limit_s)},
        "size": asdict(size),
        "hardware": _hardware(options.device),
        "versions": {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "samples": _samples(model, bpe, options),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    console.print_json(data=record)
    return record


# --- text ---


def _encoded_blocks(bpe: Tokenizer, options: Options) -> list[Block]:
    indices = range(options.blocks + _HELD_OUT_BLOCKS)
    encode = partial(_encoded_block, options.seed, bpe.to_str())
    if options.workers == 1:
        return list(map(encode, indices))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.workers, context, _one_thread) as pool:
        return list(pool.map(encode, indices, chunksize=8))


def _one_thread() -> None:
    """In a process of the pool: tokenizers' own threads would not survive a fork."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encoded_block(seed: int, bpe_json: str, index: int) -> Block:
    bpe = _tokenizer(bpe_json)
    end = bpe.token_to_id(END_OF_TEXT)
    documents = corpus.block(seed, index)
    ids = [[*encoding.ids, end] for encoding in bpe.encode_batch_fast(documents)]
    return Block(
        np.fromiter(chain.from_iterable(ids), np.uint16),
        np.array([len(each) for each in ids], np.int64),
        sum(map(len, documents)),
    )


@cache
def _tokenizer(bpe_json: str) -> Tokenizer:
    return Tokenizer.from_str(bpe_json)


# --- model ---


def _config(size: Size, bpe: Tokenizer) -> Qwen2Config:
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=bpe.token_to_id(IM_END),
        pad_token_id=bpe.token_to_id(END_OF_TEXT),
        **asdict(size),
    )


def _fit(
    model: Any,
    text: Text,
    held_out: Text,
    options: Options,
    begun_s: float,
    console: Console,
) -> dict[str, Any]:
    model.train()
    forward = torch.compile(model) if options.compile else model
    optimizer = _optimizer(model, options)
    generator = torch.Generator(options.device).manual_seed(options.seed)
    started_s = time.monotonic()
    step = tokens = 0
    loss = torch.zeros(())
    seen = math.nan
    history: list[dict[str, Any]] = []
    for step, done in _schedule(options, started_s, begun_s, console):
        longest = model.config.max_position_embeddings
        length = longest if done >= _LONG_FROM else min(options.row_tokens, longest)
        rows = max(1, options.batch_tokens // length)
        chosen = torch.randint(
            len(text.starts), (rows,), generator=generator, device=options.device
        )
        rate = options.learning_rate * min(1, step / _WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * done))
        loss = _loss(forward, text.rows(text.starts[chosen], length + 1), options.device)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += rows * length
        if step % _LOG_STEPS == 0:
            seen = loss.item()  # waits for the device, so that the schedule follows its time
        if done * _EVALUATIONS >= len(history) + 1:
            seen = loss.item()
            entry = {"step": step, "train_loss": seen}
            entry["held_out_loss"] = _loss_of(
                model, held_out, options, min(64, options.held_out_rows)
            )
            history.append(entry)
            passed_s = time.monotonic() - started_s
            console.print(
                f"step {step}: {100 * done:.0f} %, loss {seen:.3f}, held out "
                f"{entry['held_out_loss']:.3f}, {tokens / passed_s:.0f} tokens/s"
            )
    seen = loss.item()
    seconds = time.monotonic() - started_s
    return {
        "steps": step,
        "tokens": tokens,
        "training_seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "train_loss": seen,
        "history": history,
    }


def _schedule(
    options: Options, started_s: float, begun_s: float, console: Console
) -> Iterator[tuple[int, float]]:
    """Steps from 1 on, each with the part of the schedule that is over, by steps or by time."""
    allowed_s = options.limit_s - (started_s - begun_s)
    if allowed_s <= 0:
        raise ValueError(f"limit_s {options.limit_s:g} is over before the first step")
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.percentage:.1f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=1.0)
        for step in range(1, options.steps + 1):
            passed_s = time.monotonic() - started_s
            done = max((step - 1) / options.steps, passed_s / allowed_s)
            if done >= 1:
                return
            progress.update(task, completed=done)
            yield step, done


def _optimizer(model: nn.Module, options: Options) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]  # norms and biases do not decay
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=options.device.startswith("cuda"),
    )


def _loss(model: Any, rows_BT: Tensor, device: str) -> Tensor:
    """Mean loss of every next token, in nats."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
        logits_BTV = model(input_ids=rows_BT[:, :-1], use_cache=False).logits
    return cross_entropy(logits_BTV.float().flatten(0, 1), rows_BT[:, 1:].flatten())


@torch.no_grad()
def _loss_of(model: Qwen2ForCausalLM, text: Text, options: Options, rows: int) -> float:
    """Loss on so many rows from the beginning of a text, or on as many as it has."""
    length = min(options.row_tokens, model.config.max_position_embeddings)
    starts = torch.arange(0, len(text.tokens) - length, length, device=text.starts.device)[:rows]
    at_once = max(1, options.batch_tokens // length)
    losses = [
        _loss(model, text.rows(part, length + 1), options.device).double() * len(part)
        for part in torch.split(starts, at_once)
    ]
    return torch.stack(losses).sum().item() / len(starts)


# --- what is written ---


def _save(model: Qwen2ForCausalLM, bpe: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(out)
    end_of_text, im_end = (bpe.token_to_id(t) for t in (END_OF_TEXT, IM_END))
    GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        eos_token_id=[im_end, end_of_text],
        pad_token_id=end_of_text,
    ).save_pretrained(out)
    tokenizer.save(bpe, out)
    # The head is the embedding, so it is not among the parameters a second time.
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def _samples(model: Any, bpe: Tokenizer, options: Options) -> dict[str, str]:
    """What the model says to PROMPTS, drawn as generation_config.json has it."""
    torch.manual_seed(options.seed)
    samples: dict[str, str] = {}
    for prompt in PROMPTS:
        ids = torch.tensor([bpe.encode(prompt).ids], device=options.device)
        generated: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=80,
            do_sample=True,
            temperature=0.8,
            top_p=0.95,
            top_k=0,
            pad_token_id=bpe.token_to_id(END_OF_TEXT),
            eos_token_id=[bpe.token_to_id(t) for t in (IM_END, END_OF_TEXT)],
        )
        samples[prompt] = bpe.decode(generated[0, ids.shape[1] :].tolist())
    return samples


def _hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


if __name__ == "__main__":
    main()
