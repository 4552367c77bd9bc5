"""The optimization profiles that engines are built with."""

import pytest

from tide_export.bundle.plan_fields import NetworksInfo
from tide_export.bundle.profiles import profiles_for, run_sizes, state_rows
from tide_export.errors import GenerationError
from tide_export.runtime.tensorrt.flavours import TENSORRT, TENSORRT_RTX, Flavour
from tide_export.runtime.tensorrt.plans import pick_profile


def info_of(capacity: int, max_pending: int, rows: int = 1, bound: int | None = None) -> NetworksInfo:
    sizes = run_sizes(capacity, max_pending, rows, bound)
    return NetworksInfo("fp32", capacity, state_rows(capacity), sizes[0], sizes[1], 16, sizes[2], sizes[3])


@pytest.mark.parametrize("rows", [1, 2, 8, 100])
@pytest.mark.parametrize(
    ("capacity", "max_pending"), [(1024, 16), (1000, 15), (4096, 0), (8, 16), (1, 1), (131072, 40)]
)
def test_profiles_take_every_number_of_tokens_a_run_can_have(capacity: int, max_pending: int, rows: int) -> None:
    info = info_of(capacity, max_pending, rows)
    profiles = profiles_for(info)
    assert all(1 <= p.min_tokens <= p.opt_tokens <= p.max_tokens <= capacity for p in profiles)
    prefill = profiles[2]
    assert prefill.max_tokens == min(1024, capacity)
    assert pick_profile(profiles, 1) == 0
    for tokens in {2, max_pending + 1, prefill.max_tokens} & set(range(2, prefill.max_tokens + 1)):
        assert profiles[pick_profile(profiles, tokens)].max_tokens >= tokens
    if 1 < max_pending + 1 <= min(1024, capacity):
        assert profiles[pick_profile(profiles, max_pending + 1)].name == "catch-up"
    assert info.max_batch_size == min(rows, info.max_tokens)
    assert info.max_logits >= info.max_batch_size, "the head runs once over a batch"
    for several in range(2, info.max_batch_size + 1):
        assert profiles[pick_profile(profiles, 1, several)].name == "batch-decode"
        if info.max_slot_tokens > 1:
            assert profiles[pick_profile(profiles, info.max_slot_tokens, several)].name == "batch-catch-up"
    with pytest.raises(GenerationError, match=f"{info.max_batch_size + 1} sequences exceeds the plan's profiles"):
        pick_profile(profiles, 1, info.max_batch_size + 1)
    if info.max_batch_size > 1:
        with pytest.raises(GenerationError, match="of each of 2 sequences exceeds the plan's profiles, which take"):
            pick_profile(profiles, info.max_slot_tokens + 1, 2)


@pytest.mark.parametrize(("flavour", "most"), [(TENSORRT, 1), (TENSORRT_RTX, 2)])
def test_a_decoding_profile_takes_one_token_but_for_tensorrt_for_rtx(flavour: Flavour, most: int) -> None:
    """A verified draft of one token then runs by the next profile."""
    info = info_of(1024, 16, 8)
    decode, *others = profiles = profiles_for(info, flavour.decode_tokens)
    assert (decode.name, decode.min_tokens, decode.opt_tokens, decode.max_tokens) == ("decode", 1, 1, most)
    assert others == list(profiles_for(info)[1:])
    assert [profiles[pick_profile(profiles, tokens)].name for tokens in (1, 2)] == [
        "decode",
        ["catch-up", "decode"][most - 1],
    ]


def test_profiles_end_where_a_run_may_take_no_more_tokens() -> None:
    """Of a model whose experts are gathered; any number of tokens up to there is still taken."""
    for most in (1, 5):
        info = info_of(1024, 16, 8, most)
        profiles = profiles_for(info)
        assert [p.max_tokens * p.batch_size for p in profiles] == ([1, 1, 1] if most == 1 else [2, 5, 5, 5, 5])
        assert all(1 <= p.min_tokens <= p.opt_tokens <= p.max_tokens for p in profiles)
