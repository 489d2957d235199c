"""The live page: its data without a browser, and the page itself in Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import Mapping
from typing import Annotated

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException

from chairlift import (
    AsyncEngine,
    ClassConfig,
    Config,
    PolicyConfig,
    SamplingParams,
    TenantConfig,
    TryLaterError,
)
from chairlift.outputs import ITERATION_BOUNDS, TIME_BOUNDS
from chairlift.server.live import Pulse, quantile
from chairlift.server.metrics import render
from chairlift.server.pages import live_page, router
from chairlift.server.readings import Snapshot
from chairlift.testing import ScriptedExecutor

pytestmark = pytest.mark.anyio
LONG_MS = 120_000
"""What nothing in a browser takes."""
EVIL = "<img src=x onerror=document.title='owned'> & \"friends\""


@pytest.fixture
def anyio_backend():
    return "asyncio"


def started(step_time=0.002, max_num_seqs=16, **executor):
    scripted = ScriptedExecutor(step_time=step_time, **executor)
    policy = PolicyConfig(
        sharing="fair",
        classes={
            "interactive": ClassConfig(level=1, ttft_target="2s", tpot_target="3ms"),
            "batch": ClassConfig(max_queue_time="20s"),
        },
        tenants={"acme": TenantConfig(weight=2), EVIL: TenantConfig(max_queued=4)},
    )
    engine = {"max_num_seqs": max_num_seqs, "max_queued_requests": 40}
    config = Config(engine=engine, policy=policy)
    return AsyncEngine(executor=scripted, isolation="thread", config=config), scripted


def tokens(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


async def finish(engine, prompt, count, **args):
    with contextlib.suppress(TryLaterError):
        async for _ in engine.generate(prompt, tokens(count), **args):
            pass


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


async def look(pulse):
    return json.loads(await pulse.look())


# What it says.


async def test_it_tells_what_happened_between_two_looks():
    engine, scripted = started()
    clock = Clock()
    pulse = Pulse(lambda: engine, "scripted", clock)
    async with engine:
        await finish(engine, "before", 30, tenant="acme")
        first = await look(pulse)
        assert (first["window"], first["rates"]["output"], first["iteration_time"]) == (
            0,
            None,
            None,
        )
        clock.now += 10
        scripted.hold()
        both = asyncio.gather(
            finish(engine, "abc", 21, tenant="acme"),
            finish(engine, "abcd", 21, tenant=EVIL, request_class="batch"),
        )
        while (await engine.metrics())["live"] < 2:
            await asyncio.sleep(0.001)
        scripted.release()
        await both
        second = await look(pulse)
    assert second["model"] == "scripted"
    assert second["window"] == 10
    assert second["rates"] == {"output": 4.2, "prompt": 0.7, "requests": 0.2, "cache_hits": 0.0}
    assert second["iteration_time"]["count"] in range(21, 24)
    assert 0.002 <= second["iteration_time"]["p50"] < 0.1
    interactive, batch = second["classes"]
    assert (interactive["name"], interactive["ttft"]["count"]) == ("interactive", 1)
    assert (interactive["itl"]["count"], batch["itl"]["count"]) == (20, 20)
    assert (interactive["ttft_target"], batch["ttft_target"]) == (2.0, None)
    assert second["iteration_target"] == 0.003
    shown = {tenant["name"]: tenant for tenant in second["tenants"]["shown"]}
    assert shown.keys() == {"acme", EVIL}
    assert sum(tenant["share"] for tenant in shown.values()) == pytest.approx(1, abs=0.01)
    assert second["rows"] == "." * 16
    assert second["trace"], "iterations leave a trace"


async def test_chairs_waits_and_refusals_are_as_the_engine_is():
    engine, executor = started(max_num_seqs=2, hold_at_steps=[1, 5])
    pulse = Pulse(lambda: engine)
    async with engine:
        running = [
            asyncio.create_task(finish(engine, "abc", 200, tenant="acme", request_class="batch"))
            for _ in range(2)
        ]
        await asyncio.to_thread(executor.wait_held)
        while (await engine.metrics())["live"] < 2:
            await asyncio.sleep(0.001)
        executor.release()
        await asyncio.to_thread(executor.wait_held)  # both run, or a free slot is room
        waiting = [
            asyncio.create_task(finish(engine, "abc", 8, tenant=EVIL, request_class="batch"))
            for _ in range(7)
        ]
        while (await engine.metrics())["rejected"] < 3:
            await asyncio.sleep(0.001)
        assert (await engine.metrics())["running_sequences"] == 2
        state = await look(pulse)
        executor.release()
        await asyncio.gather(*running, *waiting)
    taken = state["rows"].replace(".", "")
    assert set(taken.upper()) == {"B"}, "of the second class"
    batch = state["classes"][1]
    assert batch["waiting"] + batch["running"] == 6
    assert batch["waiting"] >= 4
    assert batch["oldest"] > 0
    evil = next(tenant for tenant in state["tenants"]["shown"] if tenant["name"] == EVIL)
    assert (evil["waiting"], evil["running"]) == (4, 0)
    refusals = {refusal["reason"]: refusal["total"] for refusal in state["refusals"]}
    assert refusals == {"tenant_full": 3}


async def test_whoever_looks_gets_the_same_sample_four_times_a_second():
    engine, _ = started()
    clock = Clock()
    pulse = Pulse(lambda: engine, clock=clock)
    async with engine:
        for _ in range(8):  # two seconds
            told = await asyncio.gather(*(pulse.look() for _ in range(50)))
            assert len(set(map(id, told))) == 1
            clock.now += 0.25
    assert pulse.num_samples == 8


async def test_what_is_older_than_a_minute_is_forgotten():
    engine, _ = started()
    clock = Clock()
    pulse = Pulse(lambda: engine, clock=clock)
    async with engine:
        await look(pulse)
        await finish(engine, "abc", 5)
        for _ in range(130):
            clock.now += 1
            state = await look(pulse)
        assert 59 <= state["window"] <= 60
        assert state["rates"]["output"] == 0
        clock.now += 1_000  # nobody looked
        state = await look(pulse)
    assert state["window"] == 0


async def test_hundreds_of_tenants_do_not_swell_it():
    engine, _ = started(max_num_seqs=40)
    pulse = Pulse(lambda: engine)
    async with engine:
        for number in range(300):
            await finish(engine, "a", 1, tenant=f"tenant {number}")
        told = await pulse.look()
    state = json.loads(told)
    assert len(state["tenants"]["shown"]) == 8
    assert state["tenants"]["others"] == 300 + 2 - 8
    assert len(told) < 8_000


async def test_an_engine_in_its_own_process_is_seen_as_well():
    engine = AsyncEngine(executor="chairlift.testing:ScriptedExecutor", isolation="process")
    clock = Clock()
    pulse = Pulse(lambda: engine, clock=clock)
    async with engine:
        await look(pulse)
        await finish(engine, "abc", 12)
        clock.now += 1
        state = await look(pulse)
        scrape = render(Snapshot(await engine.group_metrics(), shown_tenants=("default",)))
    assert state["classes"][0]["itl"]["count"] == 11
    assert len(state["iterations"]) == 12
    assert state["rows"] == "." * 256
    assert b'chairlift:tenant_generation_tokens_total{model_name="",tenant="default"} 12' in scrape


def test_a_quantile_lies_within_its_bucket():
    counts = [0] * (len(TIME_BOUNDS) + 1)
    counts[3], counts[5] = 90, 10
    assert quantile(counts, TIME_BOUNDS, 0.5) == pytest.approx(0.01 + 0.01 * 50 / 90)
    assert TIME_BOUNDS[4] < quantile(counts, TIME_BOUNDS, 0.95) <= TIME_BOUNDS[5]
    beyond = [0] * len(counts)
    beyond[-1] = 1
    assert quantile(beyond, TIME_BOUNDS, 0.5) == TIME_BOUNDS[-1]


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_quantiles_are_those_of_what_was_counted(share):
    values = np.random.default_rng(7).lognormal(-3, 1, 10_000)
    counts = np.bincount(
        np.searchsorted(ITERATION_BOUNDS, values), minlength=len(ITERATION_BOUNDS) + 1
    )
    estimate = quantile(counts.tolist(), ITERATION_BOUNDS, share)
    assert estimate == pytest.approx(float(np.quantile(values, share)), rel=0.15)


# What is served.


def application(engine, **options):
    app = FastAPI()
    app.include_router(router(lambda: engine, model_name="scripted", **options))
    return app


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://chairlift")


async def test_pages_are_served():
    engine, _ = started()
    async with engine, client_of(application(engine)) as client:
        await finish(engine, "abc", 3)
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        live = await client.get("/live")
        assert (live.status_code, live.headers["cache-control"]) == (200, "no-store")
        assert live.json()["rates"].keys() == {"output", "prompt", "requests", "cache_hits"}
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'chairlift:generation_tokens_total{class="interactive",model_name="scripted"} 3' in (
            metrics.text
        )


async def test_without_an_engine_they_say_why():
    async with client_of(application(None)) as client:
        assert (await client.get("/")).status_code == 200
        live = await client.get("/live")
        assert (live.status_code, live.json()["error"]["code"]) == (503, "loading")
        assert "chairlift:engine_up{" in (await client.get("/metrics")).text
    engine, _ = started()
    await engine.shutdown()
    async with client_of(application(engine)) as client:
        live = await client.get("/live")
        assert (live.status_code, live.json()["error"]["code"]) == (503, "engine_dead")
        metrics = await client.get("/metrics")
        assert metrics.status_code == 200
        assert "chairlift:requests_live{" not in metrics.text


def test_the_page_needs_nothing_from_elsewhere():
    body = live_page().body.decode()
    for foreign in ("http://", "https://", "//cdn", "@import", "src="):
        assert foreign not in body
    assert "innerHTML" not in body
    assert "/*STYLE*/" not in body
    assert "/*SCRIPT*/" not in body


# The page in a browser.


@pytest.fixture
def chromium():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium to show the page in")
    return path


@contextlib.asynccontextmanager
async def served(app):
    """The address at which an application answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def browsing(path, address, **options):
    """A page at the address, and what it complained about."""
    from playwright.async_api import async_playwright  # noqa: PLC0415 - slow to import

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=LONG_MS
        )
        page = await browser.new_page(**options)
        page.set_default_timeout(LONG_MS)
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        await page.goto(address)
        try:
            yield page, complaints
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def loaded(engine):
    """A load of two tenants and both classes, until the context is left."""

    async def client(number):
        while True:
            args = {
                "tenant": ("acme", EVIL)[number % 2],
                "request_class": ("interactive", "batch")[number % 3 > 0],
            }
            await finish(engine, f"client {number}", 20 + number, **args)
            await asyncio.sleep(0.001)

    clients = [asyncio.create_task(client(number)) for number in range(30)]
    try:
        yield
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def text(page, element):
    return await page.text_content(f"#{element}")


