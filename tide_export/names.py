"""The fixed names every stage shares: operator domain, graph inputs and outputs, files of a bundle.

`compose` writes graphs with these names, the runtimes (Python, C++) bind them, `inspect` prints them. Shapes use B for
the batch, S for the new tokens of a step, n_k for the tokens pending before segment k, D for the hidden size.
"""

# Operators. TensorRT dispatches on the bare op type whatever its domain, so no name may equal an ONNX op's.
DOMAIN = "tide"
OP_CHECKPOINT = "TideCheckpoint"  # identity marker in the trace, attribute `layer` = layers run so far
OP_ATTENTION = "TideAttention"  # symbolic causal attention in the trace, attribute `layer`
OP_MASKED_ATTENTION = "TideMaskedAttention"  # symbolic attention under the model's mask, replaced after the trace
# Of layers with a recurrent state, in the trace, as model-local functions and in cpp/ops; attributes `layer`, `number`.
OP_CAUSAL_CONV, OP_RECURRENCE = STATE_OPERATORS = ("TideCausalConv", "TideRecurrence")
OP_EXPERT_MATMUL = "TideExpertMatMul"  # symbolic: rows [R, K] times the weights of each row's expert
OP_QUANTIZED_MATMUL = "TideQuantizedMatMul"  # symbolic: states times a quantized matrix, attribute `weights`
OP_QUANTIZED_GATHER = "TideQuantizedGather"  # symbolic: rows of a quantized matrix, attribute `weights`
# x [.., K] times [N, K], by the type of these weights; model-local functions and operators of cpp/ops.
OP_HALF_MATMUL = {"bf16": "TideBf16MatMul", "fp16": "TideFp16MatMul"}
# As MatMulNBits at accuracy level 4, by bits; functions and operators alike.
OP_INTEGER_MATMUL = {4: "TideInt4MatMul", 8: "TideInt8MatMul"}
# The same by an MLP's gate and up projections, one matrix after the other: SiLU(gate) * up; functions and operators.
OP_GATED_MATMUL = {
    name: name.replace("Tide", "TideGated") for name in (*OP_HALF_MATMUL.values(), *OP_INTEGER_MATMUL.values())
}
# Attention to K/V pages, by their type; functions and operators of cpp/ops alike.
OP_PAGED_ATTENTION = {"float32": "TidePagedAttention", "int8": "TideInt8PagedAttention"}
# Layers: nodes of the above and norms, as one; with matrices of integers or without. Functions and operators alike.
OP_INTEGER_LAYERS, OP_LAYERS = "TideIntegerLayers", "TideLayers"
# Last token's (lens +) norm + router; model-local functions and operators of cpp/ops.
OP_CANDIDATE, OP_LENS_CANDIDATE = "TideCandidate", "TideLensCandidate"
# Of cpp/ops.
OPERATORS = (
    *(*OP_HALF_MATMUL.values(), *OP_INTEGER_MATMUL.values(), *OP_GATED_MATMUL.values()),
    *(*OP_PAGED_ATTENTION.values(), *STATE_OPERATORS, OP_INTEGER_LAYERS, OP_LAYERS, OP_CANDIDATE, OP_LENS_CANDIDATE),
)
OP_EXIT = "TideExit"  # lens + norm + router + exit scatter; model-local function and TensorRT plugin
WEIGHTS_METADATA = "tide.weights"  # of a node: the parameters that hold its quantized rows, one a line
PLUGIN_NAMESPACE = "tide"
PLUGIN_VERSION = "1"

# Graph inputs.
INPUT_IDS = "input_ids"  # int64 [1, S]
SEQUENCE_LENGTHS = "sequence_lengths"  # int64 [R], tokens of each sequence with its new ones; of the step graph R is 1
PAGE_TABLE = "page_table"  # int32 [R, J], the page of each sequence's tokens j T to (j + 1) T - 1, at j
# int64 [m, 2], tokens that get logits if the last segment runs, as [0, position from the end]: [[0, -1]] is the last.
LOGITS_POSITIONS = "logits_positions"
THRESHOLDS = "exit_thresholds"  # float32 [K-1], a score above exits; 2.0 turns a checkpoint off

# int64 [R, 2], of models with recurrent states: each sequence's place in the states of all, and how many of its tokens
# nobody will take back.
STATE_PLACES = "state_places"

