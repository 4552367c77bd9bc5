"""Checks before the calibration what a later stage would otherwise refuse hours later."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

from tide_export.calibration.config import TideConfig
from tide_export.calibration.distributed import Processes
from tide_export.calibration.self_generated import answer_length, prompts_in, prompts_to_answer
from tide_export.common.formatting import size
from tide_export.data.documents import Documents
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import BundleError, ConfigError, UnsupportedModelError
from tide_export.model.source import EXIT_THRESHOLD, SourceModel
from tide_export.pipeline.request import ExportRequest
from tide_export.routers.model_gate import MODEL_GATE, gate_threshold
from tide_export.routers.router_set import RouterSet
from tide_export.trace.attention.indexed import max_keys
from tide_export.trace.attention.masks import layer_masks
from tide_export.trace.recurrence import keeps_state, refuse_unknown_state

logger = logging.getLogger("tide_export")

CHOOSE = "give it a lower --threshold, or use lossless mode, which finds its own"
BITS = {"fp16": 16, "bf16": 16, "fp8": 8, "int4": 4}  # per weight; others have 32


def given_routers(request: ExportRequest) -> RouterSet | None:
    """Loads the router file and checks that the text exists, before the model is loaded for minutes.

    Returns:
        The routers, none of them for an export without checkpoints or for the model's gate, which is not read yet;
        None: they are to be calibrated.

    Raises:
        ConfigError: there are routers, and no checkpoints.
        RouterFileError: the router file cannot be read.
        DatasetError: a file of text or prompts does not exist.
    """
    from_file = request.routers not in (None, MODEL_GATE)
    routers = RouterSet.load(request.routers or "") if from_file else None
    if request.routers == MODEL_GATE:
        _check_gate_options(request)
        routers = RouterSet({})
    if request.config.checkpoints == "none":
        if routers is not None:
            raise ConfigError("routers are for checkpoints, and --checkpoints is none: omit one of them")
        routers = RouterSet({})
    if routers is None or request.reads_text_for_weights:
        find_text(request.config if routers is None else request.config.model_copy(update={"self_generated": None}))
    return routers


def _check_gate_options(request: ExportRequest) -> None:
    """Refuses what the model's gate cannot be combined with."""
    if request.config.checkpoints is not None:
        raise ConfigError("--routers model has a checkpoint after every loop but the last: omit --checkpoints")


def for_model(source: SourceModel, request: ExportRequest) -> ExportRequest:
    """Returns `request` with a looped model's defaults, and the threshold of its gate, if that routes.

    Raises:
        ConfigError: the threshold in the model's config lies outside [0, 1].
    """
    threshold = gate_threshold(source) if request.routers == MODEL_GATE else None
    config = loop_defaults(source, request.config)
    if threshold is not None and "exit_threshold" not in config.model_fields_set:
        config = config.model_copy(update={"exit_threshold": threshold})
        if threshold == 1:
            logger.info("%s of %s is 1, so mode exit runs all loops: %s", EXIT_THRESHOLD, source.name, CHOOSE)
    return replace(request, config=config)


