"""A real tritonserver: that of the wheel `nvidia-pytriton`, which holds the program and Triton's python backend.

The wheel asks for numpy 1, which nothing of the server needs: `pip install --no-deps nvidia-pytriton`.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType

import httpx
import pytest
from running_server import free_port

SECONDS = 60  # to be ready


def triton_folder() -> Path:
    """The server's folder in the wheel; skips the test where it is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        pytest.skip("nvidia-pytriton is not installed: pip install --no-deps nvidia-pytriton")
    return Path(spec.origin).parent / "tritonserver"


class TritonServer:
    """A server of one repository on loopback, while it is entered."""

    def __init__(self, repository: Path, scratch: Path) -> None:
        wheel, self._log_file = triton_folder(), scratch / "triton.log"
        backend = scratch / "backends" / "python"
        backend.mkdir(parents=True)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            pytest.skip(f"nvidia-pytriton has no backend for Python {version}")
        folder, library = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
        if not Path(folder, library).exists() or not library.startswith("libpython"):
            pytest.skip("this Python has no shared library, which Triton's backend needs")
        for file in (*(wheel / "backends" / "python").iterdir(), stub):
            (backend / file.name).symlink_to(file)
        self.port = free_port()
        self._line = [str(wheel / "bin" / "tritonserver"), f"--model-repository={repository}", "--allow-metrics=false"]
        self._line += [f"--backend-directory={backend.parent}", "--http-address=127.0.0.1", f"--http-port={self.port}"]
        self._line += ["--allow-grpc=false", "--exit-on-error=false", "--exit-timeout-secs=5"]
        libraries = f"{folder}:{wheel.parents[1] / 'nvidia_pytriton.libs'}"
        self._environment = os.environ | {"LD_LIBRARY_PATH": libraries}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def __enter__(self) -> "TritonServer":
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(self._line, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + SECONDS
        while True:
            try:
                if self.http.get("/v2/health/live").status_code == 200:
                    return self
            except httpx.ConnectError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                raise AssertionError(f"tritonserver does not start: {self.log[-2000:]}")
            time.sleep(0.05)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.close()  # it would wait for an open connection
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
