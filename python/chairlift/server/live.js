"use strict";
// Asks for the state a few times a second while the page is seen, and shows it. Names come from
// clients: they are only ever set as text.

const INTERVAL_MS = 300;
const RETRY_MS = 2000;
const HUES = 6;
const at = (id) => document.getElementById(id);

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Makes `parent` have `count` children, the new ones by `make`. */
function resize(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make());
}

function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

const share = (value) =>
  value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
const hue = (index) => `h${index % HUES}`;
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

function showChairs(state) {
  const box = at("chairs");
  const rows = state.rows;
  const size = rows.length > 288 ? "chairs crowd" : rows.length > 64 ? "chairs many" : "chairs";
  if (box.className !== size) box.className = size;
  resize(box, rows.length, () => element("i", "chair"));
  let rides = 0;
  let boards = 0;
  for (let row = 0; row < rows.length; row += 1) {
    const letter = rows[row];
    const isFree = letter === ".";
    const doesRide = !isFree && letter < "a";
    if (doesRide) rides += 1;
    else if (!isFree) boards += 1;
    const phase = doesRide ? "rides" : "boards";
    const index = letter.toLowerCase().charCodeAt(0) - 97;
    const name = isFree ? "chair" : `chair ${phase} ${hue(index)}`;
    if (box.children[row].className !== name) box.children[row].className = name;
  }
  put(at("lift-text"),
    `${number(rides + boards)} of ${plural(rows.length, "chair")} taken, ${number(boards)} boarding`);
  const keys = at("class-keys");
  resize(keys, state.classes.length, () => {
    const key = element("li");
    key.append(element("i", "dot"), element("span"));
    return key;
  });
  state.classes.forEach((group, index) => {
    const [dot, name] = keys.children[index].children;
    dot.className = `dot ${hue(index)}`;
    put(name, group.name);
  });
}

function showFigures(state) {
  put(at("output"), number(state.rates.output));
  put(at("running"), number(state.sequences));
  put(at("waiting"), number(state.waiting));
  put(at("queued-tokens"), state.queued_tokens ? `${number(state.queued_tokens)} tokens` : "requests");
  put(at("finished"), number(state.rates.requests, 1));
  put(at("iteration"), seconds(state.iteration_time && state.iteration_time.p50));
  put(at("hits"), share(state.rates.cache_hits));
  put(at("model"), state.model);
  const span = state.window >= 59 ? "last minute" : `last ${Math.round(state.window)} s`;
  for (const node of document.querySelectorAll(".window")) put(node, span);
}

