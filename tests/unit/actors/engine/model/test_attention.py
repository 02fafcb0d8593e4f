"""Which attention a model gets, and that of the CPU against float64."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import masking_utils

from actors.engine.model import attention
from actors.engine.model.paged_step import (
    GatheredView,
    GroupRows,
    LayerPages,
    PagedStep,
    computing,
)
from tests.unit.actors.engine.small_models import SMALL, OnCuda, build, generate


def on_cuda(config: tf.PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[str, bool]:
    """The attention of a model, and whether it reads pages, on a card."""
    model = OnCuda(build(config, dtype))
    name = attention.choose_attention(model)  # type: ignore[arg-type]
    return name, attention.decodes_in_pages(model)  # type: ignore[arg-type]


def test_plain_models_get_ours_and_read_pages_on_a_card() -> None:
    model = build(tf.Qwen2Config(**SMALL), device="cpu")
    assert attention.choose_attention(model) == attention.NAME
    assert model.config._attn_implementation == attention.NAME
    assert not attention.decodes_in_pages(model)  # there is no such kernel for CPUs
    assert on_cuda(tf.Qwen2Config(**SMALL)) == (attention.NAME, True)


def test_what_the_kernels_cannot_do_is_gathered() -> None:
    for config, dtype in (
        (tf.Qwen2Config(**SMALL), torch.float32),
        (tf.Qwen3Config(**SMALL, head_dim=12), torch.bfloat16),
        (tf.Qwen3Config(**SMALL, head_dim=512), torch.bfloat16),
        (tf.MistralConfig(**SMALL, sliding_window=16), torch.bfloat16),
        (tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=16), torch.bfloat16),
    ):
        assert on_cuda(config, dtype) == (attention.NAME, False)


def test_caps_and_sinks_are_left_to_who_wrote_the_model() -> None:
    soft_capped = tf.Gemma2Config(**SMALL, head_dim=8)
    assert soft_capped.attn_logit_softcapping
    with_sinks = tf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    for config in (soft_capped, with_sinks):
        assert on_cuda(config) == (attention.OWN, False)


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((3, 3), 80), ((7, 1), 8)], ids=str)
def test_sequences_see_their_own_tokens_only(
    heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    """Whole prompts, their later parts and single tokens in one step."""
    new, cached = (5, 1, 12, 1, 1, 30), (0, 0, 9, 40, 7, 0)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, sum(new) + (0 if i == 0 else sum(cached)), head_dim)
        for i, count in enumerate((heads[0], heads[1], heads[1]))
    )
    ends_q = torch.tensor((0, *new)).cumsum(0).tolist()
    ends_k = (torch.tensor((0, *new)) + torch.tensor((0, *cached))).cumsum(0).tolist()

    def out(key: Tensor, value: Tensor) -> Tensor:
        """With what is cached in rows of a layer that lie anywhere."""
        parts_k, parts_v = (
            x[0].split_with_sizes(
                [part for pair in zip(cached, new, strict=True) for part in pair], 1
            )
            for x in (key, value)
        )
        where = torch.randperm(sum(cached) + sum(new) + 9)[9:]
        old, slots = where.split_with_sizes([sum(cached), sum(new)])
        k_rows, v_rows = torch.full((2, len(where) + 9, heads[1], head_dim), torch.nan)
        for rows, parts in ((k_rows, parts_k), (v_rows, parts_v)):
            rows[old] = torch.cat(parts[::2], 1).transpose(0, 1)
        rows = GroupRows(window, old.split_with_sizes(list(cached)), 47, torch.zeros(0))
        pages = torch.zeros(0)
        step = PagedStep(
            {0: LayerPages(0, pages, pages, k_rows, v_rows)},
            [slots],
            None,
            GatheredView(new, torch.zeros(0), [rows]),
        )
        new_k, new_v = (torch.cat(parts[1::2], 1)[None] for parts in (parts_k, parts_v))
        with computing(step):
            found, _ = attention.paged_attention(
                SimpleNamespace(layer_idx=0), query, new_k, new_v, None, scaling=0.3
            )
        torch.testing.assert_close(
            k_rows[slots], new_k[0].transpose(0, 1), rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            v_rows[slots], new_v[0].transpose(0, 1), rtol=0, atol=0, equal_nan=True
        )
        return found

    clean = out(key, value)
    for i in range(len(new)):
        mine = slice(ends_k[i], ends_k[i + 1])
        alone_k, alone_v = torch.full_like(key, torch.nan), torch.full_like(value, torch.nan)
        alone_k[:, :, mine], alone_v[:, :, mine] = key[:, :, mine], value[:, :, mine]
        got = out(alone_k, alone_v)[0, ends_q[i] : ends_q[i + 1]]
        assert torch.equal(got, clean[0, ends_q[i] : ends_q[i + 1]])
        k, v = (
            x[0, :, mine].double().repeat_interleave(heads[0] // heads[1], 0) for x in (key, value)
        )
        scores = query[0, :, ends_q[i] : ends_q[i + 1]].double() @ k.mT * 0.3
        if window is None or new[i] > 1:  # a single token is given its window and no more
            behind = torch.arange(new[i])[:, None] + cached[i] - torch.arange(new[i] + cached[i])
            seen = (behind >= 0) & (behind < (window or 10**9))
            scores = scores.masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device takes waiting for it, in the middle of a forward."""
    looked: list[Tensor] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", looked.append)
    model = build(tf.Qwen2Config(**SMALL), device="cpu").eval()
    assert len(generate(model, [(5, 6, 7)], 4)[0]) == 4
    assert not looked


def test_use_outside_the_engine_is_refused() -> None:
    for config in (tf.Qwen2Config(**SMALL), tf.Gemma2Config(**SMALL, head_dim=8)):
        model = build(config, device="cpu")
        attention.choose_attention(model)
        with pytest.raises(ValueError, match="inside the engine's steps only"):
            model(torch.tensor([[1, 2, 3]]))
