"""`tide-export inspect`: describes a bundle, as a dictionary and as text.

Reads the manifest and the segment networks' list of weights, and checks the files against the manifest. Needs neither
an engine nor PyTorch.
"""

import os
from dataclasses import asdict
from typing import Any

from tide_export.bundle.attention_kernels import attention_kernels
from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.kv_buffers import default_context, is_fused, kv_buffers
from tide_export.bundle.manifest import INT8_MATMULS, Manifest
from tide_export.bundle.model_info import FLOAT_BYTES
from tide_export.bundle.network_weights import held_size, network_weights, repeated_size
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.plan_fields import FP8, INT4
from tide_export.common.formatting import size, table
from tide_export.thresholds.resolve import resolve_thresholds

REPORT = "report"  # where the calibration record keeps one entry per checkpoint (see `calibration.fit_router.assess`)
REPORT_COLUMNS = ("positive_rate", "exit_rate", "precision", "recall", "accuracy", "loss", "base_loss", "tokens")

TUNING_COLUMNS = ("path_risk", "risk", "p_value", "layers", "passed")


def describe(path: str | os.PathLike[str], verify: bool = True) -> dict[str, Any]:
    """Returns all that `inspect` prints, as JSON types.

    Raises:
        BundleError: the path is not a bundle, or a file is missing, truncated or (with `verify`) corrupt.
    """
    bundle = open_bundle(path, verify=verify)
    found: dict[str, Any] = {"network_weights": _network_weights(bundle)}
    if bundle.manifest.has_cuda_networks:
        found["attention_kernels"] = attention_kernels(bundle)
    return describe_bundle(bundle, verify) | found


def describe_bundle(bundle: Bundle, verified: bool) -> dict[str, Any]:
    """Describes an open bundle; `verified` tells whether its hashes were checked."""
    manifest = bundle.manifest
    model = manifest.model
    return {
        "bundle": str(bundle.path),
        "created": manifest.created,
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "weights_sha256": model.weights_sha256,
            "num_layers": model.num_layers,
            "loops": model.loops or 1,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "eos_token_ids": list(model.eos_token_ids),
            "remote_code": bool(manifest.remote_code),
        },
        "targets": list(manifest.targets),
        "weights": manifest.weights,
        "quantization": None if manifest.quantization is None else asdict(manifest.quantization),
        "opset": manifest.opset,
        "min_layers": manifest.min_layers,
        "max_pending": manifest.max_pending,
        "compaction_threshold": manifest.compaction_threshold,
        "kv_cache": manifest.kv_dtype,
        "kv_bytes_per_token": manifest.kv_token_bytes,
        "state_bytes": manifest.model.state_bytes,
        "lora": _lora(manifest),
        "segments": _segments(bundle),
        "networks": None if manifest.networks is None else asdict(manifest.networks),
        "network_kv": _network_kv(manifest),
        "network_weights": None,
        "attention_kernels": None,
        "engines": None if manifest.engines is None else asdict(manifest.engines),
        "inputs": [asdict(tensor) for tensor in manifest.inputs],
        "outputs": [asdict(tensor) for tensor in manifest.outputs],
        "calibration": manifest.calibration,
        "tuning": manifest.tuning,
        "tuning_in_force": _tuning_in_force(manifest),
        "auto": None if manifest.auto is None else asdict(manifest.auto),
        "drafter": manifest.drafter and asdict(manifest.drafter),
        "drafting": None if manifest.drafting is None else asdict(manifest.drafting),
        "versions": manifest.versions,
        "files": {name: asdict(info) for name, info in manifest.files.items()},
        "files_verified": verified,
    }


def _lora(manifest: Manifest) -> dict[str, int] | None:
    """Returns rank, target layers and bytes of the low-rank adapters that fit; None: no adapters."""
    lora = manifest.model.lora
    if lora is None:
        return None
    return {"rank": lora.rank, "linear_layers": len(lora.targets), "bytes": FLOAT_BYTES * lora.size}


def _tuning_in_force(manifest: Manifest) -> bool:
    """Returns whether the thresholds are the certified ones; false if the manifest was edited by hand."""
    record = manifest.tuning or {}
    stored = (record.get("thresholds"), record.get("min_layers"))
    return bool(record.get("certified")) and stored == (list(manifest.thresholds), manifest.min_layers)


