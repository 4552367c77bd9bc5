"""K/V that are copied from one slot into another are those that a step over the same tokens writes."""

import numpy as np
import pytest
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.sequence import KvBatch
from tide_export.thresholds.resolve import NEVER_EXIT

TEXT = list(range(3, 40))
NEVER = [NEVER_EXIT] * 2


@pytest.fixture(params=["exact", "propagating"])
def batch(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> KvBatch:
    engine = tiny_llama.graph(getattr(tiny_llama, request.param))
    batch = engine.start_batch(1.0, 3)
    assert isinstance(batch, KvBatch)
    return batch


@pytest.mark.parametrize("length", [16, 30, 32])
def test_a_sequence_goes_on_after_copied_kv(batch: KvBatch, length: int) -> None:
    source, whole, copied = (batch.join(NEVER, 4) for _ in range(3))
    batch.step({source: TEXT[:36]})
    blocks = [batch.read_kv(source, start, start + 16) for start in range(0, length, 16)]
    batch.leave(source)
    batch.write_kv(copied, blocks, length)
    assert batch.sequences[copied].lengths == [length] * len(batch.sequences[copied].lengths)
    expected = batch.step({whole: TEXT})[whole].logits.copy()
    found = batch.step({copied: TEXT[length:]})[copied].logits
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert batch.sequences[copied].computed == batch.sequences[whole].computed


def test_more_tokens_than_the_context_are_refused_and_change_nothing(batch: KvBatch) -> None:
    source, target = batch.join(NEVER, 4), batch.join(NEVER, 4)
    batch.step({source: TEXT[:16]})
    block = batch.read_kv(source, 0, 16)
    with pytest.raises(GenerationError, match="would have 272 tokens but the model's context holds 256"):
        batch.write_kv(target, [block] * 17, 260)
    assert batch.sequences[target].length == 0
