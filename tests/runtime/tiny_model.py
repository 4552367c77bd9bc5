"""A hand-made early-exit transformer that obeys the networks' contract, and the same model in plain numpy.

The runtime's tests need networks without an exporter, small enough to run thousands of steps, and a judge that shares
nothing with them. `TinyModel.networks` are ONNX with attention that writes pages in place; `TinyModel.reference` runs
every layer over the whole sequence and picks the earliest exit afterwards.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.parser import parse_model

from tide_export.bundle.file_names import GRAPH_FILE, batch_file
from tide_export.bundle.manifest import Manifest, TensorInfo
from tide_export.bundle.model_info import ModelInfo
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.names import batch_networks as names
from tide_export.names import paged
from tide_export.names.networks import HEAD, segment_name
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

    # --- the networks ------------------------------------------------------------------------------------------

    def networks(self) -> dict[str, onnx.ModelProto]:
        """A network for each segment and the head, by their names; each with its weights."""
        made = {segment_name(k): self._segment(k) for k in range(len(self.edges) - 1)}
        inputs, outputs = [f"float[1,M,{WIDTH}] {names.HEAD_STATES}"], [f"float[1,M,{self.vocabulary}] {names.LOGITS}"]
        made[HEAD] = self._network(inputs, outputs, [f"{names.LOGITS} = MatMul({names.HEAD_STATES}, head)"])
        return made

    def _segment(self, k: int) -> onnx.ModelProto:
        inputs = [
            f"int64[1,N] {names.INPUT_IDS}" if k == 0 else f"float[1,N,{WIDTH}] {names.HIDDEN_STATES}",
            f"int64[1,N] {names.POSITION_IDS}",
            f"int64[M] {names.LAST_TOKENS}",
            f"int64[R] {names.SEQUENCE_LENGTHS}",
            f"int64[Q] {names.SEQUENCE_STARTS}",
            f"int32[R,J] {names.PAGE_TABLE}",
        ]
        outputs = [f"float[M,{WIDTH}] {names.EXIT_STATES}"]
        body = [
            f"h{self.edges[k]} = "
            + (f"Gather(embed, {names.INPUT_IDS})" if k == 0 else f"Identity({names.HIDDEN_STATES})")
        ]
        for layer in range(self.edges[k], self.edges[k + 1]):
            body += self._layer(layer)
            for kind in ("key", "value"):
                inputs.append(f'float[P,1,T,{HEAD_DIM}] "{paged.pages(layer, kind)}"')
                outputs.append(f'float[P,1,T,{HEAD_DIM}] "{paged.new_pages(layer, kind)}"')
        y = f"h{self.edges[k + 1]}"
        body += [f"last = Gather<axis=1>({y}, {names.LAST_TOKENS})", "axis0 = Constant<value_ints=[0]>()"]
        body += [f"{names.EXIT_STATES} = Squeeze(last, axis0)"]
        if k < len(self.checkpoints):
            inputs.append(f"float[M,1] {names.SLOT_THRESHOLDS}")
            outputs += [f"float[1,N,{WIDTH}] {names.NEW_HIDDEN_STATES}", f"float[M,1] {names.ROUTER_SCORE}"]
            body += [
                f"{names.NEW_HIDDEN_STATES} = Identity({y})",
                f"raw = MatMul({names.EXIT_STATES}, router{k + 1})",
                "score = Sigmoid(raw)",
                "one = Constant<value = float[1,1] {1}>()",
                "none = Constant<value = float[1,1] {nan}>()",
                f"off = Greater({names.SLOT_THRESHOLDS}, one)",
                f"{names.ROUTER_SCORE} = Where(off, none, score)",
            ]
        return self._network(inputs, outputs, body)

    def _layer(self, layer: int) -> list[str]:
        x = f"h{layer}"
        return [
            *(f"{p}_{layer} = MatMul({x}, {p}{layer})" for p in "qkv"),
            f'a{layer}, "{paged.new_pages(layer, "key")}", "{paged.new_pages(layer, "value")}" = '
            f"{ATTENTION}<num_heads={HEADS}, kv_num_heads=1>(q_{layer}, k_{layer}, v_{layer}, "
            f'"{paged.pages(layer, "key")}", "{paged.pages(layer, "value")}", '
            f"{names.PAGE_TABLE}, {names.SEQUENCE_LENGTHS}, {names.SEQUENCE_STARTS})",
            f"mixed{layer} = MatMul(a{layer}, o{layer})",
            f"sum{layer} = Add({x}, mixed{layer})",
            f"h{layer + 1} = Tanh(sum{layer})",
        ]

    def _network(self, inputs: list[str], outputs: list[str], body: list[str]) -> onnx.ModelProto:
        model = parse_model(
            f'<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>\n'
            f"tiny ({', '.join(inputs)}) => ({', '.join(outputs)}) {{\n" + "\n".join(body) + "\n}"
        )
        read = {name for node in model.graph.node for name in node.input}
        stored = [onnx.numpy_helper.from_array(v, name) for name, v in self.weights().items() if name in read]
        model.graph.initializer.extend(stored)
        return model

    # --- the bundle --------------------------------------------------------------------------------------------

    def described(self, **changes: object) -> dict[str, onnx.ModelProto]:
        """`networks` with the metadata that `manifest` calls for, by file."""
        made = {batch_file(name): model for name, model in self.networks().items()}
        for model in made.values():
            onnx.helper.set_model_props(model, self.manifest(**changes).graph_metadata)
        return made

    def manifest(self, **changes: object) -> Manifest:
        """The manifest of the bundle, before `write_manifest`; `changes` replace fields."""
        graph = self.networks()[HEAD].graph

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
        """A bundle of this model at `path`, whose model.onnx, which the runtime does not load, is the head."""
        with writing_bundle(path) as folder:
            write_networks(folder, self.described(**changes))
            write_manifest(folder, self.manifest(**changes))
        return path


def write_networks(folder: Path, networks: dict[str, onnx.ModelProto], **options: Any) -> None:
    """Writes networks into a bundle's folder, the head also as its model.onnx; `options` of `onnx.save`."""
    for file, model in networks.items():
        (folder / file).parent.mkdir(exist_ok=True)
        onnx.save(model, folder / GRAPH_FILE, **options)  # here the file of the weights is beside it
        shutil.copyfile(folder / GRAPH_FILE, folder / file)
