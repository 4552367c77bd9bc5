"""Lists the tensors of the segment networks and of the head, from the manifest alone.

Every provider checks its networks against these lists before it binds tensors, because only addresses are bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tide_export.bundle.drafter_field import DrafterInfo
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.plan_fields import NetworksInfo, Profile
from tide_export.errors import BundleError
from tide_export.names import segment_drafter
from tide_export.names import segment_networks as names
from tide_export.names.networks import AFTER_SEGMENTS, BEST, CANDIDATES, DRAFTER, HEAD, segment_name

TOKENS, BATCH, KEYS = "tokens", "batch", "keys"  # the dynamic dimensions: those of `RunSize`
HIDDEN_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TENSORRT_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


class RunSize(NamedTuple):
    """The sizes of a run: tokens of each sequence, sequences, and tokens of K/V that attention reads."""

    tokens: int = 1
    batch_size: int = 1
    keys: int = 1


ONE_TOKEN = RunSize()


@dataclass(frozen=True)
class Tensor:
    """Element type and shape of a tensor, with TOKENS, BATCH and KEYS as dynamic dimensions."""

    dtype: str
    shape: tuple[int | str, ...]

    def dims(self, run: RunSize) -> tuple[int, ...]:
        """Returns the shape in a run."""
        sizes = {TOKENS: run.tokens, BATCH: run.batch_size, KEYS: run.keys}
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def size(self, run: RunSize = ONE_TOKEN) -> int:
        """Returns the bytes in a run."""
        size = ITEM_SIZES[self.dtype]
        for dim in self.dims(run):
            size *= dim
        return size


@dataclass(frozen=True)
class NetworkSpec:
    """Lists the inputs and outputs of a network, by name.

    Attributes:
        keys: tokens that its K/V buffers hold; 0: it has none.
    """

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    keys: int = 0

    def check(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], where: str) -> None:
        """Checks the tensors of an opened network.

        Args:
            inputs, outputs: its tensors, dynamic dimensions as TOKENS, BATCH and KEYS.
            where: the file, for the message.

        Raises:
            BundleError: a tensor differs; names the first.
        """
        for kind, expected, actual in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            for name in sorted(expected.keys() - actual.keys()):
                raise BundleError(f"'{where}' has no {kind} {name}, which its manifest calls for: export it again")
            for name in sorted(actual.keys() - expected.keys()):
                raise BundleError(f"'{where}' has the {kind} {name}, which its manifest does not know")
            for name, tensor in sorted(expected.items()):
                if (other := actual[name]) != tensor:
                    raise BundleError(
                        f"'{where}': {kind} {name} is {other.dtype} {list(other.shape)}, but its manifest "
                        f"calls for {tensor.dtype} {list(tensor.shape)}"
                    )


def of_network(name: str, profiles: Sequence[Profile], info: NetworksInfo) -> tuple[Profile, ...]:
    """Returns the profiles of one network.

    Networks in AFTER_SEGMENTS take fewer tokens than the segments, as rows from any number of sequences.
    """
    if name not in AFTER_SEGMENTS:
        return tuple(profiles)
    fitting = [profile for profile in profiles if profile.batch_size == 1 and profile.max_tokens <= info.max_logits]
    return tuple(replace(profile, batch_size=info.max_batch_size) for profile in fitting)


def aliases(spec: NetworkSpec) -> dict[str, str]:
    """Returns {output: input} of the buffers that a network updates in place: each pair shares memory."""
    hidden = {names.NEW_PENDING: names.NEXT_PENDING_STATES, names.NEW_EXIT_STATES: names.EXIT_STATES}
    return {output: entry for output, entry in hidden.items() if output in spec.outputs} | kv_aliases(spec)


def kv_aliases(spec: NetworkSpec) -> dict[str, str]:
    """Returns {output: input} of the K/V buffers that a network updates in place."""
    return {
        present: name
        for name in spec.inputs
        if (present := name.replace("past_key_values.", "present.")) != name and present in spec.outputs
    }


def from_tensorrt(spec: NetworkSpec, described: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
    """Converts TensorRT's (dtype, shape), with -1 for dynamic dimensions, for `NetworkSpec.check`."""
    tensors = {}
    for name, (dtype, shape) in described.items():
        expected = spec.inputs.get(name, spec.outputs.get(name))
        wanted = expected.shape if expected is not None and len(expected.shape) == len(shape) else tuple(shape)
        dims = tuple(want if dim == -1 else dim for want, dim in zip(wanted, shape, strict=True))
        tensors[name] = Tensor(TENSORRT_TYPES.get(dtype, dtype), dims)
    return tensors


