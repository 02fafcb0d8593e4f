"""What a grant of card memory costs where there is room: `python -m docs.results.grants`.

A keeper in a process of its own, as with Ray, and one client that asks, is granted, and gives back; the time is that
of the whole `wake` call, from asking to knowing.
"""

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

from actors.card.config import SharingConfig
from actors.card.keeper import CardKeeper
from actors.card.tenant import CardClient, CardOfWorker
from actors.observer import Observer

GRANTS = 5000
TENANTS = 32  # of the card, asleep beside the one that asks
GIB = 2**30


def _keep(socket: str, ready: "multiprocessing.synchronize.Event") -> None:
    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(CardKeeper(gather_s=0.0).accept, socket)
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _measure(socket: str) -> list[float]:
    """Seconds of each grant."""

    async def connect(protocol: asyncio.Protocol) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, socket)

    card = CardOfWorker("card", 80 * GIB, 80 * GIB)
    clients = [
        CardClient(f"t{i}", f"m{i}", None, SharingConfig(), connect, Observer())
        for i in range(TENANTS)
    ]
    for client in clients:
        await client.place(card, 0)
        client.settled(held=0)
    seconds = []
    for _ in range(GRANTS):
        began_s = time.perf_counter()
        await clients[0].wake(16 * GIB, waits=True)
        seconds.append(time.perf_counter() - began_s)
        clients[0].settled(held=0)
    for client in clients:
        await client.close()
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "keeper")
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        keeper = context.Process(target=_keep, args=(socket, ready), daemon=True)
        keeper.start()
        ready.wait()
        seconds = sorted(asyncio.run(_measure(socket)))
        keeper.terminate()
    told = {
        "grants": GRANTS,
        "tenants": TENANTS,
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "p99_ms": round(1e3 * seconds[GRANTS * 99 // 100], 3),
        "max_ms": round(1e3 * seconds[-1], 3),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
