"""The fields of `tide.json`, which describes a bundle, and a parser that checks every one.

`pipeline.flow` fills a `Manifest`, `tuning` replaces its thresholds, `bundle.store` writes it and `bundle.opened` reads
it, the runtimes take shapes, checkpoints and defaults from it. A manifest comes from a disk or a download: a field that
is missing, of another type or out of range is refused by name.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from tide_export.bundle.auto_mode import MODES, AutoMode
from tide_export.bundle.drafter_field import DrafterInfo, check_drafter
from tide_export.bundle.file_names import (
    DRAFTER_FILE,
    EMBEDDING_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    network_file,
    plan_file,
)
from tide_export.bundle.model_info import ModelInfo, check_model
from tide_export.bundle.plan_fields import FP8, INT4, NetworksInfo, PlansInfo
from tide_export.bundle.strict_json import parse_object, parse_strictly, shown_name
from tide_export.errors import BundleError
from tide_export.names.networks import AFTER_SEGMENTS, DRAFTER, segment_name
from tide_export.names.segment_networks import FINAL_ROW
from tide_export.names.step_graph import CHECKPOINTS_METADATA, CONTEXT_METADATA, HIDDEN_SIZE_METADATA

SCHEMA = "tide_export.bundle/11"
WEIGHTS = ("fp32", "bf16", "fp16", "int8", "int4")  # of the graph
SOURCE_INTEGERS = "checkpoint"  # the integers of the source model's own files; the value is of the file format
QUANTIZATION_METHODS = ("rtn", "gptq", SOURCE_INTEGERS)
INT8_MATMULS = 4  # MatMulNBits's accuracy_level that rounds the inputs to 8 bits, block by block, too
BLOCK_SIZES = (16, 32, 64, 128, 256)
NETWORK_PRECISIONS = ("fp32", "fp16", "bf16")
NETWORK_MATRICES = (INT4, FP8)  # of segment networks in half precision
FLOAT32_KV, INT8_KV = "float32", "int8"
KV_CACHES = (FLOAT32_KV, INT8_KV)
SCALE_BYTES = 4  # after the numbers of a token's keys or values of a head in int8: their scale, a float32
CUDA = "cuda"  # segment networks for ONNX Runtime's CUDA provider
FLAVOURS = ("tensorrt", "tensorrt-rtx")  # segment networks for these, and engines
TARGETS = ("onnxruntime", CUDA, *FLAVOURS)
MAX_BYTES = 1 << 24  # of tide.json; those of large models have about 1 MB
# Fields that are not written when None.
OMITTED = (
    *("quantization", "quantization.budget", "remote_code", "auto", "kv_cache", "drafter"),
    *("model.kv_layers", "model.states", "model.lora", "model.loops"),
    *("networks.matrices", "networks.cumulative", "engines.built", "auto.slots"),
    *("drafting.draft_costs", "drafting.verify_costs", "drafting.drafter_cost", "drafting.max_learned"),
    *("networks.embedding", "engines.copied", "drafter.record", "drafter.kv_shape", "drafter.kv_layers"),
    *("drafter.num_layers", "drafter.block_size"),
)


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of the graph; a dimension is a number, or a name when it varies."""

    name: str
    dtype: str  # numpy's name: "float32", "int64", "int32"
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Quantization:
    """The quantization of the graph's matrices (see `quantize`)."""

    method: str  # one of QUANTIZATION_METHODS
    bits: int  # 4 or 8
    block_size: int  # weights of one scale
    symmetric: bool  # without zero points
    accuracy_level: int  # MatMulNBits's: 0 the engine's choice, 1 float32, 2 float16, 3 bfloat16, 4 int8 matmuls
    budget: float | None = None  # bits a weight of layers and head; None, and then not written: none was given


@dataclass(frozen=True)
class FileInfo:
    """The size in bytes and sha256 (hex) of one file of the bundle."""

    size: int
    sha256: str


DEFAULT_VERIFY_COSTS = (0.13, 0.18, 0.3, 0.54, 1.0)  # of 28 million parameters on two cores


