"""Flags that say how answers are sampled, for every command that asks for some."""

from __future__ import annotations

import argparse

from chairlift.sampling import SamplingParams


def add_sampling_flags(
    parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float, seed: int | None = 0
) -> None:
    """Add the flags with these defaults; :func:`sampling_params` reads them back."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens of an answer (default {max_tokens})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 is greedy (default {temperature:g})",
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="least mass of the candidates"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="most candidates; 0 is all"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="least of a candidate, to the best"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="1 is none"
    )
    group.add_argument(
        "--seed", type=int, default=seed, metavar="N", help="of everything that is sampled"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends an answer; may be repeated"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return what the flags say, but for the seed.

    Raises:
        InvalidRequestError: a value is none that can be.
    """
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=args.stop,
    )
