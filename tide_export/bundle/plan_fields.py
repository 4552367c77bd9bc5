"""The fields `networks` and `engines` of `tide.json`: segment networks and plans built from them."""

from dataclasses import dataclass

INT4, FP8 = "int4", "fp8"


@dataclass(frozen=True)
class EmbeddingInfo:
    """The embedding that networks take as an input, stored in a file and on the GPU only once."""

    rows: int  # tokens
    width: int
    tied: bool  # whether the head reads it too


@dataclass(frozen=True)
class NetworksInfo:
    """The segment networks, and the head's, that the bundle holds beside its graph."""

    weights: str  # precision of their weights, hidden states and K/V: fp32, fp16, bf16
    capacity: int  # tokens their K/V buffers hold
    state_rows: int  # hidden states their other buffers hold, of each sequence
    max_tokens: int  # tokens one run may take; longer prompts are run in parts
    max_logits: int  # tokens one run of the head may take
    exit_size: int  # width of the hidden states the head takes
    max_batch_size: int  # sequences of one run, and of a batch; 1: no batches
    max_slot_tokens: int  # tokens of each sequence in a run over several
    matrices: str | None = None  # of the layers, stored as int4 or fp8; None, and then not written: as `weights`
    embedding: EmbeddingInfo | None = None  # None, and then not written: each network that reads it holds its own
    cumulative: bool | None = None  # whether routers give the probability of an exit of what is left; None: not written

    @property
    def precision(self) -> str:
        """The least precise type of their arithmetic: fp32, fp16, bf16 or fp8."""
        return FP8 if self.matrices == FP8 else self.weights


@dataclass(frozen=True)
class Profile:
    """An optimization profile: tokens of each sequence in a run, and the most sequences."""

    name: str
    min_tokens: int
    opt_tokens: int
    max_tokens: int
    batch_size: int


@dataclass(frozen=True)
class PluginsInfo:
    """The plugin library that plans were built with, and the plans that hold its plugins."""

    version: str  # release of tide_export; plans are loaded with that release's library alone
    sha256: str  # of the library's file
    engines: tuple[str, ...]  # their names: segment_00, ...


@dataclass(frozen=True)
class BuiltPlan:
    """The builder's report on one plan."""

    weights_bytes: int  # of GPU memory
    activation_bytes: int  # of working memory, of the profile that takes most
    layers: int  # kernels, of all profiles
    attention_layers: int  # of the network
    fused_attention_layers: int  # of these, in every profile; the others were decomposed into several kernels


@dataclass(frozen=True)
class PlansInfo:
    """The plans that were built from those networks."""

    flavour: str  # tensorrt or tensorrt-rtx
    version: str  # of that library; plans run on no other
    compute_capabilities: tuple[str, ...]  # of the GPUs they run on, such as "8.9"; empty: the flavour's
    weights_sha256: str  # of the source model, as `model.weights_sha256`
    profiles: tuple[Profile, ...]
    seconds: float  # that building took
    plugins: PluginsInfo | None = None  # None: the networks' functions were built
    built: dict[str, BuiltPlan] | None = None  # by network; None, and then not written: of an earlier release
    # By network: bytes of buffers, which are to be updated in place, that a run over one sequence copies; None, and
    # then not written: no network's.
    copied: dict[str, int] | None = None
