import pytest
import torch
from torch import nn


@pytest.mark.gpu
def test_card_times_forwards_by_its_own_clock() -> None:
    pytest.importorskip("ray", reason="the benches need it")
    from docs.results.timeline.watch import ForwardWatch, marker

    card = torch.device("cuda", 0)
    first, second = (nn.Linear(4096, 4096, device=card) for _ in range(2))
    mark = marker(card)
    watch = ForwardWatch({first: 0, second: 1}, mark)
    zero = mark()
    zero.wait()
    with watch.installed(), torch.cuda.stream(torch.cuda.Stream()):  # another than the zero's
        second(first(torch.ones(8, 4096, device=card)))
    watch.spans[-1][2].wait()
    times = [m.seconds_since(zero) for _, begin, end in watch.spans for m in (begin, end)]
    assert [segment for segment, _, _ in watch.spans] == [0, 1]
    assert 0 < times[0] < times[1] <= times[2] < times[3]
