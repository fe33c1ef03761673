// Polls one route and shows what it says. All text goes in as text, never as markup.

import { drawActivity, kind, longest, phases, span, svg, wholeSpan, windowOf } from "./chart.js";

const ROUTE = "/emulator/v1/page";
const IDLE_MS = 1000;
const BUSY_MS = 300;
const LOST_MS = 2000;
const PATIENCE_MS = 10000;
const FIRST_HOT_LOADS = 10;
const MOVING = new Set(["PENDING", "IN_PROGRESS"]);

const STATES = {
  READY: ["ok", "Ready"],
  COMPLETED: ["ok", "Completed"],
  UPDATING: ["moving", "Updating"],
  IN_PROGRESS: ["moving", "In progress"],
  CREATING: ["moving", "Creating"],
  DELETING: ["moving", "Deleting"],
  PENDING: ["waiting", "Pending"],
  PENDING_UPDATE: ["waiting", "Waiting"],
  STARTING: ["waiting", "Starting"],
  DISABLED: ["waiting", "Disabled"],
  ERROR: ["bad", "Error"],
  DEGRADED: ["bad", "Some replicas in error"],
  FAILED: ["bad", "Failed"],
};

const at = (id) => document.getElementById(id);
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const count = new Intl.NumberFormat("en");

let token = "";
let view = null;
let known = null;
let timer = 0;
let showAll = false;

// Small helpers ---------------------------------------------------------------------------------------------------

