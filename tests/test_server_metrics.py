"""Metrics: what a scrape says of a load, and that it adds up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift import (
    AsyncEngine,
    ClassConfig,
    Config,
    PolicyConfig,
    SamplingParams,
    TenantConfig,
    TryLaterError,
)
from chairlift.errors import InvalidRequestError
from chairlift.server.loop_lag import LAG_BOUNDS, LoopLag
from chairlift.server.metrics import METRICS, render
from chairlift.server.readings import MOST_TENANTS, HttpCounters, ShownTenants, Snapshot
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
RAN = {"stop", "length", "abort", "error"}
OUTCOMES = RAN | {
    "queue_timeout",
    "deadline_missed",
    "shed",
    "displaced",
}


@pytest.fixture
def anyio_backend():
    return "asyncio"


def policy():
    return PolicyConfig(
        sharing="fair",
        classes={
            "chat": ClassConfig(level=1, max_queue_time="5ms"),
            "bulk": ClassConfig(tpot_target="50ms", may_be_shed=True),
        },
        tenants={"acme": TenantConfig(weight=2), "small": TenantConfig(max_queued=1)},
    )


def started(**options):
    executor = ScriptedExecutor(step_time=0.001, **options.pop("executor", {}))
    config = Config(
        engine={"max_num_seqs": 4, "max_queued_requests": 20, **options}, policy=policy()
    )
    return AsyncEngine(executor=executor, isolation="thread", config=config), executor


async def one(engine, prompt, *, leaves_after=None, tokens=8, **args):
    """A request; the code of what became of it."""
    stream = engine.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), **args)
    try:
        async for delta in stream:
            if leaves_after is not None:
                await stream.aclose()
                return "left"
            if delta.finish_reason is not None:
                return delta.finish_reason
    except (TryLaterError, InvalidRequestError) as error:
        return error.code
    return "end"


async def load(engine):
    """All sorts of requests at once; what became of them."""
    requests = [
        one(
            engine,
            f"prompt {number}",
            tenant=("acme", "small", f"guest {number % 7}")[number % 3],
            request_class=("chat", "bulk")[number % 2],
            leaves_after=1 if number % 11 == 0 else None,
            deadline=0.001 if number % 13 == 0 else None,
        )
        for number in range(120)
    ]
    requests.append(one(engine, "who?", request_class="gold"))
    return await asyncio.gather(*requests)


class Scrape:
    """A scrape, parsed."""

    def __init__(self, text):
        self.families = {
            family.name: family for family in text_string_to_metric_families(text.decode())
        }
        self.samples = defaultdict(dict)
        for family in self.families.values():
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert labels not in self.samples[sample.name], f"{sample} is there twice"
                self.samples[sample.name][labels] = sample.value

    def sum(self, name, **wanted):
        """Over all series with these labels; there must be one."""
        values = [
            value
            for labels, value in self.samples[f"chairlift:{name}"].items()
            if wanted.items() <= dict(labels).items()
        ]
        assert values, f"no {name} with {wanted}"
        return sum(values)

    def labels(self, name, label):
        return {dict(labels)[label] for labels in self.samples[f"chairlift:{name}"]}


async def scraped(engine, shown=None, http=None):
    groups = await engine.group_metrics()
    names = (shown or ShownTenants()).update(groups)
    return Scrape(render(Snapshot(groups, "scripted", names, http, "1.2.3")))


def check_conservation(scrape):
    rejected = scrape.sum("requests_rejected_total")
    assert scrape.sum("requests_submitted_total") == rejected + scrape.sum(
        "requests_accepted_total"
    )
    for of, label in (("", "class"), ("tenant_", "tenant")):
        for name in scrape.labels(f"{of}requests_accepted_total", label):
            group = {label: name}
            live = scrape.sum(f"{of}requests_running" if of else "num_requests_running", **group)
            live += scrape.sum(f"{of}requests_waiting" if of else "num_requests_waiting", **group)
            ended = scrape.sum(f"{of}request_outcomes_total", **group)
            assert scrape.sum(f"{of}requests_accepted_total", **group) == ended + live
    accepted = scrape.sum("tenant_requests_accepted_total")
    assert accepted == scrape.sum("requests_accepted_total")
    for name in ("generation_tokens_total", "prompt_tokens_total"):
        assert scrape.sum(f"tenant_{name}") == scrape.sum(name)


async def test_every_scrape_under_a_load_adds_up():
    engine, _ = started()
    async with engine:
        scrapes = []
        running = asyncio.create_task(load(engine))
        while not running.done():
            scrapes.append(await scraped(engine))
            await asyncio.sleep(0.002)
        said = await running
        last = await scraped(engine)
    assert any(scrape.sum("requests_live") > 0 for scrape in scrapes), "none met the load"
    for scrape in [*scrapes, last]:
        check_conservation(scrape)
    # Everything that the load is made for has really happened.
    assert {"length", "left", "queue_full", "tenant_full", "unknown_class"} <= set(said)
    assert last.sum("requests_live") == 0
    assert last.sum("requests_submitted_total") == len(said) == 121
    assert last.sum("requests_rejected_total", reason="queue_full") == said.count("queue_full")
    assert last.sum("requests_rejected_total", reason="unknown_class", **{"class": ""}) == 1
    assert last.labels("request_outcomes_total", "outcome") == OUTCOMES
    # Who leaves may find that its answer was complete already.
    ended = {why: last.sum("request_success_total", finished_reason=why) for why in RAN}
    assert sum(ended.values()) == said.count("length") + said.count("left")
    assert ended["length"] >= said.count("length")
    lost = {"queue_timeout", "deadline_missed"}
    given_up = sum(last.sum("request_outcomes_total", outcome=reason) for reason in lost)
    assert given_up == sum(said.count(reason) for reason in lost) > 0
    assert last.sum("tenant_device_seconds_total") == pytest.approx(
        last.sum("device_seconds_total"), rel=1e-6
    )


async def test_rows_of_graphs_are_apart_from_those_of_batches_that_leave_together():
    class OnGraphs(ScriptedExecutor):
        def execute(self, plan):
            result = super().execute(plan)
            rows = 0 if plan.num_prefills else 4
            return dataclasses.replace(result, graph_rows=rows)

    async with AsyncEngine(executor=OnGraphs(), isolation="thread") as engine:
        assert await one(engine, "abc", tokens=5) == "length"
        scrape = await scraped(engine)
    assert scrape.sum("cuda_graph_steps_total") == 4
    assert scrape.sum("cuda_graph_rows_total", kind="sequence") == 4
    assert scrape.sum("cuda_graph_rows_total", kind="padding") == 12
    assert scrape.sum("padded_rows_total") == 0


async def test_times_are_where_they_belong():
    engine, _ = started()
    async with engine:
        assert await one(engine, "abc", tokens=5, request_class="bulk") == "length"
        scrape = await scraped(engine)
    bulk = {"class": "bulk"}
    assert scrape.sum("inter_token_latency_seconds_count", **bulk) == 4
    assert scrape.sum("time_to_first_token_seconds_count", **bulk) == 1
    assert scrape.sum("inter_token_latency_seconds_count", **{"class": "chat"}) == 0
    assert scrape.sum("iteration_duration_seconds_count") == 5
    assert scrape.sum("iteration_duration_seconds_sum") >= 5 * 0.001
    assert scrape.sum("iteration_tokens_total_sum") == 3 + 4
    assert scrape.sum("scheduled_tokens_total", phase="prefill") == 3
    assert scrape.sum("iteration_sequences_sum") == 5
    assert scrape.sum("kv_cache_usage_perc") == 0
    total = scrape.sum("kv_blocks")
    assert total == 512


async def test_histograms_are_cumulative_and_end_in_infinity():
    engine, _ = started()
    async with engine:
        await load(engine)
        text = render(Snapshot(await engine.group_metrics(), "scripted", ("acme",)))
    scrape = Scrape(text)
    histograms = [family for family in scrape.families.values() if family.type == "histogram"]
    assert len(histograms) == sum(metric.kind == "histogram" for metric in METRICS)
    for family in histograms:
        series = defaultdict(list)
        counts = {}
        for sample in family.samples:
            labels = dict(sample.labels)
            bound = labels.pop("le", None)
            key = tuple(sorted(labels.items()))
            if sample.name.endswith("_bucket"):
                series[key].append((float(bound), sample.value))
            elif sample.name.endswith("_count"):
                counts[key] = sample.value
        assert series.keys() == counts.keys()
        for key, buckets in series.items():
            assert buckets == sorted(buckets)
            assert [value for _, value in buckets] == sorted(value for _, value in buckets)
            assert buckets[-1] == (float("inf"), counts[key])


async def test_tenants_beyond_a_bound_are_others():
    engine, _ = started(max_num_seqs=200, max_queued_requests=200)
    shown = ShownTenants()
    async with engine:
        await scraped(engine, shown)
        await asyncio.gather(
            *(
                one(engine, "x", tenant=f"tenant {number}", request_class="bulk")
                for number in range(100)
            ),
            one(engine, "x", tenant="other", request_class="bulk"),
        )
        first = await scraped(engine, shown)
        named = first.labels("tenant_requests_accepted_total", "tenant")
        # Someone who comes later, with more to say than all others, does not push anybody out.
        late = [one(engine, "x", tenant="late", request_class="bulk") for _ in range(30)]
        await asyncio.gather(*late, one(engine, "x", tenant="other", request_class="bulk"))
        second = await scraped(engine, shown)
    assert len(named) == MOST_TENANTS + 1
    assert {"acme", "small", "other"} <= named
    assert second.labels("tenant_requests_accepted_total", "tenant") == named
    others = [of.sum("tenant_requests_accepted_total", tenant="other") for of in (first, second)]
    assert others[1] == others[0] + 31
    for scrape in (first, second):
        check_conservation(scrape)


async def test_in_brief_tenants_are_counters_alone():
    engine, _ = started()
    async with engine:
        await one(engine, "abc", tenant="acme", request_class="bulk")
        brief, full = await engine.group_metrics(brief=True), await engine.group_metrics()
    assert brief["classes"].keys() == full["classes"].keys()
    assert "itl" in brief["classes"]["bulk"]
    left_out = full["tenants"]["acme"].keys() - brief["tenants"]["acme"].keys()
    assert {"itl", "ttft", "queue_time", "rejections"} <= left_out
    assert brief["tenants"]["acme"] == {
        key: full["tenants"]["acme"][key] for key in brief["tenants"]["acme"]
    }
    assert brief["tenants"]["acme"]["output_tokens"] == 8


async def test_names_cannot_break_out_of_their_labels():
    engine, _ = started()
    name = 'a"b\\c\nd{x="1"} 7'
    async with engine:
        await one(engine, "x", tenant=name, request_class="bulk")
        scrape = await scraped(engine)
    assert scrape.sum("tenant_requests_accepted_total", tenant=name) == 1


def test_without_an_engine_it_says_so_and_counts_on():
    http = HttpCounters()
    http.count("GET", "/health", 200)
    http.count("GET", "/health", 200)
    http.count("POST", "/v1/completions", 503)
    scrape = Scrape(render(Snapshot(None, "scripted", http=http)))
    assert scrape.sum("engine_up") == 0
    assert scrape.sum("http_requests_total", route="/health", status="200") == 2
    assert scrape.sum("http_requests_total") == 3
    assert "chairlift:requests_live" not in scrape.samples


def test_a_blocked_event_loop_shows():
    async def main():
        lag = LoopLag()
        watching = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        time.sleep(0.3)  # blocks the loop
        while not any(lag.counts):
            await asyncio.sleep(0.001)
        watching.cancel()
        return lag

    lag = asyncio.run(main())
    late = sum(lag.counts[bisect_left(LAG_BOUNDS, 0.25) :])
    assert late == 1
    assert lag.total > 0.25


# Names: those that are documented and drawn are those that there are.


def test_the_documented_metrics_are_those_that_there_are():
    rows = re.findall(
        r"^\| `(chairlift:\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$",
        (ROOT / "docs/metrics.md").read_text(),
        flags=re.MULTILINE,
    )
    documented = {name: (kind, labels.strip(), text.strip()) for name, kind, labels, text in rows}
    assert documented == {
        metric.exposed_name: (
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.help,
        )
        for metric in METRICS
    }


async def test_the_dashboard_draws_what_there_is():
    engine, _ = started()
    async with engine:
        await load(engine)
        scrape = await scraped(engine, http=HttpCounters({("GET", "/", 200): 1}))
    dashboard = json.loads((ROOT / "deploy/grafana/chairlift.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions = [target["expr"] for target in targets]
    assert len(expressions) > 15
    drawn = set()
    for expression in expressions:
        for name, selector in re.findall(r"(chairlift:\w+)(?:\{([^}]*)\})?", expression):
            assert scrape.samples.get(name), f"{name} in {expression} is not exposed"
            drawn.add(name)
            known = {label for labels in scrape.samples[name] for label, _ in labels}
            asked = set(re.findall(r"(\w+)\s*[=!]~?", selector))
            assert asked <= known | {"job", "instance"}, f"{expression}: {asked - known}"
        for label in re.findall(r"by \(([^)]*)\)", expression):
            for one_label in map(str.strip, label.split(",")):
                known = {
                    name
                    for metric in re.findall(r"chairlift:\w+", expression)
                    for labels in scrape.samples[metric]
                    for name, _ in labels
                }
                assert one_label in known | {"le"}, f"{expression}: {one_label}"
    assert len(drawn) >= 20


@pytest.mark.parametrize("document", ["docs/metrics.md", "deploy/README.md", "README.md"])
def test_every_name_that_is_written_about_exists(document):
    stems = {metric.exposed_name for metric in METRICS}
    for name in re.findall(r"chairlift:\w+", (ROOT / document).read_text()):
        assert re.sub(r"_(bucket|sum|count)$", "", name) in stems, name