@dataclass(frozen=True)
class Drafting:
    """How `lossless` mode drafts; chosen by `draft`, `export` or `tune --mode lossless` for speed alone.

    The costs are for `Engine.drafting_as`, and replace those that the runtime measures where it runs. Bundles of older
    releases hold costs, which it does not read.
    """

    thresholds: tuple[float, ...]  # one per checkpoint, in [0, 1]; all 1: early exits do not pay
    max_drafts: int  # drafts by early exits before one verification
    prompt_lookup: int  # tokens of an n-gram (prompt-lookup) draft at most; 0: they do not pay
    # None is not written.
    draft_costs: tuple[float, ...] | None = None  # of an early exit at each checkpoint, in steps of full depth
    verify_costs: tuple[float, ...] | None = None  # of verifying 1, 2, 4, 8, 16 drafts
    tuning: dict[str, Any] = field(default_factory=dict)  # what was measured where (see `tuning.report`)
    max_learned: int | None = None  # drafts of a drafter before one verification; None: 8
    drafter_cost: float | None = None  # of a drafter's draft, in steps of full depth; None: .1


@dataclass(frozen=True)
class Manifest:
    """The contents of `tide.json`; `write_manifest` fills `files`, the exporter everything else."""

    model: ModelInfo
    checkpoints: tuple[int, ...]  # layers run at each, ascending, never the last layer; empty: a full-depth graph
    thresholds: tuple[float, ...]  # one per checkpoint, in [0, 1]
    min_layers: int  # checkpoints after fewer layers never exit
    max_pending: int  # default of the runtime input
    weights: str  # precision of the graph's weights
    targets: tuple[str, ...]
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    calibration: dict[str, Any] | None  # provenance of the routers
    versions: dict[str, str]  # of the tools that made the bundle
    created: str  # ISO 8601
    # In [0, 1]: when a smaller share of a batch than this needs a segment, only those sequences run it.
    compaction_threshold: float = 1.0
    tuning: dict[str, Any] | None = None  # how `thresholds` were certified (see `tuning.report`); None: not at all
    drafting: Drafting | None = None  # of lossless mode; None: not tuned
    networks: NetworksInfo | None = None
    engines: PlansInfo | None = None
    quantization: Quantization | None = None  # None, and then not written: the weights are not quantized
    remote_code: bool | None = None  # whether Python code of the model's own was run; None: not written
    kv_cache: str | None = None  # one of KV_CACHES: type of the K/V pages; None, and then not written: float32
    auto: AutoMode | None = None  # what mode `auto` is; None, and then not written: not measured, so full depth
    drafter: DrafterInfo | None = None  # None, and then not written: there is none
    files: dict[str, FileInfo] = field(default_factory=dict)  # by path relative to the bundle, "/" between folders

    @property
    def segment_sizes(self) -> tuple[int, ...]:
        """The number of layers of each segment, shallowest first; the sum is `model.num_layers`."""
        edges = (0, *self.checkpoints, self.model.num_layers)
        return tuple(end - start for start, end in pairwise(edges))

    @property
    def kv_dtype(self) -> str:
        """The dtype of the K/V pages, by numpy's name."""
        return self.kv_cache or FLOAT32_KV

    @property
    def has_cuda_networks(self) -> bool:
        """Whether the segment networks are for ONNX Runtime's CUDA provider, not for TensorRT."""
        return self.networks is not None and CUDA in self.targets

    @property
    def has_drafter_network(self) -> bool:
        """Whether a segment network computes the drafter: not if it reads states or K/V within segments."""
        reads = self.drafter is None or self.drafter.layers or self.drafter.kv_layers
        return self.networks is not None and not reads

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Returns (kv_heads, width) of a layer's K/V pages, [pages, kv_heads, tokens, width].

        The width is head_dim, in int8 plus the bytes of a row's scale.
        """
        heads, head_dim = self.model.kv_shapes[layer]
        return heads, head_dim + (SCALE_BYTES if self.kv_cache == INT8_KV else 0)

    @property
    def kv_token_bytes(self) -> int:
        """The bytes of the K/V of one token in all layers."""
        shapes = [self.kv_shape(layer) for layer in self.model.kv_read(range(self.model.num_layers))]
        return 2 * sum(heads * width for heads, width in shapes) * (1 if self.kv_cache == INT8_KV else 4)

    @property
    def graph_metadata(self) -> dict[str, str]:
        """The metadata of step graph and batch networks: fields that must match and that tensors do not show."""
        context = self.model.context_length
        return {
            CHECKPOINTS_METADATA: ",".join(map(str, self.checkpoints)),
            CONTEXT_METADATA: "" if context is None else str(context),
            HIDDEN_SIZE_METADATA: str(self.model.hidden_size),
        }

    def to_json(self) -> str:
        """Returns the text of `tide.json`."""
        written = asdict(self)
        for path in OMITTED:
            *parents, name = path.split(".")
            owner = written.get(parents[0]) if parents else written
            if owner is not None and owner[name] is None:
                del owner[name]
        return json.dumps({"schema": SCHEMA, **written}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = MANIFEST_FILE) -> "Manifest":
        """Parses a manifest strictly.

        Every field except those of `OMITTED` must be present, of its type and in range; other fields are refused. The
        C++ runtime reads each text that is accepted here, and checks of it what it uses (`Manifest::from_json`).

        Raises:
            BundleError: the text is refused; the message names `source` and the field.
        """
        check_size(len(text), source)
        try:
            data = parse_strictly(text)
        except ValueError:
            raise BundleError(f"{source} is not valid JSON: export the bundle again or copy it anew") from None
        if not isinstance(data, dict) or not isinstance(schema := data.pop("schema", None), str):
            raise BundleError(f"{source} is not the manifest of a bundle: it has no field 'schema'")
        if schema != SCHEMA:
            raise BundleError(
                f"{source} has schema '{shown_name(schema)}' but this release reads '{SCHEMA}': export again "
                "(`tide-export export MODEL -o NEW --routers OLD/routers.safetensors` keeps its routers), or use the "
                "tide_export release that wrote it"
            )
        manifest = parse_object(cls, data, source, omitted=OMITTED)
        _check(manifest, source)
        return manifest


def check_size(size: int, source: str) -> None:
    """Refuses a manifest of more than MAX_BYTES bytes, with BundleError."""
    if size > MAX_BYTES:
        raise BundleError(f"{source} is too large: a manifest has at most {MAX_BYTES} bytes")


def _check(manifest: Manifest, source: str) -> None:
    """Checks the ranges of fields and their agreement with each other."""

    def require(condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise BundleError(f"{source}: field '{name}' {rule}")

    model, points = manifest.model, manifest.checkpoints
    check_model(model, require)
    alone = manifest.networks is None
    require(alone or not model.states, "model.states", "are for target onnxruntime alone")
    require(alone or model.lora is None, "model.lora", "is for target onnxruntime alone")
    require(list(points) == sorted(set(points)), "checkpoints", "must be distinct and ascending")
    require(all(1 <= p < model.num_layers for p in points), "checkpoints", f"must lie in 1..{model.num_layers - 1}")
    require(len(manifest.thresholds) == len(points), "thresholds", "must have one value per checkpoint")
    require(all(0 <= value <= 1 for value in manifest.thresholds), "thresholds", "must lie in [0, 1]")
    drafting = manifest.drafting
    if drafting is not None:
        require(len(drafting.thresholds) == len(points), "drafting.thresholds", "must have one value per checkpoint")
        require(all(0 <= value <= 1 for value in drafting.thresholds), "drafting.thresholds", "must lie in [0, 1]")
        require(drafting.max_drafts >= 0, "drafting.max_drafts", "must be 0 or more")
        require(drafting.prompt_lookup >= 0, "drafting.prompt_lookup", "must be 0 or more")
        value = drafting.max_learned
        require(value is None or value >= 0, "drafting.max_learned", "must be 0 or more")
    auto = manifest.auto
    if auto is not None:
        require(auto.mode in MODES, "auto.mode", f"must be one of {', '.join(MODES)}")
        require(len(auto.thresholds) == len(points), "auto.thresholds", "must have one value per checkpoint")
        require(all(0 <= value <= 1 for value in auto.thresholds), "auto.thresholds", "must lie in [0, 1]")
        require(0 <= auto.epsilon < 1, "auto.epsilon", "must lie in [0, 1)")
        for name in ("exit", "lossless"):
            measured = auto.mode != name or getattr(auto, f"{name}_speedup") is not None
            require(measured, f"auto.{name}_speedup", f"is missing for mode {name}")
        require(auto.slots is None or auto.slots >= 2, "auto.slots", "must be 2 or more")
        require(auto.slots is None or auto.mode != "full", "auto.slots", "is for modes exit and lossless")
    require(manifest.min_layers >= 0, "min_layers", "must be 0 or more")
    require(manifest.max_pending >= 0, "max_pending", "must be 0 or more")
    require(manifest.kv_dtype in KV_CACHES, "kv_cache", f"must be one of {', '.join(KV_CACHES)}")
    require(alone or manifest.kv_dtype != INT8_KV, "kv_cache", "int8 is for target onnxruntime alone")
    require(0 <= manifest.compaction_threshold <= 1, "compaction_threshold", "must lie in [0, 1]")
    require(manifest.weights in WEIGHTS, "weights", f"must be one of {', '.join(WEIGHTS)}")
    require(
        bool(manifest.targets) and set(manifest.targets) <= set(TARGETS),
        "targets",
        f"must be some of {', '.join(TARGETS)}",
    )
    require(GRAPH_FILE in manifest.files, "files", f"does not list {GRAPH_FILE}")
    require(
        (manifest.drafter is None) == (DRAFTER_FILE not in manifest.files),
        "drafter",
        f"must be there with the file {DRAFTER_FILE}, and not without it",
    )
    if manifest.drafter is not None:
        check_drafter(manifest.drafter, model, require)
    _check_networks(manifest, require)
    _check_quantization(manifest, require)
    for name, info in manifest.files.items():
        where = f"files.{shown_name(name)}"
        require(_is_inside(name), where, "is not a path inside the bundle")
        require(info.size >= 0, f"{where}.size", "must be 0 or more")
        is_hash = len(info.sha256) == 64 and set(info.sha256) <= set("0123456789abcdef")
        require(is_hash, f"{where}.sha256", "must be 64 lower-case hex digits")


def _is_inside(name: str) -> bool:
    """Returns whether a file's name is a path inside the bundle, without control characters."""
    path = PurePosixPath(name)
    plain = "\\" not in name and not any(character < " " or character == "\x7f" for character in name)
    return plain and not path.is_absolute() and ".." not in path.parts and name not in ("", ".", MANIFEST_FILE)