# Graph outputs.
LOGITS = "logits"  # float32 [m, V], at LOGITS_POSITIONS, or of the last token if it exited
SCORES = "router_scores"  # float32 [1, K-1], NaN where the router was not reached or is off
# float32 [1, n, D], states pending before the first segment that did not run; empty if every segment ran.
NEW_PENDING = "new_pending_states"
FINAL_STATES = "final_states"  # float32 [1, n, D'], what the head reads of the tokens that the last segment ran over

# Metadata of the step graph, which no tensor shows: decimal numbers, several joined by commas, "" for none.
CHECKPOINTS_METADATA = "tide.checkpoints"  # layers run at each
CONTEXT_METADATA = "tide.context_length"  # the most tokens of a sequence
HIDDEN_SIZE_METADATA = "tide.hidden_size"


def skip_threshold(k: int) -> str:
    """Input: segment k >= 1 is skipped where the score before it is above this, float32 [1]: the exit threshold, or 2.0
    if the segment must run because more tokens than max pending would be pending."""
    return f"skip_threshold.{k}"


def pending(k: int) -> str:
    """Input: hidden states pending before segment k >= 1, float32 [1, n_k, D]; n_k may be 0."""
    return f"pending_states.{k}"


def pages(layer: int, kind: str) -> str:
    """Input: pages of T tokens of a layer (`kind` is "key" or "value"), float32 [pages, kv_heads, T, head_dim]."""
    return f"pages.{layer}.{kind}"


def new_pages(layer: int, kind: str) -> str:
    """Output: the same pages after the step; bind it to the input's memory and nothing is copied."""
    return f"new_pages.{layer}.{kind}"


def states(layer: int, number: int) -> str:
    """Input: a recurrent state of a layer, of all sequences, float32 [places, ..]."""
    return f"states.{layer}.{number}"


def new_states(layer: int, number: int) -> str:
    """Output: the same after the step; it must be the input's memory."""
    return f"new_states.{layer}.{number}"


# The networks of one segment each, and of the head (see `lower.tensorrt.lower`). T is float32, float16 or bfloat16; B
# slots, of which each has buffers of P states that the networks update in place, and K/V buffers of C tokens.
PENDING_STATES = "pending_states"  # input: T [B, 1, P, D], of segments after the first, which takes INPUT_IDS [B, S]
TOKEN_INDICES = "token_indices"  # input: int64 [S], 0 .. S-1
PAST_LENGTHS = "past_lengths"  # input: int64 [B], tokens in the segment's K/V cache before the run
EXIT_STATES = "exit_states"  # input: T [B, 1, P, D'], what the head reads
NEW_EXIT_STATES = "new_exit_states"  # output: the same buffer, in which these rows may have changed:
EXIT_ROW, DUMP_ROW, FINAL_ROW = 0, 1, 2  # of exits; of what does not exit; from here on the last segment's states
EMBEDDING = "embedding"  # input: T [V, E], the matrix of EMBEDDING_FILE; of the first segment and a tied head
# Of all but the last segment, also THRESHOLDS [B], 2.0 where a slot may not exit, and NEW_PENDING, the same buffer as
# NEXT_PENDING_STATES.
LAST_TOKENS = "last_tokens"  # input: int64 [B], index of each slot's last real token, 0 .. S-1
PENDING_LENGTHS = "pending_lengths"  # input: int64 [B], row of the next buffer where the new states go
NEXT_PENDING_STATES = "next_pending_states"  # input: T [B, 1, P, D], pending before the next segment
ROUTER_SCORE = "router_score"  # output: float32 [B]
EXIT_FLAG = "exit_flag"  # output: int32 [B], 1 where the score is above the threshold
# The head takes EXIT_STATES and ROWS and gives LOGITS, float32 [m, V]. Two more networks take these, so that not all of
# them must cross to the host; a NaN counts as infinity.
ROWS = "rows"  # input: int64 [m], of the buffers of all slots as one: slot * P + row
BEST_TOKENS = "best_tokens"  # output of BEST: int32 [m], where the largest logit is; of equal ones the lowest id
BEST_LOGITS = "best_logits"  # output of BEST: float32 [m]
CANDIDATE_TOKENS = "candidate_tokens"  # output of CANDIDATES: int64 [m, c], of the c largest logits ...
CANDIDATE_LOGITS = "candidate_logits"  # ... and these, float32 [m, c], largest first
MAX_CANDIDATES = 128  # c, or V if that is less


def past(layer: int, kind: str) -> str:
    """Input: K/V buffers of a layer (`kind` is "key" or "value"), T [B, kv_heads, C, head_dim]."""
    return f"past_key_values.{layer}.{kind}"


def present(layer: int, kind: str) -> str:
    """Output: the same buffers after the run."""
    return f"present.{layer}.{kind}"


