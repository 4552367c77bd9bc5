"""Lists the tensors of the segment networks and of the head, by name.

`NetworkSpec` lists the tensors of a network, from the manifest alone; every engine checks its networks against it
before anything is bound, because only addresses are bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tide_export import names
from tide_export.bundle.drafter_field import DrafterInfo
from tide_export.bundle.engine_fields import NetworksInfo, Profile
from tide_export.bundle.manifest import Manifest
from tide_export.errors import BundleError

TOKENS, BATCH = "tokens", "batch"  # the dynamic dimensions: tokens of each sequence in a run, and sequences
STATE_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TENSORRT_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a network: element type by name and shape, TOKENS and BATCH where it varies."""

    dtype: str
    shape: tuple[int | str, ...]

    def dims(self, tokens: int, batch_size: int = 1) -> tuple[int, ...]:
        """The shape in a run of so many tokens of so many sequences."""
        sizes = {TOKENS: tokens, BATCH: batch_size}
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def size(self, tokens: int = 1, batch_size: int = 1) -> int:
        """Bytes in a run of so many tokens of so many sequences."""
        size = ITEM_SIZES[self.dtype]
        for dim in self.dims(tokens, batch_size):
            size *= dim
        return size


@dataclass(frozen=True)
class NetworkSpec:
    """Inputs and outputs of a network, by name."""

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def check(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], where: str) -> None:
        """Checks the tensors of a network.

        Args:
            inputs, outputs: of the network, dynamic dimensions by their names here.
            where: the file, for the message.

        Raises:
            BundleError: naming the first tensor that differs.
        """
        for kind, expected, given in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            for name in sorted(expected.keys() - given.keys()):
                raise BundleError(f"'{where}' has no {kind} {name}, which its manifest calls for")
            for name in sorted(given.keys() - expected.keys()):
                raise BundleError(f"'{where}' has the {kind} {name}, which its manifest does not know")
            for name, tensor in sorted(expected.items()):
                if given[name] != tensor:
                    raise BundleError(
                        f"'{where}': {kind} {name} is {given[name].dtype} {list(given[name].shape)}, but its manifest "
                        f"calls for {tensor.dtype} {list(tensor.shape)}"
                    )


def of_network(name: str, profiles: Sequence[Profile], info: NetworksInfo) -> tuple[Profile, ...]:
    """The profiles of one network: the head, and what reads its logits, take fewer tokens than the segments, and as
    rows of the buffers of any number of sequences."""
    if name not in names.AFTER_SEGMENTS:
        return tuple(profiles)
    fitting = [profile for profile in profiles if profile.batch_size == 1 and profile.max_tokens <= info.max_logits]
    return tuple(replace(profile, batch_size=info.max_batch_size) for profile in fitting)


def aliases(spec: NetworkSpec) -> dict[str, str]:
    """{output: input} of the buffers that a network updates in place: each pair shares its memory."""
    states = {names.NEW_PENDING: names.NEXT_PENDING_STATES, names.NEW_EXIT_STATES: names.EXIT_STATES}
    found = {output: entry for output, entry in states.items() if output in spec.outputs}
    return found | kv_aliases(spec)


def kv_aliases(spec: NetworkSpec) -> dict[str, str]:
    """The same of the K/V buffers alone."""
    return {
        present: name
        for name in spec.inputs
        if (present := name.replace("past_key_values.", "present.")) != name and present in spec.outputs
    }