def _network_kv(manifest: Manifest) -> dict[str, int] | None:
    """Returns the bytes of one sequence's K/V on the GPU, and those a token at full depth moves."""
    if manifest.networks is None:
        return None
    context, layers = default_context(manifest.networks.capacity), range(manifest.model.num_layers)
    fused = all(is_fused(manifest, k) for k in range(len(manifest.segment_sizes)))
    return {"context": context, **asdict(kv_buffers(manifest, layers, context, fused))}


def _network_weights(bundle: Bundle) -> dict[str, int] | None:
    """Returns the bytes of all networks' weights, and how many of them are copies of another network's."""
    networks = network_weights(bundle)
    if not networks:
        return None
    return {"size": held_size(networks), "repeated": repeated_size(networks)}


def _segments(bundle: Bundle) -> list[dict[str, Any]]:
    """Returns first and last layer of each segment, and the checkpoint at its end, if any."""
    manifest = bundle.manifest
    active = resolve_thresholds(manifest.checkpoints, manifest.thresholds, manifest.min_layers)
    segments, first = [], 0
    for k, layers in enumerate(manifest.segment_sizes):
        entry: dict[str, Any] = {"segment": k, "first_layer": first, "last_layer": first + layers - 1}
        first += layers
        if k < len(manifest.checkpoints):
            entry |= {
                "checkpoint": first,
                "threshold": manifest.thresholds[k],
                "exits": active[k] < 1,
            }  # no score is above 1
        segments.append(entry)
    return segments


def _adapters(lora: dict[str, int] | None) -> list[str]:
    if lora is None:
        return []
    layers, each = lora["linear_layers"], size(lora["bytes"])
    return [f"adapters   room for adapters (LoRA) up to rank {lora['rank']} of {layers} linear layers, {each} each"]


def _quantization(described: dict[str, Any]) -> str:
    used = described["quantization"]
    if used is None:
        return ""
    points = "" if used["symmetric"] else ", with zero points"
    blocks = f"blocks of {used['block_size']}{points}"
    mean = "" if used.get("budget") is None else f"at most {used['budget']:g} bits a weight, "
    return f", {mean}{used['bits']} bits by {used['method']}, {blocks}, level {used['accuracy_level']}"


def _company(described: dict[str, Any]) -> str:
    """Says whether logits have the same bits in any company (docs/contributing/verified.md)."""
    used = described["quantization"]
    if used is not None and used["accuracy_level"] != INT8_MATMULS:
        level = used["accuracy_level"]
        return f"rounds otherwise than alone: MatMulNBits of accuracy level {level} depends on the rows beside it"
    if used is not None and not used["symmetric"]:
        return "the same bits as alone where it was tried, but MatMulNBits, of zero points, promises none"
    return "the same bits as alone, in lists and servers, on x86-64 with AVX2"


def render(described: dict[str, Any]) -> str:
    """Returns the text `inspect` prints."""
    model, files = described["model"], described["files"]
    in_turns = f" in {model['loops']} loops" if model["loops"] > 1 else ""
    total = sum(info["size"] for info in files.values())
    checked = "sizes and sha256 match" if described["files_verified"] else "sizes match, sha256 not checked"
    lines = [
        f"bundle     {described['bundle']}  ({'+'.join(described['targets'])}, {described['weights']}, "
        f"opset {described['opset']})",
        f"created    {described['created']}",
        f"model      {model['name']}  ({model['architecture']}, {model['num_layers']} layers{in_turns}, "
        f"hidden {model['hidden_size']}, vocabulary {model['vocab_size']}{', code of its own' * model['remote_code']})",
        f"weights    sha256 {model['weights_sha256'][:12]}{_quantization(described)}",
        f"context    {model['context_length'] or 'unlimited'} tokens, "
        f"{size(described['kv_bytes_per_token'])} of K/V in {described['kv_cache']} per token"
        + (f", {size(described['state_bytes'])} of recurrent states per sequence" if described["state_bytes"] else ""),
        *_adapters(described["lora"]),
        f"stops at   token {', '.join(map(str, model['eos_token_ids'])) or '- (no end-of-sequence token)'}",
        f"exits      {_exits(described)}",
        f"mode auto  {_auto(described['auto'])}",
        f"drafter    {_drafter(described['drafter'])}",
        f"company    {_company(described)}",
        "",
        "segments",
        table(["segment", "layers", "exit after", "threshold"], [_segment_row(s) for s in described["segments"]]),
    ]
    lines += _network_lines(described)
    lines += ["", *_calibration_lines(described["calibration"])]
    lines += ["", *_tuning_lines(described["tuning"], described["tuning_in_force"])]
    for key in ("inputs", "outputs"):
        rows = [[name, dtype, shape] for name, dtype, shape in _grouped(described[key])]
        lines += ["", key, table(["name", "type", "shape"], rows, left=3)]
    lines += [
        "",
        f"files      {size(total)} in {len(files)} files; {checked}",
        table(["file", "size", "sha256"], [[n, size(f["size"]), f["sha256"][:12]] for n, f in files.items()]),
        "",
        "made with  " + ", ".join(f"{tool} {version}" for tool, version in sorted(described["versions"].items())),
    ]
    return "\n".join(lines)


