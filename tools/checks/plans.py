"""Compares every engine of a bundle with ONNX Runtime on the same inputs, in every optimization profile, by Polygraphy.

    python tools/checks/plans.py BUNDLE [PLUGINS]

Needs a GPU, the flavour the plans are of, and ONNX Runtime; for plans that hold plugins their library too, PLUGINS
or the one that is found as when they are run. Exit code 1 when an output differs by more than rounding.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tide_export.bundle.file_names import network_file, plan_file
from tide_export.bundle.network_spec import NetworkSpec, RunSize, of_network, specs
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import NetworksInfo, Profile
from tide_export.errors import ProviderError, TideError
from tide_export.names import segment_networks as names
from tide_export.runtime.tensorrt.flavours import FLAVOURS, TENSORRT_RTX, import_library
from tide_export.runtime.tensorrt.plugins import plugins_to_load, register

TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2}  # of the largest value of an output


def feeds(spec: NetworkSpec, profile: Profile, info: NetworksInfo) -> Iterator[dict[str, np.ndarray]]:
    """Random inputs for the fewest, usual and most tokens of a profile and as many sequences as it takes, after caches
    of several lengths."""
    random, rows = np.random.default_rng(0), profile.batch_size
    buffers = [tensor for name, tensor in spec.inputs.items() if name.startswith("past_key_values.")]
    capacity = int(buffers[0].shape[2]) if buffers else info.capacity
    for tokens in sorted({profile.min_tokens, profile.opt_tokens, profile.max_tokens}):
        lengths = {0, (capacity - tokens) // 2, capacity - tokens} if names.PAST_LENGTHS in spec.inputs else {0}
        for length in sorted(lengths):
            inputs = {}
            for name, tensor in spec.inputs.items():
                shape = tensor.dims(RunSize(tokens, rows, min(capacity, 4 * (length + tokens))))
                if name == names.PAST_LENGTHS:
                    inputs[name] = np.maximum(length - 3 * np.arange(rows), 0)
                elif name == names.LAST_TOKENS:
                    inputs[name] = (tokens - 1) * (1 + np.arange(rows)) // rows
                elif name in (names.TOKEN_INDICES, names.KEY_INDICES):
                    inputs[name] = np.arange(*shape)
                elif name == names.PENDING_LENGTHS:
                    inputs[name] = np.arange(rows)
                elif name in (names.INPUT_IDS, names.ROWS):
                    inputs[name] = random.integers(0, 100, shape)
                elif name == names.THRESHOLDS:
                    inputs[name] = np.full(shape, 0.5, np.float32)
                else:
                    inputs[name] = random.standard_normal(shape).astype(tensor.dtype)
            yield inputs


def differences(engine: Path, network: Path, profile: int, inputs: list[dict[str, np.ndarray]]) -> Mapping[str, float]:
    """The largest difference of every output, as a share of the output's largest value."""
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner
    from polygraphy.comparator import Comparator
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.WARNING
    runners = [
        TrtRunner(EngineFromBytes(BytesFromPath(str(engine))), name="engine", optimization_profile=profile),
        OnnxrtRunner(SessionFromOnnx(str(network), providers=["cpu"]), name="network"),
    ]
    results = Comparator.run(runners, data_loader=inputs)
    worst: dict[str, float] = {}
    for ours, theirs in zip(results["engine"], results["network"], strict=True):
        for name in theirs:
            expected = np.asarray(theirs[name], np.float64)
            scale = max(float(np.abs(expected).max()), 1e-6)
            error = float(np.abs(np.asarray(ours[name], np.float64) - expected).max()) / scale
            worst[name] = float(np.maximum(worst.get(name, 0.0), error))  # keeps a NaN
    return worst


def main(path: str, plugins: str | None = None) -> int:
    """Prints a line per network and profile; 1 when one differs."""
    bundle = open_bundle(path)
    manifest = bundle.manifest
    if manifest.networks is None or manifest.engines is None:
        raise ProviderError(f"bundle '{path}' holds no TensorRT plans: there is nothing to compare")
    if manifest.networks.weights not in TOLERANCES:
        raise ProviderError("ONNX Runtime does not run bfloat16 networks on the CPU: there is nothing to compare with")
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if FLAVOURS[manifest.engines.flavour] is TENSORRT_RTX else "0"
    if manifest.engines.plugins is not None:
        library = import_library(FLAVOURS[manifest.engines.flavour])
        version = str(library.__version__)
        register(library, plugins_to_load(bundle.path, manifest.engines.plugins, version, plugins).path)
    tolerance, failed = TOLERANCES[manifest.networks.weights], False
    for name, spec in specs(manifest, manifest.networks).items():
        for number, profile in enumerate(of_network(name, manifest.engines.profiles, manifest.networks)):
            inputs = list(feeds(spec, profile, manifest.networks))
            engine, network = bundle.file(plan_file(name)), bundle.file(network_file(name))
            worst = differences(engine.path, network.path, number, inputs)
            # A flag may flip where its score lies on the threshold: then the state goes to another row of the buffer;
            # the score itself is compared.
            free = (names.EXIT_FLAG, names.NEW_EXIT_STATES) if names.EXIT_FLAG in worst else ()
            wrong = {key: error for key, error in worst.items() if key not in free and not error <= tolerance}
            failed |= bool(wrong)
            print(f"{name:12} {profile.name:9} {len(inputs)} inputs, largest difference {max(worst.values()):.1e}")
            for key, error in wrong.items():
                print(f"    {key} differs by {error:.1e} of its largest value, more than {tolerance:g}")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except TideError as error:
        sys.exit(f"plans: {error}")
