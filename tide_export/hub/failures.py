"""Turns what the hub's client raises into one sentence."""

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

from tide_export.errors import HubError, TideError, one_line
from tide_export.names import MANIFEST_FILE
from tide_export.progress import quiet_loggers

WRAPPED = (LocalEntryNotFoundError, RuntimeError)  # raised for what happened to one file
UNREACHED = (OfflineModeIsEnabled, LocalEntryNotFoundError)  # OSErrors, though not of a file here


@contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Raises what goes wrong with a repository of the hub as HubError; errors of this package and of files here pass.

    Args:
        repo: its id, for the sentence.
        revision: that was asked for.
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