/** A round number at or above `value`, for the top of a scale. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function line(points, column, top) {
  let path = "";
  let last = Infinity;
  for (const point of points) {
    const x = 600 * (1 - point[0] / 60);
    const y = 118 - 112 * Math.min(point[column] / top, 1);
    // Where nothing ran for a while there is no line.
    const joins = last - point[0] < 2.5;
    path += `${joins ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!joins) path += "h.1";
    last = point[0];
  }
  return path;
}

function showTrace(state) {
  const longest = state.trace.map((point) => point[2]);
  const target = state.iteration_target;
  const top = ceiling(Math.max(0.001, target || 0, ...longest));
  setAttribute(at("trace-mean"), "d", line(state.trace, 1, top));
  setAttribute(at("trace-longest"), "d", line(state.trace, 2, top));
  const level = 118 - 112 * ((target || 0) / top);
  setAttribute(at("trace-target"), "d", target === null ? "" : `M0 ${level.toFixed(1)}H600`);
  at("target-key").hidden = target === null;
  put(at("trace-top"), seconds(top));
  const time = state.iteration_time;
  let text = "nothing ran in the last minute";
  if (time) text = `half below ${seconds(time.p50)}, 99 % below ${seconds(time.p99)}`;
  if (target !== null) text += `, target ${seconds(target)}`;
  put(at("trace-text"), text);
}

function showBatch(state) {
  const last = state.iterations;
  const most = Math.max(4, ...last.map((step) => step[1] + step[2]));
  const width = 480 / 48;
  const unit = 100 / most;
  let decodes = "";
  let prefills = "";
  let finished = "";
  last.forEach(([, decoding, prefilling, ended], index) => {
    const x = 480 - width * (last.length - index);
    const bar = (y, height) => `M${x + 1} ${y.toFixed(1)}h${width - 2}v${height.toFixed(1)}h${2 - width}z`;
    const top = 120 - decoding * unit;
    if (decoding) decodes += bar(top, decoding * unit);
    if (prefilling) prefills += bar(top - prefilling * unit, prefilling * unit);
    if (ended) finished += `M${x + width / 2} ${(top - prefilling * unit - 6).toFixed(1)}h.1`;
  });
  setAttribute(at("batch-decodes"), "d", decodes);
  setAttribute(at("batch-prefills"), "d", prefills);
  setAttribute(at("batch-finished"), "d", finished);
  put(at("batch-top"), plural(most, "sequence"));
  const step = last[last.length - 1];
  put(at("batch-text"), step
    ? `number ${number(step[0])}: ${plural(step[1], "decode")}, ${plural(step[2], "prefill")}`
    : "none yet");
}

function showMemory(state) {
  const { used, cached, free } = state.kv;
  const all = Math.max(used + cached + free, 1);
  at("kv-used").style.width = `${(100 * used) / all}%`;
  at("kv-cached").style.width = `${(100 * cached) / all}%`;
  put(at("kv-text"),
    `${share(used / all)} of ${plural(all, "block")} in use, ${share(cached / all)} cached`);
}

function cells(tags) {
  return () => {
    const row = element("tr");
    tags.forEach((className, index) => {
      const cell = element(index ? "td" : "th", className);
      if (!index) cell.scope = "row";
      row.append(cell);
    });
    return row;
  };
}

function showRefusals(state) {
  resize(at("refusals"), state.refusals.length, cells(["", "number", "number"]));
  state.refusals.forEach((refusal, index) => {
    const row = at("refusals").children[index].children;
    put(row[0], refusal.reason.replaceAll("_", " "));
    put(row[1], number(refusal.recent));
    put(row[2], number(refusal.total));
  });
  at("no-refusals").hidden = state.refusals.length > 0;
}

function showQueue(state) {
  resize(at("queue"), state.classes.length, () => {
    const row = element("li");
    const name = element("div", "name");
    name.append(element("i", "dot"), element("span"));
    const bar = element("div", "bar");
    bar.append(element("i"));
    row.append(name, element("span"), bar);
    return row;
  });
  const most = Math.max(8, ...state.classes.map((group) => group.waiting));
  state.classes.forEach((group, index) => {
    const [name, text, bar] = at("queue").children[index].children;
    name.firstElementChild.className = `dot ${hue(index)}`;
    put(name.lastElementChild, group.name);
    const oldest = group.oldest === null ? "" : `, oldest ${seconds(group.oldest)}`;
    put(text, `${number(group.waiting)} waiting${oldest}`);
    bar.className = `bar ${hue(index)}`;
    bar.firstElementChild.style.width = `${(100 * group.waiting) / most}%`;
  });
}

function showTenants(state) {
  const { shown, others, others_waiting: waiting } = state.tenants;
  resize(at("tenants"), shown.length, cells(["", "number", "number", "number", "number"]));
  shown.forEach((tenant, index) => {
    const row = at("tenants").children[index].children;
    put(row[0], tenant.name);
    row[0].title = tenant.name;
    put(row[1], number(tenant.waiting));
    put(row[2], seconds(tenant.oldest));
    put(row[3], number(tenant.running));
    put(row[4], share(tenant.share));
  });
  put(at("other-tenants"), others
    ? `and ${plural(others, "other")}, ${number(waiting)} waiting`
    : shown.length ? "" : "Nobody has come yet.");
}

function showTimes(id, state, measure, promise) {
  resize(at(id), state.classes.length, () => {
    const row = cells(["", "number", "number", "number"])();
    row.firstElementChild.append(element("span"), element("small"));
    return row;
  });
  state.classes.forEach((group, index) => {
    const row = at(id).children[index].children;
    const target = group[promise];
    put(row[0].children[0], group.name);
    put(row[0].children[1], target === null ? "no target" : `target ${seconds(target)}`);
    ["p50", "p95", "p99"].forEach((name, column) => {
      const value = group[measure] && group[measure][name];
      const cell = row[column + 1];
      put(cell, seconds(value));
      const isOver = target !== null && value !== null && value > target;
      cell.className = isOver ? "number over" : "number";
      cell.title = isOver ? "over its target" : "";
    });
  });
}

function show(state) {
  showChairs(state);
  showFigures(state);
  showTrace(state);
  showBatch(state);
  showMemory(state);
  showRefusals(state);
  showQueue(state);
  showTenants(state);
  showTimes("ttft", state, "ttft", "ttft_target");
  showTimes("itl", state, "itl", "tpot_target");
}

function say(text, light) {
  put(at("status"), text);
  at("light").className = `light ${light}`;
}

/** A key that the address brought along (#key=...): kept for this tab, and shown no longer. */
function givenKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem("key", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("key");
}

let key = givenKey();
let isPaused = false;
let timer = 0;
let asking = null;

async function ask() {
  const mine = new AbortController();
  asking = mine;
  let wait = INTERVAL_MS;
  try {
    const limit = AbortSignal.any([mine.signal, AbortSignal.timeout(10000)]);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch("live", { cache: "no-store", headers, signal: limit });
    const told = await answer.json();
    if (mine.signal.aborted) return;
    if (answer.ok) {
      show(told);
      say("live", "on");
    } else if (answer.status === 401) {
      wait = RETRY_MS;
      say("a key is needed: add #key=YOUR-KEY to the address", "off");
    } else {
      wait = RETRY_MS;
      say((told.error && told.error.message) || `the server says ${answer.status}`, "off");
    }
  } catch (error) {
    // Another question was asked, or nobody wants to know.
    if (mine.signal.aborted) return;
    wait = RETRY_MS;
    say("no answer, trying again", "off");
  }
  if (!isPaused && !document.hidden) timer = setTimeout(ask, wait);
}

function follow() {
  clearTimeout(timer);
  if (asking) asking.abort();
  if (isPaused) say("paused", "");
  if (!isPaused && !document.hidden) ask();
}

at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  setAttribute(at("pause"), "aria-pressed", String(isPaused));
  put(at("pause"), isPaused ? "Resume" : "Pause");
  follow();
});
document.addEventListener("visibilitychange", follow);
window.addEventListener("hashchange", () => {
  key = givenKey();
  follow();
});
follow();
