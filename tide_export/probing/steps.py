"""Times steps of a model's first layers in the product's own engine, and predicts those of all layers.

A bundle of the first layers is written to a temporary folder, for each type of weights, and its steps are timed as
`tune` times them. Layers cost alike, and the first ones are enough that their weights do not fit a CPU's cache, so a
step over all layers is predicted by a line: what is done once a step (embedding, head), and each layer.
"""

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from tide_export.bundle.file_names import WEIGHTS_FILE, batch_file
from tide_export.bundle.network_weights import parse_network
from tide_export.bundle.store import write_manifest
from tide_export.calibration.config import TideConfig
from tide_export.calibration.evaluate import count_costs
from tide_export.common.memory import return_free_memory
from tide_export.common.progress import quiet_loggers, stage
from tide_export.compose.cut import Pieces
from tide_export.errors import ProbeError, TideError
from tide_export.model.source import SourceModel, wrap_model
from tide_export.names.networks import segment_name
from tide_export.pipeline.contents import make_manifest, write_contents
from tide_export.pipeline.draft_head import GivenHead, compose, fusion
from tide_export.pipeline.pieces import trace_and_cut
from tide_export.pipeline.preflight import check_source
from tide_export.pipeline.request import ExportRequest
from tide_export.pipeline.weights import prepare_weights
from tide_export.quantize.half import round_to_half
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load
from tide_export.tuning.replay import StepCosts, step_costs

TIMED_PARAMETERS = 80_000_000  # of the layers timed: with a head, in int4 more than most caches hold
MIN_LAYERS = 2
HALF = "bf16"
CONTEXT = 128  # tokens in the K/V
MAX_LENGTH = 2048  # tokens that the temporary bundle may hold
VERIFIED = 16  # tokens of the longest draft
ROUNDS = 6
TIMINGS = 2
LAYER_SHARE = 2.0  # a layer's time is at most this many times what its parameters are of the bundle's, or 1 / this


@dataclass(frozen=True)
class Steps:
    """The predicted step times of one type of weights.

    Attributes:
        weights: fp32, bf16 or int4.
        depth: layers of the model.
        timed: layers of the bundle that was timed.
        base, layer: seconds of a step over one token: what is done once, and each layer.
        router: cost of a router and its lens, in layers.
        blocks: tokens of a step -> its seconds over those of one token.
        spread: largest relative difference of a timing from the mean of all.
        disk: bytes of a bundle of all layers, without its tokenizer.
        kv: bytes of keys and values of a token, in float32.
        per_model: seconds of the export that grow with the parameters, all of them.
        per_layer: seconds of the export for each layer.
    """

    weights: str
    depth: int
    timed: int
    base: float
    layer: float
    router: float
    blocks: dict[int, float]
    spread: float
    disk: int
    kv: int
    per_model: float
    per_layer: float

    @property
    def plain(self) -> float:
        """Seconds of a step over one token at full depth."""
        return self.base + self.depth * self.layer

    @property
    def export_seconds(self) -> float:
        """Seconds of an export without calibration and checks."""
        return self.per_model + self.depth * self.per_layer

    def costs(self, checkpoints: Sequence[int]) -> StepCosts:
        """Returns the step times of a bundle with these checkpoints, for `tuning.replay`."""
        first = checkpoints[0] if checkpoints else self.depth
        alone = first * self.layer
        return StepCosts(
            draft=tuple(self.base + (c + (n + 1) * self.router) * self.layer for n, c in enumerate(checkpoints)),
            verify={
                tokens: alone + (self.plain - alone) * ratio + len(checkpoints) * self.router * self.layer
                for tokens, ratio in self.blocks.items()
            },
            block={tokens: self.plain * ratio for tokens, ratio in self.blocks.items()},
            plain=self.plain,
        )


