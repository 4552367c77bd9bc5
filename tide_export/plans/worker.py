"""Builds plans in a separate process, because TensorRT can crash on a network.

Started by `build` as `python -m tide_export.plans.worker`: reads a job as JSON from stdin, writes events to stdout as
one JSON object per line, and TensorRT's log to stderr. The environment selects the flavour Polygraphy uses. Needs no
PyTorch. The parent process has checked the job and checks the results.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Emit = Callable[..., None]


def main() -> int:
    """Builds the job's networks; returns 1 if one was refused, after an event that holds the reason."""
    job = json.load(sys.stdin)
    # The library prints to stdout too, so events get another descriptor and everything else goes to the log.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(kind: str, **values: Any) -> None:
        print(json.dumps({"event": kind, **values}), file=events, flush=True)

    # Imported late: the environment decides which library Polygraphy imports as TensorRT.
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    from tide_export.errors import TideError

    G_LOGGER.module_severity = G_LOGGER.WARNING
    log = BuildLog.install()
    for network in job["networks"]:
        emit("building", network=network["name"])
        try:
            built = build(network, job, emit) | log.built(network["aliases"])
        except (PolygraphyException, TideError, RuntimeError, MemoryError, OSError) as error:
            reason = "not enough memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
            emit("refused", network=network["name"], reason=reason)
            return 1
        emit("built", network=network["name"], **built)
    return 0


