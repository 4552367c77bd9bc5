"""Computes TIDE's post-hoc rule in a page of eager PyTorch, slow and plain: the reference of all engines.

"Run every layer for every token, then take the earliest checkpoint whose router says converged" (TIDE 0.2.1,
`runtime.py`, with its errors corrected: the final norm once, the model's own norm, thresholds per checkpoint). Every
engine must equal it token for token in `exit` mode, and Hugging Face, which is the same with every checkpoint off, in
`full` mode. The rule of `kv_cache_strategy = "propagate"` is here too. Shares no code with the runtimes beyond the
model itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_export.model.source import SourceModel
from tide_export.model.structure import first_tensor, with_first_tensor
from tide_export.routers.router_set import RouterSet


@dataclass(frozen=True)
class OracleOutput:
    """The result of the rule at each of S positions.

    Attributes:
        logits: [S, V] float32, of the state each position exited with.
        exit_layers: [S] int64, layers run at the exit (the model's depth where no router fired).
        scores: [S, K-1] float32, every router's score, also after the exit.
        full_logits: [S, V], the model's own, of the same pass; None where it had frozen hidden states.
    """

    logits: torch.Tensor
    exit_layers: torch.Tensor
    scores: torch.Tensor
    full_logits: torch.Tensor | None


@torch.no_grad()
def oracle(
    source: SourceModel,
    routers: RouterSet,
    input_ids: Sequence[int],
    thresholds: Sequence[float],
    propagate_from: int | None = None,
) -> OracleOutput:
    """Applies the rule to one sequence of S token ids; `thresholds` holds one value per checkpoint (2.0: never).

    Args:
        propagate_from: with `kv_cache_strategy = "propagate"` the first position that may exit (prompts run every
            layer): the later layers make its K/V of its frozen hidden state. None: K/V are the full model's.
    """
    depth, checkpoints = source.num_layers, routers.checkpoints
    ids = torch.as_tensor(list(input_ids), dtype=torch.long, device=source.device)[None]
    rule = _Rule(source, routers, thresholds, ids.shape[1])
    if propagate_from is None:
        states = source.run(ids, [*checkpoints, depth])
        for layers in checkpoints:
            rule.decide(layers, states.raw[layers])
        last, full_logits = states.raw[depth], states.logits[0]
    else:
        full_logits = None
        last = _run_frozen(source, rule, ids, propagate_from)
    chosen = torch.where(rule.exited[..., None], rule.chosen, source.normalize(last))
    scores = torch.stack(rule.scores, dim=-1)[0]
    return OracleOutput(source.head(chosen)[0], rule.exit_layers[0], scores, full_logits)


class _Rule:
    """The exits of all positions, decided checkpoint by checkpoint; only those of `may_exit` [S] exit."""

    def __init__(self, source: SourceModel, routers: RouterSet, thresholds: Sequence[float], length: int):
        self.source, self.routers = source, routers
        self.thresholds = dict(zip(routers.checkpoints, thresholds, strict=True))
        self.may_exit = torch.ones(1, length, dtype=torch.bool, device=source.device)
        self.exited = torch.zeros_like(self.may_exit)
        self.exit_layers = torch.full((1, length), source.num_layers, device=source.device)
        self.chosen = torch.zeros(1, length, source.normalized_size, device=source.device)
        self.scores: list[torch.Tensor] = []

    def decide(self, layers: int, raw: torch.Tensor) -> None:
        """Applies the router after `layers` layers to raw states [1, S, D]."""
        normalized = self.routers.exit_state(self.source, layers, raw)
        score = self.routers.routers[layers].to(raw.device)(normalized)
        exits_here = (score > self.thresholds[layers]) & ~self.exited & self.may_exit
        self.chosen = torch.where(exits_here[..., None], normalized, self.chosen)
        self.exit_layers = torch.where(exits_here, layers, self.exit_layers)
        self.exited = self.exited | exits_here
        self.scores.append(score)


def _run_frozen(source: SourceModel, rule: _Rule, ids: torch.Tensor, propagate_from: int) -> torch.Tensor:
    """Runs one pass in which hidden states are frozen from their exit on; returns the last raw states [1, S, D].

    Whether a position exits depends on the layers before the checkpoint alone, so one pass over the whole sequence
    decides it layer by layer, as going through it token by token would.
    """
    rule.may_exit[:, :propagate_from] = False
    last: list[torch.Tensor] = []
    deciding = False

    def after(layers: int):
        def hook(_module, args, kwargs, output):
            nonlocal deciding
            if deciding:  # the final norm may be the backbone's own forward, whose layers are called again
                return output
            before, after = args[0] if args else kwargs["hidden_states"], first_tensor(output)
            raw = torch.where(rule.exited[..., None], structure.by_token(before), structure.by_token(after))
            if layers in rule.thresholds:
                deciding = True
                rule.decide(layers, raw)
                deciding = False
            last[:] = [raw]
            return with_first_tensor(output, structure.by_stream(raw))

        return hook

    structure = source.structure
    handles = [
        layer.register_forward_hook(after(number), with_kwargs=True)
        for number, layer in enumerate(structure.layers, start=1)
    ]
    try:
        source.model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return last[0]
