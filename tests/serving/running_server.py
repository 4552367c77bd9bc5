"""The HTTP server of a bundle in a thread, and its clients."""

import gc
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.serving.config import ServerConfig
from tide_export.serving.server import Server
from tide_export.serving.service import Service

KEY = "secret"
PROMPT = "def read_lines(path):"
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 24, "extra_body": {"mode": "full"}}


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Running:
    """A server in a thread, and its clients."""

    def __init__(self, bundle: Path, **config: Any) -> None:
        options = {"model_name": "demo", "api_key": KEY, "slots": 3, "waiting": 4, "body_bytes": 20_000} | config
        self.service = Service(load(bundle, provider="cpu", threads=1), ServerConfig(**options))
        self.port = free_port()
        self._server = Server(self.service, port=self.port, log_level="warning")
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        address = f"http://127.0.0.1:{self.port}"
        self.openai = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        self.http = httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.openai.close()
        self.http.close()
        vars(self.service).clear()  # FastAPI never forgets an app's functions, which hold it
        del self._server, self._thread
        gc.collect(1)  # its gauges are cycles

    def idle(self) -> bool:
        """Whether nothing runs, after waiting a little for it."""
        for _ in range(500):
            if not (self.service.scheduler.running or self.service.scheduler.waiting):
                return True
            time.sleep(0.01)
        return False


def text_of(engine: Engine, ids: list[int], **options: Any) -> str:
    tokens = engine.generate(ids, **options).tokens
    return "".join(BundleTokenizer(engine.bundle).stream(ids, tokens))
