"""The tokenizer of a model: text to token ids, token ids to bytes, messages to a prompt.

Wraps the ``tokenizers`` library around a local Hugging Face directory. Text of *output* never goes
through that library: :meth:`Tokenizer.token_table` gives each token's bytes, the Rust core joins
them, and :meth:`Tokenizer.decode` does the same in Python, so streams and decodes agree.

Two kinds of tokenizer have such bytes: byte-level BPE (the GPT-2 byte alphabet), and SentencePiece
as exported by Hugging Face (``▁`` is a space, ``<0xAB>`` a byte). A leading space is kept: output
goes on after a prompt, it does not begin a text. Any other kind is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from chairlift.chat_template import (
    ESCAPE,
    ESCAPED_ESCAPE,
    ESCAPED_GUARD,
    GUARD,
    ChatTemplate,
    Message,
    Trusted,
)
from chairlift.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTableData:
    """Each token's bytes and kind, flat, as the core's ``TokenTable`` takes them; ``V`` ids."""

    bytes: bytes
    """The bytes of all tokens, one after the other."""
    offsets: NDArray[np.int64]
    """[V+1] token ``t`` has ``bytes[offsets[t]:offsets[t + 1]]``; empty for an unused id."""
    special: NDArray[np.uint8]
    """[V] 1 for a control token, left out of the text by ``skip_special_tokens``."""


class Tokenizer:
    """A tokenizer with its chat template; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Wrap ``tokenizer``; see :meth:`from_directory` for what the files say.

        ``config`` is the content of ``tokenizer_config.json``. ``eos_token_ids`` are the model's,
        beside the tokenizer's own. ``chat_template`` may be several by name.

        Raises:
            TokenizerError: ``unsupported_tokenizer``, or ``bad_chat_template``.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._parts = (dict(config or {}), chat_template, tuple(eos_token_ids))
        self._added = tokenizer.get_added_tokens_decoder()
        self._names = _special_names(config or {})
        self._tokens = _token_bytes(tokenizer, self._added)
        self.bos_token_id = self._id_of("bos_token")
        """The token that begins a text, if the tokenizer names one."""
        own_eos = self._id_of("eos_token")
        eos = [*([] if own_eos is None else [own_eos]), *eos_token_ids]
        self.eos_token_ids = tuple(dict.fromkeys(eos))
        """The tokens that end an output: the tokenizer's own first, then the model's others."""
        self.vocab_size = len(self._tokens)
        """Largest id + 1, added tokens included; a model's may be larger (padding)."""
        self._templates = self._compile(chat_template)
        first = tokenizer.encode("", add_special_tokens=True).ids[:1]
        self._adds_bos = self.bos_token_id is not None and first == [self.bos_token_id]

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load ``tokenizer.json`` and, where present, the files beside it.

        ``tokenizer_config.json`` and ``special_tokens_map.json`` name the special tokens,
        ``generation_config.json`` (else ``config.json``) adds eos ids, ``chat_template.jinja`` goes
        before the template in ``tokenizer_config.json``.

        Raises:
            TokenizerError: ``tokenizer_not_found``, ``bad_tokenizer``, ``unsupported_tokenizer``,
                or ``bad_chat_template``.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"no tokenizer.json in {directory}: give a Hugging Face model directory with a "
                "fast tokenizer",
                code="tokenizer_not_found",
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerError(
                f"cannot read {file}: {error}; is the file complete?", code="bad_tokenizer"
            ) from error
        config = _read_json(directory / "special_tokens_map.json")
        config |= _read_json(directory / "tokenizer_config.json")
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            template: Any = template_file.read_text(encoding="utf-8")
        else:
            template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        generation = _read_json(directory / "generation_config.json")
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = _read_json(directory / "config.json").get("eos_token_id")
        return cls(
            tokenizer,
            config=config,
            chat_template=template,
            eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what it was made of."""
        return _tokenizer_of, (self._tokenizer, *self._parts)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; the text of a control token in it becomes that token.

        With ``add_special_tokens`` the tokenizer adds what its own rules say, but never a second
        bos to a text that begins with one.

        Raises:
            TokenizerError: ``bad_text`` if it holds a lone surrogate, which has no UTF-8.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """:meth:`encode` for many texts, on all cores."""
        batch = _encode(self._tokenizer, texts, add_special_tokens)
        return [self._one_bos(ids) for ids in batch] if add_special_tokens else batch

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` as a stream of them would give it: a leading space is kept.

        Bytes that are not UTF-8 become U+FFFD, one for each maximal part. Ids between
        ``vocab_size`` and a model's larger vocabulary have no text.

        Raises:
            TokenizerError: ``bad_token_id`` for a negative one.
        """
        parts = []
        for token in ids:
            if token < 0:
                raise TokenizerError(f"token id {token} is negative", code="bad_token_id")
            if token < self.vocab_size and not (skip_special_tokens and self.is_special(token)):
                parts.append(self._tokens[token])
        return b"".join(parts).decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """Whether the id is a control token."""
        added = self._added.get(token)
        return added is not None and added.special

    def token_table(self, vocab_size: int = 0) -> TokenTableData:
        """Bytes and flags of every id; ``V`` is the larger of both vocabulary sizes."""
        size = max(self.vocab_size, vocab_size)
        lengths = np.zeros(size, dtype=np.int64)
        lengths[: self.vocab_size] = [len(token) for token in self._tokens]
        offsets = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        special = np.zeros(size, dtype=np.uint8)
        special[[token for token, added in self._added.items() if added.special]] = 1
        return TokenTableData(b"".join(self._tokens), offsets, special)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: object
    ) -> list[int]:
        """Token ids of a chat: the template writes all control tokens, contents write none.

        Keyword arguments (``tools``, ``documents``, ``enable_thinking``, ...) go to the template as
        plain JSON data. As in transformers nothing is added to what the template writes, so bos is
        there if and only if the template says so. But with ``add_special_tokens=True``, which is no
        variable, the tokenizer adds what its own rules say, and never a second bos. See
        :mod:`chairlift.chat_template` for the rule that keeps control tokens out of contents.

        Raises:
            TokenizerError: ``no_chat_template``, or what :meth:`ChatTemplate.render` raises.
        """
        template = self._templates.get("default")
        if kwargs.get("tools"):
            template = self._templates.get("tool_use", template)
        if template is None:
            raise TokenizerError(
                "this model has no chat template: use text completions, or put a "
                "chat_template.jinja beside its tokenizer.json",
                code="no_chat_template",
            )
        add_special_tokens = bool(kwargs.pop("add_special_tokens", False))
        variables: dict[str, object] = {"tools": None, "documents": None}
        variables |= {name: Trusted(text) for name, text in self._names.items()}
        variables |= kwargs | {"add_generation_prompt": add_generation_prompt}
        try:
            text, guarded = template.render(messages, variables)
        except RecursionError:
            raise TokenizerError(
                "the messages or the template's arguments are nested too deeply",
                code="bad_chat_messages",
            ) from None
        tokenizer = self._guarded_tokenizer if guarded else self._tokenizer
        ids = _encode(tokenizer, [text], add_special_tokens)[0]
        return self._one_bos(ids) if add_special_tokens else ids

    @cached_property
    def _guarded_tokenizer(self) -> tokenizers.Tokenizer:
        """The same tokenizer for texts with guards.

        Control tokens match the raw text, where guards break them; then guards go, escapes become
        what they stand for, and all else is as before.
        """
        pipeline: dict[str, Any] = json.loads(self._tokenizer.to_str())
        control = {
            token for template in self._templates.values() for token in template.control_tokens
        }
        added = [
            token | {"normalized": token["normalized"] and token["content"] not in control}
            for token in pipeline["added_tokens"]
        ]
        steps = [
            {"type": "Replace", "pattern": {"String": pattern}, "content": content}
            for pattern, content in [(GUARD, ""), (ESCAPED_GUARD, GUARD), (ESCAPED_ESCAPE, ESCAPE)]
        ]
        if pipeline["normalizer"] is not None:
            steps.append(pipeline["normalizer"])
        normalizer = {"type": "Sequence", "normalizers": steps}
        pipeline |= {"added_tokens": added, "normalizer": normalizer}
        return tokenizers.Tokenizer.from_str(json.dumps(pipeline))

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self._adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def _id_of(self, name: str) -> int | None:
        token = self._names.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _compile(self, source: str | Mapping[str, str] | None) -> dict[str, ChatTemplate]:
        if source is None:
            return {}
        sources = {"default": source} if isinstance(source, str) else source
        special = [added.content for added in self._added.values() if added.special]
        others = [added.content for added in self._added.values() if not added.special]
        return {
            name: ChatTemplate(text, special_tokens=special, other_added_tokens=others)
            for name, text in sources.items()
        }


