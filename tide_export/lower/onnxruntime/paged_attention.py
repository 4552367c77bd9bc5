"""Defines paged attention as functions of standard operators.

They are `tide::TidePagedAttention` and `tide::TideInt8PagedAttention`.

The operators of `cpp/ops` compute the same and take the functions' place where their library is registered; an ONNX
Runtime without it inlines the functions, which are written to be read, not to be fast.

It is the attention of the new tokens of any number of sequences, concatenated on one axis, to keys and values in pages
of one pool that all sequences share. A node has one of three forms (`Form`) and any of the inputs in `OPTIONAL`; each
combination that a model uses is a function of its own. All but the first are told apart by their `overload`, which ONNX
Runtime loses of nodes in a function, as those of `lower.onnxruntime.layers`.

A row of int8 pages holds head_dim numbers and, in its last bytes, their scale: the largest magnitude over 127, a
finite float32 in little-endian order. New keys and values are rounded before anything attends to them, so that the K/V
cache depends on the text alone.
"""

import enum
from collections.abc import Collection, Iterable, Iterator

import onnx.parser
import onnx_ir as ir

from tide_export.bundle.manifest import INT8_KV, SCALE_BYTES
from tide_export.graph.builder import OPSET
from tide_export.graph.rewriting import dims, nodes_of, required
from tide_export.names.operators import DOMAIN, OP_PAGED_ATTENTION

INPUTS = (
    *("query", "key", "value", "key_pages", "value_pages", "page_table", "lengths"),
    *("starts", "cos", "sin", "bias", "sinks", "distance_bias"),
)
OUTPUTS = ("output", "new_key_pages", "new_value_pages")  # of what only reads, the first
PAGES = (3, 4)  # inputs
OPTIONAL = ("starts", "rotation", "bias", "sinks", "distance_bias")  # inputs; cos and sin are the rotation


class Form(enum.StrEnum):
    """Describes a node, by its query, key and value."""

    APART = "apart"  # all three: it stores keys and values, then attends
    PACKED = "packed"  # a query that holds each token's keys and values after it: the same
    READING = "reading"  # a query alone: it attends to what another node stored