def specs(manifest: Manifest, info: NetworksInfo) -> dict[str, NetworkSpec]:
    """Lists every network of a bundle: the segments, AFTER_SEGMENTS, and DRAFTER if it has one."""
    dtype, sizes = HIDDEN_TYPES[info.weights], manifest.segment_sizes
    width = manifest.model.hidden_size - bool(info.cumulative)  # states of the graph hold the score too
    pending = Tensor(dtype, (BATCH, 1, info.state_rows, width))
    exits = Tensor(dtype, (BATCH, 1, info.state_rows, info.exit_size))
    shared, networks, layer = embedding(info), {}, 0
    keys = {} if manifest.has_cuda_networks else {names.KEY_INDICES: Tensor("int64", (KEYS,))}
    for k, size in enumerate(sizes):
        last = k == len(sizes) - 1
        inputs = {names.PENDING_STATES: pending} if k else {names.INPUT_IDS: Tensor("int64", (BATCH, TOKENS)), **shared}
        inputs |= {names.TOKEN_INDICES: Tensor("int64", (TOKENS,)), **keys}
        inputs[names.PAST_LENGTHS] = Tensor("int64", (BATCH,))
        inputs[names.EXIT_STATES] = exits
        outputs = {names.NEW_EXIT_STATES: exits}
        if not last:
            inputs |= {name: Tensor("int64", (BATCH,)) for name in (names.LAST_TOKENS, names.PENDING_LENGTHS)}
            inputs |= {names.THRESHOLDS: Tensor("float32", (BATCH,)), names.NEXT_PENDING_STATES: pending}
            outputs |= {names.NEW_PENDING: pending, names.ROUTER_SCORE: Tensor("float32", (BATCH,))}
            outputs[names.EXIT_FLAG] = Tensor("int32", (BATCH,))
        for source in manifest.model.kv_read(range(layer, layer + size)):
            heads, head_dim = manifest.model.kv_shapes[source]
            for kind in ("key", "value"):
                inputs[names.past(source, kind)] = Tensor(dtype, (BATCH, heads, info.capacity, head_dim))
                if source % manifest.model.num_layers >= layer:
                    outputs[names.present(source, kind)] = inputs[names.past(source, kind)]
        layer += size
        networks[segment_name(k)] = NetworkSpec(segment_name(k), inputs, outputs, info.capacity)
    head_in = {names.EXIT_STATES: exits, names.ROWS: Tensor("int64", (TOKENS,))}
    if info.embedding is not None and info.embedding.tied:
        head_in |= shared
    vocabulary = manifest.model.vocab_size
    logits = {names.LOGITS: Tensor("float32", (TOKENS, vocabulary))}
    networks[HEAD] = NetworkSpec(HEAD, head_in, logits)
    best = {names.BEST_TOKENS: Tensor("int32", (TOKENS,)), names.BEST_LOGITS: Tensor("float32", (TOKENS,))}
    networks[BEST] = NetworkSpec(BEST, logits, best)
    shape = (TOKENS, min(names.MAX_CANDIDATES, vocabulary))
    candidates = {names.CANDIDATE_LOGITS: Tensor("float32", shape), names.CANDIDATE_TOKENS: Tensor("int64", shape)}
    networks[CANDIDATES] = NetworkSpec(CANDIDATES, logits, candidates)
    if manifest.drafter is not None and manifest.has_drafter_network:
        networks[DRAFTER] = _drafter(manifest.drafter, dtype, keys | shared)
    return networks


def embedding(info: NetworksInfo) -> dict[str, Tensor]:
    """Returns the input EMBEDDING; empty if the networks hold the embedding themselves."""
    table = info.embedding
    return {} if table is None else {names.EMBEDDING: Tensor(HIDDEN_TYPES[info.weights], (table.rows, table.width))}


def _drafter(drafter: DrafterInfo, dtype: str, others: Mapping[str, Tensor]) -> NetworkSpec:
    assert drafter.kv_shape is not None
    heads, head_dim = drafter.kv_shape
    inputs = {
        segment_drafter.INPUT_IDS: Tensor("int64", (BATCH, TOKENS)),
        segment_drafter.HIDDEN_STATES: Tensor(dtype, (BATCH, TOKENS, drafter.state_size)),
        segment_drafter.TOKEN_INDICES: Tensor("int64", (TOKENS,)),
        segment_drafter.PAST_LENGTHS: Tensor("int64", (BATCH,)),
        segment_drafter.LAST_TOKENS: Tensor("int64", (BATCH,)),
        **others,
    }
    outputs = {
        segment_drafter.LOGITS: Tensor("float32", (BATCH, 1, drafter.token_count)),
        segment_drafter.NEW_HIDDEN_STATES: Tensor(dtype, (BATCH, 1, drafter.state_size)),
    }
    for kind in ("key", "value"):
        inputs[names.past(0, kind)] = Tensor(dtype, (BATCH, heads, drafter.max_tokens, head_dim))
        outputs[names.present(0, kind)] = inputs[names.past(0, kind)]
    return NetworkSpec(DRAFTER, inputs, outputs, drafter.max_tokens)