def from_tensorrt(spec: NetworkSpec, described: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
    """Tensors as TensorRT describes them, a dynamic dimension as -1, for `NetworkSpec.check`."""
    tensors = {}
    for name, (dtype, shape) in described.items():
        expected = spec.inputs.get(name, spec.outputs.get(name))
        wanted = expected.shape if expected is not None and len(expected.shape) == len(shape) else tuple(shape)
        dims = tuple(want if dim == -1 else dim for want, dim in zip(wanted, shape, strict=True))
        tensors[name] = Tensor(TENSORRT_TYPES.get(dtype, dtype), dims)
    return tensors


def specs(manifest: Manifest, info: NetworksInfo) -> dict[str, NetworkSpec]:
    """The tensors that every network of a bundle must have: the segments, AFTER_SEGMENTS, and DRAFTER if it has one."""
    state, sizes = STATE_TYPES[info.weights], manifest.segment_sizes
    pending = Tensor(state, (BATCH, 1, info.state_rows, manifest.model.hidden_size))
    exits = Tensor(state, (BATCH, 1, info.state_rows, info.exit_size))
    shared, networks, layer = embedding(info), {}, 0
    for k, size in enumerate(sizes):
        last = k == len(sizes) - 1
        inputs = {names.PENDING_STATES: pending} if k else {names.INPUT_IDS: Tensor("int64", (BATCH, TOKENS)), **shared}
        inputs |= {names.TOKEN_INDICES: Tensor("int64", (TOKENS,)), names.PAST_LENGTHS: Tensor("int64", (BATCH,))}
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
                inputs[names.past(source, kind)] = Tensor(state, (BATCH, heads, info.capacity, head_dim))
                if source >= layer:
                    outputs[names.present(source, kind)] = inputs[names.past(source, kind)]
        layer += size
        networks[names.segment(k)] = NetworkSpec(names.segment(k), inputs, outputs)
    head_in = {names.EXIT_STATES: exits, names.ROWS: Tensor("int64", (TOKENS,))}
    if info.embedding is not None and info.embedding.tied:
        head_in |= shared
    vocabulary = manifest.model.vocab_size
    logits = {names.LOGITS: Tensor("float32", (TOKENS, vocabulary))}
    networks[names.HEAD] = NetworkSpec(names.HEAD, head_in, logits)
    best = {names.BEST_TOKENS: Tensor("int32", (TOKENS,)), names.BEST_LOGITS: Tensor("float32", (TOKENS,))}
    networks[names.BEST] = NetworkSpec(names.BEST, logits, best)
    shape = (TOKENS, min(names.MAX_CANDIDATES, vocabulary))
    found = {names.CANDIDATE_LOGITS: Tensor("float32", shape), names.CANDIDATE_TOKENS: Tensor("int64", shape)}
    networks[names.CANDIDATES] = NetworkSpec(names.CANDIDATES, logits, found)
    if manifest.drafter is not None and manifest.has_drafter_network:
        networks[names.DRAFTER] = _drafter(manifest.drafter, state, shared)
    return networks


def embedding(info: NetworksInfo) -> dict[str, Tensor]:
    """The input EMBEDDING; empty if the networks hold the embedding themselves."""
    found = info.embedding
    return {} if found is None else {names.EMBEDDING: Tensor(STATE_TYPES[info.weights], (found.rows, found.width))}


def _drafter(drafter: DrafterInfo, state: str, shared: Mapping[str, Tensor]) -> NetworkSpec:
    """The tensors of the drafter's network."""
    heads, head_dim = drafter.kv_shape
    inputs = {
        names.INPUT_IDS: Tensor("int64", (BATCH, TOKENS)),
        names.HIDDEN_STATES: Tensor(state, (BATCH, TOKENS, drafter.state_size)),
        names.TOKEN_INDICES: Tensor("int64", (TOKENS,)),
        names.PAST_LENGTHS: Tensor("int64", (BATCH,)),
        names.LAST_TOKENS: Tensor("int64", (BATCH,)),
        **shared,
    }
    outputs = {
        names.LOGITS: Tensor("float32", (BATCH, 1, drafter.token_count)),
        names.NEW_HIDDEN_STATES: Tensor(state, (BATCH, 1, drafter.state_size)),
    }
    for kind in ("key", "value"):
        inputs[names.past(0, kind)] = Tensor(state, (BATCH, heads, drafter.max_tokens, head_dim))
        outputs[names.present(0, kind)] = inputs[names.past(0, kind)]
    return NetworkSpec(names.DRAFTER, inputs, outputs)
