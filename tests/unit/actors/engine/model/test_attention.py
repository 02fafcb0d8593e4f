"""Which attention a model gets, and that of the CPU against float64."""

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import masking_utils

from actors.engine.model import attention
from tests.unit.actors.engine.small_models import SMALL, OnCuda, build, generate


def chosen_on_cuda(
    config: tf.PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, page_size: int = 256
) -> str:
    return attention.choose_attention(OnCuda(build(config, dtype)), page_size)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda: False)


def test_plain_models_get_ours_on_cpu_and_cuda() -> None:
    model = build(tf.Qwen2Config(**SMALL), device="cpu")
    assert attention.choose_attention(model, 16) == attention.NAME
    assert model.config._attn_implementation == attention.NAME
    assert not attention.decodes_in_pages(model)  # there is no such kernel for CPUs
    assert chosen_on_cuda(tf.Qwen2Config(**SMALL)) == attention.NAME


def test_what_ours_cannot_do_is_left_to_others() -> None:
    soft_capped = tf.Gemma2Config(**SMALL, head_dim=8)
    assert soft_capped.attn_logit_softcapping
    assert chosen_on_cuda(soft_capped) == "eager"
    assert attention.choose_attention(build(soft_capped, device="cpu"), 16) == "eager"
    with_sinks = tf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    assert chosen_on_cuda(with_sinks) == "eager"
    assert chosen_on_cuda(tf.Qwen2Config(**SMALL), torch.float32) == "sdpa"
    assert chosen_on_cuda(tf.Qwen3Config(**SMALL, head_dim=12)) == "sdpa"
    assert chosen_on_cuda(tf.Qwen3Config(**SMALL, head_dim=512)) == "sdpa"


def test_packages_go_first_where_their_pages_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OnCuda(build(tf.Qwen2Config(**SMALL), torch.bfloat16))

    def wanted(page_size: int) -> str:
        return attention._wanted(model, page_size)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    assert [wanted(size) for size in (256, 512, 16)] == [
        "flash_attention_2",
        "flash_attention_2",
        attention.NAME,
    ]
    monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda: True)
    assert wanted(256) == "flash_attention_3"


def test_pages_are_for_models_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_pages(config: tf.PreTrainedConfig) -> bool:
        model = OnCuda(build(config, torch.bfloat16))
        attention.choose_attention(model, 256)  # type: ignore[arg-type]
        return attention.decodes_in_pages(model)  # type: ignore[arg-type]

    assert in_pages(tf.LlamaConfig(**SMALL))
    assert not in_pages(tf.MistralConfig(**SMALL, sliding_window=16))
    assert not in_pages(tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=16))


def test_registering_twice_keeps_other_implementations() -> None:
    attention._register()
    functions = attention.flash_utils._lazy_imports
    attention._register()
    assert attention.flash_utils._lazy_imports is functions
    assert functions(attention.NAME)[2] is attention.paged_attention


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
        return attention._one_by_one(query, key, value, ends_q, ends_k, 0.3, window)

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


def test_use_outside_continuous_batching_is_refused() -> None:
    model = build(tf.Qwen2Config(**SMALL), device="cpu")
    attention.choose_attention(model, 16)
    with pytest.raises(ValueError, match="inside continuous batching only"):
        model(torch.tensor([[1, 2, 3]]))
