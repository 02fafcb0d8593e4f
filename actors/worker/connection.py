"""Messages over a local stream socket: the length of each, then msgpack."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import msgspec

from actors.threads import call_unless_closed
from actors.worker.messages import decode_error, encode_error

_LENGTH_BYTES = 4

M = TypeVar("M")


class Connection(asyncio.Protocol, Generic[M]):
    """One end of a socket. `receive` and `lost` are called on its event loop.

    What the other side does not read is kept here, so that no sender waits: neither an engine for an event
    loop nor the other way round.
    """

    def __init__(self, kind: Any, receive: Callable[[M], None], lost: Callable[[], None]) -> None:
        """Make one that is not connected; asyncio connects it.

        Args:
            kind: the messages that come, as a union.
            receive: called with each.
            lost: called once, when the other side is gone or after `close`.
        """
        self.receive = receive
        self._lost = lost
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(
            kind, dec_hook=decode_error
        )
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_error)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._transport: asyncio.Transport | None = None
        self._come = bytearray()

    def send(self, message: object) -> None:
        """Send a message, behind those sent before; one to somebody who is gone is lost. Any thread may call."""
        payload = self._encoder.encode(message)
        frame = len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
        if threading.get_ident() == self._thread:
            self._write(frame)
        else:
            call_unless_closed(self._loop, partial(self._write, frame))

    def close(self) -> None:
        """Send what is left, and end."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not `isinstance`: uvloop's, on which Serve runs replicas, inherits from nothing of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._come += data
        begin = 0
        while len(self._come) - begin >= _LENGTH_BYTES:
            payload = begin + _LENGTH_BYTES
            end = payload + int.from_bytes(self._come[begin:payload], "big")
            if end > len(self._come):
                break
            begin = end
            self.receive(self._decoder.decode(self._come[payload:end]))
        del self._come[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)
