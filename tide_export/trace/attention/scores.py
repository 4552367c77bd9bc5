"""Reads what a model does to its attention scores before the softmax: scale, causality, window, bias.

Used by `explicit` on models that compute attention themselves. Between the product of queries and keys and the softmax
there may be any chain of scalings, additions, masks and reshapes, as long as everything but the scores depends on
positions and shapes alone. The chain is not matched against known forms: its constants are evaluated for a sequence of
as many tokens as the export is for, the scores are carried along as `scale * score + bias, or masked`, and the outcome
must be causal attention, in full or in a window of the last tokens, with a bias that depends on head and key position
(ALiBi). Adding the same to a whole row changes no softmax, so slope * (key - query) is such a bias too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience as irc
from onnx.reference import ReferenceEvaluator

from tide_export.errors import UnsupportedModelError
from tide_export.names import DOMAIN

LONGEST = 8192  # tokens a mask is looked at for; it has a cell for each pair of them
HIDES = -1e8  # what is added to hide a key: the least number of a type, or some large one; no bias comes near it


@dataclass(frozen=True)
class ScoreRule:
    """Causal attention as softmax(scale * score + bias) over the keys in the window.

    Attributes:
        scale: of the product of query and key.
        window: the last so many tokens are seen, the query's own included; None for all.
        bias: float64 [H, N], by head and key position, first column 0; None for none.
    """

    scale: float
    window: int | None
    bias: np.ndarray | None

    def agrees_with(self, shorter: "ScoreRule", length: int) -> bool:
        """Whether the same rule, looked at for `length` tokens only, would give `shorter`."""
        window = self.window if self.window is not None and self.window < length else None
        if self.scale != shorter.scale or window != shorter.window or (self.bias is None) != (shorter.bias is None):
            return False
        if self.bias is None or shorter.bias is None:
            return True
        return _close(self.bias[:, :length], shorter.bias)


@dataclass(frozen=True)
class _Scores:
    """`scale * score + bias` where not `hidden`, for every head, query and key.

    Attributes:
        shape: of the scores, a batch of one.
        bias, hidden: of that rank, each dimension as in `shape` or 1.
    """

    shape: tuple[int, ...]
    scale: float
    bias: np.ndarray
    hidden: np.ndarray

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: float = 1.0) -> "_Scores":
        ones = (1,) * len(shape)
        return cls(shape, scale, np.zeros(ones), np.zeros(ones, dtype=bool))

    def plus(self, bias: np.ndarray, hidden: np.ndarray) -> "_Scores":
        return replace(self, bias=self.bias + bias, hidden=self.hidden | hidden)

    def times(self, factor: float) -> "_Scores":
        return replace(self, scale=self.scale * factor, bias=self.bias * factor)

    def reshaped(self, target: tuple[int, ...]) -> "_Scores | None":
        """The same cells under another shape; None where dimensions other than those of size 1 change."""
        if [dim for dim in self.shape if dim != 1] != [dim for dim in target if dim != 1]:
            return None

        def moved(array: np.ndarray) -> np.ndarray:
            dims = iter([size for size, dim in zip(array.shape, self.shape, strict=True) if dim != 1])
            return array.reshape([1 if dim == 1 else next(dims) for dim in target])

        return replace(self, shape=target, bias=moved(self.bias), hidden=moved(self.hidden))


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

    def read_chain(self, end: ir.Value, scores: ir.Value, heads: int) -> ScoreRule:
        """The rule between the product `scores` ([B, H, S, S] or [B * H, S, S]) and the softmax that takes `end`.

        Raises:
            UnsupportedModelError: it is no such rule; the message says why.
        """
        assert scores.shape is not None
        square = (self.length, self.length)
        shape = (1, heads, *square) if len(scores.shape) == 4 else (heads, *square)
        return self._rule(self._follow(end, scores, _Scores.start(shape)), heads)

    def read_mask(self, mask: ir.Value | None, scale: float, causal: bool, heads: int) -> ScoreRule:
        """The rule of `scaled_dot_product_attention` under `mask` ([.., S, S]; bool: True is seen; float: added)."""
        square = (self.length, self.length)
        found = _Scores.start((1, heads, *square), scale)
        if mask is not None and mask.dtype == ir.DataType.BOOL:
            found = found.plus(np.zeros(()), ~self._value(mask))
        elif mask is not None:
            found = found.plus(*self._bias_and_hidden(mask))
        if causal:
            found = found.plus(np.zeros(()), ~np.tri(self.length, dtype=bool))
        return self._rule(found, heads)

    def _follow(self, value: ir.Value, scores: ir.Value, start: _Scores) -> _Scores:
        """What became of the scores by the time they are `value`."""
        if value is scores:
            return start
        node = value.producer()
        assert node is not None
        inputs = [item for item in node.inputs if item is not None]
        carried = [item for item in inputs if leads_from(item, scores)]
        if len(carried) != 1:
            raise self._refusal(f"uses its attention scores twice in one {node.op_type}")
        (before,) = carried
        after = _STEPS[node.op_type](self, node, inputs.index(before), self._follow(before, scores, start))
        if after is None:
            raise self._refusal(f"computes its attention scores by a {node.op_type} that is not understood")
        return after

    def _add(self, node: ir.Node, at: int, before: _Scores) -> _Scores:
        return before.plus(*self._bias_and_hidden(node.inputs[1 - at]))

    def _subtract(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        return before.plus(-self._value(node.inputs[1]), np.zeros((), dtype=bool)) if at == 0 else None

    def _multiply(self, node: ir.Node, at: int, before: _Scores) -> _Scores | None:
        factor = self._value(node.inputs[1 - at])
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
        """Max(scores, hiding): the hidden ones stay hidden."""
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

    def _bias_and_hidden(self, value: ir.Value | None) -> tuple[np.ndarray, np.ndarray]:
        """What is added to scores, as the numbers and the places where it hides the key.

        A mask over the pairs of positions and a bias over the heads are kept apart where the model chooses between
        them, or both would be as large as the product of the two.
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
        """Whether `value` is one number so low that no key it is added to is seen."""
        if value is None or value.shape is None or any(dim != 1 for dim in value.shape):
            return False
        return bool((self._value(value) < HIDES).all())

    def _value(self, value: ir.Value | None) -> np.ndarray:
        """`value` for one sequence of `length` tokens.

        Raises:
            UnsupportedModelError: it depends on the tokens.
        """
        assert value is not None
        if value not in self._known:
            self._known[value] = self._evaluate(value)
        return self._known[value]

    def _evaluate(self, value: ir.Value) -> np.ndarray:
        if value.const_value is not None:
            array = value.const_value.numpy()
        else:
            piece = irc.extract(self.graph, list(self.graph.inputs), [value])
            token_ids = piece.inputs[0]
            if any(node.domain == DOMAIN for node in piece) or any(
                use.node.op_type != "Shape" for use in token_ids.uses()
            ):
                raise self._refusal("adds something to its attention scores that depends on the tokens")
            evaluator = ReferenceEvaluator(ir.serde.serialize_model(ir.Model(piece, ir_version=10)))
            positions = np.arange(self.length, dtype=np.int64)[None]
            feeds = zip(piece.inputs, (np.zeros_like(positions), positions), strict=True)
            (array,) = evaluator.run(None, {str(parameter.name): array for parameter, array in feeds})  # type: ignore[assignment]
        array = np.asarray(array)
        return array if array.dtype in (bool, np.float32) else array.astype(np.float64)

    def _rule(self, found: _Scores, heads: int) -> ScoreRule:
        length = self.length
        if found.shape not in ((1, heads, length, length), (heads, length, length)):
            raise self._refusal("takes its softmax over something else than the keys")
        hidden = found.hidden.reshape((-1, *found.hidden.shape[-2:]))
        if not (hidden == hidden[:1]).all():
            raise self._refusal("masks its attention differently from head to head")
        seen = ~np.broadcast_to(hidden[0], (length, length))
        return ScoreRule(found.scale, self._window(seen), self._key_bias(found.bias, seen, heads))

    def _window(self, seen: np.ndarray) -> int | None:
        """The window of a mask [N, N]; None for one that lets a query see all keys up to its own."""
        query, key = np.ogrid[: self.length, : self.length]
        window = int(seen[-1].sum())
        if not np.array_equal(seen, (key <= query) & (key > query - window)):
            raise self._refusal("masks attention in a way that is neither causal nor a window of the last tokens")
        return window if window < self.length else None

    def _key_bias(self, bias: np.ndarray, seen: np.ndarray, heads: int) -> np.ndarray | None:
        """The bias of each head by key position, [H, N]; None where there is none.

        Args:
            bias: [.., 1 or H, 1 or N, 1 or N], by head, query and key.
        """
        bias = bias.reshape((-1, *bias.shape[-2:]))
        if bias.shape[1] > 1:
            # By query and key: of one query, if those of the others differ from it by the same for all keys.
            last = bias[:, -1:]
            rest = np.where(seen, bias - last, 0.0)
            if not seen[-1].all() or not _close(rest, np.where(seen, rest[:, :, :1], 0.0)):
                raise self._refusal("adds a bias to its attention scores that depends on more than the key's position")
            bias = last
        table = bias[:, 0, :] - bias[:, 0, :1]
        if not table.any():
            return None
        return np.broadcast_to(table, (heads, self.length))

    def _refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.kind} {what}, so its attention cannot be exported")


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


