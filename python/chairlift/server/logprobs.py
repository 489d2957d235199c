"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chairlift.outputs import Logprob, PositionLogprobs
from chairlift.server.vocabulary import TextOffsets, Vocabulary

_LEAST = -9_999.0
"""What stands for minus infinity, which JSON cannot say (as in vLLM)."""


@dataclass(slots=True)
class CompletionLogprobs:
    """``logprobs`` of ``/v1/completions``: four lists side by side."""

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """The object of the response."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Shower:
    """Shows tokens as a request wants them."""

    vocabulary: Vocabulary
    as_ids: bool = False

    def token(self, token: int) -> str:
        """A token's text."""
        return self.vocabulary.shown(token, as_id=self.as_ids)

    def chat(self, positions: Iterable[PositionLogprobs]) -> list[dict[str, object]]:
        """``logprobs.content`` of ``/v1/chat/completions``."""
        content = []
        for position in positions:
            own = next(iter(position))
            entry = self._chat_token(own, position[own])
            entry["top_logprobs"] = [self._chat_token(*ranked) for ranked in _best(position)]
            content.append(entry)
        return content

    def completion(
        self,
        into: CompletionLogprobs,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        offsets: TextOffsets,
    ) -> None:
        """Append tokens; the first of a prompt has no log-probability."""
        into.text_offset += offsets.take(token_ids)
        for token, position in zip(token_ids, positions, strict=True):
            into.tokens.append(self.token(token))
            if position is None:
                into.token_logprobs.append(None)
                into.top_logprobs.append(None)
                continue
            into.token_logprobs.append(_finite(position[token].logprob))
            into.top_logprobs.append(
                {self.token(other): _finite(entry.logprob) for other, entry in position.items()}
            )

    def prompt(self, positions: Iterable[PositionLogprobs | None]) -> list[object]:
        """``prompt_logprobs``: by token id, as in vLLM."""
        return [
            None
            if position is None
            else {
                str(token): {
                    "logprob": _finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": self.token(token),
                }
                for token, entry in position.items()
            }
            for position in positions
        ]

    def _chat_token(self, token: int, entry: Logprob) -> dict[str, object]:
        return {
            "token": self.token(token),
            "logprob": _finite(entry.logprob),
            "bytes": list(self.vocabulary.bytes_of(token)),
        }


def _best(position: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    """The candidates that were asked for, best first: the sampled token only if it is one."""
    ranked = [(entry.rank, token, entry) for token, entry in position.items() if entry.rank]
    ranked.sort(key=lambda candidate: candidate[0])
    return [(token, entry) for _, token, entry in ranked]


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST
