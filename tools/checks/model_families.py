"""Writes the table of model families, docs/reference/models.md: calibrate, export and parity for every row.

    python tools/checks/model_families.py [--only FAMILY]... [--update] [--classes] [-o FILE]

A row is a tiny random model of tests/families.py, with the features its family is known for, saved to a folder with a
tokenizer of bytes. It is calibrated on the bundled text (where that gives nothing to learn its routers are random),
exported as `tide-export export` does it, the bundle loaded, and compared with the Hugging Face model at full depth and
with the oracle at thresholds that about half of the tokens pass, so that tokens wait and catch up. A row that fails
stays in the page with the sentence it failed with. Exit code 1 if a row is not what tests/families.py expects. With
`--only`, rows are printed and nothing is written, unless `--update` replaces them in the page. `--classes` runs nothing
and lists every class that AutoModelForCausalLM loads, with its rows or why it has none; exit code 1 if one has neither.
"""

import argparse
import importlib
import logging
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tide_export.bundle.file_names import ROUTERS_FILE
from tide_export.calibration.config import TideConfig
from tide_export.common.progress import quiet_transformers
from tide_export.errors import BuildError, CalibrationError, ProviderError, TideError, UnsupportedModelError
from tide_export.model.source import load_model
from tide_export.pipeline.flow import export
from tide_export.plans.rebuild import rebuild
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

Written by `python tools/checks/model_families.py`, which runs every row: {summary}

A row is a tiny random float32 model with the features its family is known for (`tests/families.py`): {layers} layers,
checkpoints after {checkpoints}; from {further} on 2 layers, one checkpoint. No row is a published model. A number says:

- **Equal**: tokens and exit layers are the Hugging Face model's at full depth, and the reference rule's with exits and
  1, 4 and 16 pending tokens (prompts of 1, 2 and {longest} tokens, windows of {window}, {new} new tokens). It is the
  largest difference of a logit relative to the largest logit.
- **TensorRT for RTX** builds plans of all networks, without a GPU, unless the line ends with why not. Models with
  recurrent states are for target onnxruntime alone ([why](../architecture/recurrent-states.md)).

Family, difference, features, limits:

```text
{table}
```
"""

REFUSED = """
## Refused

{groups}
"""

CLASSES = """
## Classes of transformers {version}

`AutoModelForCausalLM` loads {count} classes. {built} have rows here; {equal} of them ({share:.1f} %) are exported and
equal in all rows; of the {causal} that are causal language models on token ids, {causal_share:.1f} %. Without rows are
{unbuilt}: {names} (`--classes` says why).
"""

# What the sentence of a refused model says that is no causal language model on token ids.
NO_CAUSAL_MODEL = ("attends to later tokens", "cannot run on token ids alone")

CLOSING = """
## What is not taken as it is

- **Lengths**: up to where longrope or dynamic scaling changes earlier tokens' angles, Llama 4 attends in blocks, or
  keys are chosen (DeepSeek V3.2, GLM 5, MiniMax M3, Qwen 4, Doge). `export` prints the length.
- **Masks**: causal, a sliding window, or blocks of tokens; others are refused.
- **Experts**: one that no token chose is not read (Llama 4 runs all, as transformers does). Experts with equal scores
  up to rounding may be chosen differently; the check after export then fails, and `--no-validate` skips it.
