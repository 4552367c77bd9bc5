"""Starts HTTP servers with OpenAI's /v1/completions, and asks them streams of requests that arrive at random."""

import asyncio
import json
import random
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.peer_case import PeerError

START_SECONDS = 120


@dataclass(frozen=True)
class Ask:
    """A request: its prompt, how many tokens it asks for, how long after the one before it arrives, and its seed."""

    prompt: str
    max_tokens: int
    pause: float
    seed: int = 0


@dataclass
class Heard:
    """What came back: its text, its tokens, and when the first and each further piece came, in seconds.

    Attributes:
        first: from the sending of the request.
        gaps: between pieces, each of one token unless the server sends several as one.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)


class Server:
    """A server of one model in a separate process."""

    def __init__(self, command: str) -> None:
        """Starts it, and waits until it answers. `command` has {port} where its port goes.

        Raises:
            PeerError: it cannot be started; the message has its last line.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        words = shlex.split(command.replace("{port}", str(port)))
        try:
            self._process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise PeerError(f"{words[0]}: {error.strerror}") from error
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                answer = httpx.get(f"{self.address}/v1/models", timeout=5)
                if answer.status_code == 200:
                    self.model = answer.json()["data"][0]["id"]
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                reason = self._last_line()
                self.close()
                raise PeerError(f"does not answer: {reason}")
            time.sleep(0.2)

    @property
    def megabytes(self) -> float:
        """Its memory now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))

    def load(self, asks: Sequence[Ask], streams: int, options: Mapping[str, Any]) -> tuple[float, list[Heard]]:
        """Sends the requests as they arrive, at most `streams` at a time; the seconds of all, and what came back.

        Raises:
            PeerError: a request failed.
        """
        return asyncio.run(self._load(asks, streams, options))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    async def _load(self, asks: Sequence[Ask], streams: int, options: Mapping[str, Any]) -> tuple[float, list[Heard]]:
        limits = httpx.Limits(max_keepalive_connections=0)  # a server may close an idle connection at any time
        async with httpx.AsyncClient(base_url=self.address, timeout=600, limits=limits) as client:
            free, started = asyncio.Semaphore(streams), time.perf_counter()

            async def one(ask: Ask) -> Heard:
                async with free:
                    return await self._ask(client, ask, options)

            tasks = []
            for ask in asks:
                await asyncio.sleep(ask.pause)
                tasks.append(asyncio.create_task(one(ask)))
            heard = list(await asyncio.gather(*tasks))
            return time.perf_counter() - started, heard

    async def _ask(self, client: httpx.AsyncClient, ask: Ask, options: Mapping[str, Any]) -> Heard:
        body = {"model": self.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0}
        body |= {"seed": ask.seed, "stream": True, "stream_options": {"include_usage": True}, **options}
        heard, pieces, last = Heard(), 0, time.perf_counter()
        sent = last
        try:
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                if stream.status_code != 200:
                    raise PeerError(f"answers {stream.status_code}: {(await stream.aread()).decode()[:200]}")
                async for line in stream.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event, now = json.loads(line.removeprefix("data: ")), time.perf_counter()
                    if "error" in event:
                        raise PeerError(f"answers {event['error']}")
                    heard.tokens = (event.get("usage") or {}).get("completion_tokens", heard.tokens)
                    text = "".join(choice.get("text", "") for choice in event.get("choices", []))
                    if text and not pieces:
                        heard.first = now - sent
                    elif text:
                        heard.gaps.append(now - last)
                    if text:
                        heard.text, pieces, last = heard.text + text, pieces + 1, now
        except httpx.HTTPError as error:
            raise PeerError(f"fails: {error!r}") from error
        heard.tokens = heard.tokens or pieces
        return heard

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it printed nothing"


def draw(texts: Sequence[str], count: int, rate: float, tokens: int, order: random.Random) -> list[Ask]:
    """Requests with parts of `texts` as prompts, none of them twice.

    Args:
        rate: of their arrivals a second (Poisson).
        tokens: of an answer on average; from half to one and a half times as many.
    """
    asks = []
    for _ in range(count):
        text, characters = order.choice(texts), order.choice((100, 300, 900))
        first = order.randrange(max(len(text) - characters, 1))
        answer = order.randint(tokens - tokens // 2, tokens + tokens // 2)
        asks.append(Ask(text[first : first + characters], answer, order.expovariate(rate), order.randrange(1 << 31)))
    return asks
