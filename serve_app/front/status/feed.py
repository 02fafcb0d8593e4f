"""One poller for everybody who watches; it runs only while somebody does.

Each model is asked by a loop of its own, so one whose replicas do not answer holds up no other. What is
shown is replaced, never changed: a watcher gets the difference to what it was sent last, so a slow one
gets fewer and larger differences and nothing piles up for it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TypeVar

from actors.errors import ServingError
from actors.protocol import HeldImage, ReplicaState, ReplicaStatus
from serve_app.front.dialects import frame
from serve_app.front.status.history import History
from serve_app.front.status.snapshot import View, host_view, merge_patch, model_view, replica_views
from serve_app.models.model_client import ModelClient
from serve_app.models.registry import ServedModels, of_each
from serve_app.models.remote_errors import unwrap

logger = logging.getLogger(__name__)

T = TypeVar("T")
ReadImages = Callable[[], Awaitable[Sequence[HeldImage]]]

_LOOK_INTERVAL_S = 1.0
_MOVING_INTERVAL_S = 0.2  # while a replica drains or wakes, which may be over soon
_HOST_INTERVAL_S = 5.0
_SCALE_INTERVAL_S = 5.0
_PATIENCE_S = 1.0  # with the holder and Serve's controller
_HEARTBEAT_S = 5.0
# A page that stays open must not keep a front that is being replaced: browsers connect again by themselves.
_STREAM_S = 20.0
_RETRY_MS = 200
_SHORT_PAUSE_S = 3.0  # as when a page is loaded again, or a stream was ended to be connected again

_MOVING = (ReplicaState.DRAINING, ReplicaState.WAKING, ReplicaState.RESTARTING)


class StatusFeed:
    """What the replicas of all models say, for any number of watchers."""

    def __init__(
        self,
        models: ServedModels,
        about: View,
        read_images: ReadImages | None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Ask nobody yet.

        Args:
            about: what does not change: versions.
            read_images: asks the weight holder; None where there is none.
            now: seconds since the epoch.
        """
        self._models = models
        self._about = about
        self._read_images = read_images
        self._now = now
        self._history = History()
        self._views: dict[str, View] = {}
        self._host: View = {}
        self._changed = asyncio.Event()
        self._watchers = 0
        self._poller: asyncio.Task[None] | None = None
        self._watched_since: float | None = None
        self._paused_at: float | None = None

    async def snapshot(self) -> View:
        """As it is now; while somebody watches, as everything was seen last, which is as good."""
        views = self._views.values()
        if self._watchers and self._host and all(view["asked"] for view in views):
            return self._shown()
        asked = of_each(self._models.all, self._ask_once)
        host, found = await asyncio.gather(self._look_at_host(), asked)
        return self._shown() | {"host": host, "models": found}

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `snapshot`, then `change`s, which are JSON merge patches of it.

        Either has `time`, the server's clock; a change with nothing else in it is a heartbeat. Ends after a
        while, and is to be asked for again.
        """
        yield b"retry: %d\n\n" % _RETRY_MS
        async with self._watching() as poller:
            ends_at = time.monotonic() + _STREAM_S
            changed, sent = self._changed, self._shown()
            yield b"event: snapshot\n" + frame(sent)
            while (left_s := ends_at - time.monotonic()) > 0:
                await _first(changed, poller, min(left_s, _HEARTBEAT_S))
                changed, now = self._changed, self._shown()
                yield b"event: change\n" + frame(merge_patch(sent, now) | {"time": now["time"]})
                sent = now

    def _shown(self) -> View:
        return {
            "time": self._now(),
            "about": self._about,
            "watched_since": self._watched_since,
            "host": self._host,
            "models": dict(self._views),
            "history": self._history.entries,
        }

    # --- the poller ---

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[asyncio.Task[None]]:
        self._watchers += 1
        if self._poller is None:
            self._resume()
            self._poller = asyncio.create_task(self._poll(), name="status poller")
        try:
            yield self._poller
        finally:
            self._watchers -= 1
            if not self._watchers:
                poller, self._poller = self._poller, None
                self._paused_at = self._now()
                assert poller is not None
                poller.cancel()
                await asyncio.wait([poller])

    def _resume(self) -> None:
        now_s = self._now()
        if self._watched_since is None:
            self._watched_since = now_s
        if self._paused_at is not None and now_s - self._paused_at < _SHORT_PAUSE_S:
            return
        if self._paused_at is not None:
            self._history.unseen(self._paused_at)
        self._views = {name: model_view(model.info) for name, model in self._models.all.items()}
        self._host = {}

    async def _poll(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._follow_host())
            for model in self._models.all.values():
                loops.create_task(self._follow(model))
                loops.create_task(self._follow_scale(model))

    async def _follow(self, model: ModelClient) -> None:
        name = model.info.model_id
        while True:
            before = self._views[name]
            view, statuses = await self._ask(model, before)
            if statuses is None:
                self._history.silent(name, view["why_silent"], view["silent_since"])
            else:
                self._history.saw(name, statuses, self._now())
            self._show(name, view | {"scale": self._views[name]["scale"]})
            moving = any(status.state in _MOVING for status in statuses or ())
            await asyncio.sleep(_MOVING_INTERVAL_S if moving else _LOOK_INTERVAL_S)

    async def _follow_scale(self, model: ModelClient) -> None:
        name = model.info.model_id
        while True:
            scale = await self._ask_scale(model)
            self._show(name, self._views[name] | {"scale": scale})
            await asyncio.sleep(_SCALE_INTERVAL_S)

    async def _follow_host(self) -> None:
        while True:
            self._host = await self._look_at_host()
            self._announce()
            await asyncio.sleep(_HOST_INTERVAL_S)

    def _show(self, name: str, view: View) -> None:
        if view != self._views[name]:
            self._views[name] = view
            self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- asking; nobody's failure is anybody else's ---

    async def _ask_once(self, model: ModelClient) -> View:
        (view, _), scale = await asyncio.gather(
            self._ask(model, model_view(model.info)), self._ask_scale(model)
        )
        return view | {"scale": scale}

    async def _ask(
        self, model: ModelClient, before: View
    ) -> tuple[View, Sequence[ReplicaStatus] | None]:
        """The model's view, and what its replicas said, if they did."""
        try:
            statuses = await self._models.status(model)
        except Exception as exc:  # noqa: BLE001 - whatever it is, others are shown all the same
            root = unwrap(exc)
            if before["silent_since"] is None:
                logger.warning("no status of %s: %s", model.info.model_id, root)
            why = str(root) if isinstance(root, ServingError) else "the replicas cannot be asked"
            since = before["silent_since"] or self._now()
            return before | {"asked": True, "silent_since": since, "why_silent": why}, None
        replicas = replica_views(statuses, self._now(), before["replicas"])
        heard = {"asked": True, "silent_since": None, "why_silent": None, "replicas": replicas}
        return before | heard, statuses

    async def _ask_scale(self, model: ModelClient) -> View | None:
        scale = await _if_known(f"scale of {model.info.model_id}", model.scaler.read())
        return None if scale is None else asdict(scale)

    async def _look_at_host(self) -> View:
        if self._read_images is None:
            return host_view(None)
        return host_view(await _if_known("images of the holder", self._read_images()))


async def _if_known(what: str, answer: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await answer
    except Exception as exc:  # noqa: BLE001 - shown as not known
        logger.debug("no %s: %s", what, unwrap(exc))
        return None


async def _first(changed: asyncio.Event, poller: asyncio.Task[None], timeout_s: float) -> None:
    """Return on a change or in time.

    Raises:
        BaseExceptionGroup: the poller ended, which it should not.
    """
    waiter = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait({waiter, poller}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    if poller.done():
        poller.result()
