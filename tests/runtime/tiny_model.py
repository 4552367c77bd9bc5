"""A hand-made early-exit transformer that obeys the graph contract, and the same model in plain numpy.

The runtime's tests need a graph long before an exporter exists, small enough to run thousands of steps, and a judge
that shares nothing with it. `TinyModel.graph` is ONNX with one `If` per segment and attention that writes pages in
place; `TinyModel.reference` runs every layer over the whole sequence and picks the earliest exit afterwards.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx.parser import parse_model

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.manifest import Manifest, TensorInfo
from tide_export.bundle.model_info import ModelInfo
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.names import paged
from tide_export.names import step_graph as names
from tide_export.names.operators import DOMAIN, OP_PAGED_ATTENTION

HEADS, HEAD_DIM = 2, 8
WIDTH = HEADS * HEAD_DIM
ATTENTION = f"{DOMAIN}.{OP_PAGED_ATTENTION['float32']}"


@dataclass(frozen=True)
class TinyModel:
    """`layers` attention-only layers (one K/V head), a linear router at each checkpoint, weights drawn from `seed`."""

    layers: int = 6
    checkpoints: tuple[int, ...] = (2, 4)
    vocabulary: int = 48
    context: int | None = 256
    eos: tuple[int, ...] = ()
    seed: int = 0

    @property
    def edges(self) -> list[int]:
        return [0, *self.checkpoints, self.layers]

    def weights(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(self.seed)

        def draw(*shape: int, scale: float) -> np.ndarray:
            return (random.standard_normal(shape) * scale).astype(np.float32)

        made = {"embed": draw(self.vocabulary, WIDTH, scale=1.0), "head": draw(WIDTH, self.vocabulary, scale=1.0)}
        for layer in range(self.layers):
            made[f"q{layer}"] = draw(WIDTH, WIDTH, scale=0.4)
            made[f"k{layer}"] = draw(WIDTH, HEAD_DIM, scale=0.4)
            made[f"v{layer}"] = draw(WIDTH, HEAD_DIM, scale=0.4)
            made[f"o{layer}"] = draw(WIDTH, WIDTH, scale=0.3)
        for k in range(1, len(self.checkpoints) + 1):
            made[f"router{k}"] = draw(WIDTH, 1, scale=0.5)
        return made

    @cached_property
    def _weights(self) -> dict[str, np.ndarray]:
        return self.weights()

    # --- the judge ---------------------------------------------------------------------------------------------

    def reference(self, ids: list[int], thresholds: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits [S, V] after each position's earliest exit, exit layers [S], all scores [S, K-1]."""
        w = self._weights
        x = w["embed"][ids]
        causal = np.tril(np.ones((len(ids), len(ids)), bool))
        state = np.empty_like(x)
        exit_layers = np.zeros(len(ids), int)
        scores = np.empty((len(ids), len(self.checkpoints)), np.float32)
        for layer in range(self.layers):
            q = (x @ w[f"q{layer}"]).reshape(len(ids), HEADS, HEAD_DIM)
            k, v = x @ w[f"k{layer}"], x @ w[f"v{layer}"]
            attention = np.einsum("shd,td->hst", q, k) / np.sqrt(HEAD_DIM)
            attention = np.where(causal, attention, -np.inf)
            attention = np.exp(attention - attention.max(axis=-1, keepdims=True))
            attention /= attention.sum(axis=-1, keepdims=True)
            mixed = np.einsum("hst,td->shd", attention, v).reshape(len(ids), WIDTH)
            x = np.tanh(x + mixed @ w[f"o{layer}"])
            if layer + 1 in self.checkpoints:
                c = self.checkpoints.index(layer + 1)
                scores[:, c] = (1 / (1 + np.exp(-(x @ w[f"router{c + 1}"]))))[:, 0]
                leaves = (scores[:, c] > np.float32(thresholds[c])) & (exit_layers == 0)
                state[leaves], exit_layers[leaves] = x[leaves], layer + 1
        stays = exit_layers == 0
        state[stays], exit_layers[stays] = x[stays], self.layers
        return state @ w["head"], exit_layers, scores

    def reference_greedy(self, prompt: list[int], thresholds: list[float], count: int) -> tuple[list[int], list[int]]:
        """`count` greedy tokens after `prompt` and the exit layer of each, one full reference run per token."""
        ids, exits = self._greedy.setdefault((*prompt, None, *thresholds), (list(prompt), list[int]()))
        for _ in range(count - len(exits)):
            logits, exit_layers, _ = self.reference(ids, thresholds)
            ids.append(int(logits[-1].argmax()))
            exits.append(int(exit_layers[-1]))
        return ids[len(prompt) : len(prompt) + count], exits[:count]

    @cached_property
    def _greedy(self) -> dict[tuple[float | None, ...], tuple[list[int], list[int]]]:
        """What was found so far, by prompt and thresholds."""
        return {}

    # --- the graph ---------------------------------------------------------------------------------------------

    def graph(self) -> onnx.ModelProto:
        segments = len(self.checkpoints) + 1
        inputs = [
            f"int64[1,S] {names.INPUT_IDS}",
            f"int64[1] {names.SEQUENCE_LENGTHS}",
            f"int32[1,J] {names.PAGE_TABLE}",
            f"int64[M,2] {names.LOGITS_POSITIONS}",
        ]
        outputs = [f"float[M,{self.vocabulary}] {names.LOGITS}", f"float[1,F,{WIDTH}] {names.FINAL_STATES}"]
        if self.checkpoints:
            inputs.append(f"float[{segments - 1}] {names.THRESHOLDS}")
            inputs += [f'float[1] "{names.skip_threshold(k)}"' for k in range(1, segments)]
            outputs.append(f"float[1,{segments - 1}] {names.SCORES}")
            outputs.append(f"float[1,W,{WIDTH}] {names.NEW_PENDING}")
        for k in range(1, segments):
            inputs.append(f'float[1,N{k},{WIDTH}] "{names.pending(k)}"')
        for layer in range(self.layers):
            for kind in ("key", "value"):
                inputs.append(f'float[P,1,T,{HEAD_DIM}] "{paged.pages(layer, kind)}"')
                outputs.append(f'float[P,1,T,{HEAD_DIM}] "{paged.new_pages(layer, kind)}"')

        body = [
            f"x0 = Gather(embed, {names.INPUT_IDS})",
            "one = Constant<value_int=1>()",
            "zero = Constant<value_int=0>()",
            "axis0 = Constant<value_ints=[0]>()",
            "axis1 = Constant<value_ints=[1]>()",
            "minus1 = Constant<value_ints=[-1]>()",
            *self._segment(0, "x0", "y0"),
            self._last(0, "last0", "y0"),
            "run0 = Constant<value = bool {1}>()",
        ]
        if self.checkpoints:
            body.append(f'x1 = Concat<axis=1>("{names.pending(1)}", y0)')
            body.append(f"score1 = {self._score(1, 'last0', body)}")
        for k in range(1, segments):
            body += [
                f"index{k} = Constant<value_int={k - 1}>()",
                f"threshold{k} = Gather({names.THRESHOLDS}, index{k})",
                f"fires{k}_11 = Greater(score{k}, threshold{k})",
                f"fires{k} = Squeeze(fires{k}_11)",
                f'stop{k}_11 = Greater(score{k}, "{names.skip_threshold(k)}")',
                f"stop{k} = Squeeze(stop{k}_11)",
                f"go{k} = Not(stop{k})",
                f"run{k} = And(run{k - 1}, go{k})",
                self._if(k),
            ]
        body += self._finish(segments)
        text = (
            f'<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>\n'
            f"tiny ({', '.join(inputs)}) => ({', '.join(outputs)}) {{\n" + "\n".join(body) + "\n}"
        )
        model = parse_model(text)
        model.graph.initializer.extend(onnx.numpy_helper.from_array(v, name) for name, v in self.weights().items())
        return model

    def _segment(self, k: int, x: str, y: str, prefix: str = "") -> list[str]:
        lines = []
        for layer in range(self.edges[k], self.edges[k + 1]):
            out = y if layer + 1 == self.edges[k + 1] else f"h{layer}"
            lines += [
                *(f"{p}_{layer} = MatMul({x}, {p}{layer})" for p in "qkv"),
                f'a{layer}, "{prefix}{paged.new_pages(layer, "key")}", "{prefix}{paged.new_pages(layer, "value")}" = '
                f"{ATTENTION}<num_heads={HEADS}, kv_num_heads=1>(q_{layer}, k_{layer}, v_{layer}, "
                f'"{paged.pages(layer, "key")}", "{paged.pages(layer, "value")}", '
                f"{names.PAGE_TABLE}, {names.SEQUENCE_LENGTHS})",
                f"mixed{layer} = MatMul(a{layer}, o{layer})",
                f"sum{layer} = Add({x}, mixed{layer})",
                f"{out} = Tanh(sum{layer})",
            ]
            x = out
        return lines

    def _last(self, k: int, name: str, y: str) -> str:
        """The last position, of the last segment as many as are asked for."""
        if k < len(self.checkpoints):
            return f"{name} = Gather<axis=1>({y}, minus1)"
        return f"{name}_rows = GatherND({y}, {names.LOGITS_POSITIONS})\n{name} = Unsqueeze({name}_rows, axis0)"

    def _score(self, k: int, last: str, lines: list[str]) -> str:
        lines.append(f"raw{k} = MatMul({last}, router{k})")
        return f"Sigmoid(raw{k})"

    def _if(self, k: int) -> str:
        """Runs segment k over all that waits, or leaves it waiting."""
        layers = range(self.edges[k], self.edges[k + 1])
        caches = [(layer, kind) for layer in layers for kind in ("key", "value")]
        more = k < len(self.checkpoints)  # another router behind this segment
        then_lines = [*self._segment(k, f"x{k}", f"ty{k}", prefix="run."), self._last(k, f"tlast{k}", f"ty{k}")]
        waits = f'Concat<axis=1>("{names.pending(k + 1)}", ty{k})' if more else "ConstantOfShape(empty_shape)"
        then_lines += [f"twait{k} = {waits}"]
        else_lines = [f"elast{k} = Identity(last{k - 1})", f"ewait{k} = Identity(x{k})"]
        then_out, else_out = [f"tlast{k}", f"twait{k}"], [f"elast{k}", f"ewait{k}"]
        results = [f"last{k}", f"x{k + 1}"]
        if not more:
            then_lines.append(f"tfinal = Identity(ty{k})")
            else_lines.append("efinal = ConstantOfShape(empty_shape)")
            then_out, else_out, results = [*then_out, "tfinal"], [*else_out, "efinal"], [*results, names.FINAL_STATES]
        if more:
            then_lines.append(f"tscore{k + 1} = {self._score(k + 1, f'tlast{k}', then_lines)}")
            else_lines.append(f"escore{k + 1} = Identity(nan)")
            then_out, else_out = [*then_out, f"tscore{k + 1}"], [*else_out, f"escore{k + 1}"]
            results.append(f"score{k + 1}")
        for layer, kind in caches:
            name = paged.new_pages(layer, kind)
            then_out.append(f'"run.{name}"')
            else_out.append(f'"skip.{name}"')
            else_lines.append(f'"skip.{name}" = Identity("{paged.pages(layer, kind)}")')
            results.append(f'"{name}"')

        def branch(name: str, outputs: list[str], lines: list[str]) -> str:
            return f"{name} = g{k} () => ({', '.join('float[] ' + o for o in outputs)}) {{{chr(10).join(lines)}}}"

        prelude = "empty_shape = Constant<value_ints=[1, 0, 16]>()\nnan = Constant<value = float[1,1,1] {nan}>()\n"
        call = (
            f"{', '.join(results)} = If(run{k}) <{branch('then_branch', then_out, then_lines)}, "
            f"{branch('else_branch', else_out, else_lines)}>"
        )
        return (prelude if k == 1 else "") + call

    def _finish(self, segments: int) -> list[str]:
        lines = ["one_row = Constant<value_ints=[1]>()"]
        state = f"last{segments - 1}"
        for k in range(segments - 1, 0, -1):
            lines += [
                f"rows{k} = Shape<start=1, end=2>({state})",
                f"size{k} = Where(fires{k}, one_row, rows{k})",
                f"cut{k} = Slice({state}, axis0, size{k}, axis1)",
                f"state{k} = Where(fires{k}, last{k - 1}, cut{k})",
            ]
            state = f"state{k}"
        lines += [f"rows = Squeeze({state}, axis0)", f"{names.LOGITS} = MatMul(rows, head)"]
        if self.checkpoints:
            scores = ", ".join(f"score{k}" for k in range(1, segments))
            lines.append(f"joined = Concat<axis=2>({scores})")
            lines.append(f"{names.SCORES} = Squeeze(joined, axis0)")
            lines.append(f"{names.NEW_PENDING} = Identity(x{segments})")
        else:
            lines.append(f"{names.FINAL_STATES} = Identity(y0)")
        return lines

    # --- the bundle --------------------------------------------------------------------------------------------

    def described(self, **changes: object) -> onnx.ModelProto:
        """`graph` with the metadata that `manifest` calls for."""
        model = self.graph()
        onnx.helper.set_model_props(model, self.manifest(**changes).graph_metadata)
        return model

    def manifest(self, **changes: object) -> Manifest:
        """The manifest of `graph`, before `write_manifest`; `changes` replace fields."""
        graph = self.graph().graph

        def info(values: list[onnx.ValueInfoProto]) -> tuple[TensorInfo, ...]:
            return tuple(
                TensorInfo(
                    value.name,
                    onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
                    tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
                )
                for value in values
            )

        given: dict = {
            "model": ModelInfo(
                name="tiny",
                architecture="TinyForCausalLM",
                weights_sha256="0" * 64,
                num_layers=self.layers,
                hidden_size=WIDTH,
                vocab_size=self.vocabulary,
                context_length=self.context,
                eos_token_ids=self.eos,
                kv_shapes=((1, HEAD_DIM),) * self.layers,
            ),
            "checkpoints": self.checkpoints,
            "thresholds": (0.5,) * len(self.checkpoints),
            "min_layers": 0,
            "max_pending": 4,
            "weights": "fp32",
            "targets": ("onnxruntime",),
            "opset": 21,
            "inputs": info(graph.input),
            "outputs": info(graph.output),
            "calibration": None,
            "versions": {"onnx": onnx.__version__},
            "created": "2026-01-01T00:00:00+00:00",
        }
        return Manifest(**{**given, **changes})

    def write(self, path: Path, **changes: object) -> Path:
        """A bundle of this model at `path`."""
        with writing_bundle(path) as folder:
            onnx.save(self.described(**changes), folder / GRAPH_FILE)
            write_manifest(folder, self.manifest(**changes))
        return path
