"""Names of the inputs and outputs of the drafter beside the batch networks.

N tokens of R sequences, packed.

n is the number of tokens that it can propose, W the size of its hidden states; m tokens draft.

| input | dtype and shape | what |
| --- | --- | --- |
| `INPUT_IDS` | int64 [1, N] | the tokens |
| `HIDDEN_STATES` | float32 [1, N, W] | the model's hidden states before each token, or the drafter's own |
| `POSITION_IDS`, `SEQUENCE_LENGTHS`, `SEQUENCE_STARTS`, `PAGE_TABLE` | | equal to the batch networks' |
| `LAST_TOKENS` | int64 [m] | indices into the N |
| `paged.pages` | | one layer, or those of the model that it reads |

| output | dtype and shape | what |
| --- | --- | --- |
| `LOGITS` | float32 [m, n] | of the tokens that it can propose |
| `NEW_HIDDEN_STATES` | float32 [m, W] | what it reads for the next draft token |
| `paged.new_pages` | | one layer, if it is its own |

One that drafts blocks of B tokens has several layers, gives logits [R, B - 1, n] and no hidden states; the last B
tokens of each sequence are its block, and `LAST_TOKENS` the last of these.
"""

INPUT_IDS = "input_ids"
HIDDEN_STATES = "hidden_states"
POSITION_IDS = "position_ids"
SEQUENCE_LENGTHS = "sequence_lengths"
SEQUENCE_STARTS = "sequence_starts"
PAGE_TABLE = "page_table"
LAST_TOKENS = "last_tokens"

LOGITS = "logits"
NEW_HIDDEN_STATES = "new_hidden_states"
