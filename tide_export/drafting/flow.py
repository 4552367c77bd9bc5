"""`tide-export draft`: trains a drafter and writes it into the bundle, after checks that it can."""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

from tide_export.bundle.file_names import MANIFEST_FILE, REPORT_FILE
from tide_export.bundle.store import put_files, replace_manifest
from tide_export.calibration.distributed import Processes
from tide_export.common.files import TEMPORARY, check_writable, failure
from tide_export.common.progress import stage
from tide_export.data.sequences import load_tokenizer
from tide_export.drafting.bundle import check_bundle, write_drafter
from tide_export.drafting.config import CHANGEABLE, DraftConfig
from tide_export.drafting.prompts import check_prompts, choose_prompts
from tide_export.drafting.report import DraftReport
from tide_export.drafting.run import Run
from tide_export.drafting.store import check_settings, check_space
from tide_export.drafting.target import Target
from tide_export.errors import DraftError
from tide_export.model.source import load_model
from tide_export.report.drafts import with_drafts
from tide_export.runtime.engine import load
from tide_export.tuning.drafter_gain import with_drafter

logger = logging.getLogger("tide_export")

MEASURED_PROMPTS, MEASURED_TOKENS = 12, 64  # for the final comparison of lossless mode with full depth


def draft(
    model: str,
    bundle: str | os.PathLike[str],
    config: DraftConfig | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> DraftReport | None:
    """Trains a drafter for `model` on the answers of `bundle` and writes it into the bundle.

    A run that was interrupted resumes with the remaining minutes when it is started again; a finished run resumes when
    it is given more minutes.

    Args:
        model: folder, hub id or GGUF file.
        cache: folder for answers and snapshots, which is kept; None: a hidden folder beside the bundle, then removed.
        trust_remote_code: run Python code from the model's folder (see `model.source.load_model`).

    Returns:
        The report; None in every process but the main one.

    Raises:
        DraftError: the prompts cannot be used, the model answers with a token or two, the bundle is of another model
            or cannot hold a drafter, the cache is of another training, or the disk is full.
        TideError: the model or the bundle cannot be read or run.
    """
    config, target_bundle = config or DraftConfig(), Path(bundle).absolute()
    folder = target_bundle.parent / f".{target_bundle.name}.draft" if cache is None else Path(cache).absolute()
    processes = Processes.current()
    opened = check_bundle(bundle)
    texts = check_prompts(config)
    check_space(folder, 0, "the answers")
    try:
        check_writable(target_bundle / MANIFEST_FILE)
    except OSError as error:
        raise DraftError(f"cannot write to bundle {bundle}: {failure(error, target_bundle)}") from error
    with stage("loading the model"):
        source = load_model(model, trust_remote_code=trust_remote_code)
        target = Target.of(source)
        check_bundle(bundle, source.weights_sha256, target.embeddings.shape[1])
        contexts = source.context_length, opened.manifest.model.context_length
        source.release()
    context = min((length for length in contexts if length is not None), default=None)
    prompts = choose_prompts(texts, load_tokenizer(model, trust_remote_code), config, context)
    settings = config.model_dump(mode="json", exclude=CHANGEABLE) | {
        "model": target.weights_sha256,
        "weights": opened.manifest.weights,
        "prompts_sha256": prompts.sha256,
        "processes": processes.count,
    }
    if processes.main:
        check_settings(folder, settings)
    processes.barrier()
    run = Run(opened, target, prompts, config, folder, processes)
    try:
        run.train()
    except KeyboardInterrupt:
        logger.info("interrupted: the same command resumes from %s", folder)
        raise
    finally:
        run.close()
    if not processes.main:
        return None
    report = run.report(str(bundle), settings | {"source": model} | config.model_dump(mode="json", include=CHANGEABLE))
    with stage("writing the drafter"):
        write_drafter(bundle, run.drafter(report.provenance()))
    speed = None
    if measured_prompts := run.prompts(MEASURED_PROMPTS):  # empty if each held-out answer is one token
        with stage("measuring what drafts gain here"):
            speed = _measure(bundle, measured_prompts, config.temperature, report)
    if cache is None:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(report, measured_speed=speed)


def _measure(
    bundle: str | os.PathLike[str], prompts: list[list[int]], temperature: float, report: DraftReport
) -> float:
    """Stores the drafting settings and the mode of `auto` measured here in the bundle and its report.

    Returns:
        The speed of lossless mode over full depth's.
    """
    engine = load(bundle, provider="cpu", verify=False)
    manifest, measured = with_drafter(engine, prompts, temperature, MEASURED_TOKENS)
    page = engine.bundle.path / REPORT_FILE
    text = page.read_text("utf-8") if REPORT_FILE in manifest.files else ""
    new = with_drafts(text, report.provenance(), measured.drafts, measured.speedup)
    if new is None:
        replace_manifest(engine.bundle, manifest)
        return measured.speedup
    temporary = page.with_name(f".{REPORT_FILE}.{TEMPORARY}")
    try:
        temporary.write_text(new, "utf-8")
        put_files(engine.bundle, {REPORT_FILE: temporary}, manifest, manifest)
    except OSError as error:
        raise DraftError(f"cannot write {page}: {failure(error, page.parent)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return measured.speedup