- **Keys wider than values** (latent attention): both are stored at the wider width, decompressed.
- **Parts that cannot be found**: [adapters](../guide/your-own-model.md#models-whose-parts-cannot-be-found).
"""

Cells = tuple[str, str, str, str]


@dataclass
class Row:
    """One row of the page.

    Attributes:
        family: name in tests/families.py.
        features: as there, comma-separated.
        result: the largest relative difference of a logit, or "differs: ...", "refused" or "fails".
        tensorrt_rtx: "yes", or why there are no plans.
        note: the family's note, or the error.
        expected: whether the result is what tests/families.py foresees.
    """

    family: str
    features: str
    result: str
    tensorrt_rtx: str = "yes"
    note: str = ""
    expected: bool = True

    def cells(self) -> Cells:
        """Returns family, result, features ("-" for none) and notes."""
        said = self.tensorrt_rtx == "yes" or self.tensorrt_rtx.endswith("keeps recurrent states")
        engines = "" if said else f"TensorRT-RTX: {self.tensorrt_rtx}"
        return self.family, self.result, self.features or "-", "; ".join(filter(None, (self.note, engines)))


def tensorrt_rtx_build(bundle: Path) -> str:
    """What building TensorRT for RTX plans from the networks of `bundle` came to; no GPU is needed, or used."""
    try:
        rebuild(bundle, "tensorrt-rtx")
    except ProviderError:
        return "not tried: not installed"
    except BuildError as error:
        return str(error).split(": ")[0]
    return "yes"


def export_row(model: str, bundle: Path, config: TideConfig, max_length: int | None) -> str:
    """Exports with segment networks where these can be made; else why not. Routers are random where the tokens of a
    random model give nothing to learn."""
    options: dict[str, Any] = {"config": config, "max_length": max_length, "engines": False, "report": False}
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
        return str(error).split(",")[0]


def make_row(families: ModuleType, name: str, folder: Path) -> Row:
    """Runs family `name` from its config to the comparison, in `folder`."""
    family = families.FAMILIES[name]
    row = Row(name, ", ".join(family.features), "-", note=family.note)
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
        refused = export_row(model, bundle, config, None if built.context_length else families.CONTEXT)
        engine, source, routers = load(bundle, threads=1), load_model(model), RouterSet.load(bundle / ROUTERS_FILE)
        whole = engine.manifest.model.num_layers == source.num_layers
        thresholds = dividing_thresholds(source, routers, PROMPTS[-1])
        checks = [
            check_full(engine, source, PROMPTS, NEW_TOKENS),
            *(check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds, pending) for pending in PENDING),
        ]
        row.result = verdict(checks)
        row.tensorrt_rtx = refused or tensorrt_rtx_build(bundle)
        row.expected = not family.refused and whole and all(check.holds for check in checks)
    except TideError as error:
        row.result, row.note = "refused", str(error).replace(str(folder / "model"), name)
        row.expected = bool(family.refused) and family.refused in str(error)
    except Exception as error:  # a row must not end the table, whatever it is
        row.result, row.expected = "fails", False
        row.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return row


def verdict(checks: Sequence[Check]) -> str:
    """Returns the largest relative difference of a logit, or what differs first."""
    error = max(check.max_error / max(check.largest_logit, 1e-9) for check in checks)
    wrong = next((check for check in checks if not check.holds), None)
    if wrong is not None:
        return f"differs: {(wrong.differences or [f'logits by {error:.1g}'])[0]}"
    undecided = sum(check.within_tolerance for check in checks)
    return f"{error:.0e}" + (f", {undecided} undecided" if undecided else "")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token per byte after three special ones: any text, 259 ids."""
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
    """Returns the page's section on classes, given the families that are exported and equal."""
    rows = rows_of_classes(families)
    built = {name: found for name, found in rows.items() if found}
    good = sum(set(found) <= set(equal) for found in built.values())
    refusals = [[families.FAMILIES[family].refused for family in found] for found in built.values()]
    causal = sum(not set(reasons) & set(NO_CAUSAL_MODEL) for reasons in refusals)
    missing = [name for name in rows if name not in built]
    return CLASSES.format(
        version=transformers.__version__,
        count=len(rows),
        built=len(built),
        equal=good,
        share=100 * good / len(built),
        causal=causal,
        causal_share=100 * good / causal,
        unbuilt=len(missing),
        names=", ".join(missing),
    )


def refused_groups(rows: Sequence[Cells], families: ModuleType) -> str:
    """Returns a line for each reason: the families refused for it, and the sentence of the first of them."""
    groups: dict[str, list[Cells]] = {}
    for row in rows:
        reason = families.FAMILIES[row[0]].refused
        groups.setdefault(reason if reason and reason in row[3] else row[3], []).append(row)
    return "\n".join(f"- {', '.join(row[0] for row in group)}: {group[0][3]}" for group in groups.values())


def page(rows: Sequence[Cells], families: ModuleType) -> str:
    """Returns the text of docs/reference/models.md, from the cells of its rows."""
    sizes = importlib.import_module("tiny_configs")
    equal = [row[0] for row in rows if re.match(r"\de-\d\d", row[1])]
    refused = [row for row in rows if row[1] == "refused"]
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:{width}}  {'  '.join(row[1:])}".rstrip() for row in rows if row not in refused]
    head = INTRODUCTION.format(
        summary=f"{len(equal)} of {len(rows)} are exported and equal; {len(refused)} are [refused](#refused).",
        table="\n".join(lines),
        layers=sizes.LAYERS,
        checkpoints=" and ".join(map(str, sizes.CHECKPOINTS)),
        further=next(iter(families.FURTHER)),
        longest=len(PROMPTS[-1]),
        window=sizes.WINDOW,
        new=NEW_TOKENS,
    )
    return head + REFUSED.format(groups=refused_groups(refused, families)) + classes(equal, families) + CLOSING


def read_rows(page: Path) -> dict[str, Cells]:
    """Returns the cells of the page's rows, by family; those that are refused have no features there."""
    rows: dict[str, Cells] = {}
    text = page.read_text() if page.exists() else ""
    for line in text.partition("```text\n")[2].partition("\n```")[0].splitlines():
        family, result, features, *notes = re.split(" {2,}", line)
        rows[family] = family, result, features, "".join(notes)
    for line in text.partition("## Refused\n")[2].partition("\n## ")[0].splitlines():
        group, _, sentence = line.removeprefix("- ").partition(": ")
        rows.update({family: (family, "refused", "-", sentence) for family in group.split(", ") if sentence})
    return rows


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
            print("  ".join(rows[-1].cells()), flush=True)
            if options.update or not options.only:  # row by row, so that an interrupted run keeps what it has
                known = {**read_rows(options.output), name: rows[-1].cells()}
                options.output.write_text(page([known[key] for key in families.FAMILIES if key in known], families))
    finally:  # main may be called from a program that has a log of its own
        logger.setLevel(level)
    return 0 if all(row.expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
