"""Builds a bundle's plans: every segment network and the head, by TensorRT or TensorRT for RTX.

Called by `pipeline.flow.export` on the folder a bundle is written into, and by `rebuild` on a copy of one, so that a
bundle gets all its plans or none. `worker` builds in a separate process; this module writes its job, shows its
progress, reports its errors, and checks that the plans have what the runtime will bind.
"""

import contextlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_export.bundle.file_names import PLANS_FOLDER, network_file, plan_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.network_spec import NetworkSpec, RunSize, aliases, from_tensorrt, of_network, specs
from tide_export.bundle.plan_fields import FP8, BuiltPlan, PlansInfo, PluginsInfo, Profile
from tide_export.bundle.profiles import FEWEST_KEYS, USUAL_KEYS, profiles_for
from tide_export.common.files import check_writable, user_cache
from tide_export.common.formatting import size
from tide_export.common.progress import stage
from tide_export.errors import BuildError
from tide_export.names import segment_networks as names
from tide_export.names.operators import OP_EXIT
from tide_export.runtime.tensorrt.flavours import FP8_CAPABILITY, Flavour, built_for, import_library, warn_of_copies
from tide_export.runtime.tensorrt.gpu import compute_capability, device_name
from tide_export.runtime.tensorrt.plugins import PluginLibrary

logger = logging.getLogger("tide_export")

LOG_LINES = 3  # of a failed builder, quoted in the error
WORKER = ("-m", "tide_export.plans.worker")
MAX_WEIGHTS_GROWTH = 1.1  # GPU memory of a plan's weights over the bytes of its network's constants ...
SMALL_BYTES = 1 << 20  # ... for networks with more than a few of them


def require_builder(flavour: Flavour) -> str:
    """Checks that the flavour's library can build here, and returns its version.

    Raises:
        BuildError: Polygraphy is not installed, or there is no GPU where one is needed.
        ProviderError: the library is not installed.
    """
    library = import_library(flavour)
    if importlib.util.find_spec("polygraphy") is None:
        raise BuildError(f"building plans needs Polygraphy: pip install -e '.[{flavour.extra}]' in the clone")
    if not flavour.builds_without_gpu and compute_capability() is None:
        raise BuildError(
            f"{flavour.title} builds for the GPU it finds and there is none here: run `tide-export build` on a machine "
            "that has one, or use --target tensorrt-rtx, which builds without"
        )
    return str(library.__version__)


def check_matrices(flavour: Flavour, matrices: str | None) -> None:
    """Checks that plans with `matrices` can be built here; call `require_builder` first.

    Raises:
        BuildError: they are FP8, and the GPU that the plans are for has none.
    """
    if matrices == FP8 and not built_for(flavour, compute_capability(), fp8=True):
        raise BuildError(
            f"{flavour.title} builds for the GPU it finds, and weights fp8 need one of compute capability "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or later: use int4, fp16 or bf16"
        )


