"""The table of model families, docs/reference/models.md: runs calibrate, export and parity for every row.

    python tools/checks/model_families.py [--only FAMILY]... [--update] [--classes] [-o FILE]

A row is a tiny random model of tests/families.py, with the features its family is known for, saved to a folder with a
tokenizer of bytes. It is calibrated on the bundled text (where that gives nothing to learn its routers are random),
exported as `tide-export export` does it, the bundle loaded, and compared with the Hugging Face model at full depth and
with the oracle at thresholds that about half of the tokens pass, so that tokens wait and catch up. A row that fails
stays in the table with the sentence it failed with. Exit code 1 if a row is not what tests/families.py expects. With
`--only`, rows are printed and nothing is written, unless `--update` replaces them in the page. `--classes` runs nothing
and lists every class that AutoModelForCausalLM loads, with its rows or why it has none; exit code 1 if one has neither.
"""

import argparse
import importlib
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tide_export.config import TideConfig
from tide_export.engines.rebuild import rebuild
from tide_export.errors import BuildError, CalibrationError, ProviderError, TideError, UnsupportedModelError
from tide_export.model.source import load_model
from tide_export.names import ROUTERS_FILE
from tide_export.pipeline.flow import export
from tide_export.progress import quiet_transformers
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import Check, check_exit, check_full

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "calibration" / "text" / "python-stdlib.jsonl"
PROMPTS = ([7], [5, 9], [(i * 37) % 250 + 3 for i in range(40)])
NEW_TOKENS = 24
PENDING = (1, 4, 16)

INTRODUCTION = """# Model families

Written by `python tools/checks/model_families.py`, which runs every row; nothing here is filled in by hand. {summary}

A row is a tiny random model ({layers} layers, checkpoints after {checkpoints}; the rows from {further} on, which repeat
what others have: 2 layers and one checkpoint) with the features its family is known for and every parameter randomised
(`tests/families.py`), in float32. *Full* compares the exported graph at full
depth with the Hugging Face model, *exit* compares it with the reference rule, at thresholds that divide the tokens and
with 1, 4 and 16 tokens allowed to wait: token for token, exit layer for exit layer, over prompts of 1, 2 and {longest}
tokens (sliding windows are {window}) and {new} generated tokens each. The number is the largest difference of a logit,
relative to the largest logit. Large models of a family have the same graph with larger weights; `tide-export export`
compares each with its source before the bundle is written. *tensorrt-rtx build* says whether TensorRT for RTX builds
every network of the bundle (segments, head, and the two that choose tokens) into an engine, on a machine without GPU;
running them is another matter ([verified](verified.md)). Export seconds, calibration and that comparison included, are
of one busy machine and no measurement.

{head}
"""

CLASSES = """
## Classes of transformers {version}

`AutoModelForCausalLM` loads {count} classes, of which {built} have tiny models here: {equal} ({share:.0f} %) are
exported and equal, in all of their rows; {others}. Of {unbuilt} there is none: {reasons}.
"""

COLUMNS = [
    *("family", "features", "layers traced", "parity full", "parity exit"),
    *("onnxruntime", "tensorrt-rtx build", "export seconds", "notes"),
]

CLOSING = """
## What is not taken as it is

- **Lengths.** longrope scaling switches to other angles once a sequence is longer than the model was first made for,
  for all of its tokens, also those whose keys are in the cache by then; dynamic scaling does the same beyond
  `max_position_embeddings`; Llama 4 attends in blocks. Bundles hold sequences up to there, `export` says so, and a
  larger `--max-length` is refused.
- **Masks** are read off the model: causal, a sliding window, or blocks of tokens. A model with another mask is refused.
- **Mixture of experts.** Each expert is a matrix product of its own, and one that no token chose is not read (Llama 4
  runs all, as in transformers' own code). In the networks for TensorRT every token gathers its own experts' weights:
  [how long a run may be](../guide/tensorrt.md) follows from that. Two experts whose scores differ by less than rounding
  may be chosen differently by two correct programs; the check before a bundle is written then says that the graph
  differs, and `--no-validate` skips it.
- **Keys wider than values** (DeepSeek's latent attention): both are stored at the wider width, decompressed.
- **Attention to chosen tokens** (DeepSeek V3.2, GLM 5, MiniMax M3): where an indexer keeps the best N keys, bundles
  hold sequences of up to N tokens, which attend to all; `export` says so.
- **Recurrent states**: [which](../architecture/recurrent-states.md), for target onnxruntime alone.
- Parts that cannot be found by themselves can be told: [adapters](../guide/adapters.md).
"""