async def until(page, condition, argument=None):
    """Wait for it; Playwright's own way to wait evaluates text, which the page's policy forbids."""
    async with asyncio.timeout(LONG_MS / 1e3):
        while not await page.evaluate(condition, argument):
            await asyncio.sleep(0.02)


async def until_status(page, wanted):
    await until(page, "text => document.getElementById('status').textContent === text", wanted)


PHONE: Mapping[str, object] = {
    "viewport": {"width": 360, "height": 740},
    "color_scheme": "dark",
    "reduced_motion": "reduce",
}


@pytest.mark.browser
async def test_a_load_is_seen(chromium, tmp_path):
    engine, _ = started(step_time=0.004)
    async with (
        engine,
        served(application(engine)) as address,
        browsing(chromium, address) as (page, complaints),
    ):
        await until_status(page, "live")
        assert await text(page, "lift-text") == "0 of 16 chairs taken, 0 boarding"
        assert await page.locator(".chairs .chair").count() == 16
        async with loaded(engine):
            await until(page, "document.querySelectorAll('.chairs .rides').length > 12")
            await until(
                page, "Number(document.getElementById('output').textContent.replace(',', '')) > 100"
            )
            before = await text(page, "batch-text")
            await until(
                page,
                "before => document.getElementById('batch-text').textContent !== before",
                before,
            )
            # The other class by its colour, and a tenant's name is text.
            await page.locator(".chairs .h0").first.wait_for(state="attached")
            names = await page.locator("#tenants th").all_text_contents()
            assert set(names) == {"acme", EVIL}
            assert await page.locator("#tenants img").count() == 0
            assert await page.title() == "Chairlift"
            await page.locator("#refusals th", has_text="tenant full").wait_for()
            # An iteration of 4 ms cannot keep 3 ms between tokens, and the page says so.
            await page.wait_for_selector("#itl .over")
            assert "target 3.0 ms" in await text(page, "trace-text")
            await page.screenshot(path=tmp_path / "load.png", full_page=True)
        await until(page, "document.querySelectorAll('.chairs .rides').length === 0")
        # The lower class alone: under the load, on a slow machine, it may never get a chair.
        ride = asyncio.create_task(finish(engine, "a ride", 4_000, request_class="batch"))
        await page.locator(".chairs .h1").first.wait_for(state="attached")
        ride.cancel()
        assert complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("options", [PHONE, {"viewport": {"width": 1280, "height": 900}}])
