"""Runs rounds of answering, training and measurement, with a cache from which the next run resumes.

With several processes (`torchrun`), each generates and stores answers, and all train together on summed gradients.
"""

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_export.adaptation.snapshot import Snapshot
from tide_export.bundle.opened import Bundle
from tide_export.calibration.distributed import Processes
from tide_export.common.progress import duration, stage
from tide_export.drafting import schedule
from tide_export.drafting.answers import Answerer
from tide_export.drafting.config import DraftConfig
from tide_export.drafting.measure import Acceptance, HeldOut
from tide_export.drafting.network import DrafterNetwork
from tide_export.drafting.prompts import Prompts
from tide_export.drafting.report import DraftReport
from tide_export.drafting.schedule import Round, Spent
from tide_export.drafting.store import HIDDEN_BYTES, AnswerStore, check_space
from tide_export.drafting.target import Target
from tide_export.drafting.training import Trainer
from tide_export.drafting.vocabulary import frequent_tokens
from tide_export.errors import DraftError
from tide_export.routers.drafter_weights import Drafter, Shape
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load

logger = logging.getLogger("tide_export")

SAVE_SECONDS = 120.0  # training time between snapshots
SAMPLED_ANSWERS, SAMPLED_ROWS = 300, 20_000  # for measuring center and scale
ROUND_ANSWERS = 40  # for measuring acceptance after a round; the last round uses all held-out answers