def score_products(end: ir.Value) -> list[ir.Value]:
    """The products of two computed values that `end`, a softmax's input, can come from; one in an attention."""
    found: list[ir.Value] = []
    reached, todo = set(), [end]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or value in reached:
            continue
        reached.add(value)
        if _is_product(node):
            found.append(value)
        elif node.op_type in _STEPS:
            todo += [item for item in node.inputs if item is not None]
    return found


def first_other_step(end: ir.Value) -> str:
    """The operator between a product and the softmax that takes `end` that no step is known for; for messages."""
    reached, todo = set(), [(end, "")]
    for value, blocking in todo:
        node = value.producer()
        if node is None or value in reached:
            continue
        reached.add(value)
        if _is_product(node):
            return blocking or node.op_type
        blocking = blocking or ("" if node.op_type in _STEPS else node.op_type)
        todo += [(item, blocking) for item in node.inputs if item is not None]
    return "computation"


def _is_product(node: ir.Node) -> bool:
    return node.op_type == "MatMul" and all(item is not None and item.const_value is None for item in node.inputs)


def leads_from(value: ir.Value, scores: ir.Value) -> bool:
    """Whether `value` is computed from `scores`."""
    return value is scores or scores in score_products(value)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal up to the rounding of float32 sums."""
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max()))))