async def test_nothing_jumps_or_sticks_out(chromium, options):
    engine, _ = started(step_time=0.004, max_num_seqs=256)
    async with (
        engine,
        served(application(engine)) as address,
        browsing(chromium, address, **options) as (page, _),
    ):
        await page.wait_for_selector(".chairs .chair")
        # Chromium's own measure of what moved without being asked to.
        await page.evaluate(
            "window.moved = 0; new PerformanceObserver((list) => list.getEntries().forEach("
            "(entry) => { window.moved += entry.value; })).observe({type: 'layout-shift'})"
        )
        async with loaded(engine):
            for _ in range(4):
                before = await text(page, "batch-text")
                await until(
                    page,
                    "before => document.getElementById('batch-text').textContent !== before",
                    before,
                )
                widths = await page.evaluate(
                    "[document.documentElement.scrollWidth, window.innerWidth]"
                )
                assert widths[0] <= widths[1]
            assert await page.evaluate("window.moved") < 0.1


@pytest.mark.browser
async def test_it_pauses_and_comes_back_after_the_server_was_away(chromium):
    engine, _ = started()
    gate: dict[str, AsyncEngine | None] = {"engine": None}
    app = FastAPI()
    app.include_router(router(lambda: gate["engine"]))
    async with (
        engine,
        served(app) as address,
        browsing(chromium, address) as (page, _),
    ):
        await until_status(page, "the model is being loaded")
        gate["engine"] = engine
        await until_status(page, "live")
        await page.get_by_role("button", name="Pause").click()
        await until_status(page, "paused")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        await finish(engine, "abc", 5)
        await page.wait_for_timeout(700)
        assert asked == []
        await page.get_by_role("button", name="Resume").click()
        await until_status(page, "live")
        assert await text(page, "other-tenants") == ""