def _check_networks(manifest: Manifest, require: Callable[[bool, str, str], None]) -> None:
    networks, plans = manifest.networks, manifest.engines
    parts = [*(segment_name(k) for k in range(len(manifest.segment_sizes))), *AFTER_SEGMENTS]
    if networks is not None:
        require(
            networks.weights in NETWORK_PRECISIONS,
            "networks.weights",
            f"must be one of {', '.join(NETWORK_PRECISIONS)}",
        )
        rule = f"must be one of {', '.join(NETWORK_MATRICES)}"
        require(networks.matrices in (None, *NETWORK_MATRICES), "networks.matrices", rule)
        for name in ("capacity", "max_tokens", "max_logits", "exit_size", "max_batch_size", "max_slot_tokens"):
            require(getattr(networks, name) >= 1, f"networks.{name}", "must be 1 or more")
        require(networks.max_tokens <= networks.capacity, "networks.max_tokens", "must be at most capacity")
        fits = networks.max_tokens + FINAL_ROW <= networks.state_rows
        require(fits, "networks.state_rows", f"must be {FINAL_ROW} more than max_tokens or larger")
        for name in ("max_logits", "max_slot_tokens"):
            require(getattr(networks, name) <= networks.max_tokens, f"networks.{name}", "must be at most max_tokens")
        batched = networks.max_batch_size * networks.max_slot_tokens if networks.max_batch_size > 1 else 1
        require(
            batched <= networks.max_tokens, "networks.max_slot_tokens", "must fit max_batch_size times into max_tokens"
        )
        if networks.embedding is not None:
            rows, width = networks.embedding.rows, networks.embedding.width
            size = manifest.files[EMBEDDING_FILE].size if EMBEDDING_FILE in manifest.files else 0
            stored = min(rows, width) >= 1 and rows * width * (4 if networks.weights == "fp32" else 2) == size
            require(stored, "networks.embedding", f"must have the shape of the file {EMBEDDING_FILE}")
        drafter = [DRAFTER] if manifest.has_drafter_network else []
        for file in map(network_file, [*parts, *drafter]):
            require(file in manifest.files, "files", f"does not list {file}")
    kinds = [target for target in manifest.targets if target in (CUDA, *FLAVOURS)]
    require(len(kinds) < 2, "targets", f"must name one of {', '.join((CUDA, *FLAVOURS))} at most")
    if plans is not None:
        require(networks is not None, "engines", "needs the field 'networks'")
        require(CUDA not in kinds, "engines", f"are not built from networks for {CUDA}")
        require(plans.flavour in FLAVOURS, "engines.flavour", f"must be one of {', '.join(FLAVOURS)}")
        require(bool(plans.profiles), "engines.profiles", "must not be empty")
        for profile in plans.profiles:
            ordered = 1 <= profile.min_tokens <= profile.opt_tokens <= profile.max_tokens
            require(ordered, "engines.profiles", "must have min_tokens <= opt_tokens <= max_tokens, all 1 or more")
        size = max((profile.batch_size for profile in plans.profiles), default=0)
        if networks is not None:
            require(
                size == networks.max_batch_size, "engines.profiles", "must have the batch size networks.max_batch_size"
            )
        if plans.plugins is not None:
            holders = plans.plugins.engines
            require(
                bool(holders) and set(holders) <= set(parts), "engines.plugins.engines", "must be some of the plans"
            )
        if plans.built is not None:
            names = set(plans.built) - ({DRAFTER} if plan_file(DRAFTER) in manifest.files else set())
            require(names == set(parts), "engines.built", "must have one entry per plan")
            for name, built in plans.built.items():
                fused, attentions = built.fused_attention_layers, built.attention_layers
                numbers = (built.weights_bytes, built.activation_bytes, built.layers, fused)
                require(min(numbers) >= 0, f"engines.built.{name}", "holds a negative value")
                where = f"engines.built.{name}.fused_attention_layers"
                require(fused <= attentions, where, "must be at most attention_layers")
        for name, copied in (plans.copied or {}).items():
            is_plan = name in parts or (name == DRAFTER and plan_file(DRAFTER) in manifest.files)
            where = f"engines.copied.{shown_name(name)}"
            require(is_plan and copied >= 1, where, "must be a plan's bytes, 1 or more")
        for file in map(plan_file, parts):
            require(file in manifest.files, "files", f"does not list {file}")


def _check_quantization(manifest: Manifest, require: Callable[[bool, str, str], None]) -> None:
    how = manifest.quantization
    bits = {"int8": 8, "int4": 4}.get(manifest.weights)
    require((how is not None) == (bits is not None), "quantization", "must be there for weights int8 and int4 alone")
    if how is None:
        return
    require(how.method in QUANTIZATION_METHODS, "quantization.method", f"is none of {', '.join(QUANTIZATION_METHODS)}")
    require(how.bits == bits, "quantization.bits", f"must be {bits} for weights {manifest.weights}")
    require(how.block_size in BLOCK_SIZES, "quantization.block_size", f"is none of {', '.join(map(str, BLOCK_SIZES))}")
    require(how.accuracy_level in range(5), "quantization.accuracy_level", "must lie in 0..4")
    require(how.budget is None or 4 <= how.budget <= 8, "quantization.budget", "must lie in 4..8")
