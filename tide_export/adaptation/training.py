"""The loop of early-exit training.

Step `n` depends on parameters, optimizer state and `n` alone (order and dropout are drawn from the seed and `n`), so a
resumed run reaches the same weights as an uninterrupted one.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tide_export.adaptation.config import AdaptConfig
from tide_export.adaptation.layer_dropout import dropped_layers, skip_rates
from tide_export.adaptation.lora import Lora
from tide_export.adaptation.losses import Batch, accumulate_gradients, exit_weights
from tide_export.adaptation.snapshot import Snapshot
from tide_export.calibration.distributed import Processes
from tide_export.calibration.lens_loss import fast_dtype
from tide_export.data.sequences import TokenSequence
from tide_export.errors import AdaptError
from tide_export.model.source import SourceModel, wrap_model

logger = logging.getLogger("tide_export")

WARM_UP = 0.05  # share of the steps
FINAL_RATE = 0.05  # share of the peak learning rate at the end of the cosine
BETAS = (0.9, 0.95)
LOG_SECONDS = 60.0


@dataclass
class Trainer:
    """Trains `source` in place.

    Attributes:
        texts: sequences to train on.
        exits: checkpoints to train.
        steps: total number of steps.
        lora: the trained matrices; None trains every weight.
        bf16: whether matmuls are bfloat16; a resumed run keeps what precision `auto` chose.
    """

    source: SourceModel
    texts: Sequence[TokenSequence]
    config: AdaptConfig
    exits: tuple[int, ...]
    steps: int
    snapshot: Snapshot
    lora: Lora | None

    def __post_init__(self) -> None:
        if self.lora is None:
            self.teacher = wrap_model(copy.deepcopy(self.source.model), self.source.name)
            self.source.model.requires_grad_(True)
        else:
            self.teacher = self.source
        self.parameters = [weight for weight in self.source.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=BETAS, weight_decay=0.0)
        self.processes = Processes.current()
        self.bf16 = self.config.precision == "bf16"
        if self.config.precision == "auto":
            self.bf16 = self.processes.gather(fast_dtype(self.source.device) is torch.bfloat16)[0]
        self.step = 0
        self._order = lru_cache(2)(
            lambda epoch: np.random.default_rng([self.config.seed, epoch]).permutation(len(self.texts)).tolist()
        )

    def resume(self, snapshot: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        with torch.no_grad():
            for parameter, saved in zip(self.parameters, snapshot["parameters"], strict=True):
                parameter.copy_(saved)
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.step = snapshot["step"]
        if self.config.precision == "auto":
            self.bf16 = snapshot["bf16"]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a snapshot holds."""
        return {
            "step": self.step,
            "bf16": self.bf16,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimizer": self.optimizer.state_dict(),
        }

    def train(self, more: dict[str, Any], advance: Callable[[float], None]) -> None:
        """Runs the remaining steps.

        Args:
            more: entries to save with the snapshot.
            advance: called with 1 after each step.

        Raises:
            AdaptError: a loss or gradient is not finite, or the snapshot cannot be saved; the last one is kept.
        """
        began = saved = logged = time.monotonic()
        first = self.step
        while self.step < self.steps:
            losses = self._step()
            self.step += 1
            advance(1)
            now = time.monotonic()
            if not self.processes.main:
                continue
            if now - logged >= LOG_SECONDS:
                left = (now - began) / (self.step - first) * (self.steps - self.step) / 60
                logger.info("step %d of %d, %.0f minutes left: %s", self.step, self.steps, left, losses)
                logged = now
            if now - saved >= 60 * self.config.save_minutes and self.step < self.steps:
                if not all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters):
                    raise self._diverged()
                self.snapshot.save(self.state_dict() | more)
                saved = time.monotonic()
        for parameter in self.source.model.parameters():
            parameter.requires_grad_(False)

    def _step(self) -> str:
        """Trains on one batch; returns its losses as text for the log."""
        config, source = self.config, self.source
        batch = self._batch(self.step)
        count = config.exits_per_step or len(self.exits)
        start = self.step * count
        chosen = sorted({self.exits[(start + index) % len(self.exits)] for index in range(count)})
        weights = exit_weights(chosen, source.num_layers, config)
        tokens = int(batch.lengths.sum())
        totals: dict[int, float] = dict.fromkeys([*chosen, source.num_layers], 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        parts = batch.parts(min(config.micro_batch, -(-config.batch // self.processes.count)))
        for number, part in enumerate(parts):
            if number % self.processes.count != self.processes.rank:
                continue
            generator = torch.Generator().manual_seed((config.seed * 1_000_003 + self.step) * 1009 + number)
            for layers, loss in self._part(part, weights, tokens, generator).items():
                totals[layers] += float(loss) / tokens
        self._share_gradients()
        totals = {layers: sum(values[layers] for values in self.processes.gather(totals)) for layers in totals}
        norm = float(torch.nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], config.clip))
        if not math.isfinite(norm) or not all(map(math.isfinite, totals.values())):
            raise self._diverged()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, config.learning_rate)
        self.optimizer.step()
        *early, full = (f"{layers}: {loss:.3f}" for layers, loss in totals.items())
        return f"cross entropy after layers {', '.join(early)}; full depth from the original {full.split(': ')[1]}"

    def _diverged(self) -> AdaptError:
        file = self.snapshot.file
        kept = f"the last good snapshot is in {file}" if file.exists() else "no snapshot was saved yet"
        return AdaptError(
            f"the training diverged after {self.step} of {self.steps} steps, a loss or weight is not finite: go on "
            f"with a lower --learning-rate, or with --precision fp32; {kept}"
        )

    def _part(
        self, part: Batch, weights: dict[int, float], tokens: int, generator: torch.Generator
    ) -> dict[int, torch.Tensor]:
        source, depth = self.source, self.source.num_layers
        original = nullcontext() if self.lora is None else self.lora.original()
        rates = skip_rates(depth, self.config.layer_dropout)
        with torch.autocast(source.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            with torch.no_grad(), original:
                teacher_hidden = self.teacher.raw_hidden(part.ids, [depth])[depth]
            with ExitStack() as hooks:
                hooks.enter_context(dropped_layers(source.structure, rates, len(part.ids), generator))
                hidden = hooks.enter_context(source.structure.captured([*weights, depth]))
                hooks.enter_context(source.structure.last_position_only())
                source.model(input_ids=part.ids, use_cache=False)
            return accumulate_gradients(
                source, hidden, (self.teacher, teacher_hidden), part, weights, self.config, tokens
            )

    def _batch(self, step: int) -> Batch:
        size = self.config.batch
        indices = [divmod(index, len(self.texts)) for index in range(step * size, (step + 1) * size)]
        return padded([self.texts[self._order(epoch)[position]] for epoch, position in indices], self.source.device)

    def _share_gradients(self) -> None:
        """Sums the gradients over all processes."""
        if self.processes.count == 1:
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)


def padded(sequences: Sequence[TokenSequence], device: torch.device) -> Batch:
    """Returns one batch of `sequences`, padded on the right."""
    lengths = [len(sequence.ids) for sequence in sequences]
    ids = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence.ids)] = torch.from_numpy(sequence.ids)
    return Batch(ids.to(device), torch.tensor(lengths, device=device))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate of a step: linear warm-up, then cosine decay to `FINAL_RATE * peak`."""
    warm_up = max(1, math.ceil(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)
