"""The requests of a run, with their bodies and the times at which they are to be sent.

Everything follows from the seed and a request's number: lengths and prompts are the same at every
rate and in every mode, and bodies are made one by one, just before they are sent.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, takewhile
from typing import Literal

import numpy as np

from chairlift.bench.lengths import FixedLength, Length
from chairlift.bench.tenants import Tenant, TenantMix
from chairlift.bench.trace import TraceRow
from chairlift.errors import ConfigError

Endpoint = Literal["completions", "chat"]

_FIRST_TOKEN = 100
"""Lower ids are special tokens in many vocabularies."""
_PREFIX_BLOCK_TOKENS = 512
_WARMUP_INDEX = 2**31
"""Requests of the warm-up are numbered from here, so that their prompts are others."""
_TEXT = (
    "snow slope valley summit cable cabin winter morning skier rope tower engine village forest "
    "cloud light river stone bridge garden kitchen letter music paper window silver copper orange "
    "yellow little narrow early quiet heavy simple clever carry follow travel listen answer wander "
    "finish between under after before around without perhaps often never always slowly seven"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, ready to be sent."""

    index: int
    send_at_s: float | None
    """Seconds after the start of the run; None: as soon as it can be."""
    body: bytes
    headers: Mapping[str, str]
    output_tokens: int
    """Tokens that were asked for."""
    tenant: str | None
    request_class: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What all requests of a run have in common, and how they differ."""

    endpoint: Endpoint = "completions"
    input_tokens: Length = field(default_factory=lambda: FixedLength(128))
    output_tokens: Length = field(default_factory=lambda: FixedLength(64))
    trace: Sequence[TraceRow] = ()
    """Where the lengths (and the tenants, if it names any) come from instead."""
    length_scale: float = 1.0
    """What the trace's lengths were divided by; its prefix blocks shrink with them."""
    mix: TenantMix = field(default_factory=TenantMix)
    tenant_header: str | None = None
    """Header that carries the tenant's name."""
    is_text: bool = False
    """Whether prompts are words rather than random token ids; chat prompts always are."""
    vocab_size: int = 30_000
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what the fields cannot say alone."""
        if self.vocab_size <= _FIRST_TOKEN:
            raise ConfigError(
                f"--vocab-size is {self.vocab_size}; it must be above {_FIRST_TOKEN}, "
                "the least token id of a random prompt"
            )

    def closed(self, model: str) -> Iterator[Request]:
        """Requests without end, to be sent when there is room."""
        return (self._request(model, index, None, row) for index, row in zip(count(), self._rows()))

    def warmup(self, model: str) -> Iterator[Request]:
        """The same with other prompts."""
        return (
            self._request(model, _WARMUP_INDEX + index, None, row)
            for index, row in zip(count(), self._rows())
        )

    def poisson(self, model: str, rate: float, burstiness: float = 1.0) -> Iterator[Request]:
        """Requests without end whose gaps are gamma-distributed, with a mean of 1 / ``rate``.

        The shape of the distribution is ``burstiness``: 1 is a Poisson process, less comes in
        bursts, more is more regular. An infinite rate is everything at once.
        """
        if rate == math.inf:
            yield from self.closed(model)
        rng = np.random.default_rng([self.seed, zlib.crc32(b"arrivals")])
        at = 0.0
        for index, row in zip(count(), self._rows()):
            yield self._request(model, index, at, row)
            at += rng.gamma(burstiness, 1.0 / (rate * burstiness))

    def replay(self, model: str) -> Iterator[Request]:
        """The requests of the trace at their times.

        Raises:
            ConfigError: it has no times.
        """
        if not self.trace or self.trace[0].arrival_s is None:
            raise ConfigError("the trace has no arrival times; use it with another --mode")
        return (
            self._request(model, index, row.arrival_s or 0.0, row)
            for index, row in enumerate(self.trace)
        )

    def _rows(self) -> Iterator[TraceRow | None]:
        return cycle(self.trace or (None,))

    def _request(
        self, model: str, index: int, send_at_s: float | None, row: TraceRow | None
    ) -> Request:
        rng = np.random.default_rng([self.seed, index])
        if row is not None and row.tenant is not None:
            tenant: Tenant | None = self.mix.named(row.tenant)
        else:
            tenant = self.mix.draw(rng)
        if row is None:
            num_input, num_output = self.input_tokens.draw(rng), self.output_tokens.draw(rng)
        else:
            num_input, num_output = row.input_tokens, row.output_tokens
        hashes = () if row is None else row.prefix_hashes
        body: dict[str, object] = {
            "model": model,
            **self._prompt(rng, num_input, hashes),
            "max_tokens": num_output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        headers = {"Content-Type": "application/json"}
        if tenant is not None:
            if tenant.request_class is not None:
                body["service_tier"] = tenant.request_class
            if tenant.api_key is not None:
                headers["Authorization"] = f"Bearer {tenant.api_key}"
            if self.tenant_header is not None:
                headers[self.tenant_header] = tenant.name
        return Request(
            index=index,
            send_at_s=send_at_s,
            body=json.dumps(body | dict(self.extra_body)).encode(),
            headers=headers,
            output_tokens=num_output,
            tenant=None if tenant is None else tenant.name,
            request_class=None if tenant is None else tenant.request_class,
        )

    def _prompt(
        self, rng: np.random.Generator, num_tokens: int, prefix_hashes: Sequence[str]
    ) -> dict[str, object]:
        """A prompt of about so many tokens; the blocks that have a name come first."""
        block = max(1, int(_PREFIX_BLOCK_TOKENS / self.length_scale))
        numbers: list[int] = []
        for name in prefix_hashes:
            if len(numbers) >= num_tokens:
                break
            shared = np.random.default_rng([self.seed, zlib.crc32(name.encode()), 1])
            numbers += self._numbers(shared, block)
        del numbers[num_tokens:]
        numbers += self._numbers(rng, num_tokens - len(numbers))
        if self.endpoint == "completions" and not self.is_text:
            return {"prompt": numbers}
        text = " ".join(_WORDS[number % len(_WORDS)] for number in numbers)
        if self.endpoint == "completions":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}

    def _numbers(self, rng: np.random.Generator, how_many: int) -> list[int]:
        numbers: list[int] = rng.integers(_FIRST_TOKEN, self.vocab_size, size=how_many).tolist()
        return numbers


def until(requests: Iterator[Request], duration_s: float | None) -> Iterator[Request]:
    """Those that are to be sent before the duration is over."""
    if duration_s is None:
        return requests
    return takewhile(lambda request: (request.send_at_s or 0.0) < duration_s, requests)
