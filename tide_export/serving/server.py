"""Runs the server with uvicorn: listens, bounds its connections, ends when told to."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tide_export.errors import ConfigError
from tide_export.runtime.engine import load
from tide_export.serving.app import build_app
from tide_export.serving.config import ServerConfig
from tide_export.serving.service import Service

logger = logging.getLogger("tide_export.serving")
TELLING_SECONDS = 5  # for the last events to reach the clients, after draining
READ_BYTES = 1 << 14  # of a waiting answer, that a client has to read in `body_seconds`
SWITCH_SECONDS = 0.001  # that the event loop waits for each thread that runs Python, a fifth of Python's default
REFUSAL = "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def serve(bundle: str, config: ServerConfig, **loading: Any) -> None:
    """Serves a bundle until SIGTERM or SIGINT, then finishes the open requests and returns.

    Args:
        loading: arguments of `load`.

    Raises:
        TideError: the address cannot be listened on; or the bundle cannot be loaded or served.
    """
    with bound_socket(config) as listening:
        service = Service(load(bundle, **loading), config)
        gc.collect()
        gc.freeze()  # a large request makes the collector look at everything else, which stays anyway
        sys.setswitchinterval(SWITCH_SECONDS)
        Server(service).run([listening])


def bound_socket(config: ServerConfig) -> socket.socket:
    """Binds a socket to the server's address; it does not listen yet.

    Raises:
        ConfigError: the address is in use, or unknown.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port} ({reason}): give another --port or --host"
        ) from None
    return bound


class Server(uvicorn.Server):
    """Exits with code 0 after a signal, and answers requests that outlast `drain_seconds`.

    uvicorn's server raises the signal again at the end, and drops the connections of such requests.
    """

    def __init__(self, service: Service, **options: Any) -> None:
        """Prepares uvicorn; `options` override those of its `Config`."""
        config = service.config
        chosen: dict[str, Any] = {
            "host": config.host,
            "port": config.port,
            "http": connection_class(config),
            "timeout_graceful_shutdown": int(config.drain_seconds) + TELLING_SECONDS,
            "log_config": None,
            "access_log": False,
        }
        super().__init__(uvicorn.Config(build_app(service), **chosen | options))
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens, which uvicorn does not for sockets that it is given."""
        await super().startup(sockets)
        for listening in sockets or ():
            host, port = listening.getsockname()[:2]
            logger.info("running on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancels requests that outlast `drain_seconds`; each is answered that the server is stopping."""
        cancel_all = partial(self._service.scheduler.close, drain=False)
        cancelling = threading.Thread(target=cancel_all, daemon=True)  # the loop's own may all be busy
        timer = asyncio.get_running_loop().call_later(self._service.config.drain_seconds, cancelling.start)
        await super().shutdown(sockets)
        timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():  # no other gets signals
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.handle_exit)
        yield


def connection_class(config: ServerConfig) -> type[H11Protocol]:
    """Returns uvicorn's class of connections, with bounds on their number and on the time of clients.

    One more than there may be ends the one whose request has been awaited for the longest time, if there is any.
    """
    awaited = dict["Connection", None]()  # connections whose next request has not arrived whole, oldest first

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None  # ends it, unless the headers of a request arrive before
        _unread: asyncio.TimerHandle | None = None  # ends it, unless its client reads the answer

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # writing pauses until the client has read everything
            self._expect_headers()
            if len(self.connections) > config.connections:
                next(iter(awaited), self)._refuse("503 Service Unavailable")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_headers()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.resume_writing()
            self._forget()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def _watch_reading(self, before: int | None = None) -> None:
            """Ends the connection if too few of the bytes that were unread `before` have been read since."""
            unread = self.transport.get_write_buffer_size()
            if before is not None and unread > before - READ_BYTES:
                self.transport.abort()
            else:
                self._unread = self.loop.call_later(config.body_seconds, self._watch_reading, unread)

        def _await(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if self.transport.is_closing() or (answering and not self.cycle.more_body):
                awaited.pop(self, None)
            else:
                awaited.setdefault(self)

        def _expect_headers(self) -> None:
            self._await()
            if self.cycle is not None and not self.cycle.response_complete:
                self._expect(None)
            elif self._late is None:
                self._expect(config.body_seconds)

        def _expect(self, seconds: float | None) -> None:
            if self._late is not None:
                self._late.cancel()
            refuse = partial(self._refuse, "408 Request Timeout")
            self._late = None if seconds is None else self.loop.call_later(seconds, refuse)

        def _forget(self) -> None:
            self._expect(None)
            self.connections.discard(self)
            awaited.pop(self, None)

        def _refuse(self, status: str) -> None:
            self._forget()
            self.transport.write(REFUSAL.format(status).encode())
            self.transport.close()

    return Connection
