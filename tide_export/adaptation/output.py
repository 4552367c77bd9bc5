"""Writes the trained model as a Hugging Face folder, after checks that it can be written."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from tide_export.adaptation.snapshot import Snapshot
from tide_export.common.files import TEMPORARY, failure, fsync, is_no_space
from tide_export.common.formatting import size
from tide_export.common.progress import quiet_transformers
from tide_export.errors import AdaptError
from tide_export.model.source import SourceModel

ADAM_STATES = 2  # numbers per parameter


def check_output(output: Path, snapshot: Snapshot) -> None:
    """Checks that the output does not exist and that its folders can be written.

    Raises:
        AdaptError: it exists, or a folder cannot be written.
    """
    refuse_existing(output)
    for folder in (output.parent, snapshot.folder):
        probe = folder / f".{output.name}.{TEMPORARY}-probe"
        missing = [entry for entry in (folder, *folder.parents) if not entry.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except (OSError, ValueError) as error:
            raise AdaptError(f"cannot write to {folder}: {failure(error, folder)}") from error
        finally:
            for entry in missing:
                with contextlib.suppress(OSError):
                    entry.rmdir()


def refuse_existing(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise AdaptError(f"output '{output}' already exists: choose another name or delete it")


def check_space(source: SourceModel, output: Path, snapshot: Snapshot, dtype: torch.dtype, trained: int) -> None:
    """Checks that the disks have room for the model and two snapshots of `trained` float32 parameters.

    Raises:
        AdaptError: they have not.
    """
    model = sum(parameter.numel() for parameter in source.model.parameters()) * dtype.itemsize
    two = 2 * trained * 4 * (1 + ADAM_STATES)  # the old snapshot is replaced once the new one is complete
    if snapshot.file.exists():
        two -= snapshot.file.stat().st_size
    for what, folder, needed in (("model", output.parent, model), ("snapshot to resume from", snapshot.folder, two)):
        existing = next(entry for entry in (folder.absolute(), *folder.absolute().parents) if entry.exists())
        if (free := shutil.disk_usage(existing).free) < needed:
            raise AdaptError(
                f"no space left on the disk for the {what} in {folder}: it takes {size(needed)} and {size(free)} are "
                "free"
            )


def round_weights(source: SourceModel, dtype: torch.dtype) -> None:
    """Rounds every parameter to `dtype`, in which it will be stored, and keeps its own dtype."""
    for parameter in source.model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)


def write_model(
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    dtype: torch.dtype,
    write_more: Callable[[Path], None],
) -> None:
    """Writes weights, configs and tokenizer to the folder `output`, which appears once it is complete.

    Args:
        dtype: of the stored weights; the model's parameters have it afterwards.
        write_more: adds files to the folder it is given.

    Raises:
        AdaptError: the folder cannot be written, or exists by now.
    """
    temporary = output.parent / f".{output.name}.{TEMPORARY}"
    for parameter in source.model.parameters():
        parameter.data = parameter.data.to(dtype)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with quiet_transformers():
            source.model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        write_more(temporary)
        for file in temporary.iterdir():
            file.chmod((temporary / CONFIG_NAME).stat().st_mode)  # safetensors creates its file with mode 600
            fsync(file)
        refuse_existing(output)
        temporary.rename(output)
        fsync(output.parent)
    except AdaptError:
        raise
    except Exception as error:  # transformers, safetensors and tokenizers raise many types
        if isinstance(error, OSError) or is_no_space(error, output.parent):
            raise AdaptError(f"cannot write the model to {output}: {failure(error, output.parent)}") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
