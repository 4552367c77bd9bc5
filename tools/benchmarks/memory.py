"""Time and peak memory of exporting a model and of loading its bundle, each in a process of its own.

    python tools/benchmarks/memory.py MODEL [--json FILE] [--target onnxruntime --weights fp32] [--device-map auto]

Three peaks are told apart, sampled from outside while the process runs: *private* memory (anonymous pages, which the
system cannot take back), pages of *mapped files* (the model's or the bundle's own: clean, and dropped by the
system when it needs the room), and the *resident* set, which counts both. They are compared with the weights in
float32. Routers are random: calibration is not part of this.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROUTERS = """
from tide_export.calibration.config import TideConfig
from tide_export.model.source import load_model
from tide_export.routers.random_routers import random_routers
config = TideConfig()
source = load_model({model!r}, device_map={device_map!r})
points = config.resolve_checkpoints(source.num_layers)
routers = random_routers(source, points, range(5, 69), config.router_bottleneck_dim, 256)
routers.save({scratch!r} + "/routers.safetensors")
"""
EXPORT = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from tide_export.pipeline.flow import export
export({model!r}, {scratch!r} + "/bundle", routers={scratch!r} + "/routers.safetensors", targets=({target!r},),
       weights={weights!r}, engines=False, device_map={device_map!r})
"""
LOAD = """
import tide_export
engine = tide_export.load({scratch!r} + "/bundle")
print(engine.generate([5, 6, 7], max_new_tokens=4, mode="full", stop_token_ids=[]).tokens)
"""
IMPORTS = {
    "export": "import torch, tide_export.pipeline.flow",
    "load": "import onnxruntime, tide_export.runtime.engine",
}
SAMPLED = {"private": "RssAnon", "files": "RssFile", "resident": "VmRSS"}  # lines of /proc/PID/status
SECONDS = 0.02  # between samples
STAGE = re.compile(r"(.+) \.\.\. done in [\d.]+ s")  # what `progress.stage` logs when a stage ends


@dataclass
class Peaks:
    """Peak bytes of one process; of the whole run, and of each stage of an export by its name."""

    seconds: float = 0.0
    private: int = 0
    files: int = 0
    resident: int = 0
    stages: dict[str, dict[str, int]] = field(default_factory=dict)


def run(body: str) -> Peaks:
    """Runs `body` in a fresh interpreter and watches it."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", body], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peaks, log, now = Peaks(), list[str](), {"stage": dict.fromkeys(SAMPLED, 0)}

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if found := STAGE.fullmatch(line.strip()):
                peaks.stages[found[1]], now["stage"] = now["stage"], dict.fromkeys(SAMPLED, 0)

    listener = threading.Thread(target=listen)
    listener.start()
    while process.poll() is None:
        for kind, value in sample(process.pid).items():
            setattr(peaks, kind, max(getattr(peaks, kind), value))
            now["stage"][kind] = max(now["stage"][kind], value)
        time.sleep(SECONDS)
    listener.join()
    peaks.seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise SystemExit("".join(log[-20:]).strip() or f"the process died with exit code {process.returncode}")
    return peaks


def sample(pid: int) -> dict[str, int]:
    """Bytes the process holds now; nothing once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return {kind: int(lines[name].split()[0]) * 1024 for kind, name in SAMPLED.items() if name in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--device-map", choices=["auto"])
    arguments = parser.parse_args()
    result: dict = {"model": str(arguments.model)}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        options = {name: getattr(arguments, name) for name in ("target", "weights", "device_map")}
        names = {**options, "model": str(arguments.model), "scratch": scratch}
        run(ROUTERS.format(**names))
        for stage, body in (("export", EXPORT), ("load", LOAD)):
            base = run(IMPORTS[stage])
            peaks = run(body.format(**names))
            weights = result["weights_bytes"] = Path(scratch, "bundle", "model.onnx.data").stat().st_size
            result[stage] = {**asdict(peaks), "imports_bytes": base.resident}
    print(f"{arguments.model}: {weights / 2**20:.0f} MiB of float32 weights")
    for stage in ("export", "load"):
        row = result[stage]
        print(f"{stage} {row['seconds']:.1f} s, of which imported packages hold {row['imports_bytes'] / 2**20:.0f} MiB")
        for what, peak in {"peak": row, **row["stages"]}.items():
            shares = (f"{kind} {peak[kind] / 2**20:6.0f} MiB = {peak[kind] / weights:.2f}x" for kind in SAMPLED)
            print(f"  {what:40s} {'   '.join(shares)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
