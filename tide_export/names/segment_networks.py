"""Names of the segment networks' inputs and outputs: one network per segment, and the head.

B slots of S new tokens each. A slot has buffers of P hidden states, which the networks update in place, and K/V buffers
of C tokens. T is float32, float16 or bfloat16; V the vocabulary size; m rows that get logits; c is `MAX_CANDIDATES`, or
V if that is less. Every `new_` output is the memory of its input.

| input | dtype and shape | of |
| --- | --- | --- |
| `INPUT_IDS` | int64 [B, S] | the first segment |
| `PENDING_STATES` | T [B, 1, P, D] | segments after the first: hidden states pending before it |
| `TOKEN_INDICES` | int64 [S] | 0 .. S-1 |
| `KEY_INDICES` | int64 [J] | for TensorRT: 0 .. J-1, the tokens of the K/V buffers that attention reads |
| `PAST_LENGTHS` | int64 [B] | tokens in the segment's K/V cache before the run |
| `EXIT_STATES` | T [B, 1, P, D'] | all, and the head: what the head reads |
| `EMBEDDING` | T [V, E] | the first segment and a tied head: the matrix of the bundle's embedding file |
| `LAST_TOKENS` | int64 [B] | all but the last: index of each slot's last real token, 0 .. S-1 |
| `THRESHOLDS` | float32 [B] | all but the last; 2.0 where a slot may not exit |
| `PENDING_LENGTHS` | int64 [B] | all but the last: row of the next buffer where the new hidden states go |
| `NEXT_PENDING_STATES` | T [B, 1, P, D] | all but the last: hidden states pending before the next segment |
| `ROWS` | int64 [m] | the head: rows of all slots' buffers as one, slot * P + row |
| `LOGITS` | float32 [m, V] | BEST and CANDIDATES |
| `past` | T [B, kv_heads, C, head_dim] | K/V buffers of a layer |

| output | dtype and shape | of |
| --- | --- | --- |
| `NEW_EXIT_STATES` | T [B, 1, P, D'] | all: rows `EXIT_ROW`, `DUMP_ROW` or `FINAL_ROW` and after may have changed |
| `NEW_PENDING` | T [B, 1, P, D] | all but the last: `NEXT_PENDING_STATES` |
| `ROUTER_SCORE` | float32 [B] | all but the last |
| `EXIT_FLAG` | int32 [B] | all but the last: 1 where the score is above the threshold |
| `LOGITS` | float32 [m, V] | the head |
| `BEST_TOKENS`, `BEST_LOGITS` | int32 [m], float32 [m] | BEST: the largest logit; of equal ones the lowest id |
| `CANDIDATE_TOKENS`, `CANDIDATE_LOGITS` | int64 [m, c], float32 [m, c] | CANDIDATES: the largest logits, descending |
| `present` | T [B, kv_heads, C, head_dim] | `past` |

BEST and CANDIDATES spare the host the whole logits; a NaN counts as infinity.
"""

INPUT_IDS = "input_ids"
PENDING_STATES = "pending_states"
TOKEN_INDICES = "token_indices"
KEY_INDICES = "key_indices"
PAST_LENGTHS = "past_lengths"
EXIT_STATES = "exit_states"
EXIT_ROW, DUMP_ROW, FINAL_ROW = 0, 1, 2  # of exits; of what does not exit; from here on the last segment's
EMBEDDING = "embedding"
LAST_TOKENS = "last_tokens"
THRESHOLDS = "exit_thresholds"
PENDING_LENGTHS = "pending_lengths"
NEXT_PENDING_STATES = "next_pending_states"
ROWS = "rows"

NEW_EXIT_STATES = "new_exit_states"
NEW_PENDING = "new_pending_states"
ROUTER_SCORE = "router_score"
EXIT_FLAG = "exit_flag"
LOGITS = "logits"
BEST_TOKENS = "best_tokens"
BEST_LOGITS = "best_logits"
CANDIDATE_TOKENS = "candidate_tokens"
CANDIDATE_LOGITS = "candidate_logits"
MAX_CANDIDATES = 128


def past(layer: int, kind: str) -> str:
    """Returns the input of a layer's K/V buffers (`kind` is "key" or "value").

    T [B, kv_heads, C, head_dim].
    """
    return f"past_key_values.{layer}.{kind}"


def present(layer: int, kind: str) -> str:
    """Returns the output of the same buffers after the run."""
    return f"present.{layer}.{kind}"
