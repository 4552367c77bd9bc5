"""Builds engines in a process of its own, because a network TensorRT does not like can take its process down.

Started by `build` as `python -m tide_export.engines.worker`: a job comes as JSON on stdin, events go to stdout as one
JSON object a line, TensorRT's own log goes to stderr. The environment says which flavour Polygraphy uses. Nothing here
needs PyTorch, and nothing here decides: the parent has checked the job and will check the answers.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Emit = Callable[..., None]


def main() -> int:
    """Builds what stdin asks for; exit code 1 when a network was refused, with an event that says why."""
    job = json.load(sys.stdin)
    # The library prints to stdout too: events get a descriptor of their own, everything else goes to the log.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(kind: str, **values: Any) -> None:
        print(json.dumps({"event": kind, **values}), file=events, flush=True)

    # Late and in this order: the environment has chosen the library that Polygraphy takes for TensorRT.
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    from tide_export.errors import TideError

    G_LOGGER.module_severity = G_LOGGER.WARNING
    for network in job["networks"]:
        emit("building", network=network["name"])
        try:
            built = build(network, job, emit)
        except (PolygraphyException, TideError, RuntimeError, MemoryError, OSError) as error:
            reason = "not enough memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
            emit("refused", network=network["name"], reason=reason)
            return 1
        emit("built", network=network["name"], **built)
    return 0


def build(network: dict[str, Any], job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Parses one network, builds its engine for all profiles, writes it; returns what the parsed network is like."""
    from polygraphy import mod
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import (
        CreateConfig,
        EngineBytesFromNetwork,
        NetworkFromOnnxPath,
        PostprocessConfig,
        PostprocessNetwork,
        Profile,
    )
    from polygraphy.mod.trt_importer import lazy_import_trt

    from tide_export.runtime.tensorrt.plugins import register

    trt = lazy_import_trt()
    if job["plugins"] is not None:
        register(trt, job["plugins"])  # before parsing: the parser takes what it finds then
    described: dict[str, Any] = {}

    def prepare(network: Any) -> None:
        allow_decomposition(trt, network)
        described.update(describe(trt, network))

    def exact(builder: Any, network: Any, config: Any) -> None:
        # Float32 networks are asked for where tokens must be equal: TensorFloat-32 would round every product.
        config.clear_flag(trt.BuilderFlag.TF32)
        described["profiles"] = config.num_optimization_profiles

    profiles = []
    for shapes in network["profiles"]:
        profile = Profile()
        for name, (least, best, most) in shapes.items():
            profile.add(name, least, best, most)
        profiles.append(profile)
    options: dict[str, Any] = {"profiles": profiles, "progress_monitor": monitor(trt, emit)}
    cache = job["timing_cache"]
    if cache is not None:
        options["load_timing_cache"] = cache
    create = CreateConfigRTX if mod.config.USE_TENSORRT_RTX else CreateConfig
    engine = EngineBytesFromNetwork(
        PostprocessNetwork(NetworkFromOnnxPath(network["source"]), prepare),
        config=PostprocessConfig(create(**options), exact),
        save_timing_cache=cache,
    )()
    Path(network["engine"]).write_bytes(engine)
    return described


def allow_decomposition(trt: Any, network: Any) -> None:
    """Lets attention be built from smaller kernels where no fused one fits (there is none for float32)."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def describe(trt: Any, network: Any) -> dict[str, Any]:
    """Inputs and outputs of the parsed network, {name: [dtype, shape]}, the outputs that are updated in place,
    {output: input}, and how many plugins there are."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    aliases, plugins = {}, 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            aliases[layer.get_output(0).name] = layer.get_input(0).name
        plugins += layer.type == trt.LayerType.PLUGIN_V3
    return {
        "inputs": {tensor.name: [tensor.dtype.name, list(tensor.shape)] for tensor in inputs},
        "outputs": {tensor.name: [tensor.dtype.name, list(tensor.shape)] for tensor in outputs},
        "aliases": aliases,
        "plugins": plugins,
    }


def monitor(trt: Any, emit: Emit) -> Any:
    """Reports the steps of the outermost phase of a build."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.outermost[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.outermost:
                emit("step", of=self.outermost[phase_name])
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.outermost.pop(phase_name, None)

    return Monitor()


if __name__ == "__main__":
    sys.exit(main())
