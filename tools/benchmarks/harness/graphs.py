"""Exports the graphs that the benchmarks compare from one model by one recipe, and keeps them in a folder.

`plain` is a bundle without any branch, `branched` one with routers (seeded random ones: speed does not depend on what
they have learned), `genai` the graph of ONNX Runtime GenAI's builder, `genai-last` the same with a head that reads the
last token alone, which is what a prompt needs. `float32` is `plain` with weights in float32
where the others have bfloat16. A kept folder records its recipe and refuses another; it does not
notice changes to the exporter, so delete it after one.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch

from tide_export.bundle.manifest import Manifest, Quantization
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.compose.cut import cut
from tide_export.compose.step_graph import compose
from tide_export.config import TideConfig
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.source import SourceModel, load_model
from tide_export.names import OP_HALF_MATMUL
from tide_export.pipeline.contents import context_length, make_manifest, save_graph
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.half import round_to_half
from tide_export.quantize.settings import quantization_settings
from tide_export.routers.router import Router
from tide_export.routers.router_set import RouterSet
from tide_export.trace.tracer import trace

PLAIN, BRANCHED, FLOAT32, GENAI, GENAI_LAST = "plain", "branched", "float32", "genai", "genai-last"
RECIPE = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """All that decides what the graphs of a model are. `stretch`: another context length than the
    model's; the tokens beyond the model's are meaningless, but their time is not."""

    model: str
    weights: str = "fp32"
    block_size: int | None = None
    accuracy_level: int | None = None
    checkpoints: tuple[int, ...] | None = None
    shortlist: int | None = None
    stretch: int | None = None

    @property
    def quantization(self) -> Quantization | None:
        return quantization_settings(self.weights, block_size=self.block_size, accuracy_level=self.accuracy_level)

    @property
    def half(self) -> str | None:
        return self.weights if self.weights in OP_HALF_MATMUL else None


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("--checkpoints", help="layers run, comma separated; every 4 layers by default")
    parser.add_argument("--shortlist", type=int, help="head rows a router reads; as many as by default")
    parser.add_argument("--stretch", type=int, metavar="N", help="context length to give the model")
    parser.add_argument("--graphs", type=Path, help="keep the exported graphs in this folder, and use those in it")


def recipe_of(arguments: argparse.Namespace, **others) -> Recipe:
    points = tuple(int(c) for c in arguments.checkpoints.split(",")) if arguments.checkpoints else None
    return Recipe(
        str(arguments.model.resolve()),
        checkpoints=points,
        shortlist=arguments.shortlist,
        stretch=arguments.stretch,
        **others,
    )


class Graphs:
    """A folder of graphs of one recipe.

    Raises:
        SystemExit: the folder holds graphs of another recipe.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        folder.mkdir(parents=True, exist_ok=True)
        wanted, note = json.loads(json.dumps(asdict(recipe))), folder / RECIPE
        if note.exists() and (kept := json.loads(note.read_text())) != wanted:
            differs = ", ".join(key for key in wanted if kept.get(key) != wanted[key])
            raise SystemExit(f"{folder} holds graphs made with another {differs}: name another folder, or delete it")
        note.write_text(json.dumps(wanted, indent=2) + "\n")

    @cached_property
    def model(self) -> Path:
        """The folder of the model; of a stretched one, a copy with links to all its files but the configuration."""
        model = Path(self.recipe.model)
        if self.recipe.stretch is None:
            return model
        copy = self.folder / "model"
        if not copy.exists():
            copy.mkdir()
            for file in model.iterdir():
                (copy / file.name).symlink_to(file.resolve())
            settings = json.loads((model / "config.json").read_text())
            (copy / "config.json").unlink()
            settings["max_position_embeddings"] = self.recipe.stretch
            (copy / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        return copy

    @cached_property
    def source(self) -> SourceModel:
        """The model in PyTorch, quantized as the graphs are."""
        source = load_model(str(self.model))
        settings = self.recipe.quantization
        if settings is not None:
            quantize_model(source, settings)
        if self.recipe.half:
            round_to_half(source, self.recipe.half)
        return source

    def forget_source(self) -> None:
        """Frees the memory of `source`; the next use loads it again."""
        self.__dict__.pop("source", None)

    @property
    def manifest(self) -> Manifest:
        """Of the graph with branches, or of the plain one where only that was exported."""
        name = BRANCHED if (self.folder / BRANCHED).exists() else PLAIN
        return open_bundle(self.folder / name, verify=False).manifest

    def make(self, names: Sequence[str]) -> None:
        """Makes what is not there yet."""
        for name in names:
            if (self.folder / name).exists():
                continue
            if name in (PLAIN, BRANCHED, FLOAT32):
                self._export(name)
            else:
                partial = self.folder / f".{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                export_genai(self.model, partial, self.recipe.quantization, last_token_alone=name == GENAI_LAST)
                partial.rename(self.folder / name)

    def _export(self, name: str) -> None:
        config = TideConfig(checkpoints=self.recipe.checkpoints)
        routers = RouterSet({})
        if name == BRANCHED:
            shortlist = config.router_shortlist if self.recipe.shortlist is None else self.recipe.shortlist
            points = config.resolve_checkpoints(self.source.num_layers)
            routers = random_routers(self.source, points, config.router_bottleneck_dim, shortlist)
        export_graph(self.source, routers, self.folder / name, None if name == FLOAT32 else self.recipe.half)


def random_routers(source: SourceModel, checkpoints: Sequence[int], bottleneck: int, shortlist: int) -> RouterSet:
    torch.manual_seed(0)
    rows = source.head_rows() if shortlist else None
    read = rows[:shortlist] if rows is not None else None
    return RouterSet({c: Router(source.normalized_size, bottleneck, read).requires_grad_(False) for c in checkpoints})


def export_graph(source: SourceModel, routers: RouterSet, folder: Path, half: str | None = None) -> None:
    """Exports without calibration or tokenizer; no routers means no branch."""
    length = context_length(source, None)
    pieces = cut(trace(source, routers.checkpoints), length)
    graph = lower_for_onnxruntime(compose(pieces, routers.arrays()), source.quantized, half)
    manifest = make_manifest(source, routers, TideConfig(), pieces, graph, length, half)
    with writing_bundle(folder) as temporary:
        save_graph(graph, temporary, manifest)
        write_manifest(temporary, manifest)


def genai_installed() -> bool:
    return find_spec("onnxruntime_genai") is not None


def export_genai(model: Path, folder: Path, settings: Quantization | None, last_token_alone: bool = False) -> None:
    """The graph that ONNX Runtime GenAI's builder makes of `model`, its products quantized by the same `settings`."""
    precision, extra = "fp32", []
    if settings is not None:
        if settings.bits != 4:
            raise SystemExit("onnxruntime-genai's builder quantizes to int4 alone: measure int8 without it")
        precision = "int4"
        extra = [
            f"int4_block_size={settings.block_size}",
            f"int4_accuracy_level={settings.accuracy_level}",
            f"int4_is_symmetric={'true' if settings.symmetric else 'false'}",
        ]
    if last_token_alone:
        extra.append("prune_lm_head=true")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(folder)]
    command += ["-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
    done = subprocess.run([*command, *(["--extra_options", *extra] if extra else [])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"onnxruntime-genai could not build {model}: {done.stderr.strip().splitlines()[-1]}")
