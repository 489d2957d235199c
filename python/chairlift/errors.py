"""Exceptions of Chairlift: each has a stable ``code`` for programs and a message for people."""

from __future__ import annotations


class ChairliftError(Exception):
    """Base of all errors that Chairlift raises on purpose."""

    code: str = "internal_error"
    """Stable name of the kind of error; a class has a default, an error may be more precise."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        """Keep the message for people and the stable name for programs."""
        super().__init__(message)
        if code is not None:
            self.code = code


class ConfigError(ChairliftError, ValueError):
    """Settings that cannot work, alone or together."""

    code = "invalid_config"


class InvalidRequestError(ChairliftError, ValueError):
    """A request that can never run as it is. Nothing of it is left in the engine.

    Codes: ``invalid_parameter``, ``invalid_prompt``, ``empty_prompt``, ``token_out_of_range``,
    ``unknown_class``, ``too_many_answers``, ``no_reservation``, and those of stop strings.
    """

    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for an output token in the longest sequence the engine runs."""

    code = "context_length_exceeded"


class TryLaterError(ChairliftError):
    """The request could run, but not now: the same may be accepted later."""

    code = "try_later"
    retry_after: float | None
    """Seconds after which it may be, as predicted; None: nothing is known."""

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float | None = None
    ) -> None:
        """Keep the message, the stable name and the prediction."""
        super().__init__(message, code=code)
        self.retry_after = retry_after


class QueueFullError(TryLaterError):
    """There is no place in the waiting queue: for nobody, for the class, or for the tenant.

    Codes: ``queue_full``, ``class_full``, ``tenant_full``.
    """

    code = "queue_full"


class RateLimitError(TryLaterError):
    """Accepting the request now would break a promise: a tenant's token rate, or a class's times.

    Codes: ``rate_exceeded``, ``ttft_unreachable``, ``promise_unkeepable``.
    """

    code = "rate_exceeded"


class OverloadedError(TryLaterError):
    """More important work needs the engine.

    Codes: ``shedding`` (refused at the door), ``shed`` and ``displaced`` (given up as it waited).
    """

    code = "shedding"


class QueueTimeoutError(TryLaterError):
    """The request waited for as long as it may, and was given up before it was first scheduled.

    Codes: ``queue_timeout`` (of its class), ``deadline_missed`` (its own).
    """

    code = "queue_timeout"


class RequestFailedError(ChairliftError):
    """The executor failed on this request, or on a step it was in. The engine goes on."""

    code = "request_failed"


class UnsupportedStepError(ChairliftError):
    """A step plan asks its executor for something that the executor does not do."""

    code = "unsupported_step"


class EngineDeadError(ChairliftError):
    """The engine has ended: it was shut down, or nothing can run steps any more."""

    code = "engine_dead"


class TokenizerError(ChairliftError, ValueError):
    """A tokenizer or chat template is missing, unsupported, or refused its input.

    Codes: ``tokenizer_not_found``, ``bad_tokenizer``, ``unsupported_tokenizer``, ``bad_text``,
    ``bad_token_id``, ``no_chat_template``, ``bad_chat_template``, ``chat_template_refused`` (the
    template's own words), ``chat_template_failed``, ``bad_chat_messages``.
    """

    code = "tokenizer_error"


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


class ServerUnreachableError(ChairliftError):
    """A command-line tool cannot reach the server that it is to talk to, or is not let in."""

    code = "server_unreachable"