class PagedAttentionFunctionsPass(ir.passes.InPlacePass):
    """Gives nodes the functions that define them, and int8 pages their type.

    Runs after all passes that change nodes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for kv_cache, op_type in OP_PAGED_ATTENTION.items():
            nodes = nodes_of(model.graph, op_type, DOMAIN)
            overloads = dict[str, str]()
            for node in nodes:
                form, options = form_of(node), options_of(node)
                combination = overload(form, options)
                node.overload = overloads.setdefault(combination, combination if overloads else "")
                if (DOMAIN, op_type, node.overload) not in model.functions:
                    function = paged_attention_function(
                        kv_cache, form, options, required(model.graph.opset_imports[""])
                    )
                    function.overload = node.overload
                    model.functions[function.identifier()] = function
            if nodes and kv_cache == INT8_KV:
                read = {required(node.inputs[index]) for node in nodes for index in PAGES}
                pages = _Int8Pages(value for value in model.graph.inputs if value in read)
                pages.follow(model.graph)
            modified |= bool(nodes)
        return ir.passes.PassResult(model, modified=modified)


def form_of(node: ir.Node) -> Form:
    """The form of a node of either operator."""
    if node.inputs[1] is not None:
        return Form.APART
    return Form.READING if len(node.outputs) == 1 else Form.PACKED


def options_of(node: ir.Node) -> list[str]:
    """Which of `OPTIONAL` a node has."""
    given = [value is not None for value in [*node.inputs, *[None] * len(INPUTS)][7:13]]
    return [name for name, has in zip(OPTIONAL, (given[0], given[1], *given[3:]), strict=True) if has]


def overload(form: Form, options: Collection[str]) -> str:
    """Returns the overload that tells a function from the others of its operator."""
    return "_".join([form, *(option for option in OPTIONAL if option in options)])


def paged_attention_function(
    kv_cache: str, form: Form, options: Collection[str] = OPTIONAL, opset: int = OPSET
) -> ir.Function:
    """Defines the operator for K/V pages of `kv_cache`, for nodes of that form with those optional inputs."""
    outputs = OUTPUTS[: 1 if form == Form.READING else 3]
    body = "\n".join(_body(kv_cache == INT8_KV, form, options))
    text = f"""<opset_import: ["" : {opset}], domain: "{DOMAIN}">
        {OP_PAGED_ATTENTION[kv_cache]}
        <num_heads, kv_num_heads, scale: float = 0.0, softcap: float = 0.0,
         local_window_size: int = -1, rotary_interleaved: int = 0, rotary_embedding_dim: int = 0>
        ({", ".join(INPUTS)}) => ({", ".join(outputs)}) {{ {body} }}"""
    function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    function.overload = overload(form, options)
    return function


def _body(int8: bool, form: Form, options: Collection[str]) -> Iterator[str]:
    stores, starts = form != Form.READING, "starts" in options
    yield _NUMBERS
    yield (_FLOAT_BITS + "D = Sub (W, four)") if int8 else "D = Identity (W)"
    yield "N = Shape <start = 1, end = 2> (query)"
    yield f"all_starts = {'Identity (starts)' if starts else 'Concat <axis = 0> (zero, N)'}"
    yield _PLACES
    new = INPUTS[:3]
    if form == Form.PACKED:
        yield _UNPACK
        new = ("packed_query", "packed_key", "packed_value")
    yield f"queries = {_rotated(new[0], 'num_heads', options)}"
    if stores:
        yield f"rotated_key = {_rotated(new[1], 'kv_num_heads', options)}"
        yield "key_floats = Reshape <allowzero = 1> (rotated_key, new_rows)"
        yield f"value_floats = Reshape <allowzero = 1> ({new[2]}, new_rows)"
        yield _ENCODE if int8 else "key_rows = Identity (key_floats)  value_rows = Identity (value_floats)"
    for name in ("key", "value"):
        yield (_STORE if stores else "new_{0}_pages = Identity ({0}_pages)").format(name)
    for name in ("lengths", "page_table"):  # without starts, one row serves all tokens, if there are any
        yield f"{name}_read = Gather ({name}, sequence)" if starts else f"{name}_read = Slice ({name}, zero, N)"
    yield _READ
    yield _GATHER.format("key")
    yield _GATHER.format("value")
    yield _DECODE if int8 else "keys = Identity (key_read)  values = Identity (value_read)"
    yield _SCORE
    yield _BIAS if "bias" in options else "biased_by_key = Identity (capped)"
    yield _DISTANCE_BIAS if "distance_bias" in options else "biased = Identity (biased_by_key)"
    yield _HIDE
    yield _WEIGH_WITH_SINKS if "sinks" in options else "weights = Softmax <axis = -1> (scores)"
    yield _OUTPUT


def _rotated(value: str, heads: str, options: Collection[str]) -> str:
    if "rotation" not in options:
        return f"Identity ({value})"
    attributes = (
        f"interleaved: int = @rotary_interleaved, num_heads: int = @{heads}, "
        "rotary_embedding_dim: int = @rotary_embedding_dim"
    )
    return f"RotaryEmbedding <{attributes}> ({value}, cos, sin, positions_of_row)"


class _Int8Pages(set[ir.Value]):
    """K/V pages, whose types become int8 as they are added."""

    def __init__(self, inputs: Iterable[ir.Value]):
        super().__init__()
        for value in inputs:
            self._take(value)

    def follow(self, graph: ir.Graph) -> None:
        """Adds what the graph makes of pages: new pages and copies, in branches and after them."""
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self.follow(attribute.as_graph())
            if node.op_type == OP_PAGED_ATTENTION[INT8_KV]:
                for output in node.outputs[1:]:
                    self._take(output)
            elif node.op_type == "Identity" and node.inputs[0] in self:
                self._take(node.outputs[0])
            elif node.op_type == "If":
                branch = node.attributes["then_branch"].as_graph()
                for output, inner in zip(node.outputs, branch.outputs, strict=True):
                    if inner in self:
                        self._take(output)

    def _take(self, value: ir.Value) -> None:
        *others, head_dim = dims(value)
        assert isinstance(head_dim, int)
        value.dtype = ir.DataType.INT8
        value.shape = ir.Shape([*others, head_dim + SCALE_BYTES])
        self.add(value)


# N new tokens, R sequences, J pages of each, T tokens a page, L = J T places; H heads of queries, KV of keys, and
# G = H / KV; D numbers of a head, W numbers of a row of pages.

_NUMBERS = """
    zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [1]> ()  rest = Constant <value_ints = [-1]> ()
    four = Constant <value_ints = [4]> ()  first = Constant <value_int = 0> ()  next = Constant <value_int = 1> ()
    none = Constant <value_float = 0.0> ()  unit = Constant <value_float = 1.0> ()
    heads = Constant <value_int: int = @num_heads> ()  H = Reshape (heads, one)
    kv_heads = Constant <value_int: int = @kv_num_heads> ()  KV = Reshape (kv_heads, one)
    G = Div (H, KV)
    T = Shape <start = 2, end = 3> (key_pages)  W = Shape <start = 3> (key_pages)
