"""Turns exceptions of the hub's client into one sentence."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.common.progress import quiet_loggers
from tide_export.errors import HubError, TideError, one_line

WRAPPED = (LocalEntryNotFoundError, RuntimeError)  # their cause says what happened to a file
UNREACHED = (OfflineModeIsEnabled, LocalEntryNotFoundError)  # OSErrors that concern no local file


@contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Converts the hub client's exceptions into HubError; other `TideError`s and local `OSError`s pass.

    Args:
        repo: id of the repository, for the message.
        revision: requested revision, for the message.
    """
    try:
        with quiet_loggers(logging.ERROR, "huggingface_hub"):
            yield
    except TideError:
        raise
    except Exception as error:  # the hub's client and its parts in Rust raise many kinds
        if isinstance(error, OSError) and not isinstance(error, (HfHubHTTPError, *UNREACHED)):
            raise
        raise HubError(_sentence(error, repo, revision)) from error


def _sentence(error: BaseException, repo: str, revision: str | None) -> str:
    if isinstance(error, WRAPPED) and error.__cause__ is not None:
        return _sentence(error.__cause__, repo, revision)
    if isinstance(error, HFValidationError):
        return f"{repo!r} is no repository's id: give one such as user/name"
    if isinstance(error, GatedRepoError):
        return f"repository {repo!r} is gated: ask for access on its page, and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no repository {repo!r}, or hides it: check its id, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"repository {repo!r} has no revision {revision!r}"
    if isinstance(error, RemoteEntryNotFoundError):
        return f"repository {repo!r} holds no bundle: it has no {MANIFEST_FILE}"
    if isinstance(error, HfHubHTTPError):
        reason = f"{error.response.status_code}: {error.server_message or error.response.reason_phrase}"
        if error.response.status_code in (401, 403):
            return f"your token does not open repository {repo!r} ({reason}): use one with the right to"
        return f"the hub failed with repository {repo!r} ({reason})"
    if isinstance(error, (HTTPError, *UNREACHED)):
        return f"the hub cannot be reached for repository {repo!r}: {one_line(error)}"
    return f"the hub's client failed with repository {repo!r}: {one_line(error)}"
