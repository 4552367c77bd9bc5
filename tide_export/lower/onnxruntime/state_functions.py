"""Defines `tide::TideCausalConv` and `tide::TideRecurrence` as functions of standard operators.

The operators of `cpp/ops` compute the same and take the functions' place where their library is registered; an ONNX
Runtime without it inlines the functions, which are written to be read, not to be fast. `compose.states` says what the
states hold. Nodes of one operator differ in the inputs they have and in the sizes of their decays; each combination is
a function of its own. All but the first are told apart by their `overload`, as in `paged_attention`.
"""

from collections.abc import Iterator

import onnx.parser
import onnx_ir as ir

from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import dims, nodes_of, required
from tide_export.names.operators import DOMAIN, OP_CAUSAL_CONV, STATE_OPERATORS

CONV_INPUTS = ("x", "weights", "states", "places", "lengths", "bias", "starts")
RECURRENCE_INPUTS = ("query", "key", "value", "decay", "states", "log", "places", "lengths", "beta", "starts")
OPTIONAL = ("bias", "beta", "starts")


class StateFunctionsPass(ir.passes.InPlacePass):
    """Gives nodes with recurrent states the functions that define them.

    Runs after all passes that change nodes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for op_type in STATE_OPERATORS for node in nodes_of(model.graph, op_type, DOMAIN)]
        opset = required(model.graph.opset_imports[""])
        overloads = dict[str, dict[str, str]]()  # of each operator
        for node in nodes:
            function = state_function(node, opset)
            known = overloads.setdefault(node.op_type, {})
            node.overload = known.setdefault(function.overload, function.overload if known else "")
            function.overload = node.overload
            model.functions.setdefault(function.identifier(), function)
        return ir.passes.PassResult(model, modified=bool(nodes))


def state_function(node: ir.Node, opset: int = OPSET) -> ir.Function:
    """The function that `node` calls."""
    convolves = node.op_type == OP_CAUSAL_CONV
    names = CONV_INPUTS if convolves else RECURRENCE_INPUTS
    given = dict(zip(names, [*node.inputs, *[None] * len(names)], strict=False))
    options = [name for name in OPTIONAL if given.get(name) is not None]
    if convolves:
        attributes, outputs, body = "<silu, layer, number>", "y, new_states", "\n".join(_convolution(options))
    else:
        decay_rank = len(dims(given["decay"]))
        options.append(f"decays{decay_rank}")
        attributes, outputs = "<layer, number>", "y, new_states, new_log"
        body = "\n".join(_recurrence(options, decay_rank))
    text = f"""<opset_import: ["" : {opset}], domain: "{DOMAIN}">
        {node.op_type} {attributes} ({", ".join(names)}) => ({outputs}) {{ {body} }}"""
    function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    function.overload = "_".join(options)
    return function


def _convolution(options: list[str]) -> Iterator[str]:
    yield _NUMBERS
    yield "N = Shape <start = 1, end = 2> (x)"
    yield _starts(options)
    yield _TOKENS
    yield _CONVOLVE
    yield "biased = Add (sums, bias)" if "bias" in options else "biased = Identity (sums)"
    yield _ACTIVATE_AND_KEEP


def _recurrence(options: list[str], decay_rank: int) -> Iterator[str]:
    yield _NUMBERS
    yield "N = Shape <start = 1, end = 2> (value)"
    yield _starts(options)
    width = {3: "Identity (one)", 4: "Identity (K)", 5: "Mul (K, V)"}[decay_rank]
    axes = {3: "one, one", 4: "K, one", 5: "K, V"}[decay_rank]
    delta = "Mul (beta_column, wrong)" if "beta" in options else "Identity (value_now)"
    beta = "beta_rows = Reshape (beta, token_heads)" if "beta" in options else "beta_rows = Identity (zero_float)"
    beta_now = (
        "beta_now = Gather (beta_rows, row)  beta_column = Unsqueeze (beta_now, one)" if "beta" in options else ""
    )
    yield _RECUR.format(width=width, axes=axes, delta=delta, beta=beta, beta_now=beta_now)


def _starts(options: list[str]) -> str:
    return f"all_starts = {'Identity (starts)' if 'starts' in options else 'Concat <axis = 0> (zero, N)'}"


# N new tokens, R sequences; D channels, T taps, L rows of a place; H heads, of which G share keys; K rows and V columns
# of a head's state.

_NUMBERS = """
    zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [1]> ()  two = Constant <value_ints = [2]> ()
    rest = Constant <value_ints = [-1]> ()  last = Constant <value_ints = [9223372036854775807]> ()
    zero_number = Constant <value_int = 0> ()  one_number = Constant <value_int = 1> ()
    zero_float = Constant <value_float = 0.0> ()