# The networks of a batch, one per segment (see `lower.onnxruntime.packed`): N tokens of R sequences, one sequence after
# another; m tokens get scores. They take INPUT_IDS [1, N] or HIDDEN_STATES [1, N, D], POSITION_IDS, LAST_TOKENS [m]
# (indices into the N), all but the last one SLOT_THRESHOLDS, and SEQUENCE_LENGTHS, SEQUENCE_STARTS, PAGE_TABLE and the
# pages of the layers they read; they give NEW_HIDDEN_STATES [1, N, D], EXIT_STATES [m, D'], ROUTER_SCORE [m, 1] and the
# new pages of the layers they write. The head takes EXIT_STATES [1, m, D'] and gives LOGITS [1, m, V]. All float32.
# Where K/V are propagated, each segment after the first has one more network if it has K/V of its own, `skipped(k)`,
# from the HIDDEN_STATES of tokens that exited before it to the new pages of its layers.
HIDDEN_STATES = "hidden_states"  # input: float32 [1, N, D], of segments after the first
NEW_HIDDEN_STATES = "new_hidden_states"  # output: float32 [1, N, D], of all but the last segment
POSITION_IDS = "position_ids"  # input: int64 [1, N], each token's position in its sequence
SEQUENCE_STARTS = "sequence_starts"  # input: int64 [R + 1], each sequence's first of the N; 0 first, N at the end
SLOT_THRESHOLDS = "slot_thresholds"  # input: float32 [m, 1]; above 1: neither score nor exit state of it will be read

# The drafter's network (see `compose.drafter`): N tokens of R sequences as in a batch, with INPUT_IDS [1, N] and
# HIDDEN_STATES [1, N, W], POSITION_IDS, SEQUENCE_LENGTHS, SEQUENCE_STARTS, PAGE_TABLE, the pages of one layer, and
# LAST_TOKENS [m]. It gives LOGITS [m, n] of the tokens that it can propose, and NEW_HIDDEN_STATES [m, W]. Among the
# segment networks it is DRAFTER, with INPUT_IDS [B, S] and HIDDEN_STATES T [B, S, W], TOKEN_INDICES, PAST_LENGTHS,
# LAST_TOKENS [B], EMBEDDING if the first segment has it, and the K/V buffers of one layer; it gives LOGITS float32
# [B, 1, n] and NEW_HIDDEN_STATES T [B, 1, W].
DRAFTER = "drafter"

# Files of a bundle.
MANIFEST_FILE = "tide.json"
GRAPH_FILE = "model.onnx"
DRAFTER_FILE = "drafter.onnx"  # holds its own weights; it reads the embedding in WEIGHTS_FILE
WEIGHTS_FILE = "model.onnx.data"
ROUTERS_FILE = "routers.safetensors"
REPORT_FILE = "report.html"  # with a picture of the same name beside it; if `export` calibrated the routers
TOKENIZER_FILE = "tokenizer.json"
BATCH_FOLDER = "batch"
SEGMENTS_FOLDER = "segments"
SEGMENTS_WEIGHTS_FILE = "weights.data"  # in SEGMENTS_FOLDER, shared by all networks there
EMBEDDING_FILE = f"{SEGMENTS_FOLDER}/embedding.data"  # the matrix of their input EMBEDDING, row after row
ENGINES_FOLDER = "engines"
HEAD, BEST, CANDIDATES = "head", "best", "candidates"
AFTER_SEGMENTS = (HEAD, BEST, CANDIDATES)  # the networks that follow the segments


def segment(k: int) -> str:
    """Name of segment k's network and engine; the others' are AFTER_SEGMENTS."""
    return f"segment_{k:02}"


def skipped(k: int) -> str:
    """Name of the network of a batch for tokens that skip segment k >= 1, where K/V are propagated."""
    return f"skipped_{k:02}"


def network_file(name: str) -> str:
    """Where a bundle keeps the network `segment(k)` or one of AFTER_SEGMENTS."""
    return f"{SEGMENTS_FOLDER}/{name}.onnx"


def engine_file(name: str) -> str:
    """Where a bundle keeps the TensorRT engine of the network `segment(k)` or of one of AFTER_SEGMENTS."""
    return f"{ENGINES_FOLDER}/{name}.engine"


def batch_file(name: str) -> str:
    """Where a bundle keeps the network `segment(k)`, `skipped(k)` or HEAD of a batch; its weights are in WEIGHTS_FILE,
    one folder up."""
    return f"{BATCH_FOLDER}/{name}.onnx"