def build(network: dict[str, Any], job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Parses one network, builds and writes its plan for all profiles, and describes the network."""
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
        register(trt, job["plugins"])  # before parsing: the parser uses the plugins that are registered then
    described: dict[str, Any] = {}

    def prepare(network: Any) -> None:
        allow_decomposition(trt, network)
        described.update(describe(trt, network))

    def exact(builder: Any, parsed: Any, config: Any) -> None:
        # Float32 networks are for equal tokens: TensorFloat-32 would round every matmul.
        config.clear_flag(trt.BuilderFlag.TF32)
        if network["reads_nan"]:  # TensorRT must not assume that there are no NaNs
            config.set_flag(trt.BuilderFlag.STRICT_NANS)
        if mod.config.USE_TENSORRT_RTX:  # a plan that allocates memory in a run cannot be recorded in a CUDA graph
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        configure(trt, config, job)
        described["profiles"] = config.num_optimization_profiles

    profiles = []
    for shapes in network["profiles"]:
        profile = Profile()
        for name, (minimum, optimum, maximum) in shapes.items():
            profile.add(name, minimum, optimum, maximum)
        profiles.append(profile)
    options: dict[str, Any] = {"profiles": profiles, "progress_monitor": monitor(trt, emit)}
    cache = job["timing_cache"]
    if cache is not None:
        options["load_timing_cache"] = cache
    options["profiling_verbosity"] = trt.ProfilingVerbosity.DETAILED  # the log then lists the plan's layers
    create = CreateConfigRTX if mod.config.USE_TENSORRT_RTX else CreateConfig
    plan = EngineBytesFromNetwork(
        PostprocessNetwork(NetworkFromOnnxPath(network["source"]), prepare),
        config=PostprocessConfig(create(**options), exact),
        save_timing_cache=cache,
    )()
    Path(network["plan"]).write_bytes(plan)
    return described


def configure(trt: Any, config: Any, job: dict[str, Any]) -> None:
    """Sets what all plans are built with: plugins in place, one stream, the GPUs they are for."""
    if job["plugins"] is not None:  # they declare which input an output updates
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.max_aux_streams = 0  # runs of one token are chains: other streams would add events, and nodes to recordings
    capabilities = job["compute_capabilities"]
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), index)


class BuildLog:
    """Collects the memory and layers of plans from the builder's log; shows its warnings and errors."""

    WEIGHTS, ACTIVATIONS = (re.compile(rf"Total {kind} Memory: (\d+) bytes") for kind in ("Weights", "Activation"))
    LAYER = re.compile(
        r"^Name: ([^,]*), LayerType: \w*(?:, Inputs: \[(?P<reads>.*)\], Outputs: \[(?P<writes>.*))?", re.MULTILINE
    )
    TENSOR = re.compile(r"\{ Name: (.+?)(?: \[profile (\d+)\])?, (?:Location|Dimensions): ")

    def __init__(self) -> None:
        self.messages: list[str] = []

    @classmethod
    def install(cls) -> "BuildLog":
        """Returns the log of the builders that Polygraphy creates from now on."""
        from polygraphy.backend.trt import util
        from polygraphy.mod.trt_importer import lazy_import_trt

        trt, log = lazy_import_trt(), cls()

        class Log(trt.ILogger):  # type: ignore[name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                log.messages.append(message)
                if severity not in (trt.ILogger.Severity.INFO, trt.ILogger.Severity.VERBOSE):
                    print(message, file=sys.stderr, flush=True)

        util.TRT_LOGGER = Log()
        return log

    def built(self, aliases: dict[str, str]) -> dict[str, Any]:
        """Returns memory, layers and copied in-place buffers of the plan built since the last call.

        Args:
            aliases: {output: input} of the in-place buffers.
        """
        text, self.messages = "\n".join(self.messages), []
        layers = list(self.LAYER.finditer(text))
        return {
            "weights_bytes": sum(map(int, self.WEIGHTS.findall(text))),
            "activation_bytes": max(map(int, self.ACTIVATIONS.findall(text)), default=0),
            "layers": len(layers),
            "fused_attention_kernels": sum("mha" in layer[1] for layer in layers),
            "copied": self._copied(layers, aliases),
        }

    def _copied(self, layers: list[re.Match[str]], aliases: dict[str, str]) -> dict[str, int]:
        """Returns {output: copies per run, in the profile with most copies} of in-place buffers.

        A layer that updates a buffer in place reads and writes it. A layer copies it if it only writes it, or only
        reads it before any layer has written it.
        """
        buffers = {output: output for output in aliases} | {entry: output for output, entry in aliases.items()}
        copies, written = Counter[tuple[str, str]](), set[tuple[str, str]]()
        for layer in layers:
            tensors = (self.TENSOR.findall(layer[part] or "") for part in ("reads", "writes"))
            reads, writes = ({(buffers[name], at) for name, at in found if name in buffers} for found in tensors)
            copies.update((reads - writes - written) | (writes - reads))
            written |= writes
        return {output: max(copies[key] for key in copies if key[0] == output) for output, _ in copies}


def allow_decomposition(trt: Any, network: Any) -> None:
    """Allows attention to be built from smaller kernels if no fused one fits (there is none for float32)."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def describe(trt: Any, network: Any) -> dict[str, Any]:
    """Describes the parsed network.

    Returns:
        Inputs and outputs {name: [dtype, shape]}, in-place outputs {output: input}, numbers of plugins and attention
        layers, and the bytes of constants.
    """
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    aliases, plugins, attentions, constants = {}, 0, 0, 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            aliases[layer.get_output(0).name] = layer.get_input(0).name
        plugins += layer.type == trt.LayerType.PLUGIN_V3
        attentions += layer.type == trt.LayerType.ATTENTION_INPUT
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            weights = layer.weights  # its `nbytes` is wrong for 4-bit types
            int4 = isinstance(weights, trt.Weights) and weights.dtype == trt.DataType.INT4
            constants += -(-weights.size // 2) if int4 else weights.nbytes
    return {
        "inputs": {tensor.name: [tensor.dtype.name, list(tensor.shape)] for tensor in inputs},
        "outputs": {tensor.name: [tensor.dtype.name, list(tensor.shape)] for tensor in outputs},
        "aliases": aliases,
        "plugins": plugins,
        "attentions": attentions,
        "constants": constants,
    }


def monitor(trt: Any, emit: Emit) -> Any:
    """Returns a monitor that emits the steps of the outermost phase of a build."""

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
