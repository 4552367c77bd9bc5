"""One exception class per stage of the pipeline, raised with a single sentence a user can act on.

Every stage (load, calibrate, trace, cut/compose/lower, tune, bundle, run) raises its subclass of `TideError`. The
command line prints the sentence and exits with code 2; library users catch `TideError` or one stage's class.
"""


class TideError(Exception):
    """Base of all errors that users can fix; the message is one sentence naming the file or option."""

    exit_code = 2


def one_line(error: BaseException, limit: int = 200) -> str:
    """Returns an error's message, or its type if empty, on one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def reason(error: BaseException) -> str:
    """Returns why a file cannot be read or written, in words: "no such file or directory"."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return one_line(error)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ConfigError(TideError):
    """An option or config value is out of range or contradicts another."""


class ModelError(TideError):
    """The source model cannot be loaded, or its weights are unusable (missing, truncated, NaN)."""


class UnsupportedModelError(ModelError):
    """The architecture lacks a property that the export needs; the message names it."""


class DatasetError(TideError):
    """The dataset SPEC cannot be read or holds no usable text."""


class CalibrationError(TideError):
    """Routers cannot be fitted to the given text and model."""


class ProbeError(TideError):
    """A model's gain cannot be predicted: it does not fit the memory, or gives no answers to measure on."""


class AdaptError(TideError):
    """A model cannot be trained for early exit, or its result or saved state cannot be accessed."""


class DraftError(TideError):
    """A drafter cannot be trained on a bundle's answers, or its cache or bundle cannot be accessed."""


class RouterFileError(TideError):
    """A router file is unreadable or was made for another depth, width or model."""


class TraceError(TideError):
    """`torch.onnx.export` failed, or its graph lost an attention op or a checkpoint."""


class GraphError(TideError):
    """The traced graph cannot be cut, composed or lowered."""


class TuneError(TideError):
    """Thresholds cannot be certified: the prompts are too few, or the routers were fitted on them."""


class BundleError(TideError):
    """A bundle cannot be written, or one on disk is missing a file, truncated or corrupt."""


class HubError(TideError):
    """The hub cannot be reached or refuses access, or the repository does not hold a bundle."""


class GenerationError(TideError):
    """A generation request is unusable: empty prompt, prompt beyond the context, option out of range."""


class ConstraintError(GenerationError):
    """A request's grammar, biases, penalties or processor leave no possible next token."""


class QueueFullError(GenerationError):
    """The queue of a scheduler is full: submit the request again later."""


class ProviderError(TideError):
    """The requested engine cannot run on this machine."""


class BuildError(TideError):
    """TensorRT could not build a plan: not installed, no GPU, refused, killed or out of memory."""
