"""Exceptions of Chairlift: each has a stable ``code`` for programs and a message for people."""

from __future__ import annotations


class ChairliftError(Exception):
    """Base of all errors that Chairlift raises on purpose."""

    def __init__(self, message: str, *, code: str) -> None:
        """Keep the message for people and the stable name for programs."""
        super().__init__(message)
        self.code = code


class TokenizerError(ChairliftError, ValueError):
    """A tokenizer or chat template is missing, unsupported, or refused its input.

    Codes: ``tokenizer_not_found``, ``bad_tokenizer``, ``unsupported_tokenizer``, ``bad_text``,
    ``bad_token_id``, ``no_chat_template``, ``bad_chat_template``, ``chat_template_refused`` (the
    template's own words), ``chat_template_failed``, ``bad_chat_messages``.
    """
