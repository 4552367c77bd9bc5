"""Computes TIDE's post-hoc rule in eager PyTorch, slow and plain: the reference of all engines.

"Run every layer for every token, then take the earliest checkpoint whose router says converged" (TIDE 0.2.1,
`runtime.py`, with its errors corrected: the final norm once, the model's own norm, thresholds per checkpoint). Every
engine must equal it token for token in `exit` mode, and Hugging Face (every checkpoint off) in `full` mode. It also
computes the rule of `kv_cache_strategy = "propagate"`. Shares no code with the runtimes but the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_export.model.outputs import first_tensor, with_first_tensor
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet


@dataclass(frozen=True)
class OracleOutput:
    """Result of the rule at each of S positions.

    Attributes:
        logits: [S, V] float32, of each position's exit.
        exit_layers: [S] int64, layers before the exit (the model's depth if no score was above its threshold).
        scores: [S, K-1] float32, every router's score, also after the exit.
        full_logits: [S, V], the model's logits in the same pass; None if it had frozen hidden states.
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
    """Applies the rule to one sequence of S token ids.

    Args:
        thresholds: one per checkpoint; 2.0: never exit.
        propagate_from: with `kv_cache_strategy = "propagate"` the first position that may exit (prompts run every
            layer); later layers compute its K/V from its frozen hidden state. None: K/V are the full model's.
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
    """Decides the exits of all positions, checkpoint by checkpoint; only those in `may_exit` [S] exit."""

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
    """Runs one pass with hidden states frozen after their exit; returns the last raw states [1, S, D].

    Whether a position exits depends only on the layers before the checkpoint, so one pass over the whole sequence
    decides the same as a pass per token.
    """
    rule.may_exit[:, :propagate_from] = False
    last: list[torch.Tensor] = []
    deciding = False

    def after(layers: int):
        def hook(_module, args, kwargs, output):
            nonlocal deciding
            if deciding:  # the final norm may be the backbone's forward, which calls the layers again
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
