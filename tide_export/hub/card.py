"""Writes the model card of a bundle: how to run it, and the tables of its report, as Markdown.

The card comes from the manifest, where `calibrate`, `export`, `tune` and `draft` record their measurements, except for
the sentence at the top, which comes from the report.
"""

import html
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, ModelInfo

from tide_export.bundle.auto_mode import AutoMode, bounds
from tide_export.bundle.file_names import REPORT_FILE, TEMPLATE_FILE
from tide_export.bundle.inspect import describe_bundle
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import Bundle
from tide_export.common.formatting import percent
from tide_export.common.version import __version__

LEAD = re.compile(r'<p class="lead">(.*?)</p>', re.DOTALL)  # the report's sentence on the gains
LICENSE_FIELDS = ("license", "license_name", "license_link")
TAGS = ["tide_export", "early-exit", "onnx"]
EXIT_COLUMNS = {
    "may leave (label)": "positive_rate",
    "leave at the threshold": "exit_rate",
    "precision": "precision",
    "recall": "recall",
    "calibration error": "ece",
}


def model_card(bundle: Bundle, repo: str, revision: str | None, source: ModelInfo | None) -> str:
    """Returns the text of the repository's README.md.

    Args:
        repo, revision: where the bundle will be uploaded.
        source: the hub's record of the model that the bundle was made from; None: the hub has none.
    """
    manifest = bundle.manifest
    quantized = manifest.quantization is not None
    source_card = {} if source is None or source.card_data is None else source.card_data.to_dict()
    licensed: dict[str, Any] = {name: value for name, value in source_card.items() if name in LICENSE_FIELDS}
    data = ModelCardData(
        base_model=None if source is None else source.id,
        base_model_relation="quantized" if source is not None and quantized else None,
        library_name="tide_export",
        pipeline_tag="text-generation",
        tags=[*TAGS, manifest.weights] if quantized else TAGS,
        **licensed,
    )
    name = _line(PurePath(manifest.model.name).name if source is None else source.id)
    parts = [
        f"# {name} with early exits",
        _summary(manifest, name),
        _lead(bundle),
        _commands(manifest, repo, revision),
        _quality(manifest, describe_bundle(bundle, verified=True)["tuning_in_force"]),
        _speed(manifest.auto),
        _exits(manifest),
        _report(manifest),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"))


def _summary(manifest: Manifest, name: str) -> str:
    model = manifest.model
    layers = " or ".join(map(str, manifest.checkpoints))
    exits = f"in which a token may leave after {layers} of {model.num_layers} layers" if layers else "at full depth"
    drafter = ", with a drafter for lossless mode" if manifest.drafter is not None else ""
    return (
        f"A bundle of tide_export: {name} ({model.architecture}, {model.num_layers} layers) as an ONNX graph with "
        f"{manifest.weights} weights, {exits}{drafter}."
    )


def _lead(bundle: Bundle) -> str:
    """Returns the first sentences of the report; empty if the bundle has none."""
    if REPORT_FILE not in bundle.manifest.files:
        return ""
    found = LEAD.search(bundle.file(REPORT_FILE).read_bytes().decode(errors="replace"))
    return _line(html.unescape(found[1])) if found else ""


def _commands(manifest: Manifest, repo: str, revision: str | None) -> str:
    folder = repo.rpartition("/")[2]
    branch = "" if revision is None else f" --revision {revision}"
    engines = (
        "" if manifest.networks is None else f"\n\nTensorRT: `tide-export build {folder}` on the GPU's machine first."
    )
    if manifest.has_cuda_networks:
        engines = "\n\nOn an NVIDIA GPU: `pip install -e '.[cuda]'`."
    chat = " --chat" if TEMPLATE_FILE in manifest.files else ""
    return (
        "## Run it\n\n"
        "```bash\n"
        "pip install -e '.[cpu]'    # in a clone of tide_export, which no package index has\n"
        f"tide-export pull {repo}{branch}\n"
        f'tide-export generate {folder} --prompt "Once upon a time"{chat}\n'
        "```\n\n"
        "```python\n"
        "import tide_export\n\n"
        f'engine = tide_export.load("{folder}")\n'
        'prompt = engine.tokenizer.encode("Once upon a time")\n'
        "print(engine.tokenizer.decode(engine.generate(prompt, max_new_tokens=64).tokens))\n"
        f"```{engines}"
    )


def _quality(manifest: Manifest, tuning_in_force: bool) -> str:
    """Returns the section of the thresholds that `calibrate` chose and the guarantee of `tune`."""
    depth, record = manifest.model.num_layers, manifest.calibration or {}
    points = [p for p in record.get("operating_points") or [] if p["epsilon"] == p.get("perplexity_epsilon")]
    parts = ["## Quality"]
    if points:
        headers = [
            "at most, of both",
            "changed tokens",
            "change of perplexity",
            f"layers of {depth}",
            "operations saved",
            "thresholds",
        ]
        rows = [
            [
                percent(point["epsilon"], 1),
                f"{percent(point['changed'], 1)} ± {percent(point['changed_error'], 1)}",
                f"{100 * point['perplexity']:+.1f} ± {percent(point['perplexity_error'], 1)}",
                f"{point['layers']:.1f}",
                percent(point["saved"], 1),
                ", ".join(f"{t:.3f}" if t < 1 else "off" for t in point["thresholds"]),
            ]
            for point in points
        ]
        parts += [
            "Thresholds chosen on one half of held-out text; all else was measured on the other half "
            f"({points[0]['tokens']:,} tokens). A token is changed where another one than full depth's is drawn with "
            f"the same noise at temperature {points[0]['temperature']:g} (0: where another one is likeliest); "
            "perplexity is that of full depth's own tokens.",
            _table(headers, rows),
        ]
    if tuning_in_force and manifest.tuning is not None:
        tuning = manifest.tuning
        parts.append(
            f"The bundle's own thresholds are certified: with probability {1 - tuning['delta']:g} at most "
            f"{percent(tuning['epsilon'], 1)} changed tokens on such text "
            f"({tuning['layers_per_token']:.1f} of {depth} layers per token)."
        )
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _speed(auto: AutoMode | None) -> str:
    """Returns the section of the measured speed of modes `exit` and `lossless`; empty if not measured."""
    if auto is None:
        return ""
    share = bounds(auto)
    gains = [("exit", auto.exit_speedup, share), ("lossless", auto.lossless_speedup, "the full model's tokens")]
    rows = [
        [f"{mode} (auto)" if mode == auto.mode else mode, f"{speed:.2f}x", tokens]
        for mode, speed, tokens in gains
        if speed is not None
    ]
    if not rows:
        return ""
    how = f"Decoding one sequence, over full depth, on {_line(auto.machine)}; `tide-export bench` measures yours."
    return "\n\n".join(["## Speed", how, _table(["mode", "speed", "text"], rows)])


def _exits(manifest: Manifest) -> str:
    """Returns the section of each router's precision and recall; empty if not recorded."""
    calibration = manifest.calibration or {}
    record = calibration.get("report") or {}
    if not record:
        return ""
    rows = [
        [f"after {layers} layers", f"{report['threshold']:.3f}"]
        + ["-" if (share := report.get(key)) is None else percent(share, 1) for key in EXIT_COLUMNS.values()]
        for layers, report in sorted(record.items(), key=lambda item: int(item[0]))
    ]
    text = f"Routers on held-out text, each on all tokens; calibrated on {_line(calibration.get('dataset'))}."
    return "\n\n".join(["## Exits", text, _table(["checkpoint", "threshold", *EXIT_COLUMNS], rows)])


def _report(manifest: Manifest) -> str:
    versions = ", ".join(f"{tool} {version}" for tool, version in sorted(manifest.versions.items()))
    made = f"Made with {_line(versions)}; card by tide_export {__version__}."
    if REPORT_FILE not in manifest.files:
        return f"## Report\n\n{made}"
    picture = REPORT_FILE.replace(".html", ".png")
    return f"## Report\n\n[{REPORT_FILE}]({REPORT_FILE}) has all of it.\n\n![what the exits gain]({picture})\n\n{made}"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(_line(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _line(text: Any) -> str:
    """Returns untrusted text on one line, with HTML escaped."""
    return html.escape(" ".join(str(text).split()), quote=False)
