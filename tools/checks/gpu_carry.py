"""Packs what a lent machine with a GPU lacks, for `gpu_session.py --carried`: bundles of a model and compiled kernels.

    python tools/checks/gpu_carry.py MODEL -o FOLDER [--routers FILE] [--architectures 80,86,89,90,120]
                                     [--tide FOLDER] [--limit MIB] [--resume]

FOLDER/bundles gets a bundle each in float32, float16 and bfloat16, without what a session does not read, and
FOLDER/libtide_kernels.so the kernels for these GPUs, compiled with nvcc. Without `--routers` routers are calibrated
briefly. The bundles are not compared with the model here: the session does that. `--resume` goes on where a run before
was cut off. Exit code 1 where FOLDER is larger than the limit (48 MiB).
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from gpu_session import KERNELS
from gpu_steps import ROOT, WEIGHTS

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest

TEXT = ROOT / "calibration" / "text" / "python-stdlib.jsonl"
BRIEFLY = {"checkpoints": (3, 6, 9), "min_layers": 3, "calibration_samples": 64, "calibration_dataset": str(TEXT)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--routers", type=Path, help="router file (calibrated here)")
    parser.add_argument(
        "--architectures", default="80,86,89,90,120", help="of the kernels (80,86,89,90,120); '' for none"
    )
    parser.add_argument("--tide", type=Path, help="TIDE's sources, for its kernels' times")
    parser.add_argument("--limit", type=float, default=48, metavar="MIB", help="of the folder (48)")
    parser.add_argument("--resume", action="store_true", help="keep what a run before has finished")
    options = parser.parse_args(arguments)
    folder, begun = options.output.resolve(), time.perf_counter()
    if not options.resume:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "bundles").mkdir(parents=True, exist_ok=True)
    routers = options.routers and options.routers.resolve()
    for weights in WEIGHTS:
        bundle = folder / "bundles" / weights
        if not (bundle / names.MANIFEST_FILE).is_file():
            export_bundle(options.model, bundle, weights, routers)
        routers = routers or bundle / names.ROUTERS_FILE
        strip(bundle)
        print(f"{bundle} after {time.perf_counter() - begun:.0f} s", flush=True)
    if options.architectures and not (folder / KERNELS).is_file():
        compile_kernels(folder, options.architectures)
        print(f"{folder / KERNELS} after {time.perf_counter() - begun:.0f} s", flush=True)
    if options.tide:
        shutil.copytree(options.tide, folder / "tide", dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(f"{folder}: {size:.1f} MiB of at most {options.limit:g}")
    return int(size > options.limit)


def export_bundle(model: str, bundle: Path, weights: str, routers: Path | None) -> None:
    """Writes segment networks in one precision beside the graph."""
    from tide_export import TideConfig, export

    export(
        model,
        bundle,
        routers=routers,
        config=TideConfig.model_validate(BRIEFLY),
        targets=("tensorrt",),
        weights=weights,
        engines=False,
        validate=False,
        report=False,
        overwrite=True,
    )


def run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def strip(bundle: Path) -> None:
    """Takes out of a bundle what a session does not read: networks for batches on the CPU, the report, and the graph's
    weights, unless it is the float32 graph, that others are compared with."""
    manifest = Manifest.from_json((bundle / names.MANIFEST_FILE).read_text())
    unread = ("batch/", "report.", *(() if bundle.name == "fp32" else (names.WEIGHTS_FILE,)))
    for name in [name for name in manifest.files if name.startswith(unread)]:
        (bundle / name).unlink(missing_ok=True)
    shutil.rmtree(bundle / "batch", ignore_errors=True)
    write_manifest(bundle, replace(manifest, files={}))


def compile_kernels(folder: Path, architectures: str) -> None:
    build = folder / "build"
    run("cmake", "--preset", "plugins", "-B", str(build), f"-DCUDA_ARCHITECTURES={architectures}", "-DTENSORRT_ROOT=")
    run("cmake", "--build", str(build), "--target", "tide_kernels", "--parallel", "1")
    shutil.move(build / "plugins" / KERNELS, folder / KERNELS)  # at once: it is whole or not there
    shutil.rmtree(build)


if __name__ == "__main__":
    sys.exit(main())