def time_steps(source: SourceModel, ids: Sequence[int], weights: Sequence[str], config: TideConfig) -> list[Steps]:
    """Times the first layers of `source` for each of `weights`, widest first.

    `source` keeps only these layers.

    Args:
        ids: tokens of a text.

    Raises:
        ProbeError: the first layers cannot be run or exported alone.
        TideError: the model cannot be exported.
    """
    parameters, depth = source.model.num_parameters(), source.num_layers
    short = first_layers(source, layers_to_time(source))
    kept = short.model.num_parameters()
    with quiet_loggers(logging.WARNING, "tide_export"):
        round_to_half(short, HALF)  # before the one trace of float types: the values do not matter here
    context = short.context_length or MAX_LENGTH
    text = (list(ids) * (CONTEXT // len(ids) + 1))[: max(1, min(CONTEXT, context - VERIFIED - 1))]
    found, traced = list[Steps](), None
    with stage("timing steps", total=float(len(weights))) as advance:
        for kind in weights:
            with quiet_loggers(logging.WARNING, "tide_export"), TemporaryDirectory(prefix="tide-probe-") as folder:
                request = ExportRequest(
                    source.name, folder, weights=kind, max_length=min(MAX_LENGTH, context), config=config
                )
                began = time.perf_counter()
                prepare_weights(short, request)
                preparing = time.perf_counter() - began
                if traced is None or short.quantized is not None:  # integers are other nodes
                    traced = _Traced.of(short, request, Path(folder))
                one = _time(short, request, Path(folder), text, traced, depth, parameters)
                found.append(replace(one, per_model=one.per_model + preparing * parameters / kept))
            gc.collect()
            return_free_memory()
            advance(1)
    return found


def layers_to_time(source: SourceModel) -> int:
    """Returns how many first layers are timed: all, if they are not far more than `TIMED_PARAMETERS`."""
    layers = source.structure.layers
    each = sum(parameter.numel() for parameter in layers.parameters()) / len(layers)
    return min(len(layers), max(MIN_LAYERS, round(TIMED_PARAMETERS / each)))


def first_layers(source: SourceModel, count: int) -> SourceModel:
    """Removes all layers but the first `count` from the model in place.

    Raises:
        ProbeError: the model does not run without the others.
    """
    depth = source.num_layers
    if count >= depth:
        return source
    config: Any = source.text_config
    try:
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == depth:  # layer_types and the like
                setattr(config, name, value[:count])
        config.num_hidden_layers = count
        del source.structure.layers[count:]
        return wrap_model(source.model, source.name, source.remote_code, source.quantized)
    except (TideError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise ProbeError(
            f"{source.architecture} does not run with its first {count} layers alone, so its steps cannot be timed "
            f"without an export: run export --checkpoints none, then bench ({' '.join(str(error).split())})"
        ) from error


@dataclass(frozen=True)
class _Traced:
    """The pieces of the first layers, with a checkpoint in the middle, and the seconds of tracing them."""

    pieces: Pieces
    checkpoints: tuple[int, ...]
    length: int
    seconds: float

    @classmethod
    def of(cls, source: SourceModel, request: ExportRequest, folder: Path) -> "_Traced":
        checkpoints = (source.num_layers // 2,) if source.num_layers > 1 else ()
        length, _ = check_source(source, request, RouterSet({}), folder)
        began = time.perf_counter()
        pieces = trace_and_cut(source, request, checkpoints, length)
        return cls(pieces, checkpoints, length, time.perf_counter() - began)


def _time(
    source: SourceModel,
    request: ExportRequest,
    folder: Path,
    ids: Sequence[int],
    traced: _Traced,
    depth: int,
    parameters: int,
) -> Steps:
    """Writes a bundle into `folder` and times its steps, for a model of `depth` layers and `parameters`."""
    timed, middle, given = source.num_layers, traced.checkpoints, GivenHead()
    routers = random_routers(source, middle, ids[:8], bottleneck=request.config.router_bottleneck_dim)
    began = time.perf_counter()
    graph = compose(source, request, traced.pieces, routers, given)
    manifest = make_manifest(source, routers, request.config, traced.pieces, graph, traced.length, request.half)
    write_contents(folder, graph, manifest, traced.pieces, routers, *fusion(source, request, given))
    write_manifest(folder, manifest)
    writing = time.perf_counter() - began
    del graph
    engine = load(folder, provider="cpu", verify=False)
    runs = [step_costs(engine, ids, VERIFIED, ROUNDS, pending=False) for _ in range(TIMINGS)]
    plain = mean(run.plain for run in runs)
    share = parameters / source.model.num_parameters()
    layer_bytes, config = _layer_bytes(folder, routers, timed), request.config
    costs = count_costs(source, config)
    router, layer = (costs.router + costs.lens) / costs.layer, plain
    if middle:
        byte_share = layer_bytes / (folder / WEIGHTS_FILE).stat().st_size * plain
        layer = (plain - mean(run.draft[0] for run in runs)) / (timed - middle[0])
        layer = min(max(layer, byte_share / LAYER_SHARE), byte_share * LAYER_SHARE, plain / timed)
    return Steps(
        weights=request.weights,
        depth=depth,
        timed=timed,
        base=max(0.0, plain - timed * layer),
        layer=layer,
        router=router,
        blocks={n: mean(run.block[n] / run.block[1] for run in runs) for n in runs[0].block},
        spread=max(abs(run.plain / plain - 1) for run in runs),
        disk=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) + (depth - timed) * layer_bytes,
        kv=2 * 4 * sum(heads * width for heads, width in manifest.model.kv_shapes) * depth // timed,
        per_model=writing * share,
        per_layer=traced.seconds / timed,
    )


def _layer_bytes(folder: Path, routers: RouterSet, layers: int) -> int:
    """Returns the stored bytes of a layer, by the network of the last segment."""
    number = len(routers.checkpoints)
    network = parse_network((folder / batch_file(segment_name(number))).read_bytes())
    return round(network.size / (layers - (routers.checkpoints[0] if number else 0)))