def _auto(record: dict[str, Any] | None) -> str:
    return sentence(None if record is None else AutoMode(**record)).removeprefix("mode auto is ")


def _drafter(info: dict[str, Any] | None) -> str:
    """Describes the drafter by its record."""
    if info is None:
        return "none"
    record = info["record"] or {}
    if "head" in record:
        return f"the {record['layout']} head {record['head']}"
    acceptance = record.get("acceptance", {}).get("sampled", [])
    accepted = f", {acceptance[0]:.0%} of first drafts accepted on held-out answers" if acceptance else ""
    return f"trained on {record.get('tokens', 'an unknown number of')} tokens of answers{accepted}"


def _network_lines(described: dict[str, Any]) -> list[str]:
    """Describes the segment networks, and what runs them, if any."""
    networks, plans, kernels = described["networks"], described["engines"], described["attention_kernels"]
    if networks is None:
        return []
    kv, weights = described["network_kv"], described["network_weights"]
    lines = [
        "",
        f"networks   {_precision(networks)}, K/V buffers of {networks['capacity']} tokens, runs over at most "
        f"{networks['max_tokens']}, {networks['max_batch_size']} sequences in a batch",
        f"K/V        {size(kv['held'])} on the GPU for each sequence, however short; a token at full depth "
        + ("" if kernels is not None else f"copies {size(kv['copied'])} and ")
        + f"reads {size(kv['read'])} of it at {kv['context']} tokens",
    ]
    if weights is not None:
        shared = "none: a tied embedding" if networks.get("embedding") is None else "the embedding alone: shortlists"
        lines.append(
            f"memory     {size(weights['size'])} of weights, {size(weights['repeated'])} of them copies, because "
            f"networks share {shared}, tables of positions"
        )
    if kernels is not None:
        return [*lines, f"attention  {_attention(kernels)}"]
    if plans is None:
        return [*lines, "plans      none: tide-export build builds them"]
    gpus = ", ".join(plans["compute_capabilities"]) or "of all GPUs it supports"
    profiles = ", ".join(
        f"{p['name']} {p['batch_size']} x {p['min_tokens']}-{p['max_tokens']}" for p in plans["profiles"]
    )
    return [
        *lines,
        f"plans      {plans['flavour']} {plans['version']}, compute capability {gpus}, built in {plans['seconds']:g} s",
        f"profiles   sequences x tokens of a run: {profiles}",
        f"plugins    {_plugins(plans['plugins'])}",
        *([] if plans["built"] is None else [_built_table(plans["built"])]),
    ]


def _attention(kernels: list[dict[str, Any]]) -> str:
    """Describes the kernels of ONNX Runtime's attention by `attention_kernels.attention_kernels`."""
    kinds = (
        f"{one['kernel']} in {one['layers']} layers (heads of {one['head_dim']}, {one['group']} per K/V head"
        + (", a softcap)" if one["softcap"] else ")")
        for one in kernels
    )
    return f"of one new token by {', '.join(kinds)}, of more by Flash; CUDA kernels of onnxruntime 1.31"


def _precision(networks: dict[str, Any]) -> str:
    matrices = {None: "", INT4: " with matrices in int4", FP8: " with matrices and their inputs in fp8"}
    return networks["weights"] + matrices[networks["matrices"]]