def build_plans(folder: Path, manifest: Manifest, flavour: Flavour, plugins: PluginLibrary | None = None) -> PlansInfo:
    """Builds a plan from every network in `folder` and writes it to `folder`/engines.

    Args:
        manifest: manifest of the unfinished bundle, with `networks`; its files need not be listed yet.
        plugins: library from `plugins_to_build_with`, used instead of the networks' functions.

    Raises:
        BuildError: a plan could not be built, or the builder crashed (the message has its last log lines).
        ProviderError: the library is not installed.
    """
    version, info = require_builder(flavour), manifest.networks
    if info is None:
        raise BuildError("the bundle holds no segment networks to build plans from: export it for that target")
    check_matrices(flavour, info.matrices)
    capabilities = built_for(flavour, compute_capability(), fp8=info.matrices == FP8)
    expected = specs(manifest, info)
    profiles = profiles_for(info, flavour.decode_tokens)
    (folder / PLANS_FOLDER).mkdir()
    job = {
        "networks": [
            {
                "name": name,
                "source": str(folder / network_file(name)),
                "plan": str(folder / plan_file(name)),
                "profiles": [shapes(spec, profile) for profile in of_network(name, profiles, info)],
                "reads_nan": names.LOGITS in spec.inputs,
                "aliases": aliases(spec),
            }
            for name, spec in expected.items()
        ],
        "timing_cache": _timing_cache(flavour, version),
        "plugins": None if plugins is None else str(plugins.path),
        # The others are the flavour's default.
        "compute_capabilities": capabilities if flavour.compute_capabilities not in ((), capabilities) else (),
    }
    if plugins is not None:
        logger.info("building with the plugins of '%s'", plugins.path)
    started = time.perf_counter()
    with stage(f"building {len(expected)} plans with {flavour.title} {version}", total=len(expected)) as advance:
        built = run_worker(job, flavour, version, advance)
    for name, spec in expected.items():
        _check_built(name, spec, built[name], len(of_network(name, profiles, info)))
    seconds = time.perf_counter() - started
    weights = manifest.model.weights_sha256
    used = None if plugins is None else _plugins_used(plugins, expected, built)
    found = {name: _built_plan(event) for name, event in built.items()}
    _warn(flavour, found, {name: event["constants"] for name, event in built.items()})
    copied = {name: _copied_bytes(expected[name], event["copied"]) for name, event in built.items() if event["copied"]}
    warn_of_copies(flavour, copied)
    return PlansInfo(
        *(flavour.name, version, capabilities, weights, profiles, round(seconds, 1), used, found), copied or None
    )


def _copied_bytes(spec: NetworkSpec, copied: Mapping[str, int]) -> int:
    """Returns the bytes of in-place buffers that a run over one sequence copies."""
    return sum(spec.outputs[output].size() * count for output, count in copied.items())


def _built_plan(event: Mapping[str, Any]) -> BuiltPlan:
    """Returns the builder's report; every profile has separate kernels."""
    fused = min(event["attentions"], event["fused_attention_kernels"] // event["profiles"])
    return BuiltPlan(event["weights_bytes"], event["activation_bytes"], event["layers"], event["attentions"], fused)


def _warn(flavour: Flavour, built: Mapping[str, BuiltPlan], constants: Mapping[str, int]) -> None:
    """Logs warnings for plans that hold more weights than their networks, or slower attention.

    Args:
        constants: network name -> bytes of its constants.
    """
    for name, plan in built.items():
        if plan.weights_bytes > MAX_WEIGHTS_GROWTH * constants[name] + SMALL_BYTES:
            logger.warning(
                "%s stores the weights of %s in %s of GPU memory, %.1f times their size: a profile has its own copy",
                flavour.title,
                name,
                size(plan.weights_bytes),
                plan.weights_bytes / max(1, constants[name]),
            )
    decomposed = [name for name, plan in built.items() if plan.fused_attention_layers < plan.attention_layers]
    if decomposed:
        logger.warning(
            "%s has no fused attention for %s and uses several kernels instead: fp16 and bf16 may have one",
            flavour.title,
            ", ".join(decomposed),
        )


def _plugins_used(
    plugins: PluginLibrary, expected: Mapping[str, NetworkSpec], built: Mapping[str, Mapping[str, Any]]
) -> PluginsInfo | None:
    """Returns the plans that hold plugins, all with a router; None if the model has no router.

    Raises:
        BuildError: TensorRT built a function's body instead of the plugin.
    """
    routed = tuple(name for name, spec in expected.items() if names.ROUTER_SCORE in spec.outputs)
    for name in routed:
        if not built[name]["plugins"]:
            raise BuildError(f"TensorRT did not take the plugin {OP_EXIT} of '{plugins.path}' in {name}")
    return PluginsInfo(plugins.version, plugins.sha256, routed) if routed else None


def shapes(spec: NetworkSpec, profile: Profile) -> dict[str, list[list[int]]]:
    """Returns minimum, optimum and maximum shape of every input in a profile that has several shapes.

    The optimum of a batch profile is its maximum batch: smaller batches are bound by reading the weights, whatever
    kernel is chosen.
    """
    sizes = (
        RunSize(profile.min_tokens, 1, min(FEWEST_KEYS, spec.keys)),
        RunSize(profile.opt_tokens, profile.batch_size, min(USUAL_KEYS, spec.keys)),
        RunSize(profile.max_tokens, profile.batch_size, spec.keys),
    )
    return {
        name: [list(tensor.dims(size)) for size in sizes]
        for name, tensor in spec.inputs.items()
        if any(isinstance(dim, str) for dim in tensor.shape)
    }


def _timing_cache(flavour: Flavour, version: str) -> str | None:
    """Returns the file of kernel times of earlier builds, one per version and GPU, in the user's cache.

    None: the flavour has none, or the cache cannot be written, which only costs time.
    """
    if not flavour.has_timing_cache:
        return None
    try:
        folder = user_cache()
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / "timing")
    except (OSError, RuntimeError):
        return None
    return str(folder / f"{flavour.name}-{version}-{device_name()}.timing")