"""

# Each new token's sequence, of which some may have none, and position: [N].
_PLACES = """
    last = Constant <value_ints = [9223372036854775807]> ()
    ends = Slice (all_starts, one, last)
    N_scalar = Squeeze (N)  numbers = Range (first, N_scalar, next)
    ends_column = Unsqueeze (ends, one)
    ended = LessOrEqual (ends_column, numbers)
    ended_count = Cast <to = 7> (ended)
    sequence = ReduceSum <keepdims = 0> (ended_count, zero)
    length = Gather (lengths, sequence)  end = Gather (ends, sequence)
    before_end = Sub (length, end)
    position = Add (before_end, numbers)
    positions_of_row = Unsqueeze (position, zero)
    page_number = Div (position, T)  page_column = Unsqueeze (page_number, one)
    row_number = Mod (position, T)  row = Unsqueeze (row_number, one)
    token_tables = Gather (page_table, sequence)
    page_int32 = GatherElements <axis = 1> (token_tables, page_column)
    page = Cast <to = 7> (page_int32)
    place = Concat <axis = 1> (page, row)
    new_rows = Concat <axis = 0> (N, KV, D)
"""

_UNPACK = """
    query_width = Mul (H, D)  key_width = Mul (KV, D)
    widths = Concat <axis = 0> (query_width, key_width, key_width)
    packed_query, packed_key, packed_value = Split <axis = 2> (query, widths)
"""

# The pages [P, KV, T, W] with the rows [N, KV, W] of the new tokens.
_STORE = """
    {0}_by_token = Transpose <perm = [0, 2, 1, 3]> ({0}_pages)
    {0}_stored = ScatterND ({0}_by_token, place, {0}_rows)
    new_{0}_pages = Transpose <perm = [0, 2, 1, 3]> ({0}_stored)
"""

# The tables of the pages that each token reads, [N, J], and its places, [N, L]. Entries that no position of the
# sequence needs are not read, so they may be anything.
_READ = """
    J = Shape <start = 1> (page_table)  L = Mul (J, T)  L_scalar = Squeeze (L)  T_scalar = Squeeze (T)
    places = Range (first, L_scalar, next)
    page_starts = Range (first, L_scalar, T_scalar)
    length_column = Unsqueeze (lengths_read, one)
    needed = Less (page_starts, length_column)
    first_int32 = Cast <to = 6> (first)
    table = Where (needed, page_table_read, first_int32)
    filled = Less (places, length_column)
    position_column = Unsqueeze (position, one)  distance = Sub (position_column, places)
    value_axes = Constant <value_ints = [1, 3]> ()
    filled_rows = Unsqueeze (filled, value_axes)
    N_read = Shape <end = 1> (table)  read_shape = Concat <axis = 0> (N_read, KV, L, W)
"""

_GATHER = """
    {0}_gathered = Gather (new_{0}_pages, table)
    {0}_by_head = Transpose <perm = [0, 2, 1, 3, 4]> ({0}_gathered)
    {0}_read = Reshape <allowzero = 1> ({0}_by_head, read_shape)