function h(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Set a node's text, if it is another one: what does not change keeps the reader's selection. */
function say(node, words) {
  const text = printable(String(words));
  if (node.textContent !== text) node.textContent = text;
}

/** Spell out what cannot be seen, or would turn the rest of the line around: names come from anywhere. */
function printable(text) {
  return text.replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

/** Make `parent`'s children of class `item` those of `entries`, in order, keeping the ones that are there. */
function keyed(parent, entries, key, make) {
  const there = new Map([...parent.children].filter((node) => node.made).map((node) => [node.made.key, node]));
  let last = null;
  for (const entry of entries) {
    const name = key(entry);
    let node = there.get(name);
    if (node) {
      there.delete(name);
    } else {
      const update = make(entry);
      node = update.node;
      node.made = { key: name, update };
    }
    const place = last ? last.nextSibling : [...parent.children].find((child) => child.made) ?? null;
    if (place !== node) parent.insertBefore(node, place);
    node.made.update.with(entry);
    last = node;
  }
  for (const node of there.values()) node.remove();
}

/** Return a state's badge: a sign, and the word for it. */
function badge() {
  const use = svg("use", {});
  const words = h("span");
  const node = h("span", { class: "state" }, svg("svg", { class: "icon", "aria-hidden": "true" }, use), words);
  return {
    node,
    with(state) {
      const [tone, label] = STATES[state] ?? ["waiting", state];
      if (node.dataset.state === state) return;
      node.dataset.state = state;
      node.className = `state ${tone}`;
      use.setAttribute("href", `#i-${tone}`);
      say(words, label);
    },
  };
}

// Deployments -----------------------------------------------------------------------------------------------------

function served(deployment) {
  const counts = new Map();
  for (const replica of deployment.replicas) {
    if (replica.identity) counts.set(replica.identity, (counts.get(replica.identity) ?? 0) + 1);
  }
  return counts;
}

function chainWords(deployment) {
  if (!deployment.identity) return "base weights";
  if (!deployment.deltas) return "full";
  return `${deployment.deltas} ${deployment.deltas === 1 ? "delta" : "deltas"} on ${deployment.full_identity}`;
}

function servedWords(deployment) {
  const counts = served(deployment);
  const total = deployment.replicas.length;
  const wanted = deployment.identity || (counts.size === 1 ? [...counts.keys()][0] : "");
  const having = counts.get(wanted) ?? 0;
  if (!counts.size) return [deployment.identity || "no weights yet", total ? `none of ${total} replicas serves` : "no replica"];
  const many = having === total ? (total === 1 ? "its one replica" : `all ${total} replicas`) : `${having} of ${total} replicas`;
  return [wanted || "several identities", `${chainWords(deployment)} · ${many}`];
}

function makeDeployment(first) {
  const name = h("h3", { id: `d-${first.id}` });
  const state = badge();
  const model = h("p", { class: "deployment-model" });
  const identity = h("span", { class: "serves-identity" });
  const detail = h("span", { class: "sub" });
  const problem = h("p", { class: "problem" });
  const hint = h("code");
  const empty = h("div", { class: "empty inside" }, h("p", {}, h("strong", {}, "No weights yet."), " Publish a checkpoint:"), h("pre", {}, hint));
  const headings = [["Replica"], ["State"], ["Serves"], ["Zone", "wide"], ["Process", "number wide"]];
  const head = h("tr", {}, ...headings.map(([words, names]) => h("th", { scope: "col", class: names ?? "" }, words)));
  const table = h("table", {}, h("caption", { class: "unseen" }), h("thead", {}, head));
  const node = h(
    "article",
    { class: "card deployment", "aria-labelledby": `d-${first.id}`, "data-deployment": first.id },
    h(
      "div",
      { class: "deployment-head" },
      h("div", { class: "deployment-name" }, name, state.node),
      model,
      h("p", { class: "serves" }, h("span", { class: "unseen" }, "Serves "), identity, detail),
    ),
    problem,
    table,
    empty,
  );
  return {
    node,
    with(deployment) {
      const [words, more] = servedWords(deployment);
      say(name, deployment.name);
      state.with(deployment.status);
      say(model, `model ${deployment.model}${deployment.endpoints.length ? ` at ${deployment.endpoints.join(", ")}` : ""}`);
      say(identity, words);
      identity.classList.toggle("none", words === "no weights yet");
      say(detail, more);
      say(problem, ["ERROR", "DEGRADED"].includes(deployment.status) ? deployment.reason : "");
      say(table.caption, `Replicas of ${deployment.name}`);
      show(table, deployment.replicas.length > 0);
      const nothing = deployment.hot_loads && deployment.status === "READY" && !served(deployment).size && !deployment.identity;
      show(empty, nothing);
      say(hint, publishCommand(deployment));
      const wanted = deployment.identity;
      keyed(table, deployment.replicas.map((replica) => ({ ...replica, wanted })), (replica) => replica.name, makeReplica);
    },
  };
}

function makeReplica() {
  const name = h("th", { scope: "row", class: "breaks" });
  const state = badge();
  const identity = h("td", { class: "mono" });
  const zone = h("td", { class: "wide muted" });
  const pid = h("td", { class: "number wide muted" });
  const reason = h("p");
  const reasonRow = h("tr", { class: "reason" }, h("td", { colspan: "5" }, reason));
  const row = h("tr", {}, name, h("td", {}, state.node), identity, zone, pid);
  const node = h("tbody", { class: "item" }, row, reasonRow);
  return {
    node,
    with(replica) {
      node.dataset.replica = replica.name;
      say(name, replica.name);
      state.with(replica.state);
      say(identity, replica.identity || "–");
      identity.classList.toggle("elsewhere", Boolean(replica.identity && replica.wanted && replica.identity !== replica.wanted));
      say(zone, replica.zone);
      say(pid, replica.pid || "–");
      say(reason, replica.error);
      show(reasonRow, Boolean(replica.error));
    },
  };
}

function publishCommand(deployment) {
  const place = deployment ? deployment.id : "ID";
  return `cwtrain hotload publish --deployment ${place} --checkpoint DIR --identity v0`;
}

// Hot-loads -------------------------------------------------------------------------------------------------------

function makeHotLoad() {
  const identity = h("span", { class: "mono" });
  const detail = h("span", { class: "sub" });
  const state = badge();
  const picture = h("td", { class: "wide phases-cell" });
  const took = h("td", { class: "number" });
  const began = h("td", { class: "number wide muted" });
  const reason = h("p");
  const reasonRow = h("tr", { class: "reason" }, h("td", { colspan: "5" }, reason));
  const row = h("tr", {}, h("th", { scope: "row", class: "breaks" }, identity, " ", detail), h("td", {}, state.node), picture, took, began);
  const node = h("tbody", { class: "item" }, row, reasonRow);
  let drawn = "";
  return {
    node,
    with({ load, now, scale, several }) {
      node.dataset.hotLoad = load.id;
      say(identity, load.identity);
      say(detail, several ? `${kind(load)} · ${load.deployment || "deleted deployment"}` : kind(load));
      state.with(load.state);
      say(took, span((load.finished_at ?? now) - load.created_at));
      say(began, clock.format(load.created_at * 1000));
      say(reason, load.state === "FAILED" ? load.reason || "no reason was given" : "");
      show(reasonRow, load.state === "FAILED");
      const wanted = JSON.stringify([load.finished_at ?? now, scale, load.replicas]);
      if (wanted !== drawn) picture.replaceChildren(phases(load, now, scale));
      drawn = wanted;
    },
  };
}

function showHotLoads() {
  const loads = view.hot_loads;
  const table = at("hot-loads").querySelector("table");
  const shown = showAll ? loads : loads.slice(0, FIRST_HOT_LOADS);
  const scale = longest(shown, view.now);
  const several = new Set(loads.map((load) => load.deployment_id)).size > 1;
  keyed(table, shown.map((load) => ({ load, now: view.now, scale, several })), ({ load }) => load.id, makeHotLoad);
  const button = at("all-hot-loads");
  show(button, loads.length > FIRST_HOT_LOADS);
  button.setAttribute("aria-expanded", String(showAll));
  say(button, showAll ? `Show the last ${FIRST_HOT_LOADS} only` : `Show ${loads.length - FIRST_HOT_LOADS} earlier ones`);
  show(at("hot-loads"), loads.length > 0);
  show(at("no-hot-loads"), loads.length === 0);
  say(at("publish-command"), publishCommand(view.deployments.at(-1)));
}

// Requests and errors ---------------------------------------------------------------------------------------------

function showActivity() {
  const seconds = windowOf(view);
  const whole = Math.floor(view.now);
  const rows = view.requests.seconds.filter((row) => row[0] >= view.now - seconds);
  // The second that has not ended says little; the five before it say what is going on now.
  const recent = rows.filter((row) => row[0] >= whole - 5 && row[0] < whole);
  const rate = recent.reduce((sum, row) => sum + row[1] + row[2], 0) / 5;
  const [answered, refused, apiAnswered, apiRefused] = view.requests.total;
  say(at("h-activity"), seconds < 120 ? `Activity in the last ${seconds} seconds` : `Activity in the last ${seconds / 60} minutes`);
  say(at("f-rate"), rate && rate < 10 ? rate.toFixed(1) : count.format(Math.round(rate)));
  say(at("f-peak"), count.format(Math.max(0, ...rows.map((row) => row[1] + row[2]))));
  say(at("f-total"), count.format(answered + refused));
  say(at("f-refused"), count.format(refused + apiRefused));
  at("f-refused").classList.toggle("bad", refused + apiRefused > 0);
  say(at("f-calls"), count.format(apiAnswered + apiRefused));
  say(at("v1-url"), `${view.emulator.base_url}/v1/completions`);
  show(at("no-requests"), answered + refused === 0);
  drawActivity(at("chart"), view, seconds);
}

function makeProblem() {
  const what = h("span", { class: "mono" });
  const status = h("strong", { class: "bad" });
  const message = h("span", { class: "muted" });
  const times = h("td", { class: "number" });
  const id = h("td", { class: "wide mono muted" });
  const last = h("td", { class: "number muted" });
  const cell = h("th", { scope: "row", class: "breaks" }, status, " ", what, h("br"), message);
  return {
    node: h("tr", {}, cell, times, id, last),
    with(problem) {
      say(status, problem.status === null ? "Warning" : problem.status || "No answer");
      say(what, problem.source === "service" ? `from ${problem.what}` : problem.what);
      say(message, problem.message);
      say(times, `${problem.count}×`);
      say(id, problem.request_id);
      say(last, clock.format(problem.at * 1000));
    },
  };
}

function showProblems() {
  const key = (problem) => JSON.stringify([problem.source, problem.what, problem.status, problem.message]);
  keyed(at("problems").querySelector("tbody"), view.problems, key, makeProblem);
  show(at("problems"), view.problems.length > 0);
  show(at("no-problems"), view.problems.length === 0);
}

// The whole -------------------------------------------------------------------------------------------------------

function showAbout() {
  const { emulator } = view;
  const facts = [
    ["API", emulator.base_url],
    ["bucket", `${emulator.bucket} at ${emulator.s3_endpoint}`],
    ["seed", emulator.seed],
    ["version", emulator.version],
    ["up", wholeSpan(view.now - emulator.started_at)],
  ];
  const list = at("about");
  if (!list.children.length) list.append(...facts.map(([name]) => h("div", {}, h("dt", {}, name), h("dd"))));
  facts.forEach(([, value], number) => say(list.children[number].lastChild, value));
}

/** Tell a screen reader what has just happened, once. */
function announce() {
  const states = new Map(view.hot_loads.map((load) => [load.id, load.state]));
  if (known) {
    for (const load of view.hot_loads.slice(0, 5).reverse()) {
      if (MOVING.has(load.state) || known.get(load.id) === load.state) continue;
      const end = load.state === "FAILED" ? `failed: ${load.reason}` : load.state.toLowerCase();
      at("news").append(h("span", {}, `Hot-load ${load.identity} on ${load.deployment} ${end}. `));
    }
    while (at("news").children.length > 5) at("news").firstChild.remove();
  }
  known = states;
}

function showLink(name, icon, words) {
  const link = at("link");
  if (link.dataset.is === name) return;
  link.dataset.is = name;
  link.className = `link ${name}`;
  link.querySelector("use").setAttribute("href", `#i-${icon}`);
  say(link.querySelector("span"), words);
}

function render() {
  showAbout();
  const shown = [...view.deployments].reverse();
  keyed(at("deployments"), shown, (deployment) => deployment.id, makeDeployment);
  show(at("no-deployments"), shown.length === 0);
  const more = view.more_deployments ? ` (the newest ${shown.length} of ${shown.length + view.more_deployments})` : "";
  say(at("h-deployments"), `Deployments${more}`);
  show(at("main"), true);
  showActivity();
  showHotLoads();
  showProblems();
  announce();
}

function busy() {
  return (
    view.hot_loads.some((load) => MOVING.has(load.state)) ||
    view.deployments.some(({ replicas }) => replicas.some(({ state }) => state === "UPDATING" || state === "STARTING"))
  );
}

/** Return the route's answer; null when there is none, which the browser explains on its console. */
async function ask() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch(ROUTE, { headers, cache: "no-store", credentials: "omit", signal });
    return { status: answer.status, found: answer.ok ? await answer.json() : null };
  } catch {
    return { status: 0, found: null };
  }
}

async function poll() {
  clearTimeout(timer);
  const { status, found } = await ask();
  if (status === 401) {
    lock();
    return;
  }
  if (!found) {
    showLink("lost", "bad", "No answer: does the emulator still run?");
    schedule(LOST_MS);
    return;
  }
  view = found;
  show(at("unlock"), false);
  showLink("live", "ok", "Live");
  schedule(busy() ? BUSY_MS : IDLE_MS);
  render();
}

function schedule(pause) {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, pause);
}

function lock() {
  show(at("main"), false);
  show(at("unlock"), true);
  say(at("refused"), token ? "The emulator does not know this token." : "");
  showLink("waiting", "waiting", "Waiting for a token");
  token = "";
}

/** Take a token from the address, and out of it, so that it stays out of the history. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  token = given;
  history.replaceState(null, "", location.pathname);
}

at("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value.trim();
  at("token").value = "";
  poll();
});
at("all-hot-loads").addEventListener("click", () => {
  showAll = !showAll;
  showHotLoads();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
window.addEventListener("hashchange", () => {
  takeToken();
  poll();
});

let drawnWidth = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (view && contentRect.width !== drawnWidth) showActivity();
  drawnWidth = contentRect.width;
}).observe(at("chart"));

takeToken();
poll();
