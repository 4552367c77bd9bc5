"""The judge: TIDE's post-hoc rule in a page of eager PyTorch, slow and plain.

"Run every layer for every token, then take the earliest checkpoint whose router says converged" (TIDE 0.2.1,
`runtime.py`, with its mistakes mended: the final norm once, the model's own norm, thresholds per checkpoint). Every
engine must equal it token for token in `exit` mode, and HuggingFace, which is the same with every checkpoint off, in
`full` mode. Shares no code with the runtimes beyond the model itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_export.model import SourceModel
from tide_export.routers import RouterSet


@dataclass(frozen=True)
class OracleOutput:
    """The rule's answer at each of S positions.

    Attributes:
        logits: [S, V] float32, of the state each position exited with.
        exit_layers: [S] int64, layers run at the exit (the model's depth where no router fired).
        scores: [S, K-1] float32, every router's score, also behind the exit.
    """

    logits: torch.Tensor
    exit_layers: torch.Tensor
    scores: torch.Tensor


@torch.no_grad()
def oracle(
    source: SourceModel, routers: RouterSet, input_ids: Sequence[int], thresholds: Sequence[float]
) -> OracleOutput:
    """Applies the rule to one sequence of S token ids; `thresholds` holds one value per checkpoint (2.0 = off)."""
    depth, checkpoints = source.num_layers, routers.checkpoints
    ids = torch.as_tensor(list(input_ids), dtype=torch.long, device=source.device)[None]
    states = source.run(ids, [*checkpoints, depth])

    chosen = source.normed(states.raw[depth])
    exit_layers = torch.full(ids.shape, depth, device=ids.device)
    exited = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    scores = []
    for layers, threshold in zip(checkpoints, thresholds, strict=True):
        normed = routers.exit_state(source, layers, states.raw[layers])
        score = routers.routers[layers].to(ids.device)(normed)
        leaves = (score > threshold) & ~exited
        chosen = torch.where(leaves[..., None], normed, chosen)
        exit_layers = torch.where(leaves, layers, exit_layers)
        exited |= leaves
        scores.append(score)
    return OracleOutput(source.head(chosen)[0], exit_layers[0], torch.stack(scores, dim=-1)[0])