def run_worker(
    job: Mapping[str, Any],
    flavour: Flavour,
    version: str,
    advance: Callable[[float], object],
    command: Sequence[str] = WORKER,
) -> dict[str, dict[str, Any]]:
    """Runs a job in a separate process and returns its `built` event of every network.

    Args:
        advance: called with the share of a network that is done, in 0..1.
        command: arguments of Python, for tests of failing builders.

    Raises:
        BuildError: a network was refused, or the process failed.
    """
    rtx = "1" if flavour.module == "tensorrt_rtx" else "0"
    environment = os.environ | {"POLYGRAPHY_USE_TENSORRT_RTX": rtx, "POLYGRAPHY_AUTOINSTALL_DEPS": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    built: dict[str, dict[str, Any]] = {}
    current, done = "", 0.0
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):  # it ended at once; its exit code tells why
                    json.dump(job, worker.stdin)
                    worker.stdin.close()
                refused = None
                for line in worker.stdout:
                    event = json.loads(line)
                    if event["event"] == "building":
                        current, done = event["network"], 0.0
                    elif event["event"] == "step" and done + 1 / event["of"] < 1:
                        done += 1 / event["of"]
                        advance(1 / event["of"])
                    elif event["event"] == "built":
                        built[current] = event
                        advance(1 - done)
                    elif event["event"] == "refused":
                        refused = event["reason"]
                code = worker.wait()
            except BaseException:
                worker.kill()
                raise
        log.seek(0)
        last_lines = [" ".join(line.split()) for line in log.read().splitlines() if line.strip()][-LOG_LINES:]
    builder = f"{flavour.title} {version}"
    where = f"while building {current}" if current else "before it built anything"
    log_end = f"; its last log lines: {' | '.join(last_lines)}" if last_lines else ""
    if refused is not None:
        raise BuildError(f"{builder} cannot build {current}: {' '.join(refused.split())[:300]}{log_end}")
    if code == -signal.SIGKILL:
        raise BuildError(f"{builder} was killed {where}, most likely because memory ran out{log_end}")
    if code < 0:
        raise BuildError(f"{builder} crashed {where} ({signal.Signals(-code).name}){log_end}")
    if code or any(network["name"] not in built for network in job["networks"]):
        raise BuildError(f"{builder} ended with exit code {code} {where}{log_end}")
    return built


def _check_built(name: str, spec: NetworkSpec, built: Mapping[str, Any], profiles: int) -> None:
    """Checks that a plan has the tensors, in-place buffers and profiles that the runtime binds.

    Raises:
        BuildError: it has not; the message names the difference.
    """
    spec.check(from_tensorrt(spec, built["inputs"]), from_tensorrt(spec, built["outputs"]), name)
    expected = aliases(spec)
    if built["plugins"]:
        expected.pop(names.NEW_EXIT_STATES)  # a plugin writes it to any address
    if expected != built["aliases"]:
        raise BuildError(f"TensorRT does not update the buffers of {name} in place: it aliases {built['aliases']}")
    if built["profiles"] != profiles:
        raise BuildError(f"TensorRT took {built['profiles']} of the {profiles} optimization profiles of {name}")