@dataclass
class Row:
    """One line of the table; `expected` says whether it is what tests/families.py foresees."""

    family: str
    features: str
    layers: str = "-"
    full: str = "-"
    exit: str = "-"
    onnxruntime: str = "-"
    tensorrt_rtx: str = "-"
    seconds: str = "-"
    note: str = ""
    expected: bool = True

    def markdown(self) -> str:
        cells = [self.family, self.features, self.layers, self.full, self.exit, self.onnxruntime, self.tensorrt_rtx]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, self.seconds, self.note]) + " |"


def tensorrt_rtx_build(bundle: Path) -> str:
    """What building TensorRT for RTX engines from the networks of `bundle` came to; no GPU is needed, or used."""
    try:
        rebuild(bundle, "tensorrt-rtx")
    except ProviderError:
        return "not tried: not installed"
    except BuildError as error:
        return f"fails: {error}"
    return "yes"


def export_row(model: str, bundle: Path, config: TideConfig, max_length: int | None) -> str:
    """Exports with segment networks where these can be made; else why not. Routers are random where the tokens of a
    random model give nothing to learn."""
    options: dict[str, Any] = {"config": config, "max_length": max_length, "engines": False}
    try:
        return exported(model, bundle, options)
    except CalibrationError as error:
        if "nothing to learn" not in str(error):
            raise
    assert isinstance(config.checkpoints, tuple)
    routers = bundle.with_name(ROUTERS_FILE)
    random_routers(load_model(model), config.checkpoints, PROMPTS[-1], config.router_bottleneck_dim).save(routers)
    return exported(model, bundle, options | {"routers": routers})


def exported(model: str, bundle: Path, options: dict[str, Any]) -> str:
    """Exports for both targets, or for ONNX Runtime alone; returns why not for TensorRT."""
    try:
        export(model, bundle, targets=("onnxruntime", "tensorrt-rtx"), **options)
        return ""
    except UnsupportedModelError as error:
        if "TensorRT" not in str(error):
            raise
        export(model, bundle, **options)
        return f"refused: {str(error).split(',')[0]}"


def make_row(families: ModuleType, name: str, folder: Path) -> Row:
    """Runs family `name` from its config to the comparison, in `folder`."""
    family = families.FAMILIES[name]
    row = Row(name, ", ".join(family.features), note=family.note)
    try:
        model, bundle = str(folder / "model"), folder / "bundle"
        built = families.build(name)
        with quiet_transformers():
            built.model.save_pretrained(model)
        byte_tokenizer().save_pretrained(model)
        config = TideConfig(
            checkpoints=family.checkpoints,
            min_layers=1,
            calibration_dataset=str(TEXT),
            calibration_samples=48,
            calibration_length=64,
            router_epochs=2,
            router_bottleneck_dim=16,
            router_shortlist=16,
        )
        started = time.perf_counter()
        refused = export_row(model, bundle, config, None if built.context_length else families.CONTEXT)
        row.seconds = f"{time.perf_counter() - started:.0f}"
        engine, source, routers = load(bundle, threads=1), load_model(model), RouterSet.load(bundle / ROUTERS_FILE)
        row.layers = f"{len(engine.manifest.model.kv_shapes)} of {source.num_layers}"
        full = check_full(engine, source, PROMPTS, NEW_TOKENS)
        thresholds = dividing_thresholds(source, routers, PROMPTS[-1])
        exits = [check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds, pending) for pending in PENDING]
        row.full, row.exit = verdict([full]), verdict(exits)
        row.onnxruntime = "yes"
        row.tensorrt_rtx = refused or tensorrt_rtx_build(bundle)
        row.expected = not family.refused and all(check.holds for check in (full, *exits))
    except TideError as error:
        row.onnxruntime, row.note = "refused", str(error).replace(str(folder / "model"), name)
        row.expected = bool(family.refused) and family.refused in str(error)
    except Exception as error:  # a row must not end the table, whatever it is
        row.onnxruntime, row.expected = "fails", False
        row.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return row


