"""Every architecture that is not refused, small, in half precision: with the kernels and graphs of a card."""

import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.model.architectures import experts_need_host
from actors.engine.model.attention import decodes_in_pages
from tests.integration.gpu_engine import counted_replays, running
from tests.unit.actors.engine.small_architectures import ARCHITECTURES, refusal_of, small
from tests.unit.actors.engine.small_models import build, randomise

pytestmark = pytest.mark.gpu

PROMPTS = [tuple(3 + (7 * i) % 90 for i in range(length)) for length in (3, 17, 100)]
LIMITS = EngineConfig(page_size=16, num_blocks=64, max_batch_tokens=64, max_requests_per_batch=4)
# All of them for each token: which two of them are best is up to rounding.
ALL_EXPERTS = dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 4)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # of theirs
def test_greedy_is_that_of_a_plain_forward(name: str) -> None:
    if refusal_of(build(small(name, **ALL_EXPERTS))):
        pytest.skip("refused")
    with (
        running(small(name, **ALL_EXPERTS), LIMITS, torch.bfloat16, fill=randomise) as h,
        counted_replays() as replays,
    ):
        for prompt in PROMPTS:
            h.submit(prompt, 60)
        h.finish()
        h.lose_and_restore()
        for prompt in PROMPTS:
            h.submit(prompt, 60)
        h.finish()
        print(f"{h.model.config._attn_implementation}, {replays[0]} graphs replayed")
        h.check_greedy(missed=0.07)
        assert (replays[0] > 0) == (decodes_in_pages(h.model) and not experts_need_host(h.model))
