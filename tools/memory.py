"""Time and peak memory of exporting a model and of loading its bundle, each in a process of its own.

    python tools/memory.py MODEL [--json FILE]

Peak memory is the process's largest resident set (what the kernel counted), compared with the weights in float32 and,
for small models, with what importing the packages alone takes. Routers are random: calibration is not part of this.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXPORT = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tools!r})
from benchmark import random_routers
from tide_export.config import TideConfig
from tide_export.model import load_model
from tide_export.pipeline import export
import gc
config = TideConfig()
source = load_model({model!r})
routers = random_routers(source, config.resolve_checkpoints(source.num_layers), config.router_bottleneck_dim)
routers.save(Path({scratch!r}) / "routers.safetensors")
del source, routers
gc.collect()
export({model!r}, Path({scratch!r}) / "bundle", routers=Path({scratch!r}) / "routers.safetensors", config=config)
"""
LOAD = """
import tide_export
engine = tide_export.load({scratch!r} + "/bundle")
print(engine.generate([5, 6, 7], 4, mode="full", stop_token_ids=[]).tokens)
"""
IMPORTS = {
    "export": "import torch, tide_export.pipeline",
    "load": "import onnxruntime, tide_export.runtime.engine",
}
MEASURED = """
import resource, time
started = time.perf_counter()
{body}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("MEASURED", time.perf_counter() - started, peak)
"""


def run(body: str) -> tuple[float, int]:
    """Seconds and peak bytes of `body` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", MEASURED.format(body=body)], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED")), None)
    if line is None:
        raise SystemExit(done.stderr.strip())
    _, seconds, peak = line.split()
    return float(seconds), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict = {"model": str(arguments.model)}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        names = {"model": str(arguments.model), "scratch": scratch, "tools": str(Path(__file__).parent)}
        for stage, body in (("export", EXPORT), ("load", LOAD)):
            base = run(IMPORTS[stage])[1]
            seconds, peak = run(body.format(**names))
            weights = Path(scratch, "bundle", "model.onnx.data").stat().st_size
            result["weights_bytes"] = weights
            result[stage] = {
                "seconds": seconds,
                "peak_bytes": peak,
                "imports_bytes": base,
                "peak_over_weights": peak / weights,
                "peak_without_imports_over_weights": (peak - base) / weights,
            }
    print(f"{arguments.model}: {result['weights_bytes'] / 2**20:.0f} MiB of float32 weights")
    for stage in ("export", "load"):
        row = result[stage]
        print(
            f"{stage:7s} {row['seconds']:7.1f} s   peak {row['peak_bytes'] / 2**20:7.0f} MiB = "
            f"{row['peak_over_weights']:.2f}x weights ({row['peak_without_imports_over_weights']:.2f}x without the "
            f"{row['imports_bytes'] / 2**20:.0f} MiB of imported packages)"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
