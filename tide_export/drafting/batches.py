"""Makes batches of answers: sequences of similar length together, those that were trained on least first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.drafting.store import Answer, AnswerStore

MAX_POSITIONS = 3400  # of a batch, padding included
SORTED = 160  # answers that are sorted by length together


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences, padded at the end.

    Attributes:
        ids: int64 [B, S + 1].
        states: the model's, bfloat16 [B, S, D].
        sequences, positions: of the states whose next token belongs to an answer, int64 [N] each.
    """

    ids: torch.Tensor
    states: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], store: AnswerStore, first: int, device: torch.device) -> "Batch":
        """Reads the states of answers.

        Args:
            first: the first position that may be learned from: before it there are too few rows.
        """
        length = max(answer.states for answer in answers)
        ids = torch.zeros(len(answers), length + 1, dtype=torch.long)
        states = torch.zeros(len(answers), length, store.width, dtype=torch.bfloat16)
        learned = torch.zeros(len(answers), length, dtype=torch.bool)
        for row, answer in enumerate(answers):
            ids[row, : len(answer.ids)] = torch.from_numpy(answer.ids)
            states[row, : answer.states] = store.states(answer)
            learned[row, max(answer.prompt - 1, first) : answer.states] = True
        sequences, positions = learned.nonzero(as_tuple=True)
        return cls(ids.to(device), states.to(device), sequences.to(device), positions.to(device))


def learned_tokens(answers: Iterable[Answer], first: int) -> int:
    """Returns the number of positions that batches of these answers have to learn from."""
    return sum(max(0, answer.states - max(answer.prompt - 1, first)) for answer in answers)


def plan_batches(
    answers: Sequence[Answer], visits: Mapping[int, int], generator: np.random.Generator
) -> list[list[int]]:
    """Returns batches of the answers (by their place) that were visited least, in random order.

    Args:
        visits: by the number of an answer.
    """
    counts = [visits.get(answer.number, 0) for answer in answers]
    least = min(counts)
    places = [place for place, count in enumerate(counts) if count == least]
    generator.shuffle(places)
    batches = list[list[int]]()
    for first in range(0, len(places), SORTED):
        part = sorted(places[first : first + SORTED], key=lambda place: answers[place].states)
        made: list[list[int]] = [[]]
        for place in part:
            if made[-1] and (len(made[-1]) + 1) * answers[place].states > MAX_POSITIONS:
                made.append([])
            made[-1].append(place)
        batches += [made[index] for index in generator.permutation(len(made))]
    return batches