"""

# Keys and values are [N, KV, L, D], or [1, KV, L, D] of one sequence; queries [N, KV, G, D]. A scale of 0 is 1 /
# sqrt(D), a cap of 0 none.
_SCORE = """
    D_float = Cast <to = 1> (D)  root = Sqrt (D_float)  usual_scale = Reciprocal (root)
    scale = Constant <value_float: float = @scale> ()  usual = Equal (scale, none)
    by = Where (usual, usual_scale, scale)
    grouped = Concat <axis = 0> (N, KV, G, D)
    by_group = Reshape <allowzero = 1> (queries, grouped)
    scaled = Mul (by_group, by)
    turned_keys = Transpose <perm = [0, 1, 3, 2]> (keys)
    products = MatMul (scaled, turned_keys)
    softcap = Constant <value_float: float = @softcap> ()  has_cap = Greater (softcap, none)
    cap = Where (has_cap, softcap, unit)
    share = Div (products, cap)  bent = Tanh (share)  bent_back = Mul (bent, cap)
    capped = Where (has_cap, bent_back, products)
"""

# The table [H, ..] by key position, less the number at the query's own position.
_BIAS = """
    bias_length = Shape <start = 1> (bias)  bias_end = Sub (bias_length, one)
    bias_places = Min (places, bias_end)
    at_keys = Gather <axis = 1> (bias, bias_places)  at_queries = Gather <axis = 1> (bias, position)
    keys_shape = Concat <axis = 0> (one, KV, G, L)  bias_of_keys = Reshape (at_keys, keys_shape)
    queries_shape = Concat <axis = 0> (N, KV, G, one)
    by_query = Transpose <perm = [1, 0]> (at_queries)
    bias_of_queries = Reshape <allowzero = 1> (by_query, queries_shape)
    relative = Sub (bias_of_keys, bias_of_queries)
    biased_by_key = Add (capped, relative)
"""

# The numbers [1, N, H E] of the queries' heads, by distance; none beyond these E distances.
_DISTANCE_BIAS = """
    bias_width = Shape <start = 2> (distance_bias)  E = Div (bias_width, H)
    by_distance_shape = Concat <axis = 0> (N, KV, G, E)
    by_distance = Reshape <allowzero = 1> (distance_bias, by_distance_shape)
    no_bias_shape = Concat <axis = 0> (N, KV, G, one)  no_bias = ConstantOfShape (no_bias_shape)
    with_none = Concat <axis = -1> (by_distance, no_bias)
    ahead = Less (distance, zero)  beyond = GreaterOrEqual (distance, E)  outside = Or (ahead, beyond)
    bounded = Where (outside, E, distance)
    group_axes = Constant <value_ints = [1, 2]> ()  bounded_of_group = Unsqueeze (bounded, group_axes)
    wanted_distances = Concat <axis = 0> (N, KV, G, L)  distances = Expand (bounded_of_group, wanted_distances)
    bias_by_distance = GatherElements <axis = -1> (with_none, distances)
    biased = Add (biased_by_key, bias_by_distance)
"""

_HIDE = """
    reached = LessOrEqual (places, position_column)
    given_window = Constant <value_int: int = @local_window_size> ()
    no_window = LessOrEqual (given_window, first)
    window = Where (no_window, last, given_window)
    near = Less (distance, window)
    visible = And (reached, near)
    score_axes = Constant <value_ints = [1, 2]> ()  visible_scores = Unsqueeze (visible, score_axes)
    hidden = Constant <value_float = -inf> ()
    scores = Where (visible_scores, biased, hidden)
"""

_WEIGH_WITH_SINKS = """
    sinks_shape = Concat <axis = 0> (one, KV, G, one)  sinks_alone = Reshape (sinks, sinks_shape)
    sinks_wanted = Concat <axis = 0> (N, KV, G, one)  sinks_of_all = Expand (sinks_alone, sinks_wanted)
    with_sinks = Concat <axis = -1> (scores, sinks_of_all)
    all_weights = Softmax <axis = -1> (with_sinks)
    weights_end = Constant <value_ints = [3]> ()
    weights = Slice (all_weights, zero, L, weights_end)
