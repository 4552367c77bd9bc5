"""`tide-export inspect --roofline`: predicts a token's time on a GPU from the bytes it moves.

Decoding one sequence is bound by memory: a run reads its network's weights and the sequence's K/V once. The host's time
at each boundary between networks is an estimate. Nothing is measured: every number is printed as a prediction, with its
assumptions.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tide_export.bundle.gpu_bandwidth import bandwidth_of
from tide_export.bundle.kv_buffers import BLOCK_ROWS, KvBuffers, default_context, is_fused, kv_buffers
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.network_weights import NetworkWeights, network_weights
from tide_export.bundle.opened import Bundle
from tide_export.common.formatting import size, table
from tide_export.common.values import whole_number
from tide_export.errors import BundleError, ConfigError
from tide_export.names.networks import BEST, HEAD, segment_name
from tide_export.thresholds.resolve import resolve_thresholds

SHARE = (
    0.8  # share of the bandwidth that decoding reaches, an estimate: 650 us for four layers of 8B in bf16 on an H100
)

NETWORK_COLUMNS = ("network", "weights read", "K/V held", "K/V copied", "K/V read", "launches", "waits")

Range = tuple[float, float]  # at the lowest and highest cost of the host


class Host(NamedTuple):
    """A way to drive the networks, with estimated microseconds in which the GPU is idle."""

    name: str
    step: Range  # of the launch that ends a token, and its wait
    checkpoint: Range  # of a place where a token may exit: another launch and wait, or a node in the one that there is


HOSTS = (
    Host("Python", (50.0, 100.0), (50.0, 100.0)),
    Host("C++", (15.0, 25.0), (15.0, 25.0)),
    Host("conditional graph", (15.0, 25.0), (2.0, 5.0)),
)


@dataclass(frozen=True)
class NetworkBytes:
    """The bytes that one launch moves for one token of one sequence, and whether the host then waits."""

    network: str
    weights_read: int
    kv: KvBuffers
    waits: int  # 1 or 0, in mode exit

    @property
    def moved(self) -> int:
        return self.weights_read + 2 * self.kv.copied + self.kv.read


@dataclass(frozen=True)
class Path:
    """The path of one token through the networks, with the launches and waits of a host."""

    token: str
    launches: int
    waits: int
    microseconds: dict[str, Range]  # by the host's name


@dataclass(frozen=True)
class BreakEven:
    """The share of tokens that must exit at a checkpoint for mode `exit` to be as fast as `full`.

    All other tokens are assumed to run all layers.
    """

    checkpoint: int  # layers run there
    exit_rate: dict[str, tuple[float | None, float | None]]  # by the host's name; None: no share is enough


@dataclass(frozen=True)
class Roofline:
    """The predicted times of a bundle's networks on a GPU."""

    gpu: str
    bytes_per_second: float
    context: int  # tokens in the K/V
    capacity: int  # tokens that they can hold
    built: bool  # weights are what the builder reported; else what the networks hold
    networks: tuple[NetworkBytes, ...]
    paths: tuple[Path, ...]
    break_even: tuple[BreakEven, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the prediction and its assumptions as JSON types."""
        assumed = {
            "bandwidth_share": SHARE,
            "microseconds_per_step": {host.name: host.step for host in HOSTS},
            "microseconds_per_checkpoint": {host.name: host.checkpoint for host in HOSTS},
        }
        return {"prediction": True, "assumed": assumed, **asdict(self)}

    def render(self) -> str:
        """Returns the text that `inspect --roofline` prints."""
        hosts = [host.name for host in HOSTS]
        networks = [
            [
                network.network,
                *map(size, (network.weights_read, network.kv.held, network.kv.copied, network.kv.read)),
                *(1, network.waits),
                _number(step_time((network,), self.bytes_per_second)),
            ]
            for network in self.networks
        ]
        paths = [[p.token, p.launches, p.waits, *(_span(p.microseconds[host]) for host in hosts)] for p in self.paths]
        rates = [
            [f"{entry.checkpoint} layers", *(_shares(*entry.exit_rate[host]) for host in hosts)]
            for entry in self.break_even
        ]
        lines = [
            f"roofline   of {self.gpu}, {self.bytes_per_second / 1e12:g} TB/s: every time and rate below is a "
            "prediction, none is measured",
            f"step       one token of one sequence, {self.context} of {self.capacity} tokens in its K/V",
            *_assumptions(self.built),
            "",
            table([*NETWORK_COLUMNS, "predicted us"], networks),
            "",
            "predicted microseconds a token",
            table(["token", "launches", "waits", *hosts], paths),
        ]
        if not rates:
            return "\n".join([*lines, "", "no checkpoint may exit: mode exit is full depth"])
        title = "predicted share of tokens that must exit there, the others running all layers, for exit to be as fast "
        return "\n".join([*lines, "", title + "as full", table(["exit after", *hosts], rates)])


def predict(bundle: Bundle, gpu: str, context: int | None = None) -> Roofline:
    """Predicts the times of a bundle's networks on a GPU.

    Args:
        gpu: a name of `gpu_bandwidth.GPUS`, or a bandwidth such as `1.2TB/s`.
        context: tokens in the K/V including the new one, at most the buffers' capacity; None: `default_context`.

    Raises:
        ConfigError: the GPU is not known, or `context` is out of range.
        BundleError: the bundle holds no segment networks, or they have experts.
    """
    manifest = bundle.manifest
    info = manifest.networks
    if info is None:
        raise BundleError(f"bundle '{bundle.path}' holds no segment networks: export it with --target cuda")
    name, bandwidth = bandwidth_of(gpu)
    tokens = default_context(info.capacity) if context is None else context
    whole_number("context", tokens, 1, info.capacity, ConfigError)
    weights = network_weights(bundle)
    if any(weight.is_gathered for network in weights.values() for weight in network.weights):
        raise BundleError(f"bundle '{bundle.path}' has experts, and of how many a token reads the weights is not known")
    active = resolve_thresholds(manifest.checkpoints, manifest.thresholds, manifest.min_layers)
    exits = [threshold < 1 for threshold in active]
    networks = network_bytes(manifest, weights, exits, tokens)
    built = manifest.engines is not None and manifest.engines.built is not None
    paths, rates = token_paths(
        networks, bandwidth, [p for p, on in zip(manifest.checkpoints, exits, strict=True) if on]
    )
    return Roofline(name, bandwidth, tokens, info.capacity, built, networks, paths, rates)


def network_bytes(
    manifest: Manifest, weights: dict[str, NetworkWeights], exits: list[bool], context: int
) -> tuple[NetworkBytes, ...]:
    """Returns the bytes of each launch: one per segment, and one for the head and the choice of a token.

    Args:
        weights: the networks' weights by name.
        exits: whether a token may exit after each segment but the last.
        context: tokens in the K/V.
    """
    networks, first = [], 0
    for k, count in enumerate(manifest.segment_sizes):
        network = weights[segment_name(k)]
        held = _held(segment_name(k), manifest, weights)
        kv = kv_buffers(manifest, range(first, first + count), context, is_fused(manifest, k, network.attentions))
        waits = int(k < len(exits) and exits[k])
        networks.append(NetworkBytes(segment_name(k), max(0, held - network.table_size), kv, waits))
        first += count
    after = sum(_held(name, manifest, weights) for name in (HEAD, BEST))
    return (*networks, NetworkBytes(f"{HEAD}, {BEST}", after, KvBuffers(0, 0, 0), 1))


def _held(name: str, manifest: Manifest, weights: dict[str, NetworkWeights]) -> int:
    """Returns the bytes of a network's weights, by the builder's report or else by its network."""
    built = None if manifest.engines is None else manifest.engines.built
    return weights[name].size if built is None else built[name].weights_bytes + weights[name].shared_size


def step_time(networks: Sequence[NetworkBytes], bytes_per_second: float) -> float:
    """Returns the microseconds in which a GPU with that bandwidth runs the networks once."""
    return sum(network.moved for network in networks) / (bytes_per_second * SHARE) * 1e6


def token_paths(
    networks: Sequence[NetworkBytes], bytes_per_second: float, checkpoints: Sequence[int]
) -> tuple[tuple[Path, ...], tuple[BreakEven, ...]]:
    """Returns the possible paths of a token, full depth first, and the break-even share of each exit.

    Args:
        networks: the segments, which wait where a token may exit, and the head last.
        checkpoints: layers run where a token may exit.
    """
    *segments, head = networks

    def path(token: str, runs: int, waits: int) -> Path:
        gpu = step_time((*segments[:runs], head), bytes_per_second)
        times = {}
        for host in HOSTS:
            low, high = (gpu + step + (waits - 1) * each for step, each in zip(host.step, host.checkpoint, strict=True))
            times[host.name] = (low, high)
        return Path(token, runs + 1, waits, times)

    full = path("full depth, mode full", len(segments), head.waits)
    if not checkpoints:
        return (full,), ()
    deep = path("full depth, mode exit", len(segments), sum(network.waits for network in networks))
    ends = [k for k, network in enumerate(segments, 1) if network.waits]
    exits = [
        path(f"exits after {c} layers", k, n + 1) for n, (c, k) in enumerate(zip(checkpoints, ends, strict=True), 1)
    ]
    rates = []
    for checkpoint, left in zip(checkpoints, exits, strict=True):
        shares = {}
        for host in HOSTS:
            times = (p.microseconds[host.name] for p in (full, deep, left))
            low, high = (break_even(*costs) for costs in zip(*times, strict=True))
            shares[host.name] = (low, high)
        rates.append(BreakEven(checkpoint, shares))
    return (full, deep, *exits), tuple(rates)


def break_even(full: float, deep: float, left: float) -> float | None:
    """Returns the share of exits at which mode `exit` takes as long as `full`; None if no share is enough.

    Args:
        full: time of a token in mode `full`.
        deep: time of a token that could have exited and did not.
        left: time of a token that exits.
    """
    return (deep - full) / (deep - left) if left < full else None


def _assumptions(built: bool) -> list[str]:
    """Returns the assumptions of the prediction, a line each."""
    python, native, graph = HOSTS
    return [
        f"assumed    {100 * SHARE:.0f} % of the bandwidth is reached, and only memory traffic takes time: what many "
        "small kernels take comes on top",
        f"           a launch with its wait leaves the GPU idle for {_span(native.step)} us from C++, "
        f"{_span(python.step)} us from Python, or as C++ where it replays a recorded run",
        "           in a conditional CUDA graph a token is one launch and one wait, from C++, and a checkpoint "
        f"{_span(graph.checkpoint)} us",
        "           a run over the tokens that wait takes as long as one over a single token",
        "           each run copies the K/V buffers, which counts twice, then reads the rows in use, in blocks of "
        f"{BLOCK_ROWS}, or all where attention is not fused",
        f"           weights are those that {'the builder reported' if built else 'the networks hold'}, but tables of "
        "which a token reads a row",
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _span(span: Range) -> str:
    low, high = (f"{value:.0f}" for value in span)
    return low if low == high else f"{low}-{high}"


def _shares(low: float | None, high: float | None) -> str:
    if low is None:
        return "never"
    if high is None:
        return f"{100 * low:.0f} % or never"
    return f"{_span((100 * low, 100 * high))} %"
