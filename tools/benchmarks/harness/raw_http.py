"""Sends requests by hand, so that a client can vanish at any byte of one, and reads the answers with little work."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

VANISH = struct.pack("ii", 1, 0)  # SO_LINGER: a reset, as of a client whose process was killed


def head(path: str, length: int | None = None) -> bytes:
    """The first lines of a request in HTTP/1.0, whose answer is not in chunks and ends with the connection."""
    if length is None:
        return f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode()
    lines = f"POST {path} HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return lines.encode()


def message(path: str, body: Mapping[str, Any] | bytes | None = None) -> bytes:
    """A whole request; a GET where there is no body."""
    if body is None:
        return head(path)
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return head(path, len(content)) + content


class Connection:
    """One connection, for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator["Connection"]:
        """Connects; at the end the connection is closed, if `vanish` has not ended it."""
        opened = cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))
        try:
            yield opened
        finally:
            opened._writer.close()

    async def send(self, data: bytes) -> None:
        """Sends; a server that has answered already and listens no more is no error."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def status(self) -> int:
        """The status of the answer, after its headers were read; 0: the connection ended without one."""
        try:
            lines = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        return int(lines.split(None, 2)[1])

    async def rest(self) -> bytes:
        """What comes until the server closes the connection."""
        try:
            return await self._reader.read()
        except ConnectionError:
            return b""

    async def line(self) -> bytes:
        """The next line; empty at the end."""
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""

    def vanish(self) -> None:
        """Ends the connection at once; what the server sends is answered with a reset."""
        with contextlib.suppress(OSError):  # it has ended
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, VANISH)
        self._writer.transport.abort()


async def ask(port: int, path: str, body: Mapping[str, Any] | bytes | None = None) -> tuple[int, bytes]:
    """The status and the body of the answer."""
    async with Connection.open(port) as connection:
        await connection.send(message(path, body))
        return await connection.status(), await connection.rest()
