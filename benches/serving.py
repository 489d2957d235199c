#!/usr/bin/env python
"""What the server costs and promises, with real sockets and real clients.

    serving.py streams    1,000 streams on an executor with steps of 100 ms: how late the event loop
                          is, how long /health takes
    serving.py overhead   tokens/s over HTTP beside the library's, the default model
    serving.py reading    time of an iteration with 64 streams read, and with nobody reading
    serving.py flood      a key that floods beside one that does not, the default model

Every figure is the median of ``--reps`` alternating runs; the clients share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from chairlift.server.tenants import hash_key

ITERATION = "iteration_duration_seconds"
LAG = "event_loop_lag_seconds"
POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
COMMAND = [sys.executable, "-m", "chairlift"]
BENCH = [*COMMAND, "bench", "--seed", "7", "--json", "-"]


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """A server in processes of its own; its address."""
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--no-log-requests", *flags],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            if found is None:
                raise SystemExit(f"the server did not start: {line!r}")
            yield found[0]
        finally:
            process.terminate()
            process.wait(60)


def load(url: str, *flags: str) -> dict:
    """Run the load client; its summary."""
    command = [*BENCH, "--base-url", url, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the load client failed: {done.stderr[-2_000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def scrape(url: str, *, key: str = "") -> list[Sample]:
    """All samples of the server's metrics."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with urllib.request.urlopen(request) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]


def buckets(url: str, name: str, *, key: str = "") -> tuple[dict[float, float], float]:
    """A histogram of the server: cumulative counts by upper bound, and the sum."""
    samples = scrape(url, key=key)
    counts = {
        float(sample.labels["le"]): sample.value
        for sample in samples
        if sample.name == f"chairlift:{name}_bucket"
    }
    return counts, sum(each.value for each in samples if each.name == f"chairlift:{name}_sum")


def p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """Upper bound of the bucket that holds the 99th percentile of what came between."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values())
    return 1e3 * next(bound for bound, count in counts.items() if count >= 0.99 * total)


def quantile(values: list[float], q: float) -> float:
    """The value below which a share of all is."""
    values = sorted(values)
    return values[min(int(len(values) * q), len(values) - 1)]


async def probe(url: str, lasts: Callable[[], bool]) -> list[float]:
    """Ask /health again and again; seconds each."""
    host, port = url.removeprefix("http://").split(":")
    took = []
    reader, writer = await asyncio.open_connection(host, int(port))
    while lasts():
        start = time.perf_counter()
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        await reader.readexactly(int(length[1]))
        took.append(time.perf_counter() - start)
        if b" 200 " not in head.splitlines()[0]:
            raise SystemExit(f"/health says {head!r}")
        await asyncio.sleep(0.02)
    writer.close()
    return took


def streams(args: argparse.Namespace) -> dict:
    """Many streams on an executor that costs nothing."""
    count = args.streams
    flags = ["--executor", "chairlift.testing:PacedExecutor", "--max-num-seqs", str(count)]
    flags += ["--max-num-batched-tokens", "16384", "--max-model-len", "2048"]
    with server(*flags) as url:
        command = [*BENCH, "--base-url", url, "--mode", "closed", "--concurrency", str(count)]
        command += ["--num-requests", str(count), "--input-tokens", "16", "--output-tokens", "200"]
        command += ["--vocab-size", "256"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
            took, before = asyncio.run(beside_streams(url, count, client))
            summary = json.loads(client.stdout.read())
        lag, _ = buckets(url, LAG)
    return {
        "streams": count,
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "itl_ms": summary["itl_ms"],
        "health_p99_ms": 1e3 * quantile(took, 0.99),
        "health_max_ms": 1e3 * max(took),
        "event_loop_lag_p99_ms_at_most": p99_ms(before, lag),
        "with_the_start_of_all_at_once": p99_ms({}, lag),
    }


async def beside_streams(url: str, count: int, client: subprocess.Popen) -> tuple[list, dict]:
    """How long /health takes until the client ends, and the loop's lags before all streams ran."""

    def until_all_run() -> dict[float, float]:
        while client.poll() is None and running(url) < count:
            time.sleep(0.05)
        return buckets(url, LAG)[0]

    lasts = probe(url, lambda: client.poll() is None)
    took, before = await asyncio.gather(lasts, asyncio.to_thread(until_all_run))
    return took, before


def running(url: str) -> int:
    """Requests that run on the server."""
    name = "chairlift:num_requests_running"
    return int(sum(sample.value for sample in scrape(url) if sample.name == name))


def overhead(args: argparse.Namespace) -> dict:
    """64 requests (128 in, 64 out) through the library and over HTTP, both warm.

    Every run has prompts of its own: those of an earlier one would be in the prefix cache.
    """
    in_process, over_http = [], []
    with server() as url:
        for rep in range(args.reps):
            in_process.append(library())
            run = ("--num-requests", "64", "--warmup", "64", "--seed", str(rep), *W1)
            over_http.append(load(url, *run)["output_tokens_per_s"])
    ratio = statistics.median(over_http) / statistics.median(in_process)
    return {"library": in_process, "http": over_http, "http_over_library": ratio}


