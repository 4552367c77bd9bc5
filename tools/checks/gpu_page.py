"""Writes the results and figures of a `gpu_session` as a page, for docs/measurements/beside-others.md."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = """# On a GPU

Written by `tools/checks/gpu_session.py` ([how](../contributing/gpu-session.md)), which runs everything
that only a GPU can show; figures are copied as its steps recorded them."""
NOTHING = """**Nothing has run on a GPU yet.** What follows is a rehearsal on a machine without one: each step that
needs a GPU says why it was skipped. Times on the CPU, which others used too, show no more than that the steps run."""


def page(machine: Mapping[str, str], results: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """The whole page.

    Args:
        machine: of `gpu_machine.facts`.
        results: of the steps, in order.
        folder: of the session, with the figures of its steps.
    """
    where = f"{machine['date']}; GPU: {machine['gpu']}; {machine['cpu']}; {machine['versions']}."
    parts = [HEAD, where] if machine["gpu"] != "none" else [HEAD, NOTHING, where]
    shown = [result for result in results if not result["outcome"].endswith(" has not passed")]
    parts += ["## Steps", table(["step", "outcome", "seconds", "shows"], map(_step, shown))]
    if len(shown) < len(results):
        parts.append(f"{len(results) - len(shown)} more steps rest on steps that have not passed.")
    parts += _of_networks(folder, results)
    for file in sorted(folder.glob("exits-*.json")):
        title = f"## A token's time by the layers it runs: {file.stem.removeprefix('exits-')}"
        parts += [title, _of_records(json.loads(file.read_text()))]
    parts += _of_kernels(folder)
    for file in sorted(folder.glob("batch-*.json")):
        rows = json.loads(file.read_text())
        parts += [f"## Sequences batched: {file.stem.removeprefix('batch-')}", _of_records(rows)]
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _step(result: Mapping[str, Any]) -> list[object]:
    return [result["step"], result["outcome"], f"{result['seconds']:g}", result["shows"]]


def _of_networks(folder: Path, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The segment networks: a row per engine, mode and number of sequences."""
    rows, notes = [], []
    for result in results:
        file = folder / f"{result['step']}.json"
        if not result["step"].startswith("networks-") or not file.is_file() or result["outcome"].startswith("skipped"):
            continue
        found = json.loads(file.read_text())
        engine = f"{found['engine']}, {found['precision']}"
        steps = found["steps"]
        notes.append(
            f"- {engine}: {steps['steps']} steps on the same tokens, logits within {steps['largest']:.1e} of the "
            "largest" + "".join(f"; **differs: {sentence}**" for sentence in found["wrong"])
        )
        for row in found["rows"]:
            speeds = dict(row["speeds"])
            own = speeds.pop(found["engine"])
            beside = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
            equal = f"{row['equal']} / {row['alone']} of {row['tokens']}"
            rows.append([engine, row["mode"], row["sequences"], f"{own:.1f}", beside, equal])
    if not rows:
        return []
    heads = ["where", "mode", "sequences", "tokens/s", "beside, tokens/s"]
    heads.append("tokens equal to the CPU's graph / to one by one")
    return ["## Segment networks", table(heads, iter(rows)), "\n".join(notes)]


def _of_kernels(folder: Path) -> list[str]:
    file = folder / "kernels.json"
    if not file.is_file():
        return []
    found = json.loads(file.read_text())
    rows = found.pop("times", None) if isinstance(found, dict) else found
    notes = [f"{name}: {value}" for name, value in found.items()] if isinstance(found, dict) else []
    return ["## Kernels, microseconds", "; ".join(notes), _of_records(rows or [])]


def _of_records(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [[f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    return table(list(rows[0]), cells) if rows else ""
