"""Trains a small looped model with an exit gate on Python's own standard library, in two stages as Ouro's paper does.

    python demo/train_looped.py out/looped --minutes 120 --threads 2

Stage 1 trains all weights but the gate's: the loss is that of the last loop, and each earlier loop is held to the last
by the divergence of their distributions. (The paper, arXiv 2510.25741, weighs all loops' losses by the gate's exit
distribution and adds an entropy term: at this size that made the last loop the worst.) Stage 2 trains the gate alone:
after a loop it shall say "exit" with a probability that falls with the loop's divergence from the last.

`--loops 1` trains a plain Llama on the same text to compare with: as many layers, and as many minutes.

The state is saved every few minutes and when a signal stops the run; the same command continues it. Of the files, those
in calibration/text and 4 % of the others, chosen by their names, are held out.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from looped_code.configuration_looped import LoopedConfig
from looped_code.modeling_looped import LoopedForCausalLM
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.calibration.lens_loss import fast_dtype
from tide_export.drafting.muon import Muon

HERE = Path(__file__).parent
TOKENIZER = HERE / "demo-llama"
STAGE_1 = 0.96  # of the time
WARM_UP, DECAY = 0.02, 0.25  # of the time: the learning rate rises, stays, and falls to 0 at the end of stage 1
RATE, GATE_RATE, WEIGHT_DECAY, CLIP = 2e-3, 1e-2, 0.1, 1.0
HOLD = 2.0  # nats of loss that a nat of the earlier loops' divergence from the last is worth
SCALE = 0.03  # nats of divergence at which the gate shall say "exit" with a probability of 1/e
LENGTH = 512  # tokens of a sequence
HELD_OUT_SEQUENCES = 64
SAVE_SECONDS, LOG_SECONDS = 240, 30


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    trained, held_out = read_tokens(options.sources)
    print(f"{len(trained):,} tokens to train on, {len(held_out):,} held out", flush=True)
    training = Training(options)
    print(f"{sum(one.numel() for one in training.model.parameters()):,} parameters", flush=True)
    if training.train(trained):
        save_model(training.model, options.out)
        print_held_out(training.model, held_out)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write; the state is beside it, in OUT.training.pt")
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--minutes", type=float, default=120, help="of CPU time by thread, all runs together (120)")
    how_long.add_argument("--steps", type=int, help="instead of minutes: repeatable to the bit")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--loops", type=int, default=4, help="1: a plain model without a gate")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64, the size of a head")
    parser.add_argument("--batch", type=int, default=4, help=f"sequences of {LENGTH} tokens in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sources", type=Path, default=sysconfig.get_path("stdlib"), help="folder of Python files")
    return parser.parse_args()


def read_tokens(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of the Python files in `folder` to train on and those held out, int32 [N] each."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = HERE.parent.glob("calibration/text/*.jsonl")
    held_out = {json.loads(line)["source"] for text in texts for line in text.read_text().splitlines()}
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        if name.startswith("site-packages/"):
            continue
        held = name in held_out or zlib.crc32(name.encode()) % 25 == 0
        ids = [end, *tokenizer.encode(file.read_text("utf-8", "replace")).ids]
        parts[held].append(torch.tensor(ids, dtype=torch.int32))
    if min(sum(len(part) for part in kind) for kind in parts) <= LENGTH:
        sys.exit(f"{folder} has too few Python files to train on some and hold out others: choose a larger one")
    return torch.cat(parts[False]), torch.cat(parts[True])


class Training:
    """The model and its optimizers, as far as they have come."""

    def __init__(self, options: argparse.Namespace):
        heads = options.hidden // 64
        sizes = {
            "vocab_size": Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab_size(),
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "max_position_embeddings": 2 * LENGTH,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if options.loops > 1:
            config = LoopedConfig(total_ut_steps=options.loops, early_exit_threshold=0.5, gate_width=1, **sizes)
            self.model = LoopedForCausalLM._from_config(config, attn_implementation="sdpa")
        else:
            self.model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="sdpa")
        self.options = options
        self.file = Path(f"{options.out}.training.pt")
        matrices = [one for one in self.model.model.layers.parameters() if one.dim() == 2]
        others = [one for one in self.model.parameters() if not any(one is matrix for matrix in matrices)]
        dtype = fast_dtype(matrices[0].device) or torch.float32
        muon = Muon(matrices, dtype, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
        self.optimizers = [muon, torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
        if options.loops > 1:
            self.optimizers.append(torch.optim.AdamW(self.model.model.early_exit_gate.parameters(), weight_decay=0.0))
        self.step, self.seconds, self.stopped = 0, 0.0, False
        self.sizes = [options.layers, options.loops, options.hidden, options.batch, options.seed]
        if self.file.exists():
            self.load()

    def load(self) -> None:
        state = torch.load(self.file, weights_only=True)
        if state["sizes"] != self.sizes:
            sys.exit(f"{self.file} is of a run with other options: continue with those, or remove it")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
        print(f"continues after step {self.step}, {self.seconds / 60:.1f} minutes", flush=True)

    def save(self) -> None:
        """Replaces the file of the state at once, so that one is whole whatever happens."""
        state = {"step": self.step, "seconds": self.seconds, "sizes": self.sizes, "model": self.model.state_dict()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, f"{self.file}.new")
        Path(f"{self.file}.new").replace(self.file)

    @property
    def progress(self) -> float:
        """How much of the training is done, in 0..1."""
        steps, minutes = self.options.steps, self.options.minutes
        return self.seconds / (60 * minutes) if steps is None else self.step / steps

    def train(self, tokens: torch.Tensor) -> bool:
        """Trains until the time is over or a signal comes; returns whether it is over."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.stop)
        saved = logged = time.monotonic()
        began = time.process_time()
        while self.progress < 1 and not self.stopped:
            stage_2 = self.options.loops > 1 and self.progress >= STAGE_1
            losses, loops = (self.step_gate if stage_2 else self.step_all)(self.batch(tokens))
            began, before = time.process_time(), began
            self.step, self.seconds = self.step + 1, self.seconds + (began - before) / self.options.threads
            if time.monotonic() - logged > LOG_SECONDS or self.progress >= 1:
                logged = time.monotonic()
                left = self.seconds * (1 / self.progress - 1) / 60
                tokens_seen = self.step * self.options.batch * LENGTH / 1e6
                each = " ".join(f"{loss:.3f}" for loss in losses)
                print(
                    f"stage {1 + stage_2}, step {self.step}, {tokens_seen:.2f} M tokens: loss by loop {each}, "
                    f"{loops:.2f} loops by gate; {left:.1f} minutes left",
                    flush=True,
                )
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                self.save()
        self.save()
        return not self.stopped

    def stop(self, *_: object) -> None:
        self.stopped = True

    def batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns random sequences for the next step, [B, LENGTH + 1]; the same for a step, whenever it runs."""
        random = np.random.default_rng([self.options.seed, self.step])
        starts = torch.from_numpy(random.integers(0, len(tokens) - LENGTH, self.options.batch))
        return tokens[starts[:, None] + torch.arange(LENGTH + 1)].long()

    def step_all(self, batch: torch.Tensor) -> tuple[list[float], float]:
        """Makes a step of stage 1; returns the losses by loop and the mean of the exit distribution, in loops."""
        losses, gates, _, distances = by_loop(self.model, batch)
        (losses[-1].mean() + HOLD * distances.sum() / max(1, distances.numel())).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        end = STAGE_1 if self.options.loops > 1 else 1
        self.update(self.optimizers[:2], RATE * min(1, self.progress / WARM_UP, (end - self.progress) / DECAY))
        return losses.mean((1, 2)).tolist(), mean_loops(exit_distribution(gates.detach()))

    def step_gate(self, batch: torch.Tensor) -> tuple[list[float], float]:
        """Makes a step of stage 2; returns what `step_all` does."""
        with torch.no_grad():
            losses, _, states, distances = by_loop(self.model, batch)
        exits = torch.exp(-distances / SCALE)
        gates = self.model.model.early_exit_gate(states[:-1].float())[..., 0]
        F.binary_cross_entropy_with_logits(gates, exits).backward()
        self.update(self.optimizers[2:], GATE_RATE * (1 - self.progress) / (1 - STAGE_1))
        return losses.mean((1, 2)).tolist(), mean_loops(exit_distribution(gates.detach()))

    def update(self, optimizers: list[torch.optim.Optimizer], rate: float) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.model.zero_grad()


def by_loop(model: LoopedForCausalLM | LlamaForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns, for every loop, each token's loss [T, B, S], gate logits [T - 1, B, S] and states [T, B, S, D].

    And each earlier loop's divergence from the last, KL(last || loop), [T - 1, B, S], whose gradient leaves the last as
    it is. In bfloat16 where the CPU multiplies such matrices.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        if isinstance(model, LoopedForCausalLM):
            _, loops, gates = model.model(batch[:, :-1])
        else:
            loops, gates = [model.model(batch[:, :-1]).last_hidden_state], []
        logits = [model.lm_head(states).float() for states in loops]
    found = [F.log_softmax(each, -1) for each in logits]
    losses = [-each.gather(-1, batch[:, 1:, None])[..., 0] for each in found]
    last = found[-1].detach()
    distances = [(last.exp() * (last - each)).sum(-1) for each in found[:-1]] or [losses[0][:0]]
    gates = torch.stack([gate[..., 0].float() for gate in gates[:-1]]) if gates else losses[0][None][:0]
    return torch.stack(losses), gates, torch.stack(loops), torch.stack(distances)


def exit_distribution(gates: torch.Tensor) -> torch.Tensor:
    """Returns the probability of an exit after each loop [T, ...] from the logits of all gates but the last's."""
    left, shares = torch.ones(gates.shape[1:]), []
    for gate in torch.sigmoid(gates):
        shares.append(left * gate)
        left = left * (1 - gate)
    return torch.stack([*shares, left])


