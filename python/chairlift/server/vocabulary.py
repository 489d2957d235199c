"""The tokens' bytes, as log-probabilities show them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.engine import TokenizerLike


class Vocabulary:
    """Bytes and shown text of every token; ids beyond the tokenizer's have none."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        """Take the tokenizer's table."""
        table = tokenizer.token_table()
        self._bytes = table.bytes
        self._offsets = table.offsets.tolist()
        self._special = table.special
        self.longest = max(
            (end - begin for begin, end in zip(self._offsets, self._offsets[1:], strict=False)),
            default=1,
        )
        """Bytes of the longest token."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token."""
        if not 0 <= token < len(self._offsets) - 1:
            return b""
        return self._bytes[self._offsets[token] : self._offsets[token + 1]]

    def shown(self, token: int, *, as_id: bool = False) -> str:
        """A token as text: its own; ``bytes:\\xNN`` for a part of a character; or its id."""
        if as_id:
            return f"token_id:{token}"
        data = self.bytes_of(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token: int) -> bool:
        """Whether it is a control token."""
        return 0 <= token < len(self._special) and bool(self._special[token])


class TextOffsets:
    """Where each token of a text begins, in characters; fed token by token."""

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool, start: int = 0
    ) -> None:
        """``start`` is the offset of the first token."""
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start

    def take(self, tokens: Iterable[int]) -> list[int]:
        """Offsets of the next tokens. One within a character has that character's offset."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            if not (self._skip_special_tokens and self._vocabulary.is_special(token)):
                self._offset += len(self._decoder.decode(self._vocabulary.bytes_of(token)))
        return offsets