W1 = ("--mode", "closed", "--concurrency", "64", "--input-tokens", "128", "--output-tokens", "64")
LIBRARY = """
import random, time
from chairlift import LLM, SamplingParams
rng = random.Random(7)
prompts = [[rng.randrange(100, 29_999) for _ in range(128)] for _ in range(128)]
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
with LLM() as llm:
    llm.generate(prompts[64:], params, use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts[:64], params, use_tqdm=False)
    print(64 * 64 / (time.perf_counter() - start))
"""


def library() -> float:
    """Output tokens/s of the library, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", LIBRARY], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def reading(args: argparse.Namespace) -> dict:
    """Mean time of an iteration of 64 decodes, with their streams read and without."""
    read, unread = [], []
    with server() as url:
        for _ in range(args.reps):
            for times, stream in ((read, True), (unread, False)):
                times.append(asyncio.run(iteration_ms(url, stream=stream)))
    ratio = statistics.median(read) / statistics.median(unread)
    return {"read_ms": read, "unread_ms": unread, "read_over_unread": ratio}


async def iteration_ms(url: str, *, stream: bool) -> float:
    """Mean milliseconds of a step while 64 requests are answered, as events or as a whole."""
    host, port = url.removeprefix("http://").split(":")
    body = {"prompt": [1, 2, 3], "max_tokens": 128, "ignore_eos": True, "stream": stream}

    async def one(seed: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body | {"seed": seed}).encode()
        head = f"{POST}Content-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        while await reader.read(1 << 16):
            pass
        writer.close()

    counts, total = buckets(url, ITERATION)
    await asyncio.gather(*map(one, range(64)))
    counts_after, total_after = buckets(url, ITERATION)
    return 1e3 * (total_after - total) / (max(counts_after.values()) - max(counts.values()))


ROWS, CALM = 128, 8
FLOOD = """
[queue]
sharing = "fair"

[keys.calm]
hash = "{calm}"
tenant = "calm"

[keys.flood]
hash = "{flood}"
tenant = "flood"

[keys.look]
hash = "{look}"
admin = true
"""


def flood(args: argparse.Namespace) -> dict:
    """One key's p99 TTFT while the other fills what it leaves of the rows, and while it floods."""
    results: dict[str, list] = {"equal_ttft_ms": [], "flood_ttft_ms": [], "iteration_p99_ms": []}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "chairlift.toml"
        hashes = {name: hash_key(f"{name}-key") for name in ("calm", "flood", "look")}
        config.write_text(FLOOD.format(**hashes))
        flags = [
            "--config",
            str(config),
            "--max-num-seqs",
            str(ROWS),
            "--max-num-batched-tokens",
            "512",
        ]
        with server(*flags) as url:
            for _ in range(args.reps):
                for name, others in (("equal_ttft_ms", ROWS - CALM), ("flood_ttft_ms", args.flood)):
                    summary, steps = beside(url, others)
                    results[name].append(summary["ttft_ms"]["p99"])
                    if name == "flood_ttft_ms":
                        results["iteration_p99_ms"].append(steps)
    medians = {name: statistics.median(values) for name, values in results.items()}
    raised = medians["flood_ttft_ms"] - medians["equal_ttft_ms"]
    return {**results, "raised_in_p99_iterations": raised / medians["iteration_p99_ms"]}


def beside(url: str, others: int) -> tuple[dict, float]:
    """The calm key's summary, beside ``others`` requests at once of the other key."""
    shape = ["--input-tokens", "64", "--output-tokens", "16-48", "--base-url", url]
    noise = [*BENCH, *shape, "--api-key", "flood-key", "--mode", "closed"]
    noise += ["--concurrency", str(others), "--duration", "600", "--num-requests", "1000000"]
    before, _ = buckets(url, ITERATION, key="look-key")
    with subprocess.Popen(noise, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        try:
            time.sleep(10)  # both are well under way
            calm = ["--api-key", "calm-key", "--mode", "closed", "--concurrency", str(CALM)]
            summary = load(url, *shape, *calm, "--num-requests", "120")
        finally:
            client.kill()
    after, _ = buckets(url, ITERATION, key="look-key")
    return summary, p99_ms(before, after)


EXPERIMENTS = {"streams": streams, "overhead": overhead, "reading": reading, "flood": flood}


def main() -> None:
    """Run one experiment, print its figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--flood", type=int, default=512, help="requests of the flood at once")
    args = parser.parse_args()
    print(json.dumps(EXPERIMENTS[args.experiment](args), indent=1))


if __name__ == "__main__":
    main()
