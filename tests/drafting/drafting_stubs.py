"""A model whose state depends on the last two tokens alone, as an engine that answers prompts; a clock that counts."""

from types import SimpleNamespace

import numpy as np
import torch

from tide_export.bundle.manifest import DEFAULT_VERIFY_COSTS
from tide_export.drafting.target import Target

VOCABULARY, WIDTH, EMBEDDING = 300, 64, 48
END = 2


def small_target(seed: int = 0, bias: bool = False) -> Target:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(VOCABULARY, EMBEDDING, generator=generator)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.25
    return Target(embeddings, head, torch.randn(VOCABULARY, generator=generator) if bias else None, "ab" * 32)


class StubEngine:
    """Answers prompts by sampling; counts the calls, and interrupts one of them."""

    def __init__(self, target: Target, longest: int | None = None, interrupt_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        width = target.head.shape[1]
        size = (2, target.embeddings.shape[1], width)
        self.mixers = torch.randn(size, generator=generator) * 0.4 / target.embeddings[:100].std()
        self.target, self.longest, self.interrupt_at = target, longest, interrupt_at
        self.prompts: list[tuple[int, ...]] = []
        self.calls = 0

    def states_of(self, last: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        table = self.target.embeddings
        return torch.tanh(table[last] @ self.mixers[0] * 0.3 + table[before] @ self.mixers[1] * 0.2) * 3 + 0.5

    def resolved(self, config):
        assert config.mode == "lossless"
        return {"drafting": {"verify_costs": DEFAULT_VERIFY_COSTS}}

    def generate(self, ids, config):
        assert config.mode == "full"
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        return [self._one(prompt, seed, config) for prompt, seed in zip(ids, config.seed, strict=True)]

    def _one(self, prompt, seed, config):
        self.prompts.append(tuple(prompt))
        generator = torch.Generator().manual_seed(seed)
        tokens, states = [END, *prompt], []
        before, last = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
        states.append(self.states_of(last, before))
        for _ in range(min(config.max_new_tokens, self.longest or 10**6)):
            logits = self.target.head @ states[-1][-1]
            logits = logits if self.target.bias is None else logits + self.target.bias
            tokens.append(int(torch.multinomial((logits / config.temperature).softmax(-1), 1, generator=generator)))
            if tokens[-1] == END:
                break
            states.append(self.states_of(torch.tensor(tokens[-1:]), torch.tensor(tokens[-2:-1])))
        states = torch.cat(states)[: len(tokens) - 2].numpy().astype(np.float32)
        return SimpleNamespace(tokens=tokens[1 + len(prompt) :], states=states)


class Clock:
    """Every look at it takes an eighth of a second, so that sums are exact."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 0.125
        return self.time
