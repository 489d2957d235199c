"""Typed errors: each has a stable ``code`` and a message that says what to do next."""

from __future__ import annotations


class ChairliftError(Exception):
    """Base of every error that Chairlift raises on purpose."""

    code: str = "internal_error"
    """Stable name of the kind of error, for programs; the message is for people."""


class ModelError(ChairliftError, ValueError):
    """A model cannot be found, read or run."""

    code = "model_error"


class ModelNotFoundError(ModelError):
    """No directory, known name or hub repository of the given name."""

    code = "model_not_found"


class DownloadError(ModelError):
    """A model could not be fetched, or what arrived is not what was published."""

    code = "model_download_failed"


class ModelFileError(ModelError):
    """A file of a model directory is missing, truncated or malformed."""

    code = "model_file_invalid"


class UnsupportedModelError(ModelError):
    """The model's architecture, or a setting of it, is not supported."""

    code = "model_unsupported"


class WeightsError(ModelError):
    """A tensor is missing, has the wrong shape, or belongs to no part of the model."""

    code = "model_weights_invalid"