def loop_defaults(source: SourceModel, config: TideConfig) -> TideConfig:
    """Returns `config` with, where none are given, checkpoints at the ends of loops and no minimum."""
    loops = {"checkpoint_interval": source.num_layers // source.loops, "min_layers": 0} if source.loops > 1 else {}
    return config.model_copy(update={name: loops[name] for name in loops.keys() - config.model_fields_set})


def find_text(config: TideConfig) -> None:
    """Checks that the files of the dataset exist, or reads the prompts for the model to answer.

    Raises:
        DatasetError: a file does not exist, or holds no prompt.
    """
    if config.self_generated is None:
        Documents(config.calibration_dataset)
    else:
        prompts_in(config.self_generated)


def check_source(
    source: SourceModel, request: ExportRequest, routers: RouterSet | None, folder: Path
) -> tuple[int, tuple[int, ...]]:
    """Checks `request` against the loaded model, the routers, the disk of `folder` and the text.

    Returns:
        The maximum sequence length in tokens, and the checkpoints to trace the model with.

    Raises:
        UnsupportedModelError: the model has a recurrent state or attention masks that cannot be exported.
        ConfigError: sequence length or checkpoints do not fit the model, or several processes calibrate.
        RouterFileError: the routers are of another model.
        BundleError: the disk has less space than the weights of the layers need.
        ModelError, DatasetError: the tokenizer or the dataset is needed and cannot be read.
    """
    refuse_unknown_state(source)
    _check_state(source, request)
    length = context_length(source, request.max_length)
    if routers is not None:
        routers.check(source, request.routers or "")
    checkpoints = routers.checkpoints if routers is not None else planned_checkpoints(request.config, source.num_layers)
    _check_space(source, request, folder)
    if routers is None and Processes.current().count > 1:
        raise ConfigError("export runs in one process: calibrate with several, then export with --routers")
    if routers is None or request.reads_text_for_weights:
        check_text(source, request)
    return length, checkpoints


def context_length(source: SourceModel, max_length: int | None) -> int:
    """Returns the most tokens of a sequence: `max_length`, at most what the graph is exact for.

    Raises:
        ConfigError: `max_length` is out of range, or the model sets no bound and none is given.
        UnsupportedModelError: the model attends in a way that cannot be exported.
    """
    limit, why = source.context_length, "the model's context"
    if limit is not None and limit == source.longrope_length:
        why = "longer ones would change the rotary angles of tokens already cached (longrope)"
    masks = layer_masks(source.model, source.structure.layers) or ()
    blocks = [mask.size for mask in masks if mask and mask.kind == "chunk"]
    if blocks and (limit is None or min(blocks) < limit):
        limit, why = min(blocks), "layers attend in blocks of that many tokens"
    chosen = max_keys(source.model)
    if chosen is not None and (limit is None or chosen < limit):
        limit, why = chosen, "longer ones would attend to chosen tokens only"
    if max_length is None:
        if limit is None:
            raise ConfigError(f"{source.name} sets no context length of its own: give --max-length")
        if limit != getattr(source.text_config, "max_position_embeddings", None):
            logger.warning("the bundle holds sequences of at most %d tokens: %s", limit, why)
        return limit
    if max_length < 2 or (limit is not None and max_length > limit):
        raise ConfigError(f"max_length must lie in 2..{limit or 'any'} ({why}), not {max_length}")
    return max_length


def planned_checkpoints(config: TideConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the checkpoints to trace with: those of `config`, or one in the middle for `auto`.

    Raises:
        ConfigError: the model has no such layers.
    """
    config.check_checkpoints(num_layers)
    return (num_layers // 2,) if config.checkpoints == "auto" else config.resolve_checkpoints(num_layers)


def _check_state(source: SourceModel, request: ExportRequest) -> None:
    """Refuses targets and options that recurrent states do not allow."""
    if not keeps_state(source):
        return
    if request.network_target is not None:
        raise UnsupportedModelError(
            f"{source.architecture} keeps recurrent states, which the networks of {request.network_target} cannot take "
            "back when drafts are rejected: export it for target onnxruntime"
        )


def check_text(source: SourceModel, request: ExportRequest) -> None:
    """Loads the tokenizer and reads the first document of the dataset, or the prompts to answer.

    Raises:
        ModelError: the model has no tokenizer that can be read.
        DatasetError: the dataset, or the file of prompts, cannot be read or holds no text.
    """
    tokenizer, config = load_tokenizer(request.model, request.trust_remote_code), request.config
    if config.self_generated is not None and request.routers is None:
        prompts_to_answer(tokenizer, config.self_generated, answer_length(source, config), config.calibration_samples)
    else:
        next(iter(Documents(config.calibration_dataset)))


def warn_if_nothing_exits(checkpoints: tuple[int, ...], min_layers: int) -> None:
    if checkpoints and checkpoints[-1] < min_layers:
        logger.warning(
            "no token can exit by default: min_layers is %d but the last checkpoint comes after layer %d; "
            "lower --min-layers, or give min_layers when generating",
            min_layers,
            checkpoints[-1],
        )


def _check_space(source: SourceModel, request: ExportRequest, folder: Path) -> None:
    """Checks that the disk has room for the decoder layers' weights, the minimum of every bundle."""
    settings = request.quantization_settings or (None if source.quantized is None else source.quantized.settings)
    bits = (16 if request.half else 32) if settings is None else settings.bits
    if request.network_target is not None:
        bits += BITS.get(request.weights, 32)
    parameters = {id(parameter): parameter for layer in source.structure.layers for parameter in layer.parameters()}
    needed = sum(parameter.numel() for parameter in parameters.values()) * bits // 8
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BundleError(
            f"no space left on the disk for bundle '{request.output}': the weights of its layers take {size(needed)} "
            f"and {size(free)} are free"
        )
