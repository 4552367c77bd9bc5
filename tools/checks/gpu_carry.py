"""Packs what a lent machine with a GPU lacks, for `gpu_session.py --carried`: bundles of a model and compiled kernels.

    python tools/checks/gpu_carry.py MODEL -o FOLDER [--routers FILE] [--architectures 80,86,89,90,120]
                                     [--tide FOLDER] [--limit MIB]

FOLDER/bundles gets a bundle each in float32, float16 and bfloat16, without what a session does not read, and
FOLDER/libtide_kernels.so the kernels for these GPUs, compiled with nvcc. Without `--routers` routers are calibrated
briefly. Exit code 1 where FOLDER is larger than the limit (48 MiB).
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from gpu_steps import PYTHON, ROOT, WEIGHTS

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest

EXPORT = ["--target", "tensorrt", "--no-engines", "--overwrite", "-q"]
CALIBRATE = ["--checkpoints", "3,6,9", "--min-layers", "3", "--calibration-samples", "200", "--dataset"]
TEXT = "calibration/text/python-stdlib.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--routers", type=Path, help="router file (calibrated here)")
    parser.add_argument(
        "--architectures", default="80,86,89,90,120", help="of the kernels (80,86,89,90,120); '' for none"
    )
    parser.add_argument("--tide", type=Path, help="TIDE's sources, for its kernels' times")
    parser.add_argument("--limit", type=float, default=48, metavar="MIB", help="of the folder (48)")
    options = parser.parse_args()
    folder = options.output.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bundles").mkdir(parents=True)
    routers = options.routers and options.routers.resolve()
    for weights in WEIGHTS:
        bundle = folder / "bundles" / weights
        how = ["--routers", str(routers)] if routers else [*CALIBRATE, TEXT]
        run(
            PYTHON,
            "-m",
            "tide_export.cli.main",
            "export",
            options.model,
            "-o",
            str(bundle),
            "--weights",
            weights,
            *how,
            *EXPORT,
        )
        routers = routers or bundle / "routers.safetensors"
        strip(bundle)
    if options.architectures:
        compile_kernels(folder, options.architectures)
    if options.tide:
        shutil.copytree(options.tide, folder / "tide")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(f"{folder}: {size:.1f} MiB of at most {options.limit:g}")
    return int(size > options.limit)


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
    shutil.copyfile(build / "plugins" / "libtide_kernels.so", folder / "libtide_kernels.so")
    shutil.rmtree(build)


if __name__ == "__main__":
    sys.exit(main())
