"""The optimization profiles engines are built with: for how many tokens a run is meant.

`lower.tensorrt` records the most tokens of a run with the networks, `build` builds by these.
"""

from tide_export.manifest import Profile

PREFILL_TOKENS = 1024  # most tokens of one run: longer prompts are run in parts


def profiles_for(capacity: int, max_pending: int, most_tokens: int | None = None) -> tuple[Profile, ...]:
    """The optimization profiles of a segment: one new token, catching up, a prompt.

    Args:
        capacity: tokens the K/V buffers hold.
        max_pending: tokens that may wait.
        most_tokens: of one run, where that is fewer than PREFILL_TOKENS.

    Together they take any number of tokens up to the last one's most. Catching up ends at the power of two that the run
    over `max_pending` tokens and the new one is padded to (see `runtime.segmented.lane`).
    """
    most = min(PREFILL_TOKENS, capacity, most_tokens or PREFILL_TOKENS)
    catch_up = min(1 << max_pending.bit_length(), most)
    found = [Profile("decode", 1, 1, 1), Profile("catch-up", 1, max(1, catch_up // 2), catch_up)]
    return (*found, Profile("prefill", 1, max(1, most // 2), most))