class Run:
    """One run of a drafter's training: its answers, trainer and measurements."""

    def __init__(
        self, opened: Bundle, target: Target, prompts: Prompts, config: DraftConfig, folder: Path, processes: Processes
    ) -> None:
        device = f"cuda:{processes.rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
        target = target.to(torch.device(device))
        self._opened, self._target, self._prompts, self._config = opened, target, prompts, config
        self._folder, self._processes = folder, processes
        width = target.head.shape[1]
        self._store = AnswerStore(folder, width, processes.rank, processes.count)
        self._held_out = HeldOut(target, self._store, config.temperature, config.seed, processes)
        self._snapshot = Snapshot(folder, {}, DraftError)
        self._engine: Engine | None = None
        self._trainer: Trainer | None = None
        self._measuring = 0.0
        self._measured: list[tuple[int, float]] = []
        self._acceptance: Acceptance | None = None
        self._verify_costs: tuple[float, ...] | None = None
        self._round: Round | None = None
        self._answering = True  # whether the round has not begun to train
        self._finished: float | None = None  # minutes of the finished training

    def close(self) -> None:
        self._store.close()

    def train(self) -> None:
        """Runs the remaining rounds."""
        self._resume()
        total = 60 * self._config.minutes
        if self._finished is not None and self._config.minutes <= self._finished:
            return
        self._finished = None
        self._verify_costs = self._measured_costs()  # a snapshot's may be another machine's
        spent = self._seconds()
        with self._processes.stage("training a drafter", max(total - spent, 1.0)) as advance:
            progress = _Progress(advance, spent)
            while self._finished is None:
                self._do_round(total, progress)

    def prompts(self, count: int) -> list[list[int]]:
        """Returns the token ids of the first held-out prompts, at most `count`."""
        return [answer.ids[: answer.prompt].tolist() for answer in self._held_out.answers[:count]]

    def drafter(self, provenance: dict[str, Any]) -> Drafter:
        """Returns the drafter, after `train`."""
        trainer, acceptance = self._result()
        network = trainer.network
        return Drafter(
            network.shape,
            trainer.token_ids.cpu().numpy(),
            network.head.cpu().numpy(),
            None if network.bias is None else network.bias.cpu().numpy(),
            network.to_arrays(),
            acceptance.by_confidence,
            self._target.weights_sha256,
            provenance,
        )

    def report(self, bundle: str, settings: dict[str, Any]) -> DraftReport:
        """Returns the report, after `train`."""
        trainer, acceptance = self._result()
        answers = self._store.answers
        return DraftReport(
            bundle=bundle,
            settings=settings,
            minutes=self._seconds() / 60,
            answers=len(answers),
            tokens=sum(answer.new_tokens for answer in answers if not answer.held_out),
            trained_tokens=trainer.tokens,
            held_out=len(self._held_out.answers),
            acceptance=acceptance,
            speed=(max(1.0, self._speed(acceptance.sampled)), max(1.0, self._speed(acceptance.greedy))),
        )

    def _result(self) -> tuple[Trainer, Acceptance]:
        assert self._trainer is not None
        assert self._acceptance is not None
        return self._trainer, self._acceptance

    def _do_round(self, total: float, progress: "_Progress") -> None:
        if self._round is None:
            self._round = self._next_round(total)
            self._answering = True
            self._save()
        plan = self._round
        if self._answering:
            self._answer(plan.answer_until, total, progress)
            self._answering = False
            if self._trainer is None:
                self._trainer = self._new_trainer()
            else:
                self._trainer.new_text()
            self._save()
        trainer = self._trainer
        assert trainer is not None
        saved = trainer.seconds
        while True:
            trainer.seconds = float(self._processes.from_main(lambda: repr(trainer.seconds)))
            if trainer.seconds >= plan.train_until:
                break
            began = schedule.now()
            trainer.train_step(trainer.seconds / plan.train_total)
            trainer.seconds += schedule.now() - began
            progress.reached(self._seconds())
            if trainer.seconds - saved >= SAVE_SECONDS:
                self._save()
                saved = trainer.seconds
        began = schedule.now()
        some = None if plan.last else ROUND_ANSWERS
        self._acceptance = self._held_out.measure(trainer.network, trainer.token_ids, some)
        self._measuring += schedule.now() - began
        self._measured.append((trainer.tokens, self._speed(self._acceptance.sampled)))
        self._round = None
        if plan.last:
            self._finished = self._config.minutes
        self._save()
        self._log(total)
        progress.reached(self._seconds())

    def _next_round(self, total: float) -> Round:
        """Plans the next round on the main process."""

        def planned() -> str:
            spent, enough = self._spent(), False
            if self._trainer is not None:
                first = schedule.next_round(spent, total, False)
                share = spent.training / max(first.train_total, spent.training, 1e-9)
                gain = schedule.gain_left(self._measured, share)
                enough = gain < schedule.MIN_GAIN
                if enough and not first.last:
                    logger.info("the remaining time would gain %.1f %% of speed: the last round", 100 * max(gain, 0.0))
            return json.dumps(asdict(schedule.next_round(spent, total, enough)))

        return Round(**json.loads(self._processes.from_main(planned)))

    def _answer(self, until: float, total: float, progress: "_Progress") -> None:
        store = self._store
        if store.seconds < until or not store.answered:
            answerer = Answerer(self._loaded_engine(), self._prompts, store, self._config)
            checked = False
            while store.seconds < until or not store.answered:
                answerer.answer_batch(until - store.seconds)
                progress.reached(self._seconds())
                if not checked:
                    self._check_room(total)
                    checked = True
        self._processes.barrier()
        store.reload()
        if not any(not answer.held_out for answer in store.answers):
            raise DraftError("there is no answer to train on: give more --minutes")

    def _loaded_engine(self) -> Engine:
        if self._engine is None:
            threads = None
            if self._processes.count > 1:
                threads = max(1, (os.cpu_count() or 1) // self._processes.count)
            with stage("loading the bundle"):
                provider = "auto" if threads is None else "cpu"  # the GPU is for one process
                self._engine = load(self._opened.path, provider, threads)
        return self._engine

    def _measured_costs(self) -> tuple[float, ...]:
        """Returns what verifying costs on this machine; training and many answers at once would change it."""
        drafting = self._loaded_engine().resolved(GenerationConfig(mode="lossless"))["drafting"]
        return tuple(drafting["verify_costs"])

    def _check_room(self, total: float) -> None:
        """Checks that the disk has room for all hidden states, extrapolated from the first answers.

        Raises:
            DraftError: it has not.
        """
        store = self._store
        stored = sum(answer.rows for answer in store.answers if answer.process == store.rank)
        left = max(0.0, schedule.answer_share(self._spent()) * total - store.seconds)
        needed = stored / store.seconds * left * store.width * HIDDEN_BYTES * store.count if store.seconds else 0.0
        check_space(self._folder, int(needed), f"the answers of {duration(total)}")

    def _new_trainer(self, tokens: np.ndarray | None = None) -> Trainer:
        """Returns a trainer for `tokens`, by default the most frequent ones in the answers to train on so far."""
        target, store, seed = self._target, self._store, self._config.seed
        if tokens is None:
            trained_on = [answer for answer in store.answers if not answer.held_out]
            tokens = frequent_tokens(trained_on, self._config.vocabulary, target.vocabulary)
        token_ids = torch.from_numpy(tokens).to(target.head.device)
        generator = np.random.default_rng(seed)
        sample = generator.permutation(len(store.answers))[:SAMPLED_ANSWERS]
        hidden = torch.cat([store.hidden(store.answers[index]) for index in sample])
        hidden = hidden[torch.from_numpy(generator.permutation(len(hidden))[:SAMPLED_ROWS])].float()
        shape = Shape.of(target.head.shape[1], target.embeddings.shape[1])
        bias = None if target.bias is None else target.bias[token_ids]
        network = DrafterNetwork.untrained(shape, hidden, target.head[token_ids], bias, seed)
        network = network.to(target.head.device)
        return Trainer(network, token_ids, target.embeddings, store, seed, self._processes)

    def _seconds(self) -> float:
        trained = 0.0 if self._trainer is None else self._trainer.seconds
        return self._store.seconds + trained + self._measuring

    def _spent(self) -> Spent:
        trainer = self._trainer
        return Spent(
            self._store.seconds,
            0.0 if trainer is None else trainer.seconds,
            self._measuring,
            sum(answer.new_tokens for answer in self._store.answers),
            0 if trainer is None else trainer.rows,
        )

    def _speed(self, acceptance: tuple[float, ...]) -> float:
        costs = self._verify_costs or self._measured_costs()
        return schedule.expected_speed(acceptance, costs)

    def _log(self, total: float) -> None:
        if not self._processes.main or self._acceptance is None or self._trainer is None:
            return
        left = total - self._seconds()
        shown = " / ".join(f"{100 * share:.0f}" for share in self._acceptance.sampled)
        logger.info(
            "%s, %d tokens of answers, %d learned from: drafts accepted %s %%, greedy %.0f %%, expected %.2fx of full "
            "depth, greedy %.2fx",
            "done" if self._finished is not None or left <= 0 else f"{duration(left)} left",
            sum(answer.new_tokens for answer in self._store.answers),
            self._trainer.tokens,
            shown,
            100 * self._acceptance.greedy[0],
            max(1.0, self._speed(self._acceptance.sampled)),
            max(1.0, self._speed(self._acceptance.greedy)),
        )

    def _save(self) -> None:
        if not self._processes.main:
            return
        trainer = self._trainer
        self._snapshot.save(
            {
                "trainer": None if trainer is None else trainer.state_dict(),
                "tokens": None if trainer is None else trainer.token_ids.cpu(),
                "round": None if self._round is None else asdict(self._round),
                "answering": self._answering,
                "measuring": self._measuring,
                "measured": [list(one) for one in self._measured],
                "acceptance": None if self._acceptance is None else asdict(self._acceptance),
                "finished": self._finished,
                "minutes": self._config.minutes,
                "verify_costs": None if self._verify_costs is None else list(self._verify_costs),
            }
        )

    def _resume(self) -> None:
        snapshot = self._snapshot.load()
        self._processes.barrier()  # before the main process saves another
        if snapshot is None:
            return
        if snapshot["trainer"] is not None:
            self._trainer = self._new_trainer(snapshot["tokens"].numpy())
            self._trainer.resume(snapshot["trainer"])
        self._round = None if snapshot["round"] is None else Round(**snapshot["round"])
        if self._round is not None and self._round.last and self._config.minutes > snapshot.get("minutes", math.inf):
            self._round = None  # it would end as early as was then asked for
        self._answering, self._measuring = snapshot["answering"], snapshot["measuring"]
        self._measured = [(int(tokens), float(speed)) for tokens, speed in snapshot["measured"]]
        acceptance = snapshot["acceptance"]
        self._acceptance = None if acceptance is None else Acceptance(**acceptance)
        self._finished = snapshot["finished"]
        costs = snapshot.get("verify_costs")
        self._verify_costs = None if costs is None else tuple(costs)
        logger.info("resuming after %s, from %s", duration(self._seconds()), self._folder)


class _Progress:
    """Advances a stage to the seconds of the budget spent, beyond the `seconds` of earlier runs."""

    def __init__(self, advance: Callable[[float], Any], seconds: float) -> None:
        self._advance, self._seconds = advance, seconds

    def reached(self, seconds: float) -> None:
        self._advance(seconds - self._seconds)
        self._seconds = seconds