def mean_loops(shares: torch.Tensor) -> float:
    return float((shares.flatten(1).mean(1) * torch.arange(1, len(shares) + 1)).sum())


def save_model(model: LoopedForCausalLM | LlamaForCausalLM, folder: Path) -> None:
    """Writes the model, rounded to bfloat16, its code and its tokenizer into `folder`."""
    if isinstance(model, LoopedForCausalLM):
        LoopedConfig.register_for_auto_class()
        LoopedForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    model.bfloat16().save_pretrained(folder)
    model.float()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)


@torch.no_grad()
def print_held_out(model: LoopedForCausalLM, tokens: torch.Tensor) -> None:
    """Prints each loop's loss, how often its likeliest token is the last loop's, and what the gate would change."""
    count = min(HELD_OUT_SEQUENCES, (len(tokens) - 1) // LENGTH)
    starts = torch.linspace(0, len(tokens) - LENGTH - 1, count).long()
    losses, equal, shares = [], [], []
    for start in starts:
        batch = tokens[start : start + LENGTH + 1][None].long()
        each, gates, states, _ = by_loop(model, batch)
        best = torch.stack([model.lm_head(one.float()).argmax(-1) for one in states])
        losses.append(each.flatten(1))
        equal.append((best == best[-1]).flatten(1))
        shares.append(exit_distribution(gates).flatten(1))
    equal, shares = torch.cat(equal, 1), torch.cat(shares, 1)
    print(f"held out: {equal.shape[1]} tokens")
    for loop, loss in enumerate(torch.cat(losses, 1).mean(1), 1):
        same = equal[loop - 1].float().mean()
        print(f"loop {loop}: loss {loss:.3f}, likeliest token is the last loop's at {100 * same:.1f} %")
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95) if len(shares) > 1 else ():
        chosen = ((shares.cumsum(0) > threshold)[:-1].logical_not()).long().cumprod(0).sum(0)
        changed = 1 - equal.gather(0, chosen[None]).float().mean()
        mean = 1 + chosen.float().mean()
        print(f"gate at {threshold}: {mean:.2f} loops per token, {100 * changed:.1f} % changed tokens")


if __name__ == "__main__":
    main()
