"""Makes routers of the exit gate that a looped model was trained with: `--routers model`.

After loop k of Ouro (https://arxiv.org/abs/2510.25741) the gate gives p_k = sigmoid(g_k), g_k linear in the normalized
states: the probability of an exit there of what has not exited before. A token exits after the first loop at which the
probability of an exit there or before, 1 - (1 - p_1) .. (1 - p_k), is above the threshold.

As SiLU(g) - SiLU(-g) = g, such a gate is a router of two hidden units.
"""

import torch
from torch import nn

from tide_export.common.version import __version__
from tide_export.errors import ConfigError, UnsupportedModelError
from tide_export.model.source import EXIT_THRESHOLD, SourceModel
from tide_export.routers.router import Router
from tide_export.routers.router_set import RouterSet

MODEL_GATE = "model"  # in place of a router file
GATE = "early_exit_gate"  # of a looped model's backbone


def gate_routers(source: SourceModel) -> RouterSet:
    """Returns a router after every loop of `source` but the last, all with the weights of its gate.

    Raises:
        UnsupportedModelError: the model has no loops or no such gate, or it does not give one number.
    """
    gate = getattr(source.structure.backbone, GATE, None)
    if not isinstance(gate, nn.Linear) or source.loops == 1:
        raise UnsupportedModelError(
            f"{source.architecture} has no exit gate of its own after loops ({GATE}): omit --routers model to "
            "calibrate routers"
        )
    if (gate.out_features, gate.in_features) != (1, source.normalized_size):
        raise UnsupportedModelError(
            f"{source.architecture}: its {GATE} gives {gate.out_features} numbers for {gate.in_features}, not 1 for "
            f"{source.normalized_size}: omit --routers model to calibrate routers"
        )
    checkpoints = range(source.num_layers // source.loops, source.num_layers, source.num_layers // source.loops)
    provenance = {
        "model": source.name,
        "weights_sha256": source.weights_sha256,
        "num_layers": source.num_layers,
        "imported_from": f"the model's {GATE}",
        "versions": {"tide_export": __version__},
        **({"remote_code": True} if source.remote_code else {}),
    }
    return RouterSet({layers: _router(source, gate) for layers in checkpoints}, provenance, cumulative=True)


def _router(source: SourceModel, gate: nn.Linear) -> Router:
    name = next(name for name, module in source.model.named_modules() if module is gate)
    weight = source.weight(f"{name}.weight")
    router = Router(source.normalized_size, 2).eval().requires_grad_(False)
    router.down.weight.copy_(torch.cat((weight, -weight)))
    router.up.weight.copy_(torch.tensor([[1.0, -1.0]]))
    if gate.bias is not None:
        router.up.bias.copy_(source.weight(f"{name}.bias"))
    return router


def gate_threshold(source: SourceModel) -> float | None:
    """Returns the threshold in the model's config; None if there is none.

    Raises:
        ConfigError: it lies outside [0, 1].
    """
    threshold = getattr(source.text_config, EXIT_THRESHOLD, None)
    if threshold is None or (isinstance(threshold, int | float) and 0 <= threshold <= 1):
        return threshold
    raise ConfigError(
        f"{source.name}: {EXIT_THRESHOLD} in its config.json must lie in 0..1, not {threshold!r}: give --exit-threshold"
    )
