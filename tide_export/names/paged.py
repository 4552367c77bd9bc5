"""Names of K/V pages, recurrent states and adapters.

The step graph, the batch networks and the drafter all bind them.

Every output is the memory of its input: a runtime binds both to one buffer, and nothing is copied.
"""

LORA_WEIGHTS = "lora_weights"  # input: float32 [adapters, T], a row of each adapter; the first is zeros
ADAPTERS = "adapters"  # input: int64 [R], each sequence's row


def pages(layer: int, kind: str) -> str:
    """Returns the input of a layer's pages of T tokens (`kind` is "key" or "value").

    float32 [pages, kv_heads, T, head_dim]; int8 where the cache is.
    """
    return f"pages.{layer}.{kind}"


def new_pages(layer: int, kind: str) -> str:
    """Returns the output of a layer's pages after the run."""
    return f"new_pages.{layer}.{kind}"


def states(layer: int, number: int) -> str:
    """Returns the input of a layer's recurrent state for all sequences, float32 [slots, ..]."""
    return f"states.{layer}.{number}"


def new_states(layer: int, number: int) -> str:
    """Returns the output of a layer's recurrent state after the run."""
    return f"new_states.{layer}.{number}"
