"""A stand-in for the hub, which `huggingface_hub` takes for the real one."""

import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import TOKEN, Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Its user is logged in, and has an empty cache."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    constants = {"ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants |= {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "no-token")}
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
