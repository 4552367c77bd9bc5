"""Names of the inputs and outputs of the drafter among the segment networks: B slots of S tokens each.

n is the number of tokens that it can propose, W the size of its hidden states, T the networks' type.

| input | dtype and shape | what |
| --- | --- | --- |
| `INPUT_IDS` | int64 [B, S] | the tokens |
| `HIDDEN_STATES` | T [B, S, W] | the model's hidden states before each token, or the drafter's own |
| `TOKEN_INDICES`, `PAST_LENGTHS`, `segment_networks.KEY_INDICES` | | equal to the segment networks' |
| `LAST_TOKENS` | int64 [B] | index of each slot's last real token, 0 .. S-1 |
| `EMBEDDING` | T [V, E] | if the first segment has it |
| `segment_networks.past` | | K/V buffers of one layer |

| output | dtype and shape | what |
| --- | --- | --- |
| `LOGITS` | float32 [B, 1, n] | of the tokens that it can propose |
| `NEW_HIDDEN_STATES` | T [B, 1, W] | what it reads for the next draft token |
| `segment_networks.present` | | K/V buffers of one layer |
"""

INPUT_IDS = "input_ids"
HIDDEN_STATES = "hidden_states"
TOKEN_INDICES = "token_indices"
PAST_LENGTHS = "past_lengths"
LAST_TOKENS = "last_tokens"
EMBEDDING = "embedding"

LOGITS = "logits"
NEW_HIDDEN_STATES = "new_hidden_states"
