"""Writes the trained model as a plain Hugging Face folder, in one step; checks beforehand that it can be written."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from tide_export.adaptation.checkpoint import Checkpoint
from tide_export.errors import AdaptError
from tide_export.files import TEMPORARY, failure, fsync, is_no_space
from tide_export.formatting import size
from tide_export.model.source import SourceModel
from tide_export.progress import quiet_transformers

ADAM_STATES = 2  # numbers per parameter


def check_output(output: Path, checkpoint: Checkpoint) -> None:
    """Refuses an output that is there, or folders that cannot be written.

    Raises:
        AdaptError: naming the folder.
    """
    refuse_existing(output)
    for folder in (output.parent, checkpoint.folder):
        probe = folder / f".{output.name}.{TEMPORARY}-probe"
        made = [entry for entry in (folder, *folder.parents) if not entry.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except (OSError, ValueError) as error:
            raise AdaptError(f"cannot write to {folder}: {failure(error, folder)}") from error
        finally:
            for entry in made:
                with contextlib.suppress(OSError):
                    entry.rmdir()


def refuse_existing(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise AdaptError(f"output '{output}' already exists: choose another name or delete it")


def check_space(source: SourceModel, output: Path, checkpoint: Checkpoint, dtype: torch.dtype, trained: int) -> None:
    """Compares the free space with what the model and two states of `trained` float32 parameters need.

    Raises:
        AdaptError: it is less.
    """
    model = sum(parameter.numel() for parameter in source.model.parameters()) * dtype.itemsize
    states = 2 * trained * 4 * (1 + ADAM_STATES)  # the one before is replaced only when the new one is whole
    for what, folder, needed in (("model", output.parent, model), ("state to resume from", checkpoint.folder, states)):
        present = next(entry for entry in (folder.absolute(), *folder.absolute().parents) if entry.exists())
        if (free := shutil.disk_usage(present).free) < needed:
            raise AdaptError(
                f"no space left on the disk for the {what} in {folder}: it takes {size(needed)} and {size(free)} are "
                "free"
            )


def round_weights(source: SourceModel, dtype: torch.dtype) -> None:
    """Rounds every floating-point parameter to the numbers of `dtype`, in which they will be stored."""
    for parameter in source.model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)


def write_model(
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    dtype: torch.dtype,
    write_more: Callable[[Path], None],
) -> None:
    """Writes weights in `dtype`, config, generation config and tokenizer (with its chat template) to `output`.

    `write_more` adds files. The folder appears when it is whole. The model's parameters are in `dtype` afterwards.

    Raises:
        AdaptError: it cannot be written, or something is there by now.
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
            file.chmod((temporary / CONFIG_NAME).stat().st_mode)  # safetensors makes its file private
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
