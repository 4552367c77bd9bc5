"""Checks that a model can be where its name says, before PyTorch is loaded, which takes seconds."""

from pathlib import Path

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.common.progress import quiet_loggers
from tide_export.errors import ModelError, one_line

GGUF = ".gguf"
HUB_SECONDS = 10.0  # for the hub's one answer


def is_gguf(name: str) -> bool:
    """Tells whether `name` is the path of a GGUF file."""
    return name.lower().endswith(GGUF) and not Path(name).is_dir()


def check_model(name: str) -> None:
    """Checks that `name` is a model's folder, a GGUF file or, by one request, a model on the hub.

    Raises:
        ModelError: it is none of them, or the hub cannot be reached and the model is not in its cache.
    """
    path = Path(name)
    if (path / MANIFEST_FILE).is_file():
        raise ModelError(f"{name!r} is a bundle: give the model that it was made from")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"folder {name!r} holds no config.json: it is not a Hugging Face model")
    if is_gguf(name):
        if not path.is_file():
            raise ModelError(f"no GGUF file at {name!r}")
    elif path.is_file():
        raise ModelError(f"{name!r} is a file: give the folder of a Hugging Face model, a GGUF file or a hub id")
    elif not path.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelError(f"no model at {name!r}: the folder does not exist")
        _check_hub(name)


def _check_hub(name: str) -> None:
    """Asks the hub once: transformers would ask it again for half a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    missing = f"no model {name!r}: there is no such folder"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        with quiet_loggers(40, "huggingface_hub"):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        raise ModelError(
            f"model {name!r} is gated: ask for access on its page, and log in with `hf auth login`"
        ) from None
    except HFValidationError:
        raise ModelError(f"{missing}, and a hub id is such as Qwen/Qwen2.5-0.5B") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{missing}, and the hub has no such model, or hides it: log in with `hf auth login`"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(f"{missing}, and the hub failed with it: {one_line(error)}") from None
    except Exception as error:  # of the client's own transport: many kinds
        raise ModelError(f"{missing}, and the hub cannot be reached: {one_line(error)}") from None