"""

# What no token has filled may be no number.
_OUTPUT = """
    filled_values = Where (filled_rows, values, none)
    attended = MatMul (weights, filled_values)
    output_width = Mul (H, D)
    output_shape = Concat <axis = 0> (one, N, output_width)
    output = Reshape <allowzero = 1> (attended, output_shape)
"""

# The bits of a float32 that is not negative are k 2^23 + m, and the number is m 2^-23 times power k of these, 2^-126
# first: m has 24 bits, or fewer of a subnormal number, whose k is 0. So all of this is exact.
_FLOAT_BITS = f"""
    powers = Constant <value_floats = [{", ".join(repr(2.0**exponent) for exponent in range(-126, 128))}]> ()
    byte_values = Constant <value_ints = [1, 256, 65536, 16777216]> ()  byte_end = Constant <value_ints = [256]> ()
    whole = Constant <value_ints = [8388608]> ()  whole_float = Cast <to = 1> (whole)
"""

# The rows [N, KV, W] of keys and of values, from floats. ONNX Runtime reduces no axis of an empty tensor: Slice does.
_ENCODE = """
    floats = Concat <axis = 1> (key_floats, value_floats)
    magnitudes = Abs (floats)  reduced = ReduceMax <keepdims = 1> (magnitudes, rest)
    largest = Slice (reduced, zero, one, rest)
    limit = Constant <value_float = 127.0> ()
    row_scale = Div (largest, limit)
    is_some = Greater (largest, none)  divisor = Where (is_some, largest, unit)
    quotient = Div (limit, divisor)  inverse = Where (is_some, quotient, none)
    exact_numbers = Mul (floats, inverse)  even_numbers = Round (exact_numbers)
    numbers_int8 = Cast <to = 3> (even_numbers)
    reaches = GreaterOrEqual (row_scale, powers)  reaches_int = Cast <to = 7> (reaches)
    summed = ReduceSum <keepdims = 1> (reaches_int, rest)  power_count = Slice (summed, zero, one, rest)
    counted = Max (power_count, one)  k = Sub (counted, one)
    power = Gather (powers, k)
    fraction = Div (row_scale, power)  m_float = Mul (fraction, whole_float)  m = Cast <to = 7> (m_float)
    k_bits = Mul (k, whole)  bits = Add (k_bits, m)
    half_byte = Constant <value_ints = [128]> ()
    shifted = Div (bits, byte_values)  raised = Add (shifted, half_byte)  bytes = Mod (raised, byte_end)
    signed_bytes = Sub (bytes, half_byte)  scale_bytes = Cast <to = 3> (signed_bytes)
    rows = Concat <axis = -1> (numbers_int8, scale_bytes)
    halves = Concat <axis = 0> (KV, KV)
    key_rows, value_rows = Split <axis = 1> (rows, halves)
"""

_DECODE = """
    read_rows = Concat <axis = 2> (key_read, value_read)
    row_parts = Concat <axis = 0> (D, four)
    read_int8, read_scale_bytes = Split <axis = -1> (read_rows, row_parts)
    read_signed = Cast <to = 7> (read_scale_bytes)  read_bytes = Mod (read_signed, byte_end)
    read_terms = Mul (read_bytes, byte_values)  read_sum = ReduceSum <keepdims = 1> (read_terms, rest)
    read_bits = Slice (read_sum, zero, one, rest)
    field = Div (read_bits, whole)  lower = Mod (read_bits, whole)
    leading = Min (field, one)  leading_bit = Mul (leading, whole)  read_m = Add (lower, leading_bit)
    field_end = Constant <value_ints = [254]> ()
    at_least_1 = Max (field, one)  at_most_254 = Min (at_least_1, field_end)  read_k = Sub (at_most_254, one)
    read_power = Gather (powers, read_k)
    read_m_float = Cast <to = 1> (read_m)  read_fraction = Div (read_m_float, whole_float)
    read_scale = Mul (read_fraction, read_power)
    read_floats = Cast <to = 1> (read_int8)  decoded = Mul (read_floats, read_scale)
    read_halves = Concat <axis = 0> (L, L)
    keys, values = Split <axis = 2> (decoded, read_halves)
"""