"""

# Each new token's place and position, and its sequence's first new position: [N].
_TOKENS = """
    ends = Slice (all_starts, one, last)  begins = Slice (all_starts, zero, rest)
    N_number = Squeeze (N)  numbers = Range (zero_number, N_number, one_number)
    ends_column = Unsqueeze (ends, one)  ended = LessOrEqual (ends_column, numbers)
    ended_count = Cast <to = 7> (ended)  sequence = ReduceSum <keepdims = 0> (ended_count, zero)
    own_places = Slice (places, zero, one, one)  places_row = Squeeze (own_places, one)
    place = Gather (places_row, sequence)
    counts = Sub (ends, begins)  firsts = Sub (lengths, counts)
    first = Gather (firsts, sequence)  begin = Gather (begins, sequence)  length = Gather (lengths, sequence)
    in_run = Sub (numbers, begin)  position = Add (first, in_run)
    place_column = Unsqueeze (place, one)
"""

# Of each token and tap the input at the tap's position: a new one, one of the states, or zero before the first token.
_CONVOLVE = """
    L = Shape <start = 1, end = 2> (states)  T = Shape <start = 0, end = 1> (weights)
    T_number = Squeeze (T)  taps = Range (zero_number, T_number, one_number)
    T_less = Sub (T, one)  back = Sub (taps, T_less)
    position_column = Unsqueeze (position, one)  wanted = Add (position_column, back)
    first_column = Unsqueeze (first, one)  is_new = GreaterOrEqual (wanted, first_column)
    begin_column = Unsqueeze (begin, one)  after_first = Sub (wanted, first_column)
    row_or_less = Add (begin_column, after_first)  row = Max (row_or_less, zero)
    rows = Squeeze (x, zero)  new_inputs = Gather (rows, row)
    held_or_less = Max (wanted, zero)  held = Mod (held_or_less, L)
    held_axis = Unsqueeze (held, two)  place_axes = Constant <value_ints = [1, 2]> ()
    place_cube = Unsqueeze (place, place_axes)  held_shape = Shape (held_axis)
    place_of_taps = Expand (place_cube, held_shape)
    held_at = Concat <axis = 2> (place_of_taps, held_axis)
    old_inputs = GatherND (states, held_at)
    is_new_axis = Unsqueeze (is_new, two)
    known_inputs = Where (is_new_axis, new_inputs, old_inputs)
    is_before = Less (wanted, zero)  is_before_axis = Unsqueeze (is_before, two)
    inputs = Where (is_before_axis, zero_float, known_inputs)
    weighted = Mul (inputs, weights)  sums = ReduceSum <keepdims = 0> (weighted, one)
"""

# The last inputs of each sequence, as many as its place has rows. They are taken from those that were read: what is
# read must be read before it is overwritten.
_ACTIVATE_AND_KEEP = """
    asks_silu = Constant <value_int: int = @silu> ()  with_silu = Equal (asks_silu, one_number)
    share = Sigmoid (biased)  bent = Mul (biased, share)
    activated = Where (with_silu, bent, biased)
    y = Unsqueeze (activated, zero)
    to_end = Sub (length, position)  stays = LessOrEqual (to_end, L)
    staying = NonZero (stays)  kept = Squeeze (staying, zero)
    inputs_at_last_tap = Slice (inputs, T_less, T, one)  read_rows = Squeeze (inputs_at_last_tap, one)
    kept_rows = Gather (read_rows, kept)
    ring = Mod (position, L)  ring_column = Unsqueeze (ring, one)
    every_at = Concat <axis = 1> (place_column, ring_column)  kept_at = Gather (every_at, kept)
    new_states = ScatterND (states, kept_at, kept_rows)
