"""``chairlift explain``: the story of one request of a flight log."""

from __future__ import annotations

import argparse
import json
from typing import Any

from chairlift.cli.replay import notes
from chairlift.errors import ConfigError
from chairlift.flight_log import FlightLog, Replay

_FOR = {
    "slots": "a row: all were taken",
    "memory": "memory",
    "budget": "the step in flight, or the token budget",
    "fairness": "its turn: others that came later went ahead",
    "rate": "its tenant's rate or running answers",
    "window": "its batch to be formed",
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the ``chairlift`` parser."""
    parser = commands.add_parser(
        "explain",
        help="tell the story of one request of a flight log",
        description="Replay a flight log (--record of serve and generate) and tell one request's "
        "story: when it waited and for what, who went ahead and why, what it ran, and what held it "
        "up. Times are from its submission. Without a request: list the requests of the log, the "
        "slowest first.",
    )
    parser.add_argument("log", metavar="LOG", help="the file")
    parser.add_argument("request", metavar="REQUEST_ID", nargs="?", type=int, help="its number")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    log = FlightLog(args.log)
    if args.request is None:
        requests = json.loads(log.measure().measures())["requests"]
        print(json.dumps(requests, indent=2) if args.json else "\n".join(_listed(requests)))
        return 0
    told = log.explain(args.request)
    if told.story is None:
        examples = ", ".join(map(str, told.examples))
        known = f"such as {examples}" if examples else "none at all"
        raise ConfigError(
            f"{args.log} has no request {args.request}; it has {told.num_requests}, {known}. "
            f"chairlift explain {args.log} lists them"
        )
    lines = [] if args.json else tell(told.story, told.replay, is_heard=told.is_heard)
    print(json.dumps(told.story, indent=2) if args.json else "\n".join(lines))
    return 0


def tell(story: dict[str, Any], replay: Replay, *, is_heard: bool = False) -> list[str]:
    """Lines of a story, in order of time."""
    arrival_us = story["arrival_us"]
    zero_us = story["reserved_us"] if arrival_us is None else arrival_us
    user = "" if story["user"] is None else f", user {story['user']}"
    longest = story["max_tokens"]
    title = (
        f"request {story['request']}: tenant {story['tenant']}{user}, class {story['class']}, "
        f"{story['prompt_tokens']} prompt tokens, "
        f"{'no max_tokens' if longest is None else f'max_tokens {longest}'}"
    )
    if story["answers"] > 1:
        title += f", {story['answers']} answers"
    events = _accepted(story, is_heard=is_heard) + _waits(story) + _ran(story) + _ends(story)
    events.sort(key=lambda event: event[0])
    shown = [f"{(at_us - zero_us) / 1e6:+12.6f} s  {text}" for at_us, text in events]
    lines = [title, *shown, *_summary(story)]
    if is_heard:
        return [
            *lines,
            "(this part of the log cannot be replayed: it has no more than that to say)",
        ]
    return [*lines, *notes(replay), *_mismatch(replay)]


Lines = list[tuple[int, str]]


def _accepted(story: dict[str, Any], *, is_heard: bool) -> Lines:
    lines = []
    if story["arrival_us"] is None:
        if story["refused"] is not None:
            return [(story["reserved_us"], f"refused at the door: {story['refused']}")]
        return [(story["reserved_us"], "took a place at the door, and was never submitted")]
    if story["reserved_us"] < story["arrival_us"]:
        lines.append(
            (story["reserved_us"], "took a place at the door; then its prompt was tokenised")
        )
    if story["refused"] is not None:
        return [*lines, (story["arrival_us"], f"refused: {story['refused']}")]
    waited, ran = _count(story["waiting"], "request"), _count(story["running"], "sequence")
    text = "submitted" if is_heard else f"submitted: {waited} waited, {ran} ran"
    stats = story["stats"]
    if stats is not None and stats["predicted_queue_time_us"] is not None:
        text += (
            f"; predicted to wait {_length(stats['predicted_queue_time_us'])} and to say its first "
            f"token after {_length(stats['predicted_ttft_us'])}"
        )
    return [*lines, (story["arrival_us"], text)]


def _waits(story: dict[str, Any]) -> Lines:
    lines = []
    for span in story["waits"]:
        length = span["to_us"] - span["from_us"]
        is_open = span["to_us"] == 2**64 - 1
        until = "until the log ends" if is_open else f"for {_length(length)}"
        lines.append((span["from_us"], f"waits {until} for {_FOR[span['reason']]}"))
    return lines


def _ran(story: dict[str, Any]) -> Lines:
    lines: Lines = []
    scheduled = story["scheduled"]
    if scheduled is not None:
        step = f", in step {scheduled['step']}" if scheduled["step"] else ""
        text = f"scheduled first{step}"
        if scheduled["cached_tokens"]:
            text += f"; {scheduled['cached_tokens']} prompt tokens were cached"
        lines.append((scheduled["at_us"], text))
    for moment in story["moments"]:
        lines.append((moment["at_us"], _moment(moment)))
    stats = story["stats"]
    if stats is not None and stats["first_token"] is not None:
        lines.append((stats["first_token"], "first token"))
    for gap in story["gaps"]:
        if gap["to_us"] > gap["from_us"]:
            lines.append((gap["from_us"], _gap(gap)))
    return lines


def _moment(moment: dict[str, Any]) -> str:
    step = f"in step {moment['step']}"
    if moment["what"] == "chunk":
        end = moment["computed_before"] + moment["tokens"]
        return f"{moment['tokens']} tokens computed {step}, up to token {end}"
    if moment["what"] == "resumed":
        cached = moment["cached_tokens"]
        return f"runs again {step}" + (f"; {cached} tokens were cached" if cached else "")
    admitted = ", ".join(map(str, moment["admitted"][:5]))
    whom = f"request {admitted}" if admitted else "the next tokens of those that run on"
    return f"preempted {step}: gives {moment['lost_tokens']} computed tokens up for {whom}"


def _gap(gap: dict[str, Any]) -> str:
    text = (
        f"says nothing for {_length(gap['to_us'] - gap['from_us'])}: {_count(gap['steps'], 'step')}"
    )
    if gap["steps_with_it"] < gap["steps"]:
        text += f", {gap['steps_with_it']} of them with it"
    longest = gap["longest"]
    if longest is not None:
        text += (
            f"; the longest, step {longest['step']}, took {_length(longest['duration_us'])} for "
            f"{longest['num_decodes']} decodes and {longest['prefill_tokens']} prefill tokens"
        )
    return text


def _ends(story: dict[str, Any]) -> Lines:
    name = "" if story["answers"] <= 1 else "answer {child} "
    return [
        (end["at_us"], f"{name.format(child=end['child'])}ended: {end['reason']}")
        for end in story["ends"]
    ]


def _summary(story: dict[str, Any]) -> list[str]:
    lines = []
    if story["ahead"]:
        lines.append("went ahead of it while it waited:")
    for ahead in story["ahead"]:
        names = ", ".join(map(str, ahead["requests"]))
        more = ", ..." if ahead["count"] > len(ahead["requests"]) else ""
        tenants = ", ".join(f"{count} of {tenant}" for tenant, count in ahead["tenants"])
        lines.append(
            f"  {ahead['count']} {ahead['why']} ({ahead['prompt_tokens']} prompt tokens; "
            f"{tenants}): {names}{more}"
        )
    stats = story["stats"]
    if stats is None:
        return lines if story["refused"] else [*lines, "it had not ended when the log did"]
    waits = {name.removesuffix("_us"): us for name, us in stats["waits"].items() if us}
    waited = ", ".join(f"{name} {_length(us)}" for name, us in waits.items()) or "nothing"
    lines.append(
        f"in all: waited for {waited}; {stats['num_output_tokens']} output tokens, "
        f"{stats['num_preemptions']} preemptions, {_length(stats['finished'] - stats['arrival'])}"
    )
    return lines


def _mismatch(replay: Replay) -> list[str]:
    if replay.message is None:
        return []
    return [f"the replay ends here, since it differs: {replay.message}"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _length(microseconds: int) -> str:
    if microseconds < 1_000:
        return f"{microseconds} us"
    if microseconds < 1_000_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.3f} s"


def _listed(requests: list[dict[str, Any]]) -> list[str]:
    def slowness(request: dict[str, Any]) -> int:
        stats = request["stats"]
        return 0 if stats is None else stats["finished"] - stats["arrival"]

    lines = [f"{len(requests)} requests, the slowest first"]
    for request in sorted(requests, key=slowness, reverse=True):
        stats = request["stats"]
        if stats is None:
            end = f"refused: {request['refused']}" if request["refused"] else "no end in the log"
        else:
            end = (
                f"{stats['num_output_tokens']} output tokens, "
                f"{stats['num_preemptions']} preemptions, {_length(slowness(request))}"
            )
        lines.append(
            f"{request['id']:>10}  at {request['arrival_us'] / 1e6:.3f} s, tenant "
            f"{request['tenant']}, {request['input_tokens']} prompt tokens, {end}"
        )
    return lines
