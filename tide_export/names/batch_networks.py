"""Names of the batch networks' inputs and outputs: one network per segment, and the head.

N tokens of R sequences, one sequence after another; m of them get scores. J pages of the longest sequence. R is 1 in
the networks of a model that counts positions on from one token's.

| input | dtype and shape | of |
| --- | --- | --- |
| `INPUT_IDS` | int64 [1, N] | the first segment |
| `HIDDEN_STATES` | float32 [1, N, D] | segments after the first |
| `POSITION_IDS` | int64 [1, N] | each token's position in its sequence |
| `SEQUENCE_LENGTHS` | int64 [R] | tokens of each sequence, the new ones included |
| `SEQUENCE_STARTS` | int64 [R + 1] | each sequence's first of the N; 0 first, N at the end |
| `PAGE_TABLE` | int32 [R, J] | the page of each sequence's tokens j T to (j + 1) T - 1, at j |
| `STATE_PLACES` | int64 [R, 2] | with recurrent states: each sequence's slot, and how many of its tokens are final |
| `paged.LORA_WEIGHTS`, `paged.ADAPTERS` | | with room for adapters: all of them, and each sequence's |
| `LAST_TOKENS` | int64 [m] | indices into the N |
| `SLOT_THRESHOLDS` | float32 [m, 1] | all but the last; above 1 neither the score nor the exit state will be read |
| `HEAD_STATES` | float32 [1, m, D'] | the head: rows of `EXIT_STATES` |
| `paged.pages`, `paged.states` | | the layers that the segment reads |

| output | dtype and shape | of |
| --- | --- | --- |
| `NEW_HIDDEN_STATES` | float32 [1, N, D] | all but the last segment |
| `EXIT_STATES` | float32 [m, D'] | what the head would read |
| `DRAFT_STATES` | float32 [1, N, H] | the last segment, with a draft head that reads several layers: what it reads |
| `ROUTER_SCORE` | float32 [m, 1] | all but the last segment |
| `LOGITS` | float32 [1, m, V] | the head |
| `paged.new_pages`, `paged.new_states` | | the layers that the segment writes |
"""

INPUT_IDS = "input_ids"
HIDDEN_STATES = "hidden_states"
POSITION_IDS = "position_ids"
SEQUENCE_LENGTHS = "sequence_lengths"
SEQUENCE_STARTS = "sequence_starts"
PAGE_TABLE = "page_table"
STATE_PLACES = "state_places"
LAST_TOKENS = "last_tokens"
SLOT_THRESHOLDS = "slot_thresholds"
HEAD_STATES = "exit_states"

NEW_HIDDEN_STATES = "new_hidden_states"
EXIT_STATES = "exit_states"
DRAFT_STATES = "draft_states"
ROUTER_SCORE = "router_score"
LOGITS = "logits"
