"""Names of the step graph's inputs, outputs and metadata.

It runs one sequence, with an `If` per segment.

| symbol | means |
| --- | --- |
| S | new tokens of the step |
| n, n_k | tokens pending; before segment k, S included where k is 0 |
| m | tokens that get logits |
| K | segments; K-1 checkpoints |
| J, T | pages of the sequence, tokens of a page |
| D, D' | size of hidden states, of the states that the head reads |
| V | vocabulary size |

| input | dtype and shape | what |
| --- | --- | --- |
| `INPUT_IDS` | int64 [1, S] | the new tokens |
| `SEQUENCE_LENGTHS` | int64 [1] | tokens of the sequence, the new ones included |
| `PAGE_TABLE` | int32 [1, J] | the page of tokens j T to (j + 1) T - 1, at j |
| `LOGITS_POSITIONS` | int64 [m, 2] | tokens that get logits if the last segment runs: [0, position from the end] |
| `THRESHOLDS` | float32 [K-1] | a score above exits; 2.0 turns a checkpoint off |
| `skip_threshold(k)` | float32 [1] | see there |
| `pending(k)` | float32 [1, n_k, D] | hidden states pending before segment k >= 1; n_k may be 0 |
| `STATE_PLACES` | int64 [1, 2] | with recurrent states: the sequence's slot, and how many tokens are final |
| `paged.pages`, `paged.states` | | K/V pages and recurrent states of the layers |

| output | dtype and shape | what |
| --- | --- | --- |
| `LOGITS` | float32 [m, V] | at `LOGITS_POSITIONS`, or of the last token if it exited |
| `SCORES` | float32 [1, K-1] | NaN where a router was not reached or is off |
| `NEW_PENDING` | float32 [1, n, D] | pending before the first segment that did not run; n is 0 if all ran |
| `FINAL_STATES` | float32 [1, n, D'] | what the head reads of the tokens that the last segment ran over |
| `paged.new_pages`, `paged.new_states` | | the memory of the inputs |
"""

INPUT_IDS = "input_ids"
SEQUENCE_LENGTHS = "sequence_lengths"
PAGE_TABLE = "page_table"
LOGITS_POSITIONS = "logits_positions"
THRESHOLDS = "exit_thresholds"
STATE_PLACES = "state_places"

LOGITS = "logits"
SCORES = "router_scores"
NEW_PENDING = "new_pending_states"
FINAL_STATES = "final_states"

DRAFT_HEAD_FUSION = "draft_head.fc.weight"  # the weight that makes a draft head's state of several hidden states

# Metadata, which no tensor shows: decimal numbers, several joined by commas, "" for none.
CHECKPOINTS_METADATA = "tide.checkpoints"  # layers run at each
CONTEXT_METADATA = "tide.context_length"  # the most tokens of a sequence
HIDDEN_SIZE_METADATA = "tide.hidden_size"


def skip_threshold(k: int) -> str:
    """Returns the input that decides whether segment k >= 1 is skipped, float32 [1].

    It is skipped where the score before it is above this: the exit threshold, or 2.0 if the segment must run because
    more tokens than max pending would be pending.
    """
    return f"skip_threshold.{k}"


def pending(k: int) -> str:
    """Returns the input of hidden states pending before segment k >= 1, float32 [1, n_k, D]."""
    return f"pending_states.{k}"
