"""Checks size, API key and rate of requests before they are read, and logs and counts them."""

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.responses import JSONResponse

from tide_export.serving.config import ServerConfig
from tide_export.serving.metrics import Metrics
from tide_export.serving.protocol import UNFORESEEN, ApiError

logger = logging.getLogger("tide_export.serving")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
OPEN = ("/health", "/ready", "/metrics")  # paths that need no key: others watch the server by them
MAX_CLIENTS = 10_000  # whose rates are remembered
SKIPPED_BYTES = 1 << 24  # of a body that is too large, at most


class Guard:
    """Wraps the whole server as ASGI middleware."""

    def __init__(self, app: App, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, with_key(config), metrics
        self._allowance = dict[str, tuple[float, float]]()  # by client: requests left, and when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers refused requests, and passes the others on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        asked = quote(scope["path"])  # one line in the log, whatever the client sent

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            if scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN:
                self._check_origin(headers)
                self._check_key(headers)
                self._check_rate(headers, scope)
            await self._app(scope, await self._bounded(headers, receive), counted)
        except ApiError as error:
            await answer(error)(scope, receive, counted)
        except Exception:
            if status:  # the answer has begun, so only the connection can end
                raise
            logger.exception("%s %s failed", scope["method"], asked)
            await answer(ApiError(500, UNFORESEEN, "server_error"))(scope, receive, counted)
        finally:
            seconds = time.perf_counter() - started
            known = scope.get("route")
            path = known.path if known is not None else "other"
            self._metrics.requests.labels(path, str(status)).inc()
            fields = {"method": scope["method"], "path": asked, "status": status, "seconds": round(seconds, 4)}
            logger.info("%s %s %d %.3f s", *fields.values(), extra={"fields": fields})

    def _check_origin(self, headers: dict[str, str]) -> None:
        """Refuses pages of a browser, which reach servers that are closed to others; those who have a key may."""
        origin, allowed = headers.get("origin"), self._config.allow_origin
        if origin is not None and self._config.api_key is None and not {origin, "*"} & set(allowed):
            raise ApiError(403, f"pages of {origin} may not use this server: start it with --allow-origin {origin}")

    def _check_key(self, headers: dict[str, str]) -> None:
        key = self._config.api_key
        authorization = headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(authorization.encode("latin-1"), f"Bearer {key}".encode()):
            raise ApiError(401, "give the server's API key: Authorization: Bearer KEY", "authentication_error")

    def _check_rate(self, headers: dict[str, str], scope: Scope) -> None:
        """Takes one request from the client's allowance, which refills up to `requests_per_minute`."""
        limit = self._config.requests_per_minute
        if limit is None:
            return
        key = headers["authorization"] if self._config.api_key is not None else None  # else clients could send any
        client = key or (scope.get("client") or ("",))[0]
        now = time.monotonic()
        left, at = self._allowance.pop(client, (float(limit), now))
        left = min(limit, left + (now - at) * limit / 60)
        allowed = left >= 1
        self._allowance[client] = (left - allowed, now)  # clients are in the order of their last requests
        if len(self._allowance) > MAX_CLIENTS:
            del self._allowance[next(iter(self._allowance))]
        if not allowed:
            raise ApiError(
                429, f"{limit} requests a minute are allowed", "rate_limit_error", 1 + int((1 - left) * 60 / limit)
            )

    async def _bounded(self, headers: dict[str, str], receive: Receive) -> Receive:
        """Wraps `receive` to refuse a body of more than `body_bytes`."""
        limit, seen = self._config.body_bytes, 0
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > limit:
            if "expect" not in headers:  # such a client waits for an answer before it sends the body
                await self._skip_body(receive)
            raise ApiError(413, f"the request has more than {limit} bytes")

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                await self._skip_body(receive)
                raise ApiError(413, f"the request has more than {limit} bytes")
            return message

        return bounded

    async def _skip_body(self, receive: Receive) -> None:
        """Reads on, within bounds: a client whose connection ends while it writes may miss the answer."""
        left = SKIPPED_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.body_seconds):
                while left > 0 and (message := await receive()).get("more_body"):
                    left -= len(message["body"])


def with_key(config: ServerConfig) -> ServerConfig:
    """Returns the options with the key in TIDE_API_KEY, unless they have one."""
    key = config.api_key or os.environ.get("TIDE_API_KEY") or None
    return config if key == config.api_key else config.model_copy(update={"api_key": key})


def answer(error: ApiError) -> JSONResponse:
    """Returns the HTTP response of an error."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 408:
        headers["Connection"] = "close"  # the rest of the body may still arrive
    return JSONResponse(error.body(), error.status, headers)
