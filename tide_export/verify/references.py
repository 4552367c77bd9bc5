"""Runs the references of an engine: the Hugging Face model, and TIDE's rule (`oracle.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.verify.oracle import oracle


@dataclass(frozen=True)
class Expected:
    """Results of a reference after N prefixes of one text, each a token longer than the one before.

    Attributes:
        logits: [N, V] float32.
        exit_layers: N numbers of layers before the exit.
        margins: layers before a checkpoint -> [N], |score - threshold| there; empty if no token may exit.
    """

    logits: np.ndarray
    exit_layers: list[int]
    margins: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class References:
    """Results of both references on one text.

    Attributes:
        prompt: the first prefix.
        forced: the N - 1 tokens after it.
        thresholds: those of the oracle, one per checkpoint.
        full: the results of the Hugging Face model.
        exits: the results of the oracle.
    """

    prompt: list[int]
    forced: list[int]
    thresholds: list[float]
    full: Expected
    exits: Expected


def compute_references(
    source: SourceModel,
    routers: RouterSet,
    prompt: Sequence[int],
    forced: Sequence[int],
    thresholds: Sequence[float],
) -> References:
    """Runs both references after `prompt` and after each of the `forced` tokens that follow it."""
    text = [*prompt, *forced]
    full, exits = exit_references(source, routers, text, len(prompt), thresholds)
    return References(list(prompt), list(forced), list(thresholds), full, exits)


@torch.no_grad()
def full_reference(source: SourceModel, text: Sequence[int], prompt_length: int) -> Expected:
    """Runs the Hugging Face model after the first `prompt_length` tokens of `text` and each later one."""
    ids = torch.tensor([list(text)], device=source.device)
    return _at_full_depth(source, source.run(ids, []).logits[0], prompt_length)


def exit_references(
    source: SourceModel,
    routers: RouterSet,
    text: Sequence[int],
    prompt_length: int,
    thresholds: Sequence[float],
) -> tuple[Expected, Expected]:
    """Runs the Hugging Face model and the oracle at the positions of `full_reference`."""
    first = prompt_length - 1
    judged = oracle(source, routers, text, thresholds)
    full = _at_full_depth(source, judged.full_logits, prompt_length)
    distance = (judged.scores[first:].cpu() - torch.tensor(list(thresholds))).abs().numpy()
    margins = {layers: distance[:, k] for k, layers in enumerate(routers.checkpoints)}
    return full, Expected(_numpy(judged.logits[first:]), judged.exit_layers[first:].tolist(), margins)


def _at_full_depth(source: SourceModel, logits: torch.Tensor, prompt_length: int) -> Expected:
    """Takes the rows of `logits` [S, V] from the end of the prompt on."""
    rows = _numpy(logits[prompt_length - 1 :])
    return Expected(rows, [source.num_layers] * len(rows))


def _numpy(logits: torch.Tensor) -> np.ndarray:
    return logits.float().cpu().numpy().copy()  # a copy, or all positions would stay in memory