def verdict(checks: Sequence[Check]) -> str:
    """ "equal" with the largest relative difference of a logit, or what differs first."""
    error = max(check.max_error / max(check.largest_logit, 1e-9) for check in checks)
    wrong = next((check for check in checks if not check.holds), None)
    if wrong is not None:
        return f"differs: {(wrong.differences or [f'logits by {error:.1g}'])[0]}"
    undecided = sum(check.within_tolerance for check in checks)
    return f"equal ({error:.0e}" + (f", {undecided} undecided)" if undecided else ")")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte behind three special ones: any text, 259 ids."""
    special = ["<pad>", "<s>", "</s>"]
    symbols = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def rows_of_classes(families: ModuleType) -> dict[str, list[str]]:
    """The families of each class that AutoModelForCausalLM loads; none where there is no row."""
    rows: dict[str, list[str]] = {name: [] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    for family, row in families.FAMILIES.items():
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(row.config().model_type)
        if name is not None:
            rows[name].append(family)
    return rows


def list_classes(families: ModuleType) -> int:
    """Prints each class with its rows, or why it has none; returns 1 if one has neither, else 0."""
    rows = rows_of_classes(families)
    for name, found in rows.items():
        print(f"{name}: {', '.join(found) or families.UNBUILT.get(name, 'no row yet')}")
    return int(any(not found and name not in families.UNBUILT for name, found in rows.items()))


def classes(equal: Sequence[str], families: ModuleType) -> str:
    """What the page says of classes: `equal` are the families that are exported and equal."""
    rows = rows_of_classes(families)
    built = {name: found for name, found in rows.items() if found}
    good = [name for name, found in built.items() if set(found) <= set(equal)]
    others = [name for name in built if name not in good]
    missing = {name: families.UNBUILT.get(name, "no row yet") for name in rows if name not in built}
    return CLASSES.format(
        version=transformers.__version__,
        count=len(rows),
        built=len(built),
        equal=len(good),
        share=100 * len(good) / len(built),
        others=f"not so {', '.join(others)}" if others else "no others",
        unbuilt=len(missing),
        reasons="; ".join(f"{name} ({why})" for name, why in missing.items()),
    )


def page(lines: Sequence[str], families: ModuleType) -> str:
    """docs/reference/models.md, of its rows."""
    sizes = importlib.import_module("tiny_configs")
    cells = [line.removeprefix("| ").split(" | ") for line in lines]
    status = {row[0]: row[COLUMNS.index("onnxruntime")] for row in cells}
    equal = [
        row[0] for row in cells if all(row[COLUMNS.index(f"parity {mode}")][:5] == "equal" for mode in ("full", "exit"))
    ]
    others = [f"{family} ({what})" for family, what in status.items() if what != "yes"]
    summary = f"{len(equal)} of {len(lines)} rows are exported and equal"
    table = "\n".join(("| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"))
    head = INTRODUCTION.format(
        summary=summary + (f"; not so: {', '.join(others)}." if others else "."),
        head=table,
        layers=sizes.LAYERS,
        checkpoints=" and ".join(map(str, sizes.CHECKPOINTS)),
        further=next(iter(families.FURTHER)),
        longest=len(PROMPTS[-1]),
        window=sizes.WINDOW,
        new=NEW_TOKENS,
    )
    return head + "\n".join(lines) + "\n" + classes(equal, families) + CLOSING


def read_rows(page: Path) -> dict[str, str]:
    """The lines of the table in a page, by family."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:] if page.exists() else []
    return {line.removeprefix("| ").split(" | ")[0]: line for line in lines}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="FAMILY", help="run these rows and write nothing")
    parser.add_argument("--classes", action="store_true", help="list the classes of transformers and run nothing")
    parser.add_argument("--update", action="store_true", help="with --only: replace these rows in the page")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "reference" / "models.md")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "tests"))
    families = importlib.import_module("families")
    if options.classes:
        return list_classes(families)
    unknown = sorted(set(options.only or ()) - families.FAMILIES.keys())
    if unknown:
        parser.error(f"no family {unknown[0]!r}: there are {', '.join(families.FAMILIES)}")
    logger = logging.getLogger("tide_export")
    rows, level = [], logger.level
    logger.setLevel(logging.ERROR)
    try:
        for name in options.only or families.FAMILIES:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(make_row(families, name, Path(folder)))
            print(rows[-1].markdown(), flush=True)
            if options.update or not options.only:  # row by row, so that an interrupted run keeps what it has
                lines = {**read_rows(options.output), name: rows[-1].markdown()}
                options.output.write_text(page([lines[key] for key in families.FAMILIES if key in lines], families))
    finally:  # main may be called from a program that has a log of its own
        logger.setLevel(level)
    return 0 if all(row.expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