@pytest.mark.browser
async def test_a_key_is_taken_from_the_address_and_shown_no_longer(chromium):
    def check(authorization: Annotated[str, Header()] = ""):
        if authorization != "Bearer sk-right":
            raise HTTPException(401, "no such key")

    engine, _ = started()
    app = application(engine, dependencies=[Depends(check)])
    async with (
        engine,
        served(app) as address,
        browsing(chromium, address) as (page, _),
    ):
        await until_status(page, "a key is needed: add #key=YOUR-KEY to the address")
        await page.goto(f"{address}#key=sk-right")
        await until_status(page, "live")
        assert page.url == address
        await page.reload()
        await until_status(page, "live")
    async with client_of(app) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/")).status_code == 200


@pytest.mark.browser
async def test_a_question_that_is_overtaken_is_no_failure(chromium):
    """A key that comes meanwhile is asked with at once, and once."""
    engine, _ = started()
    async with (
        engine,
        served(application(engine)) as address,
        browsing(chromium, address) as (page, _),
    ):
        await until_status(page, "live")
        asked = []

        async def answer(route):
            asked.append(route)
            if len(asked) > 1:
                await route.continue_()

        await page.route("**/live", answer)
        while not asked:
            await asyncio.sleep(0.01)
        await page.evaluate(
            "window.said = []; new MutationObserver(() => said.push(at('status').textContent))"
            ".observe(at('status'), {childList: true, characterData: true, subtree: true})"
        )
        await page.evaluate("location.hash = '#key=any'")
        while len(asked) < 3:
            await asyncio.sleep(0.01)
        assert await page.evaluate("said") == []
        assert asked[1].request.headers["authorization"] == "Bearer any"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_can_be_read(chromium, scheme):
    """Contrast of text against its ground is 4.5 at least (WCAG 2.2, 1.4.3)."""
    engine, _ = started()
    async with (
        engine,
        served(application(engine)) as address,
        browsing(chromium, address, color_scheme=scheme) as (page, _),
        loaded(engine),
    ):
        await page.wait_for_selector("#itl .over")
        worst = await page.evaluate(CONTRAST)
        assert len(worst) > 40
        assert min(worst)[0] >= 4.5, min(worst)


CONTRAST = """() => {
  const channels = (color) => color.match(/[0-9.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      const alpha = channels(color)[3];
      if (alpha === undefined || alpha > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  for (const node of document.body.querySelectorAll('*')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest('script, style') || !node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, node.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""
