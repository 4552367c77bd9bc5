"""The training loop of a drafter, which learns the model's distribution over the drafter's tokens.

The loss of a position is the divergence of the draft's distribution from the model's at temperature 1. Its gradient
with respect to the logits, `q - p`, is computed in chunks and multiplied by the head's frozen rows, so autograd sees
neither logits nor head. Muon trains matrices, AdamW vectors.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tide_export.calibration.distributed import Processes
from tide_export.calibration.lens_loss import fast_dtype
from tide_export.drafting.batches import Batch, learned_tokens, plan_batches
from tide_export.drafting.muon import Muon
from tide_export.drafting.network import DrafterNetwork
from tide_export.drafting.schedule import rate
from tide_export.drafting.store import AnswerStore
from tide_export.errors import DraftError

STEP_WEIGHTS = (1.0, 0.8, 0.6)  # weight of the loss of each draft step
STEP_BATCHES = 2  # batches whose gradients are summed for one change of the weights
SINGLE_STEP_SHARE = 0.2  # share of the training, at its start, with one draft step
MATRIX_RATE, VECTOR_RATE = 0.02, 6e-3
MATRIX_DECAY = 0.02
MOMENTUM = 0.95
ORTHOGONAL_STEPS = 3  # Muon's iterations of Newton-Schulz; 5 cost more and learn no faster
BETAS = (0.9, 0.98)
CLIP = 1.0  # maximum gradient norm of the vectors
CHUNK = {"cpu": 128}  # positions whose logits are computed at once
GPU_CHUNK = 2048
AVERAGED = 0.03  # weight of a batch in the running average of the overlap


class Trainer:
    """Trains one drafter.

    Attributes:
        seconds: training time so far, on the main process.
        tokens: positions trained on so far, counting repetitions.
        rows: rows trained on so far, summed over all draft steps.
        overlap: running average of `sum(min(p, q))` of first drafts on the training text.
    """

    def __init__(
        self,
        network: DrafterNetwork,
        tokens: torch.Tensor,
        embeddings: torch.Tensor,
        store: AnswerStore,
        seed: int,
        processes: Processes,
    ) -> None:
        """Creates the optimizers.

        Args:
            network: the drafter, on the device to train on.
            tokens: the drafter's tokens, int64 [n].
            embeddings: the model's, on the same device, [V, E].
            seed: seed of the order of the answers.
        """
        self.network, self.token_ids, self.embeddings, self.store = network, tokens, embeddings, store
        self._seed, self._processes = seed, processes
        self.device = network.center.device
        self._bf16 = processes.gather(fast_dtype(self.device) is torch.bfloat16)[0]  # all as the main process
        self._head = network.head.to(torch.bfloat16) if self._bf16 else network.head
        self._matrices = [weight for weight in network.parameters() if weight.dim() == 2]
        self._vectors = [weight for weight in network.parameters() if weight.dim() < 2]
        self._muon = Muon(
            self._matrices,
            torch.bfloat16 if self._bf16 else torch.float32,
            lr=0.0,
            weight_decay=MATRIX_DECAY,
            momentum=MOMENTUM,
            ns_steps=ORTHOGONAL_STEPS,
            adjust_lr_fn="original",
        )
        self._adam = torch.optim.AdamW(self._vectors, lr=0.0, betas=BETAS, weight_decay=0.0)
        self._visits = Counter[int]()
        self._planned: list[list[int]] = []
        self.step = self.tokens = self.rows = 0
        self.seconds = self.overlap = 0.0
        self.new_text()

    def new_text(self) -> None:
        """Takes the answers that the store holds now."""
        longest = len(STEP_WEIGHTS)
        self.answers = [one for one in self.store.answers if not one.held_out and learned_tokens([one], longest)]
        self._planned = []

    def resume(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.network.load_state_dict(state["network"])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        self._visits = Counter(dict(state["visits"]))
        self._planned = [list(batch) for batch in state["planned"]]
        for name in ("step", "tokens", "rows", "seconds", "overlap"):
            setattr(self, name, state[name])

    def state_dict(self) -> dict[str, Any]:
        """Returns what a snapshot holds."""
        return {
            "network": self.network.state_dict(),
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
            "visits": sorted(self._visits.items()),
            "planned": self._planned,
            **{name: getattr(self, name) for name in ("step", "tokens", "rows", "seconds", "overlap")},
        }

    def train_step(self, progress: float) -> None:
        """Changes the weights once, by the next `STEP_BATCHES` batches.

        Args:
            progress: share of the training that is done.

        Raises:
            DraftError: the loss or a gradient is not finite.
        """
        if not self._planned:
            random = np.random.default_rng([self._seed, self.step])
            self._planned = plan_batches(self.answers, len(STEP_WEIGHTS), self._visits, random)
        batches = [[self.answers[index] for index in indices] for indices in self._planned[:STEP_BATCHES]]
        del self._planned[:STEP_BATCHES]
        steps = 1 if progress < SINGLE_STEP_SHARE else len(STEP_WEIGHTS)
        total = sum(learned_tokens(answers, len(STEP_WEIGHTS)) for answers in batches)
        self._muon.zero_grad(set_to_none=True)
        self._adam.zero_grad(set_to_none=True)
        overlap = 0.0
        for answers in batches:
            if part := answers[self._processes.rank :: self._processes.count]:
                batch = Batch.of(part, self.store, len(STEP_WEIGHTS), self.device)
                overlap += self.accumulate_gradients(batch, steps, total)
        self._share_gradients()
        overlap = sum(self._processes.gather(overlap)) / total
        norm = float(torch.nn.utils.clip_grad_norm_(self._vectors, CLIP))
        if not math.isfinite(norm) or not math.isfinite(overlap):
            raise DraftError(
                f"the training of the drafter diverged after {self.step} steps: start it with another --seed"
            )
        factor = rate(self.step, progress)
        for optimizer, peak in ((self._muon, MATRIX_RATE), (self._adam, VECTOR_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
        self.overlap = overlap if self.step == 0 else (1 - AVERAGED) * self.overlap + AVERAGED * overlap
        self._visits.update(answer.number for answers in batches for answer in answers)
        self.step += 1
        self.tokens += total
        self.rows += total * steps

    def accumulate_gradients(self, batch: Batch, steps: int, total: int) -> float:
        """Accumulates the gradient of the batch's loss divided by `total`.

        Returns:
            The sum of the overlaps `sum(min(p, q))` of first drafts.
        """
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            embeddings = functional.embedding(batch.ids, self.embeddings)
            outputs = [
                drafted[batch.sequences, batch.columns(step)]
                for step, drafted in enumerate(self.network.draft_steps(embeddings, batch.hidden, batch.rows, steps), 1)
            ]
        hidden = batch.hidden[batch.sequences, batch.positions]
        overlap, gradients = self._output_gradients(hidden, [rows.detach() for rows in outputs], total)
        torch.autograd.backward(outputs, gradients)
        return overlap

    @torch.no_grad()
    def _output_gradients(
        self, hidden: torch.Tensor, outputs: list[torch.Tensor], total: int
    ) -> tuple[float, list[torch.Tensor]]:
        """Returns the sum of overlaps and the gradient of the normalized outputs [N, D] of each draft step."""
        head, bias = self._head, self.network.bias
        gradients = [torch.empty_like(rows) for rows in outputs]
        overlap = torch.zeros((), device=self.device)
        size = CHUNK.get(self.device.type, GPU_CHUNK)
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            wanted = _probabilities(hidden[part].to(head.dtype), head, bias)
            for step, (rows, gradient) in enumerate(zip(outputs, gradients, strict=True)):
                drafted = _probabilities(rows[part].to(head.dtype), head, bias)
                if step == 0:
                    overlap += torch.minimum(wanted, drafted).sum()
                gradient[part] = (drafted.sub_(wanted).to(head.dtype) @ head).float() * (STEP_WEIGHTS[step] / total)
        return float(overlap), gradients

    def _share_gradients(self) -> None:
        """Sums the gradients over all processes."""
        for weight in self.network.parameters():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if self._processes.count > 1:
                gradient = weight.grad.cpu()
                torch.distributed.all_reduce(gradient)
                weight.grad.copy_(gradient)


def _probabilities(rows: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    logits = functional.linear(rows, head).float()
    return torch.softmax(logits if bias is None else logits + bias, -1)
