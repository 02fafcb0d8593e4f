"""Prompts with one right greedy answer, which is `model.generate`'s and nothing of ours."""

from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path

# Batches and cached prefixes change float32 logits in the sixth digit.
_MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class Puzzle:
    prompt: list[int]  # token ids
    max_tokens: int
    answer: str


def find_puzzles(checkpoint: Path, count: int, max_tokens: int) -> tuple[Puzzle, ...]:
    """Prompts whose answer does not hang on a rounding error.

    At every step the likeliest token's logit leads the next one's by more than `_MARGIN`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found: list[Puzzle] = []
    for number in numbers(1):
        length = 3 + 7 * number % 60
        prompt = [(17 * number + 31 * i * i) % 1000 for i in range(length)]
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.stack([step[0].topk(2).values for step in output.logits])
        if float((top[:, 0] - top[:, 1]).min()) <= _MARGIN:
            continue
        answer = tokenizer.decode(output.sequences[0, length:], skip_special_tokens=True)
        found.append(Puzzle(prompt, max_tokens, answer))
        if len(found) == count:
            break
    return tuple(found)
