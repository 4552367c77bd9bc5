"""Reads what a model does to its attention scores before the softmax: scale, causality, window, bias.

Used by `matching` on models that compute attention themselves. Between the matmul of queries and keys and the softmax
there may be any chain of scalings, additions, masks and reshapes, as long as everything but the scores depends on
positions and shapes alone. The chain is not matched against known forms: its constants are evaluated for a sequence of
the export's max length, the scores are represented as `scale * score + bias, or masked`, and the result must be causal
attention, in full or in a window of the last tokens, with a bias that depends on head and key position (ALiBi). Adding
one number to a whole row does not change its softmax, so slope * (key - query) is such a bias too. An addend may also
be a number of each key that is computed from its token, one by K/V head (`key_bias`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience as irc
from onnx.reference import ReferenceEvaluator

from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import nodes_of, rank, required, static_dim
from tide_export.trace.attention.key_bias import from_tokens, known_shape, numbers_of_keys

MAX_LENGTH = 8192  # tokens that a mask is evaluated for; it has a cell for each pair of them
HIDES = -1e8  # an addend below this hides the key; no bias comes near it
HIDES_ZERO = -1e4  # so low an addend hides a key whose score was multiplied by 0
FROM_TOKENS = "adds something to its attention scores that depends on the tokens, other than one number a key"


@dataclass(frozen=True)
class ScoreRule:
    """Describes causal attention to the keys in a window.

    It is softmax(scale * (score + by_token_factor * by_token) + bias).

    Attributes:
        scale: of the product of query and key.
        window: tokens that are seen, the last of them the query's; None: all up to the query's.
        bias: float64 [H, N], by head and key position, first column 0; None: no bias.
        by_token: numbers computed from the keys' tokens, [B, G, 1, S], each for H / G heads in a row; None: nothing.
    """

    scale: float
    window: int | None
    bias: np.ndarray | None
    by_token: ir.Value | None = None
    by_token_factor: float = 1.0

    def agrees_with(self, shorter: "ScoreRule", length: int) -> bool:
        """Whether the same rule, read for `length` tokens only, would be `shorter`."""
        window = self.window if self.window is not None and self.window < length else None
        if self.scale != shorter.scale or window != shorter.window or (self.bias is None) != (shorter.bias is None):
            return False
        if (self.by_token, self.by_token_factor) != (shorter.by_token, shorter.by_token_factor):
            return False
        if self.bias is None or shorter.bias is None:
            return True
        return _close(self.bias[:, :length], shorter.bias)


@dataclass(frozen=True)
class _Scores:
    """`scale * score + bias` where not `hidden`, for every head, query and key.

    Attributes:
        shape: of the scores, a batch of one.
        bias, hidden, zeroed: same rank, each dimension as in `shape` or 1; `zeroed` where the score is multiplied by 0.
        by_token, by_token_factor: as in ScoreRule.
    """

    shape: tuple[int, ...]
    scale: float
    bias: np.ndarray
    hidden: np.ndarray
    zeroed: np.ndarray
    by_token: ir.Value | None = None
    by_token_factor: float = 1.0

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: float = 1.0) -> "_Scores":
        ones = (1,) * len(shape)
        return cls(shape, scale, np.zeros(ones), np.zeros(ones, dtype=bool), np.zeros(ones, dtype=bool))

    def plus(self, bias: np.ndarray, hidden: np.ndarray) -> "_Scores":
        low = self.zeroed & (bias <= HIDES_ZERO)  # OpenAI GPT
        if low.any():
            bias, hidden = np.where(low, 0.0, bias), hidden | low
        return replace(self, bias=self.bias + bias, hidden=self.hidden | hidden, zeroed=self.zeroed & ~low)

    def where_one(self, factor: np.ndarray) -> "_Scores":
        """Multiplied by `factor`, which is 0 or 1 everywhere."""
        return replace(self, bias=self.bias * factor, zeroed=self.zeroed | (factor == 0))

    def times(self, factor: float) -> "_Scores":
        return replace(self, scale=self.scale * factor, bias=self.bias * factor)

    def reshaped(self, target: tuple[int, ...]) -> "_Scores | None":
        """Reshapes the cells; None if dimensions other than those of size 1 change."""
        if [dim for dim in self.shape if dim != 1] != [dim for dim in target if dim != 1]:
            return None

        def reshape(array: np.ndarray) -> np.ndarray:
            sizes = iter([size for size, dim in zip(array.shape, self.shape, strict=True) if dim != 1])
            return array.reshape([1 if dim == 1 else next(sizes) for dim in target])

        bias, hidden, zeroed = map(reshape, (self.bias, self.hidden, self.zeroed))
        return replace(self, shape=target, bias=bias, hidden=hidden, zeroed=zeroed)


class ScoreReader:
    """Reads the attention of one traced graph, for sequences of `length` tokens.

    Args:
        kind: the architecture, for messages.
    """

    def __init__(self, graph: ir.Graph, length: int, kind: str):
        self.graph = graph
        self.length = length
        self.kind = kind
        self._known: dict[ir.Value, np.ndarray] = {}
        shapes = {node.outputs[0]: known_shape(graph, node, length) for node in nodes_of(graph, "Shape")}
        self._shapes = {value: np.array(shape) for value, shape in shapes.items() if shape is not None}

    def read_chain(self, end: ir.Value, scores: ir.Value, heads: int) -> ScoreRule:
        """Returns the rule between the matmul result `scores` and the softmax of `end`.

        `scores`: [B, H, S, S] or [B * H, S, S].

        Raises:
            UnsupportedModelError: it is no such rule; the message names the reason.
        """
        square = (self.length, self.length)
        shape = (1, heads, *square) if rank(scores) == 4 else (heads, *square)
        return self._rule(self._follow(end, scores, _Scores.start(shape)), heads)

    def read_mask(self, mask: ir.Value | None, scale: float, causal: bool, heads: int) -> ScoreRule:
        """Returns the rule of `scaled_dot_product_attention` with `mask`.

        `mask`: [.., S, S]; bool: True is seen; float: added.
        """
        square = (self.length, self.length)
        scores = _Scores.start((1, heads, *square), scale)
        if mask is not None and mask.dtype == ir.DataType.BOOL:
            scores = scores.plus(np.zeros(()), ~self._value(mask))
        elif mask is not None:
            scores = self._plus(scores, mask)
        if causal:
            scores = scores.plus(np.zeros(()), ~np.tri(self.length, dtype=bool))
        return self._rule(scores, heads)

    def _follow(self, value: ir.Value, scores: ir.Value, start: _Scores) -> _Scores:
        """`value` as a function of `scores`, which is `start`."""
        if value is scores:
            return start
        node = required(value.producer())
        inputs = [item for item in node.inputs if item is not None]
        from_scores = [item for item in inputs if item is scores or scores in score_matmuls(item)]
        if len(from_scores) != 1:
            raise refusal(self.kind, f"uses its attention scores twice in one {node.op_type}")
        (before,) = from_scores
        after = _STEPS[node.op_type](self, node, inputs.index(before), self._follow(before, scores, start))
        if after is None:
            raise refusal(self.kind, f"computes its attention scores by a {node.op_type} that is not understood")
        return after

    def _add(self, node: ir.Node, at: int, before: _Scores) -> _Scores:
        return self._plus(before, required(node.inputs[1 - at]))

    def _subtract(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        return before.plus(-self._value(node.inputs[1]), np.zeros((), dtype=bool)) if at == 0 else None

    def _multiply(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        factor = self._value(node.inputs[1 - at])
        if factor.size > 1 and np.isin(factor, (0, 1)).all():
            return before.where_one(factor)
        return before.times(float(factor.reshape(()))) if factor.size == 1 and factor > 0 else None

    def _divide(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        divisor = self._value(node.inputs[1])
        if at != 0 or divisor.size != 1 or not divisor > 0:
            return None
        return before.times(1 / float(divisor.reshape(())))

    def _choose(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        """Where(condition, scores, hiding) or Where(condition, hiding, scores)."""
        if at == 0 or not self._hides(node.inputs[3 - at]):
            return None
        condition = self._value(node.inputs[0])
        return before.plus(np.zeros(()), ~condition if at == 1 else condition)

    def _floor(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        """Max(scores, hiding): hidden scores stay hidden."""
        return before if len(node.inputs) == 2 and self._hides(node.inputs[1 - at]) else None

    def _reshape(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        if at != 0:
            return None
        target = [int(dim) for dim in self._value(node.inputs[1])]
        if not node.attributes.get_int("allowzero", 0):
            target = [before.shape[axis] if dim == 0 else dim for axis, dim in enumerate(target)]
        if -1 in target:
            rest = int(np.prod([dim for dim in target if dim != -1]))
            target[target.index(-1)] = int(np.prod(before.shape)) // rest
        return before.reshaped(tuple(target))

    def _cast(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        wide = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        return before if node.op_type == "Identity" or node.attributes["to"].as_int() in wide else None

    def _plus(self, before: _Scores, value: ir.Value) -> _Scores:
        if before.by_token is not None or not from_tokens(self.graph, value):
            return before.plus(*self._bias_and_hidden(value))
        by_token = numbers_of_keys(self.graph, value)
        if by_token is None:
            raise refusal(self.kind, FROM_TOKENS)
        hidden = self._hidden_beside(value, by_token)
        return replace(before.plus(np.zeros(()), hidden), by_token=by_token, by_token_factor=1 / before.scale)

    def _hidden_beside(self, value: ir.Value, by_token: ir.Value) -> np.ndarray:
        """Where `value` [B, H, S, S], which adds `by_token` [B, G, 1, S] to scores, hides the key instead.

        What leads from one to the other is evaluated for numbers that differ.
        """
        groups = static_dim(by_token, 1)
        numbers = np.arange(groups * self.length, dtype=np.float32).reshape(1, groups, 1, self.length)
        array = self._run(value, {by_token: numbers})
        hidden = array < HIDES
        repeated = array.shape[1] % groups == 0
        if not repeated or not (hidden | (array == numbers.repeat(array.shape[1] // groups, axis=1))).all():
            raise refusal(self.kind, FROM_TOKENS)
        return hidden

    def _bias_and_hidden(self, value: ir.Value | None) -> tuple[np.ndarray, np.ndarray]:
        """`value`, which is added to scores, as a bias and a mask of the cells where it hides the key.

        A mask over the pairs of positions and a bias over the heads that are joined by a Where are evaluated one by
        one, or both would be as large as their product.
        """
        node = value.producer() if value is not None else None
        if node is not None and node.op_type == "Where":
            condition, chosen, other = node.inputs
            for hiding, rest, negated in ((chosen, other, False), (other, chosen, True)):
                if self._hides(hiding):
                    where = self._value(condition)
                    bias, hidden = self._bias_and_hidden(rest)
                    return bias, hidden | (~where if negated else where)
        array = self._value(value)
        hidden = array < HIDES
        bias = np.where(hidden, 0.0, array)
        return (bias if bias.any() else np.zeros(())), hidden

    def _hides(self, value: ir.Value | None) -> bool:
        """Whether `value` is one number so low that it hides every key it is added to."""
        if value is None or value.shape is None or any(dim != 1 for dim in value.shape):
            return False
        return bool((self._value(value) < HIDES).all())

    def _value(self, value: ir.Value | None) -> np.ndarray:
        """Evaluates `value` for one sequence of `length` tokens.

        Raises UnsupportedModelError: it depends on the tokens.
        """
        value = required(value)
        if value not in self._known:
            self._known[value] = self._evaluate(value)
        return self._known[value]

    def _evaluate(self, value: ir.Value) -> np.ndarray:
        if value.const_value is not None:
            array = np.asarray(value.const_value.numpy())
        elif from_tokens(self.graph, value):
            raise refusal(self.kind, FROM_TOKENS)
        else:
            array = self._run(value, {})
        return array if array.dtype in (bool, np.float32) else array.astype(np.float64)

    def _run(self, value: ir.Value, given: Mapping[ir.Value, np.ndarray]) -> np.ndarray:
        """Computes `value` for one sequence of `length` tokens from their positions and `given` values."""
        positions = np.arange(self.length, dtype=np.int64)[None]
        feeds = dict(zip(self.graph.inputs, (np.zeros_like(positions), positions), strict=True))
        feeds |= self._shapes | dict(given)
        piece = irc.extract(self.graph, list(feeds), [value])
        evaluator = ReferenceEvaluator(ir.serde.serialize_model(ir.Model(piece, ir_version=10)))
        (array,) = evaluator.run(None, {str(parameter.name): array for parameter, array in feeds.items()})
        return np.asarray(array)

    def _rule(self, scores: _Scores, heads: int) -> ScoreRule:
        length = self.length
        if scores.shape not in ((1, heads, length, length), (heads, length, length)):
            raise refusal(self.kind, "takes its softmax over something else than the keys")
        if scores.zeroed.any():
            raise refusal(self.kind, "multiplies attention scores by 0 without hiding their keys")
        hidden = scores.hidden.reshape((-1, *scores.hidden.shape[-2:]))
        if not (hidden == hidden[:1]).all():
            raise refusal(self.kind, "masks its attention differently from head to head")
        seen = ~np.broadcast_to(hidden[0], (length, length))
        bias = self._key_bias(scores.bias, seen, heads)
        return ScoreRule(scores.scale, self._window(seen), bias, scores.by_token, scores.by_token_factor)

    def _window(self, seen: np.ndarray) -> int | None:
        """The window of a mask [N, N]; None if a query sees all keys up to its position."""
        query, key = np.ogrid[: self.length, : self.length]
        window = int(seen[-1].sum())
        if not np.array_equal(seen, (key <= query) & (key > query - window)):
            raise refusal(self.kind, "masks attention in a way that is neither causal nor a window of the last tokens")
        return window if window < self.length else None

    def _key_bias(self, bias: np.ndarray, seen: np.ndarray, heads: int) -> np.ndarray | None:
        """Returns the bias of each head by key position, [H, N]; None if there is none.

        `bias`: [.., 1 or H, 1 or N, 1 or N], by head, query and key.
        """
        bias = bias.reshape((-1, *bias.shape[-2:]))
        if bias.shape[1] > 1:
            # By query and key: the last query's, if those of the others differ from it by one number for all keys.
            last = bias[:, -1:]
            rest = np.where(seen, bias - last, 0.0)
            if not seen[-1].all() or not _close(rest, np.where(seen, rest[:, :, :1], 0.0)):
                raise refusal(
                    self.kind, "adds a bias to its attention scores that depends on more than the key's position"
                )
            bias = last
        table = bias[:, 0, :] - bias[:, 0, :1]
        if not table.any():
            return None
        return np.broadcast_to(table, (heads, self.length))


_Step = Callable[[ScoreReader, ir.Node, int, _Scores], _Scores | None]
_STEPS: dict[str, _Step] = {
    "Add": ScoreReader._add,
    "Sub": ScoreReader._subtract,
    "Mul": ScoreReader._multiply,
    "Div": ScoreReader._divide,
    "Where": ScoreReader._choose,
    "Max": ScoreReader._floor,
    "Reshape": ScoreReader._reshape,
    "Cast": ScoreReader._cast,
    "Identity": ScoreReader._cast,
}


def score_matmuls(end: ir.Value) -> list[ir.Value]:
    """The matmuls of two computed values that `end`, a softmax's input, depends on; one in an attention."""
    matmuls: list[ir.Value] = []
    reached, todo = set(), [end]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or value in reached:
            continue
        reached.add(value)
        if _is_computed_matmul(node):
            matmuls.append(value)
        elif node.op_type in _STEPS:
            todo += [item for item in node.inputs if item is not None]
    return matmuls


def first_unknown_step(end: ir.Value) -> str:
    """The first operator not in `_STEPS` between a matmul and the softmax of `end`; for messages."""
    reached, todo = set(), [(end, "")]
    for value, blocking in todo:
        node = value.producer()
        if node is None or value in reached:
            continue
        reached.add(value)
        if _is_computed_matmul(node):
            return blocking or node.op_type
        blocking = blocking or ("" if node.op_type in _STEPS else node.op_type)
        todo += [(item, blocking) for item in node.inputs if item is not None]
    return "computation"


def refusal(kind: str, reason: str) -> UnsupportedModelError:
    """That architecture `kind`'s attention cannot be exported, and why."""
    return UnsupportedModelError(f"{kind} {reason}, so its attention cannot be exported")


def _is_computed_matmul(node: ir.Node) -> bool:
    return node.op_type == "MatMul" and all(item is not None and item.const_value is None for item in node.inputs)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal up to the rounding of float32 sums."""
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max()))))