def _tokenizer_of(
    tokenizer: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    chat_template: str | Mapping[str, str] | None,
    eos_token_ids: Sequence[int],
) -> Tokenizer:
    return Tokenizer(
        tokenizer, config=config, chat_template=chat_template, eos_token_ids=eos_token_ids
    )


def _encode(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    try:
        # The fast one finds no offsets, which nobody needs. They take half of the time, and all of
        # it with the interpreter's lock held for so long that an event loop stands still.
        batch = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise TokenizerError(
            "the text holds a lone surrogate (\\ud800 to \\udfff), which has no UTF-8: remove it",
            code="bad_text",
        ) from error
    return [encoding.ids for encoding in batch]


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(
            f"cannot read {file}: {error}; is the file complete?", code="bad_tokenizer"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} does not hold a JSON object", code="bad_tokenizer")
    return content


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like: plain strings, or objects with a ``content``."""
    names = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(token, str):
            names[name] = token
    return names


def _token_bytes(
    tokenizer: tokenizers.Tokenizer,
    added: Mapping[int, tokenizers.AddedToken],
) -> list[bytes]:
    """[V] each id's bytes, by the rules of the tokenizer's decoder."""
    vocabulary = {
        token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()
    }
    vocabulary |= {token: entry.content for token, entry in added.items()}
    decoder = tokenizer.decoder
    # Its state, as pickle takes it, is its part of tokenizer.json.
    steps = [] if decoder is None else _decoder_steps(json.loads(decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        alphabet = _byte_alphabet()
        texts = {token: _byte_level(text, alphabet) for token, text in vocabulary.items()}
    elif kinds and all(_is_sentencepiece(step) for step in steps):
        byte_fallback = "ByteFallback" in kinds
        texts = {token: _sentencepiece(text, byte_fallback) for token, text in vocabulary.items()}
    else:
        raise TokenizerError(
            f"a tokenizer that decodes by {' + '.join(sorted(kinds)) or 'nothing'} is not "
            "supported: byte-level BPE and SentencePiece are",
            code="unsupported_tokenizer",
        )
    return [texts.get(token, b"") for token in range(max(texts, default=-1) + 1)]


def _decoder_steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _is_sentencepiece(step: Mapping[str, Any]) -> bool:
    """Whether a decoder step is one of those that SentencePiece exports consist of."""
    match step:
        case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
            return True
        case {"type": "Strip", "content": " ", "stop": 0}:  # of the leading space
            return True
        case {"type": "Metaspace", "replacement": "▁"} | {"type": "ByteFallback" | "Fuse"}:
            return True
        case _:
            return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level(text: str, alphabet: Mapping[str, int]) -> bytes:
    """Characters of the alphabet are bytes; a token (an added one) with others is plain text."""
    try:
        return bytes(alphabet[character] for character in text)
    except KeyError:
        return text.encode("utf-8")


def _sentencepiece(text: str, byte_fallback: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text) if byte_fallback else None
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode("utf-8")
