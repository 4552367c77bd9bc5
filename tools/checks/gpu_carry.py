"""Packs what a lent machine with a GPU lacks, for `gpu_session.py --carried`: bundles of a model and compiled kernels.

    python tools/checks/gpu_carry.py MODEL -o FOLDER [--routers FILE] [--architectures 80,86,89,90,120]
                                     [--shape BUNDLE]... [--limit MIB] [--resume]

FOLDER/bundles gets a bundle each in float32, float16 and bfloat16, without what a session does not read, the one in
float32 with a drafter, and one each for ONNX Runtime on CUDA in bfloat16, float16 and int4. FOLDER/libtide_kernels.so
and libtide_plugins.so get the kernels and the plugin for these GPUs, compiled with nvcc: with TensorRT's headers where
TENSORRT_ROOT has them, else with what the tests declare of them, which makes the same machine code. Without `--routers`
routers are calibrated briefly, and the drafter is trained for a minute. Of each `--shape`, a bundle of `--target cuda`
of a model as large as people serve, the networks alone are packed, and timed on random weights: what counts most comes
first. The bundles are not compared with the model here: the session does that. `--resume` goes on where a run before
was cut off. Exit code 1 where FOLDER is larger than the limit (60 MiB).
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from gpu_machine import headers
from gpu_steps import CUDA, CUDA_WEIGHTS, DECLARED, KERNELS, PLUGINS, ROOT, SHAPES, WEIGHTS

from tide_export.bundle.file_names import DRAFTER_FILE, MANIFEST_FILE, ROUTERS_FILE, SEGMENTS_FOLDER, WEIGHTS_FILE
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
    parser.add_argument(
        "--shape", action="append", type=Path, default=[], metavar="BUNDLE", help="packed without weights"
    )
    parser.add_argument("--limit", type=float, default=60, metavar="MIB", help="of the folder (60)")
    parser.add_argument("--resume", action="store_true", help="keep what a run before has finished")
    options = parser.parse_args(arguments)
    folder, begun = options.output.resolve(), time.perf_counter()
    for shape in options.shape:
        if not Manifest.from_json((shape / MANIFEST_FILE).read_text()).has_cuda_networks:
            sys.exit(f"gpu_carry: bundle '{shape}' holds no networks for CUDA: export it with --target cuda")
    if not options.resume:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "bundles").mkdir(parents=True, exist_ok=True)
    routers = options.routers and options.routers.resolve()
    for weights in (*WEIGHTS, *(CUDA + weights for weights in CUDA_WEIGHTS)):
        bundle = folder / "bundles" / weights
        if not (bundle / MANIFEST_FILE).is_file():
            export_bundle(options.model, bundle, weights, routers)
        if weights == "fp32" and not (bundle / DRAFTER_FILE).is_file():
            train_drafter(options.model, bundle)
        routers = routers or bundle / ROUTERS_FILE
        strip(bundle)
        print(f"{bundle} after {time.perf_counter() - begun:.0f} s", flush=True)
    if options.architectures and not all((folder / name).is_file() for name in (KERNELS, PLUGINS)):
        compile_libraries(folder, options.architectures)
        print(f"{KERNELS} and {PLUGINS} after {time.perf_counter() - begun:.0f} s", flush=True)
    for number, shape in enumerate(options.shape):
        pack_shape(shape, folder / SHAPES / f"{number}-{shape.resolve().name}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(f"{folder}: {size:.1f} MiB of at most {options.limit:g}")
    return int(size > options.limit)


def export_bundle(model: str, bundle: Path, name: str, routers: Path | None) -> None:
    """Writes segment networks in one precision beside the graph; `name`: as in `gpu_steps.Given`."""
    from tide_export import TideConfig, export

    export(
        model,
        bundle,
        routers=routers,
        config=TideConfig.model_validate(BRIEFLY),
        targets=("cuda" if name.startswith(CUDA) else "tensorrt",),
        weights=name.removeprefix(CUDA),
        engines=False,
        validate=False,
        report=False,
        overwrite=True,
    )


def train_drafter(model: str, bundle: Path) -> None:
    """Puts a drafter into a bundle, trained for a minute: its drafts are seldom right, and count all the same."""
    from tide_export import DraftConfig, draft

    draft(model, bundle, DraftConfig(minutes=1.0))


def run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def strip(bundle: Path) -> None:
    """Takes out of a bundle what a session does not read: the report, and what runs on the CPU (the graph's weights,
    its networks for batches), unless it or another is compared with that."""
    manifest = Manifest.from_json((bundle / MANIFEST_FILE).read_text())
    unread = ("report.", *(() if bundle.name in ("fp32", f"{CUDA}int4") else ("batch/", WEIGHTS_FILE)))
    for name in [name for name in manifest.files if name.startswith(unread)]:
        (bundle / name).unlink(missing_ok=True)
    write_manifest(bundle, replace(manifest, files={}))


def pack_shape(bundle: Path, target: Path) -> None:
    """Copies a bundle without weights. Its manifest goes on naming its networks' files of weights, for their sizes."""
    unread = shutil.ignore_patterns("*.data", "batch", "routers*", "report.*")
    shutil.copytree(bundle, target, ignore=unread, dirs_exist_ok=True)
    manifest = Manifest.from_json((bundle / MANIFEST_FILE).read_text())
    kept = {name: info for name, info in manifest.files.items() if (target / name).exists()}
    kept |= {name: info for name, info in manifest.files.items() if name.startswith(f"{SEGMENTS_FOLDER}/")}
    (target / MANIFEST_FILE).write_text(replace(manifest, files=kept).to_json())


def compile_libraries(folder: Path, architectures: str) -> None:
    """Compiles the kernels and the plugin, which share their objects."""
    build, root = folder / "build", DECLARED if headers("TENSORRT_ROOT")() else os.environ["TENSORRT_ROOT"]
    options = (f"-DCUDA_ARCHITECTURES={architectures}", f"-DTENSORRT_ROOT={root}")
    run("cmake", "--preset", "plugins", "-B", str(build), *options)
    run("cmake", "--build", str(build), "--target", "tide_kernels", "tide_plugins", "--parallel", "1")
    for name in (KERNELS, PLUGINS):
        shutil.move(build / "plugins" / name, folder / name)  # at once: it is whole or not there
    shutil.rmtree(build)


if __name__ == "__main__":
    sys.exit(main())