"""

# For each sequence: each token after those that its state holds takes its turn, first what the log has of old ones. The
# state that is kept is the one after the tokens that nobody will take back, or that the log is too short for.
_RECUR = """
    heads = Shape <start = 2, end = 3> (value)  V = Shape <start = 3> (value)
    key_heads = Shape <start = 2, end = 3> (key)  K = Shape <start = 3> (key)
    DW = {width}
    G = Div (heads, key_heads)  L = Shape <start = 1, end = 2> (log)
    token_heads = Concat <axis = 0> (N, heads)
    value_rows = Squeeze (value, zero)  query_rows = Squeeze (query, zero)  key_rows = Squeeze (key, zero)
    decay_rows_shape = Concat <axis = 0> (N, heads, DW)  decay_rows = Reshape <allowzero = 1> (decay, decay_rows_shape)
    {beta}
    state_shape = Concat <axis = 0> (heads, K, V)  decay_shape = Concat <axis = 0> (heads, {axes})
    decays = Mul (heads, DW)  deltas = Mul (heads, V)  keys = Mul (key_heads, K)
    row_parts = Concat <axis = 0> (decays, deltas, keys)
    decays_shape = Concat <axis = 0> (heads, DW)  deltas_shape = Concat <axis = 0> (heads, V)
    keys_shape = Concat <axis = 0> (key_heads, K)
    grouped_shape = Concat <axis = 0> (key_heads, G, K)  all_keys_shape = Concat <axis = 0> (heads, K)
    numbers_in_state = Mul (K, V)  state_parts = Concat <axis = 0> (numbers_in_state, one)
    nothing_shape = Concat <axis = 0> (N, heads, V)  nothing = ConstantOfShape (nothing_shape)
    R = Shape <start = 0, end = 1> (lengths)  R_number = Squeeze (R)
    always = Cast <to = 9> (one_number)
    new_states, new_log, outputs = Loop (R_number, always, states, log, nothing) <body = sequences (
        int64 i, bool going, float[p, h, s] states_in, float[p, l, w] log_in, float[n, h, v] outputs_in
    ) => (bool go_on, float[p, h, s] states_out, float[p, l, w] log_out, float[n, h, v] outputs_out) {{
        go_on = Identity (going)
        next = Add (i, one_number)
        begin = Gather (all_starts, i)  end_row = Gather (all_starts, next)  count = Sub (end_row, begin)
        end = Gather (lengths, i)  first = Sub (end, count)
        of_sequence = Gather (places, i)  place = Gather (of_sequence, zero_number)
        asked = Gather (of_sequence, one_number)
        L_number = Squeeze (L)  past_log = Sub (end, L_number)
        may_settle = Min (asked, first)  settled = Max (may_settle, past_log)
        found = Gather (states_in, place)
        found_numbers, found_count = Split <axis = 1> (found, state_parts)
        begins_new = Equal (first, zero_number)
        old_state = Reshape (found_numbers, state_shape)
        state = Where (begins_new, zero_float, old_state)
        count_numbers = Reshape (found_count, rest)  count_of_first = Gather (count_numbers, zero_number)
        count_float = Where (begins_new, zero_float, count_of_first)  at = Cast <to = 7> (count_float)
        turns = Sub (end, at)
        place_only = Unsqueeze (place, zero)
        kept, ran, log_then, outputs_then = Loop (turns, going, state, state, log_in, outputs_in) <body = tokens (
            int64 j, bool running, float[h, k, v] kept_in, float[h, k, v] state_in, float[p, l, w] log_now,
            float[n, h, v] outputs_now
        ) => (bool run_on, float[h, k, v] kept_out, float[h, k, v] state_out, float[p, l, w] log_next,
              float[n, h, v] outputs_next) {{
            run_on = Identity (running)
            position = Add (at, j)
            in_run = Sub (position, first)  is_new = GreaterOrEqual (in_run, zero_number)
            row_or_less = Add (begin, in_run)  row = Max (row_or_less, zero_number)
            ring = Mod (position, L_number)  ring_only = Unsqueeze (ring, zero)
            log_at = Concat <axis = 0> (place_only, ring_only)
            log_row = GatherND (log_now, log_at)
            log_decays, log_deltas, log_keys = Split <axis = 0> (log_row, row_parts)
            new_decay = Gather (decay_rows, row)  log_decay = Reshape (log_decays, decays_shape)
            decay_now = Where (is_new, new_decay, log_decay)  decay_cube = Reshape (decay_now, decay_shape)
            new_key = Gather (key_rows, row)  log_key = Reshape (log_keys, keys_shape)
            key_now = Where (is_new, new_key, log_key)
            key_groups = Unsqueeze (key_now, one)  keys_expanded = Expand (key_groups, grouped_shape)
            key_of_heads = Reshape (keys_expanded, all_keys_shape)  key_cube = Unsqueeze (key_of_heads, two)
            decayed = Mul (state_in, decay_cube)
            remembered = Mul (decayed, key_cube)  known = ReduceSum <keepdims = 0> (remembered, one)
            value_now = Gather (value_rows, row)  wrong = Sub (value_now, known)
            {beta_now}
            new_delta = {delta}
            log_delta = Reshape (log_deltas, deltas_shape)  delta_now = Where (is_new, new_delta, log_delta)
            delta_cube = Unsqueeze (delta_now, one)  added = Mul (key_cube, delta_cube)
            state_out = Add (decayed, added)
            query_now = Gather (query_rows, row)  query_groups = Unsqueeze (query_now, one)
            query_expanded = Expand (query_groups, grouped_shape)
            query_of_heads = Reshape (query_expanded, all_keys_shape)  query_cube = Unsqueeze (query_of_heads, two)
            read = Mul (state_out, query_cube)  output = ReduceSum <keepdims = 0> (read, one)
            row_only = Unsqueeze (row, zero)  output_row = Unsqueeze (output, zero)
            row_at = Unsqueeze (row_only, zero)
            with_output = ScatterND (outputs_now, row_at, output_row)
            outputs_next = Where (is_new, with_output, outputs_now)
            flat_decays = Reshape (decay_now, rest)  flat_deltas = Reshape (delta_now, rest)
            flat_keys = Reshape (key_now, rest)
            new_row = Concat <axis = 0> (flat_decays, flat_deltas, flat_keys)
            new_rows = Unsqueeze (new_row, zero)  log_rows_at = Unsqueeze (log_at, zero)
            log_next = ScatterND (log_now, log_rows_at, new_rows)
            is_settled = Less (position, settled)
            kept_out = Where (is_settled, state_out, kept_in)
        }}>
        held = Max (at, settled)  held_float = Cast <to = 1> (held)
        counts_shape = Concat <axis = 0> (heads, one)  counts = Expand (held_float, counts_shape)
        flat_shape = Concat <axis = 0> (heads, numbers_in_state)  flat = Reshape (kept, flat_shape)
        with_count = Concat <axis = 1> (flat, counts)  state_row = Unsqueeze (with_count, zero)
        states_at = Unsqueeze (place_only, zero)
        changed = ScatterND (states_in, states_at, state_row)
        some = Greater (count, zero_number)
        states_out = Where (some, changed, states_in)
        log_out = Identity (log_then)  outputs_out = Identity (outputs_then)
    }}>
    y = Unsqueeze (outputs, zero)
"""
