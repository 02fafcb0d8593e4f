"""CudaDriver, its link and arenas on it, on a real card."""

import gc
import itertools
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.batching.inputs import read_by_kernel
from actors.errors import DeviceMemoryError, DeviceMemoryShort
from actors.memory import workspaces
from actors.memory.arena import DeviceArena
from actors.memory.pinned import ByteArray, HostRange, host_range

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from actors.memory.cuda import CudaDriver, _check_visible
from actors.memory.cuda_link import CudaLink
from actors.memory.cuda_pool import CudaPool

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # what is free of the card is looked at

MIB = 2**20
GIB = 2**30
SIZES = [64 * MIB, 10 * MIB + 12345, 1, 200 * MIB + 1]


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    return CudaDriver(0)


@pytest.fixture
def arena(driver: CudaDriver) -> Iterator[DeviceArena]:
    made = DeviceArena(driver, SIZES)
    yield made
    made.release()


def in_store(contents: list[ByteArray]) -> list[memoryview]:
    """Bytes that lie like Ray's: one shared mapping, 64-byte aligned, neighbours share edge pages."""
    store = memoryview(mmap.mmap(-1, sum(c.nbytes + 128 for c in contents)))
    views = []
    offset = 64
    for found in contents:
        view = store[offset : offset + found.nbytes]
        np.frombuffer(view, dtype=np.uint8)[:] = found
        views.append(view.toreadonly())
        offset += -(-found.nbytes // 64) * 64 + 64
    return views


def random_views(sizes: list[int], seed: int = 0) -> list[memoryview]:
    rng = np.random.default_rng(seed)
    return in_store([rng.integers(0, 256, size, dtype=np.uint8) for size in sizes])


@pytest.fixture(scope="module")
def payloads() -> list[memoryview]:
    return random_views(SIZES)


@pytest.fixture
def link(driver: CudaDriver, payloads: list[memoryview]) -> Iterator[CudaLink]:
    made = driver.open_link(payloads)
    yield made
    made.close()


def holds(tensor: torch.Tensor, payload: memoryview) -> bool:
    return np.array_equal(tensor.cpu().numpy(), np.frombuffer(payload, dtype=np.uint8))


def assert_holds(arena: DeviceArena, payloads: list[memoryview]) -> None:
    for i, payload in enumerate(payloads):
        assert holds(arena.bytes_of(i, len(payload)), payload), f"segment {i} differs"


def test_addresses_and_bytes_are_the_same_over_twenty_cycles(
    arena: DeviceArena, link: CudaLink, payloads: list[memoryview]
) -> None:
    tensor = arena.tensor(3, 256, torch.bfloat16, (1000, 1000))
    address = tensor.data_ptr()
    assert tensor.device == torch.device("cuda", 0)
    assert address == arena.address + arena.spans[3].offset + 256
    for cycle in range(20):
        arena.map()
        arena.bytes_of(3).fill_(cycle)  # nothing is right by what the memory held before
        torch.cuda.synchronize()  # a link's stream waits for no other
        stats = arena.restore(link, dict(enumerate(payloads))).finish()
        assert stats.size == sum(SIZES)
        assert_holds(arena, payloads)
        assert tensor.data_ptr() == address
        assert arena.unmap() == arena.size


def test_unmap_raises_the_card_s_free_memory_by_the_segments(
    driver: CudaDriver, arena: DeviceArena
) -> None:
    before = driver.memory()
    arena.map()
    mapped = driver.memory()
    assert before.free - mapped.free == pytest.approx(arena.size, abs=4 * MIB)
    assert before.used + before.free == before.total
    assert mapped.used - before.used == before.free - mapped.free
    assert mapped.held - before.held == pytest.approx(arena.size, abs=4 * MIB)
    if before.own is not None and mapped.own is not None:  # NVML can be blind in a container
        assert mapped.own - before.own == pytest.approx(arena.size, abs=4 * MIB)
    arena.unmap([3])
    assert mapped.held - driver.memory().held == pytest.approx(arena.spans[3].size, abs=4 * MIB)
    arena.unmap()
    assert driver.memory().held == pytest.approx(before.held, abs=4 * MIB)


def test_collecting_what_was_cleared_takes_nothing(driver: CudaDriver, arena: DeviceArena) -> None:
    arena.map()
    arena.unmap()
    before = driver.memory()
    for _ in range(3):
        driver.collect_cleared()
    assert driver.memory().held == pytest.approx(before.held, abs=4 * MIB)
    arena.map()
    arena.bytes_of(3).fill_(7)
    assert bool((arena.bytes_of(3) == 7).all())


def test_map_of_more_than_the_card_has_rolls_back_and_logs_who_holds_it(
    driver: CudaDriver,
    arena: DeviceArena,
    payloads: list[memoryview],
    link: CudaLink,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena.map()
    arena.restore(link, dict(enumerate(payloads))).finish()
    before = driver.memory()
    too_big = DeviceArena(driver, [GIB, before.total - GIB, GIB])
    with pytest.raises(DeviceMemoryShort) as caught:
        too_big.map()
    text = str(caught.value)
    assert "do not fit on cuda:0" in text
    assert "cuMemCreate" in str(caught.value.__cause__)
    if before.own is not None:  # NVML can be blind in a container
        assert f"by pid {os.getpid()} (" in caplog.text
    assert "pid" not in text
    assert too_big.mapped_bytes == 0
    assert driver.memory().held == pytest.approx(before.held, abs=4 * MIB)
    assert_holds(arena, payloads)
    too_big.map([0])
    too_big.bytes_of(0).fill_(3)
    assert int(too_big.bytes_of(0)[-1]) == 3
    too_big.release()


def test_refusal_that_is_no_shortage_names_the_call_and_leaves_the_mapping(
    driver: CudaDriver, arena: DeviceArena
) -> None:
    arena.map([0])
    arena.bytes_of(0).fill_(5)
    held = driver.memory().held  # not what is free: the card may have other users
    with pytest.raises(DeviceMemoryError, match=r"cuMemMap of 0\.06 GiB .*INVALID_VALUE.*are free"):
        driver.map(arena.address, arena.spans[0].size)
    with pytest.raises(DeviceMemoryError, match=r"cuMemHostUnregister.*NOT_REGISTERED"):
        driver.unregister(HostRange(mmap.PAGESIZE, mmap.PAGESIZE))
    assert driver.memory().held == held
    assert bool((arena.bytes_of(0) == 5).all())


def test_no_such_device_is_told() -> None:
    with pytest.raises(DeviceMemoryError, match=r"cuDeviceGet on cuda:99 .*INVALID_DEVICE"):
        CudaDriver(99)


def test_kept_segments_survive(
    arena: DeviceArena, link: CudaLink, payloads: list[memoryview]
) -> None:
    arena.map()
    arena.restore(link, dict(enumerate(payloads))).finish()
    arena.unmap([0, 1, 2])
    assert holds(arena.bytes_of(3, SIZES[3]), payloads[3])
    missing = arena.unmapped()
    arena.map()
    transfer = arena.restore(link, {i: payloads[i] for i in missing})
    assert [s.segment for s in transfer.finish().segments] == [0, 1, 2]
    assert_holds(arena, payloads)


def test_gate_makes_the_compute_stream_wait_for_that_segment(driver: CudaDriver) -> None:
    sizes = [128 * MIB] * 12
    views = random_views(sizes, seed=1)
    arena = DeviceArena(driver, sizes)
    link = driver.open_link(views)
    compute = torch.cuda.Stream()
    for _ in range(3):
        arena.map()
        arena.bytes_of(0).fill_(0)
        torch.cuda.synchronize()
        transfer = arena.restore(link, dict(enumerate(views)))
        copies = []
        with torch.cuda.stream(compute):
            for i in range(len(sizes)):
                transfer.gate(i)
                copies.append(arena.bytes_of(i).clone())
        compute.synchronize()
        stats = transfer.finish()
        assert all(holds(copy, view) for copy, view in zip(copies, views, strict=True))
        assert [s.size for s in stats.segments] == sizes
        arena.unmap()
    link.close()
    arena.release()


def test_a_captured_graph_waits_for_what_was_last_recorded_before_its_replay(
    driver: CudaDriver,
) -> None:
    sizes = [128 * MIB] * 12
    views = random_views(sizes, seed=2)
    arena = DeviceArena(driver, sizes)
    link = driver.open_link(views)
    arrivals = [torch.cuda.Event(external=True) for _ in sizes]
    for event in arrivals:
        event.record()
    arena.map()
    copies = [torch.empty_like(arena.bytes_of(i)) for i in range(len(sizes))]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for i, copy in enumerate(copies):
            torch.cuda.current_stream().wait_event(arrivals[i])
            copy.copy_(arena.bytes_of(i))
    for kept in ([], [], [3, 7]):
        torch.cuda.synchronize()
        missing = [i for i in range(len(sizes)) if i not in kept]
        arena.unmap(missing)
        arena.map()
        for copy in copies:
            copy.zero_()
        for i in missing:
            arena.bytes_of(i).zero_()
        torch.cuda.synchronize()
        transfer = arena.restore(link, {i: views[i] for i in missing}, arrivals=arrivals)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begun.record()
            graph.replay()
            done.record()
        stream.synchronize()
        stats = transfer.finish()
        assert all(holds(copy, view) for copy, view in zip(copies, views, strict=True))
        assert begun.elapsed_time(done) > 0.9 * 1e3 * stats.seconds  # it did wait
        with torch.cuda.stream(stream):
            begun.record()
            graph.replay()
            done.record()
        stream.synchronize()
        assert begun.elapsed_time(done) < 0.5 * 1e3 * stats.seconds  # it does not any more
    link.close()
    arena.release()


def test_captured_graph_replays_right_after_unmap_map_and_copy(driver: CudaDriver) -> None:
    matrices = [torch.randn(2048, 2048).mul(0.02).bfloat16() for _ in range(2)]
    views = in_store([m.view(torch.uint8).flatten().numpy() for m in matrices])
    arena = DeviceArena(driver, [len(view) for view in views])
    link = driver.open_link(views)
    weights = [arena.tensor(i, 0, torch.bfloat16, (2048, 2048)) for i in range(2)]
    arena.map()
    arena.restore(link, dict(enumerate(views))).finish()
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        (x @ weights[0]).relu() @ weights[1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x @ weights[0]).relu() @ weights[1]
    graph.replay()
    torch.cuda.synchronize()
    expected = y.clone()
    assert float(expected.abs().max()) > 0
    for _ in range(5):
        arena.unmap()
        y.zero_()
        arena.map()
        transfer = arena.restore(link, dict(enumerate(views)))
        for segment in range(len(views)):
            transfer.gate(segment)
        graph.replay()
        assert torch.equal(y, expected)
        transfer.finish()
    del weights
    link.close()
    arena.release()


def matrix_graph(
    pool: CudaPool, size: int, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that multiplies twice, on memory of the pool, and where its result is."""
    x = torch.eye(size, dtype=torch.bfloat16, device="cuda") * 3
    x @ x
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        pool.reserve(4 * x.nbytes + 64 * MIB)
    with torch.cuda.graph(graph, pool=pool.id, stream=stream):  # type: ignore[arg-type]
        result = x @ x @ x
    graph.keep = x  # type: ignore[attr-defined]
    return graph, result


def test_graph_computes_right_after_its_pool_was_unmapped_and_mapped(driver: CudaDriver) -> None:
    pool = driver.make_pool()
    graph, result = matrix_graph(pool, 2048, torch.cuda.Stream())
    size, arenas = pool.size, len(pool._arenas)
    assert pool.mapped_bytes == size > 4 * 2048**2 * 2
    for _ in range(3):
        driver.synchronize()
        held = driver.memory().held
        pool.unmap()
        assert driver.memory().held == held - size
        assert pool.mapped_bytes == 0
        neighbour = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")  # gets the memory
        pool.map()
        del neighbour
        graph.replay()
        assert torch.equal(result, 27 * torch.eye(2048, dtype=torch.bfloat16, device="cuda"))
    assert (pool.size, len(pool._arenas)) == (size, arenas)


def test_pool_that_gets_no_memory_keeps_no_addresses(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arena: DeviceArena) -> None:
        raise DeviceMemoryShort("a neighbour has it")

    released: list[int] = []
    release = CudaDriver.release
    monkeypatch.setattr(DeviceArena, "map", refuse)
    monkeypatch.setattr(
        CudaDriver,
        "release",
        lambda self, *range: (released.append(range[1]), release(self, *range)),
    )
    with pytest.raises(DeviceMemoryShort):
        driver.make_pool().reserve(64 * MIB)
    assert released


def test_pool_that_is_garbage_is_not_collected_while_another_is_given_memory(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end would change the allocator in the middle of an allocation, which ends the process."""
    other = driver.make_pool()
    other.reserve(64 * MIB)
    cycle: list[object] = [other]
    cycle.append(cycle)
    gone = weakref.ref(other)
    roots = [cycle]
    del other, cycle
    pool, map_arena, thresholds = driver.make_pool(), DeviceArena.map, gc.get_threshold()

    def with_garbage(arena: DeviceArena) -> None:
        roots.clear()
        gc.set_threshold(1, 1, 1)
        kept = [[i] for i in range(1000)]  # objects enough for a collection
        assert kept
        assert gone() is not None
        map_arena(arena)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceArena, "map", with_garbage)
        try:
            pool.reserve(64 * MIB)
        finally:
            gc.set_threshold(*thresholds)
    assert not roots
    gc.collect()
    assert gone() is None
    assert pool.mapped_bytes >= 64 * MIB


def test_captures_find_room_in_what_was_reserved_and_ask_for_no_more(driver: CudaDriver) -> None:
    pool = driver.make_pool()
    stream = torch.cuda.Stream()  # torch keeps what one has used from the others
    first = matrix_graph(pool, 2048, stream)
    size = pool.size
    assert size > 0
    second = matrix_graph(pool, 1024, stream)
    assert pool.size == size
    del first, second


def test_reserving_waits_for_no_thread_that_frees_tensors(project: Path) -> None:
    """Each would wait for the other: for the lock of torch's allocator, and for the GIL."""
    script = """
import sys, threading, torch
from actors.memory.cuda import CudaDriver, _check_visible
driver, stop = CudaDriver(0), threading.Event()
sys.setswitchinterval(1e-6)
def hammer():
    while not stop.is_set():
        for tensor in [torch.empty(1000, device="cuda") for _ in range(20)]:
            del tensor
threads = [threading.Thread(target=hammer) for _ in range(4)]
for thread in threads:
    thread.start()
pools = [driver.make_pool() for _ in range(40)]
for pool in pools:
    pool.reserve(2**25)
stop.set()
for thread in threads:
    thread.join()
print(min(pool.mapped_bytes for pool in pools))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=project, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2**25


def test_workspaces_are_given_back_when_nobody_computes(driver: CudaDriver) -> None:
    x = torch.eye(512, device="cuda")
    x @ x
    torch.cuda.synchronize()
    with workspaces.in_use():
        driver.trim()
        before = driver.memory().torch_reserved
    driver.trim()
    assert driver.memory().torch_reserved < before
    assert torch.equal(x @ x, x)


def test_neighbouring_buffers_are_pinned_without_a_gap(
    link: CudaLink, payloads: list[memoryview]
) -> None:
    assert link.in_place
    assert all(a.end == b.address for a, b in itertools.pairwise(link.pinned))
    assert link.pinned[0].address <= host_range(payloads[0]).address
    assert link.pinned[-1].end >= host_range(payloads[-1]).end


def test_pinned_in_place_is_several_times_as_fast_as_pageable(driver: CudaDriver) -> None:
    sizes = [512 * MIB] * 4
    views = random_views(sizes, seed=3)
    arena = DeviceArena(driver, sizes)
    arena.map()
    source = torch.from_numpy(np.frombuffer(views[0], np.uint8).copy())
    torch.cuda.synchronize()
    started = time.perf_counter()
    arena.bytes_of(0).copy_(source)
    torch.cuda.synchronize()
    pageable = sizes[0] / 1e9 / (time.perf_counter() - started)
    link = driver.open_link(views)
    assert link.in_place
    rates = [arena.restore(link, dict(enumerate(views))).finish().gb_per_s for _ in range(3)]
    link.close()
    arena.release()
    print(f"pageable {pageable:.1f} GB/s, pinned in place {max(rates):.1f} GB/s")
    assert pageable < 15
    assert max(rates) > 40


def test_refused_pinning_stages_the_same_bytes_and_says_so(
    driver: CudaDriver,
    arena: DeviceArena,
    payloads: list[memoryview],
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = host_range(payloads[3]).address // mmap.PAGESIZE * mmap.PAGESIZE
    occupied = HostRange(start + 100 * mmap.PAGESIZE, mmap.PAGESIZE)
    driver.register(occupied)  # CUDA registers no page twice
    with caplog.at_level(logging.WARNING):
        link = driver.open_link(payloads)
    driver.unregister(occupied)
    assert not link.in_place
    assert link.pinned == ()
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" in caplog.text
    assert "staging" in caplog.text
    for cycle in range(3):
        arena.map()
        arena.bytes_of(3).fill_(cycle)
        torch.cuda.synchronize()
        stats = arena.restore(link, dict(enumerate(payloads))).finish()
        assert_holds(arena, payloads)
        arena.unmap()
    print(f"staged: {stats.gb_per_s:.1f} GB/s")
    link.close()


def test_host_memory_is_written_and_read_by_the_device_and_goes_for_good(
    driver: CudaDriver,
) -> None:
    for _ in range(3):
        host = driver.take_host(2**25)
        assert host.is_pinned()
        there = torch.randint(0, 256, (2**25,), dtype=torch.uint8, device=driver.device)
        host.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(host, there.cpu())
        again = torch.empty_like(there)
        read_by_kernel(host.view(torch.int64), again.view(torch.int64))
        assert torch.equal(again, there)
        driver.give_host(host)
        assert not host.is_pinned()


def test_pages_can_be_pinned_again_after_close(
    driver: CudaDriver, payloads: list[memoryview]
) -> None:
    for _ in range(3):
        link = driver.open_link(payloads)
        assert link.in_place
        link.close()


def test_images_with_segments_in_common_are_pinned_at_once(
    driver: CudaDriver, arena: DeviceArena, payloads: list[memoryview]
) -> None:
    """One takes the place of another: both links are open for a while, and the other's goes first."""
    other = driver.open_link(payloads[1:])
    link = driver.open_link(payloads)
    assert other.in_place
    assert link.in_place
    for goes in (None, other):
        if goes is not None:
            goes.close()
        arena.map()
        arena.bytes_of(0).fill_(0)
        torch.cuda.synchronize()
        arena.restore(link, dict(enumerate(payloads))).finish()
        assert_holds(arena, payloads)
        arena.unmap()
    assert len(driver.pages.take(link.pinned)) == len(link.pinned)  # they still are
    driver.pages.give_back(link.pinned)
    link.close()


def test_any_mapping_of_this_process_can_be_the_source(driver: CudaDriver, tmp_path: Path) -> None:
    """Private memory of a load from disk, and a file that is mapped read-only."""
    size = 8 * MIB + 5
    saved = np.random.default_rng(4).bytes(size)
    path = tmp_path / "segment"
    path.write_bytes(saved)
    private = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    private[:] = saved
    with path.open("rb") as file:
        read_only = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    arena = DeviceArena(driver, [size])
    arena.map()
    for mapping in (private, read_only):
        view = memoryview(mapping)[:size].toreadonly()
        link = driver.open_link([view])
        arena.bytes_of(0).fill_(0)
        torch.cuda.synchronize()
        arena.restore(link, {0: view}).finish()
        assert holds(arena.bytes_of(0, size), memoryview(saved))
        print(f"in place: {link.in_place}")
        link.close()
    arena.release()


def test_a_thread_that_never_used_cuda_can_wake_and_sleep(
    driver: CudaDriver, arena: DeviceArena, payloads: list[memoryview]
) -> None:
    found: list[bool] = []

    def cycle() -> None:
        link = driver.open_link(payloads)
        arena.map()
        arena.restore(link, dict(enumerate(payloads))).finish()
        found.append(holds(arena.bytes_of(3, SIZES[3]), payloads[3]))
        link.close()
        arena.unmap()

    thread = threading.Thread(target=cycle)
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_two_devices_from_the_same_pinned_bytes(payloads: list[memoryview]) -> None:
    drivers = [CudaDriver(0), CudaDriver(1)]
    link = drivers[0].open_link(payloads)
    arenas = [DeviceArena(d, SIZES) for d in drivers]
    for arena in arenas:
        arena.map()
    assert arenas[1].bytes_of(0).device == torch.device("cuda", 1)
    arenas[0].restore(link, dict(enumerate(payloads))).finish()
    link.close()
    link = drivers[1].open_link(payloads)
    arenas[1].restore(link, dict(enumerate(payloads))).finish()
    for arena in arenas:
        assert_holds(arena, payloads)
    link.close()
    for arena in arenas:
        arena.release()


CONTEXT = """
import torch
from actors.memory.cuda import CudaDriver, _check_visible

driver = CudaDriver(0)
first = driver.memory()
kept = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # no second context, whoever comes next
again = CudaDriver(0)
later = again.memory()
print(driver.context_bytes, again.context_bytes, first.held, later.held, later.torch_reserved)
print(sum(holder.size or 0 for holder in again.holders()))
"""


def test_context_is_what_a_fresh_process_holds_of_the_card(project: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CONTEXT], cwd=project, capture_output=True, text=True, check=True
    )
    context, again, first, later, reserved = (int(word) for word in run.stdout.split()[:5])
    print(f"context {context / GIB:.3f} GiB")
    assert 50 * MIB < context < 2 * GIB
    assert again == context
    assert first == pytest.approx(context, abs=64 * MIB)
    assert reserved == pytest.approx(256 * MIB, abs=32 * MIB)
    assert later - first == pytest.approx(reserved, abs=64 * MIB)


def test_figures_are_cheap_enough_for_every_sleep(driver: CudaDriver) -> None:
    driver.memory()
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        driver.memory()
        seconds.append(time.perf_counter() - started)
    seconds.sort()
    print(f"memory(): median {1e3 * seconds[10]:.2f} ms, most {1e3 * seconds[-1]:.2f} ms")
    assert seconds[10] < 4e-3


REPLICA = """
import mmap, random, sys, time
import numpy as np, torch
from actors.errors import DeviceMemoryShort
from actors.memory.arena import DeviceArena
from actors.memory.cuda import CudaDriver, _check_visible

seed, MIB = int(sys.argv[1]), 2**20
driver = CudaDriver(0)
sizes = [32 * MIB + seed] * 16
views = [memoryview(mmap.mmap(-1, size)) for size in sizes]
rng = np.random.default_rng(seed)
for view in views:
    np.frombuffer(view, np.uint8)[:] = rng.integers(0, 256, len(view), dtype=np.uint8)
arena, link = DeviceArena(driver, sizes), driver.open_link(views)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(15):
    arena.map()
    arena.restore(link, dict(enumerate(views))).finish()
    for i, view in enumerate(views):
        found = arena.bytes_of(i, len(view)).cpu().numpy()
        assert np.array_equal(found, np.frombuffer(view, np.uint8)), i
    arena.bytes_of(0, 1).fill_(1)  # loads its kernel, for which a full card has no room
    arena.unmap()
print("ready", flush=True)
sys.stdin.readline()
greedy = DeviceArena(driver, [driver.memory().total * 6 // 80] * 8)  # 60% of the card
woken = short = 0
random.seed(seed)
deadline = time.monotonic() + 30
while woken < 5 and time.monotonic() < deadline:
    try:
        greedy.map()
        greedy.bytes_of(7).fill_(1)
        woken += 1
        time.sleep(0.2)  # longer than the pauses below, so that they do meet
        greedy.unmap()
    except DeviceMemoryShort:
        short += 1
        assert greedy.mapped_bytes == 0
    time.sleep(random.uniform(0, 0.1))
assert woken == 5, (woken, short)
print("short", short, flush=True)
"""


def test_two_replicas_on_one_card_wake_at_once(project: Path) -> None:
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", REPLICA, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=project,
        )
        for seed in (1, 2)
    ]
    try:
        for _ in range(2):  # together into the equal wakes, together into the fight for the card
            assert [_line(r) for r in replicas] == ["ready", "ready"]
            for replica in replicas:
                print("go", file=replica.stdin, flush=True)
        refusals = [int(_line(r).removeprefix("short ")) for r in replicas]
        print(f"refused: {refusals}")
        assert sum(refusals) > 0
        assert [r.wait(timeout=30) for r in replicas] == [0, 0]
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()


def _line(replica: "subprocess.Popen[str]") -> str:
    assert replica.stdout is not None
    return replica.stdout.readline().strip()


def test_cards_that_were_asked_for_before_it_was_said_which_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver reads CUDA_VISIBLE_DEVICES once: a worker would compute on its neighbour's card."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(
        DeviceMemoryError, match="CUDA_VISIBLE_DEVICES is 1, and the driver shows 2"
    ):
        _check_visible(2)
    _check_visible(1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    _check_visible(8)


_NOT_INITIALISED = """
import ctypes, importlib
from serve_app.process.spares import IMPORTS
for names in IMPORTS.values():
    for name in names:
        importlib.import_module(name)
count = ctypes.c_int()
print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)))
"""


def test_what_is_imported_ahead_asks_for_no_card() -> None:
    told = subprocess.run([sys.executable, "-c", _NOT_INITIALISED], capture_output=True, text=True)
    assert told.stdout.split()[-1] == "3", told  # CUDA_ERROR_NOT_INITIALIZED
