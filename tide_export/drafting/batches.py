"""Batches answers of similar length, those that were trained on least first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tide_export.drafting.store import Answer, AnswerStore

MAX_ROWS = 1024  # to learn from in a batch, padding included
SORTED = 160  # answers per group that is sorted by length


@dataclass(frozen=True, eq=False)
class Batch:
    """Answers to train on, padded on the right.

    Attributes:
        ids: token ids, int64 [B, S + 1].
        hidden: the model's final states, bfloat16 [B, S, D].
        rows: the rows after which drafts for the answers begin, int64 [B, R].
        sequences, positions: indices of the hidden states whose next token belongs to an answer, int64 [N] each.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], store: AnswerStore, first: int, device: torch.device) -> "Batch":
        """Reads the hidden states of `answers` into a batch on `device`.

        Args:
            first: first position to learn from; earlier ones have too few rows before them.
        """
        length = max(answer.rows for answer in answers)
        ids = torch.zeros(len(answers), length + 1, dtype=torch.long)
        hidden = torch.zeros(len(answers), length, store.width, dtype=torch.bfloat16)
        learned = torch.zeros(len(answers), length, dtype=torch.bool)
        begins = [first_learned(answer, first) for answer in answers]
        for row, (answer, begin) in enumerate(zip(answers, begins, strict=True)):
            ids[row, : len(answer.ids)] = torch.from_numpy(answer.ids)
            hidden[row, : answer.rows] = store.hidden(answer)
            learned[row, begin : answer.rows] = True
        sequences, positions = learned.nonzero(as_tuple=True)
        count = first - 1 + max(answer.rows - begin for answer, begin in zip(answers, begins, strict=True))
        rows = (torch.tensor(begins)[:, None] - first + torch.arange(count)).clamp(max=length - 1)
        return cls(*(value.to(device) for value in (ids, hidden, rows, sequences, positions)))

    def columns(self, step: int) -> torch.Tensor:
        """Returns the column of `rows` whose draft at `step` is for the token after each of `positions`, [N]."""
        return self.positions - step - self.rows[self.sequences, 0]


def first_learned(answer: Answer, first: int) -> int:
    """Returns the first position of `answer` to learn from, at least `first`."""
    return max(answer.prompt - 1, first)


def learned_tokens(answers: Iterable[Answer], first: int) -> int:
    """Returns the number of positions to learn from in batches of `answers`."""
    return sum(max(0, answer.rows - first_learned(answer, first)) for answer in answers)


def plan_batches(
    answers: Sequence[Answer], first: int, visits: Mapping[int, int], generator: np.random.Generator
) -> list[list[int]]:
    """Batches the answers that were visited least, in random order.

    Args:
        first: first position to learn from.
        visits: answer number -> times it was trained on.

    Returns:
        Batches of indices into `answers`.
    """
    counts = [visits.get(answer.number, 0) for answer in answers]
    fewest = min(counts)
    indices = [index for index, count in enumerate(counts) if count == fewest]
    generator.shuffle(indices)
    lengths = [learned_tokens([answer], first) for answer in answers]
    batches = list[list[int]]()
    for start in range(0, len(indices), SORTED):
        part = sorted(indices[start : start + SORTED], key=lambda index: (lengths[index], answers[index].rows))
        group: list[list[int]] = [[]]
        for index in part:
            if group[-1] and (len(group[-1]) + 1) * lengths[index] > MAX_ROWS:
                group.append([])
            group[-1].append(index)
        batches += [group[number] for number in generator.permutation(len(group))]
    return batches