def _built_table(built: dict[str, dict[str, int]]) -> str:
    """Returns a table of the builder's reports on the plans."""
    rows = []
    for name, plan in built.items():
        fused, attentions = plan["fused_attention_layers"], plan["attention_layers"]
        attention = "-" if not attentions else f"{fused} of {attentions} fused"
        memory = (size(plan["weights_bytes"]), size(plan["activation_bytes"]))
        rows.append([name, *memory, plan["layers"], attention])
    return table(["plan", "weights", "working memory", "layers", "attention"], rows)


def _plugins(plugins: dict[str, Any] | None) -> str:
    if plugins is None:
        return "none: the networks' functions"
    return f"of tide_export {plugins['version']} in {', '.join(plugins['engines'])}"


def _segment_row(segment: dict[str, Any]) -> list[object]:
    layers = f"{segment['first_layer']}-{segment['last_layer']}"
    if "checkpoint" not in segment:
        return [segment["segment"], layers, "-", "-"]
    off = "off" if segment["threshold"] >= 1 else "off (min_layers)"
    note = _short(segment["threshold"]) if segment["exits"] else off
    return [segment["segment"], layers, f"{segment['checkpoint']} layers", note]


def _exits(described: dict[str, Any]) -> str:
    if len(described["segments"]) == 1:
        return "none: the bundle has no checkpoints"
    limit = f"at most {described['max_pending']} tokens are pending before a segment runs"
    return f"from {described['min_layers']} layers on; {limit}"


def _calibration_lines(record: dict[str, Any] | None) -> list[str]:
    """Formats the calibration record: a line per plain field, and a table of the report per checkpoint."""
    if not record:
        return ["calibration  none recorded (no checkpoints, or routers from elsewhere)"]
    lines = ["calibration"]
    for key, value in record.items():
        if key != REPORT and isinstance(value, str | int | float):
            shown = value[:12] if key.endswith("sha256") and isinstance(value, str) else value
            lines.append(f"  {key}: {shown}")
    report = record.get(REPORT)
    if isinstance(report, dict) and report and all(isinstance(entry, dict) for entry in report.values()):
        rows = [[layers, *(_short(entry.get(c)) for c in REPORT_COLUMNS)] for layers, entry in report.items()]
        lines += ["", table(["checkpoint", *REPORT_COLUMNS], rows)]
    return lines


def _tuning_lines(record: dict[str, Any] | None, in_force: bool) -> list[str]:
    """Formats the guarantee of `tune`: a line per number, and a table of the tested candidates."""
    if not record:
        return ["thresholds  without a guarantee (see `tune`)"]
    lines = ["thresholds  certified by `tune`"]
    if not record.get("certified"):
        lines = ["thresholds  `tune` found none that passed: nothing exits"]
    elif not in_force:
        lines = ["thresholds  are NOT those that `tune` certified, which the record below is about"]
    for key, value in record.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            shown = value[:12] if key.endswith("sha256") and isinstance(value, str) else value
            lines.append(f"  {key}: {_short(shown)}")
    tested = record.get("path")
    if isinstance(tested, list) and tested and all(isinstance(entry, dict) for entry in tested):
        rows = [[number, *(_short(entry.get(c)) for c in TUNING_COLUMNS)] for number, entry in enumerate(tested, 1)]
        lines += ["", table(["candidate", *TUNING_COLUMNS], rows)]
    return lines


def _short(value: object) -> object:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else value


def _grouped(tensors: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Joins tensors whose names differ in one number (layer or segment): `pages.{0..11}.key`."""
    groups: dict[tuple, list[int | None]] = {}
    for tensor in tensors:
        parts = tensor["name"].split(".")
        number = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit() and len(part) < 9), None)
        pattern = tuple("#" if i == number else part for i, part in enumerate(parts))
        key = (pattern, tensor["dtype"], "[" + ", ".join(map(str, tensor["shape"])) + "]")
        groups.setdefault(key, []).append(int(parts[number]) if number is not None else None)
    rows = []
    for (pattern, dtype, shape), members in groups.items():
        numbers = [n for n in members if n is not None]
        span = f"{{{min(numbers)}..{max(numbers)}}}" if len(numbers) > 1 else "".join(map(str, numbers))
        rows.append((".".join(span if part == "#" else part for part in pattern), dtype, shape))
    return rows
