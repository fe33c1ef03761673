// The drawings: requests by the second with hot-loads under them, on one axis of time; and one hot-load's replicas.

const SVG = "http://www.w3.org/2000/svg";
const WINDOWS = [30, 60, 120, 300];
const LANES = 6;
const MOVING = new Set(["PENDING", "IN_PROGRESS"]);

/** Make an SVG element; children may be elements or text. */
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** Say a time span in seconds: "84 ms", "1.23 s", "2 min 3 s", "3 h 5 min". */
export function span(seconds) {
  if (seconds < 0.9995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Say a time span in whole seconds: "8 s", "2 min 3 s". */
export function wholeSpan(seconds) {
  return seconds < 60 ? `${Math.floor(seconds)} s` : span(Math.floor(seconds));
}

/** Say what a hot-load is: "full", or "delta on v1". */
export function kind(load) {
  return load.type === "FULL" ? "full" : `delta on ${load.previous}`;
}

/** Return the seconds that the chart shows: the shortest span that holds all that happened of late. */
export function windowOf(view) {
  const oldest = view.now - view.requests.kept_seconds;
  const moments = view.requests.seconds.map((row) => row[0]);
  moments.push(...view.hot_loads.map((load) => load.created_at));
  const first = Math.min(view.now, ...moments.filter((moment) => moment >= oldest));
  return WINDOWS.find((seconds) => view.now - first <= seconds) ?? WINDOWS.at(-1);
}

/** Return a round number that is not below `value`. */
function ceiling(value) {
  let unit = 1;
  for (;;) {
    for (const step of [1, 2, 4, 5, 8]) if (step * unit >= value) return step * unit;
    unit *= 10;
  }
}

/** Draw the activity of the last `seconds` into `box`. */
export function drawActivity(box, view, seconds) {
  const width = Math.max(240, Math.floor(box.clientWidth - padding(box)));
  const left = 30;
  const top = 12;
  const plot = 112;
  const lanes = lanesOf(view, seconds);
  const lane = 44;
  const bottom = top + plot + 10 + lanes.length * lane;
  const height = bottom + 20;
  const from = view.now - seconds;
  const x = (moment) => left + ((moment - from) / seconds) * (width - left);

  const rows = view.requests.seconds.filter((row) => row[0] + 1 > from);
  const most = ceiling(Math.max(4, ...rows.map(([, ok, bad, apiOk, apiBad]) => Math.max(ok + bad, apiOk + apiBad))));
  const y = (count) => top + plot - (count / most) * plot;

  const parts = [hatch()];
  for (const count of [0, most / 2, most]) {
    parts.push(svg("line", { class: count ? "grid" : "base", x1: left, x2: width, y1: y(count), y2: y(count) }));
    parts.push(svg("text", { x: left - 6, y: y(count) + 4, "text-anchor": "end" }, String(count)));
  }
  const columns = svg("g", { "clip-path": "url(#plot)" });
  const step = (width - left) / seconds;
  const gap = step > 4 ? 1 : 0;
  for (const [second, ok, bad] of rows) {
    const place = { x: (x(second) + gap / 2).toFixed(2), width: (step - gap).toFixed(2) };
    if (ok) columns.append(svg("rect", { class: "answered", ...place, y: y(ok), height: y(0) - y(ok) }));
    if (bad) columns.append(svg("rect", { class: "refused", ...place, y: y(ok + bad), height: y(ok) - y(ok + bad) }));
  }
  columns.append(svg("path", { class: "calls", d: callsPath(rows, from, view.now, x, y) }));
  parts.push(columns);

  lanes.forEach(({ name, loads }, number) => {
    const middle = top + plot + 10 + number * lane + 26;
    parts.push(svg("line", { class: "lane", x1: left, x2: width, y1: middle, y2: middle }));
    parts.push(svg("text", { class: "halo", x: left, y: middle - 14 }, name));
    parts.push(...laneParts(loads, view.now, { x, middle, left, width, name }));
  });

  const ticks = width > 560 ? 6 : 3;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const ago = Math.round(seconds - (seconds * tick) / ticks);
    const anchor = tick === ticks ? "end" : tick ? "middle" : "start";
    const words = ago ? `−${ago % 60 || ago < 60 ? `${ago} s` : `${ago / 60} min`}` : "now";
    parts.push(svg("text", { x: x(view.now - ago), y: height - 4, "text-anchor": anchor }, words));
  }
  parts.unshift(
    svg("clipPath", { id: "plot" }, svg("rect", { x: left, y: 0, width: width - left, height: top + plot })),
  );
  const words = summary(view, rows, lanes, seconds);
  box.replaceChildren(
    svg("svg", { role: "img", "aria-label": words, viewBox: `0 0 ${width} ${height}`, height, width }, ...parts),
  );
}

function padding(box) {
  const style = getComputedStyle(box);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
}

function hatch() {
  const pattern = svg("pattern", {
    id: "hatch-bad", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
  });
  pattern.append(svg("line", { class: "hatch-bad-line", x1: 1, y1: 0, x2: 1, y2: 4 }));
  return svg("defs", {}, pattern);
}

function callsPath(rows, from, now, x, y) {
  const counts = new Map(rows.map(([second, , , ok, bad]) => [second, ok + bad]));
  const points = [];
  for (let second = Math.floor(from); second <= Math.floor(now); second += 1) {
    const height = y(counts.get(second) ?? 0).toFixed(1);
    points.push(`${x(second).toFixed(1)},${height}`, `${Math.min(x(second + 1), x(now)).toFixed(1)},${height}`);
  }
  return `M${points.join("L")}`;
}

/** Return the deployments with hot-loads in the window, each with its hot-loads, oldest first. */
function lanesOf(view, seconds) {
  const byDeployment = new Map();
  for (const load of view.hot_loads) {
    if ((load.finished_at ?? view.now) < view.now - seconds) continue;
    const name = load.deployment || `deleted ${load.deployment_id.slice(0, 8)}`;
    if (!byDeployment.has(load.deployment_id)) byDeployment.set(load.deployment_id, { name, loads: [] });
    byDeployment.get(load.deployment_id).loads.unshift(load);
  }
  return [...byDeployment.values()].slice(0, LANES).sort((a, b) => a.name.localeCompare(b.name));
}

function laneParts(loads, now, { x, middle, left, width, name }) {
  const bars = [];
  const labels = [];
  const nameEnds = left + name.length * 7 + 12;
  let free = width + 8;
  for (const load of [...loads].reverse()) {
    const begin = Math.max(left, x(load.created_at));
    const size = Math.max(3, x(load.finished_at ?? now) - begin);
    const tall = load.type === "FULL" ? 18 : 10;
    const title = svg("title", {}, described(load, now));
    const box = { x: begin.toFixed(1), y: middle - tall / 2, width: size.toFixed(1), height: tall, rx: 1 };
    bars.push(svg("rect", { class: `bar ${barClass(load.state)}`, ...box }, title));
    if (load.state === "FAILED") bars.push(cross(begin + size / 2, middle + 13, 3));
    // The newest identity is always named, older ones where there is room for them.
    const words = load.identity.length > 26 ? `${load.identity.slice(0, 25)}…` : load.identity;
    const long = words.length * 6.8 + 8;
    const start = Math.min(begin - 1, width - long + 8);
    if (start + long <= free && start >= nameEnds) {
      labels.push(svg("text", { class: "identity halo", x: start.toFixed(1), y: middle - 14 }, words));
      free = start;
    }
  }
  return [...bars.reverse(), ...labels];
}

function cross(x, y, half) {
  const d = `M${x - half} ${y - half}l${2 * half} ${2 * half}m0 ${-2 * half}l${-2 * half} ${2 * half}`;
  return svg("path", { class: "cross", d });
}

function barClass(state) {
  return { PENDING: "pending", IN_PROGRESS: "moving", FAILED: "failed" }[state] ?? "completed";
}

function described(load, now) {
  const took = span((load.finished_at ?? now) - load.created_at);
  return `${load.identity}, ${kind(load)}: ${load.state.toLowerCase().replace("_", " ")}, ${took}`;
}

function summary(view, rows, lanes, seconds) {
  const most = Math.max(0, ...rows.map((row) => row[1] + row[2]));
  const loads = lanes.reduce((sum, lane) => sum + lane.loads.length, 0);
  return `Requests and hot-loads of the last ${seconds} seconds: at most ${most} completions in a second, ${loads} hot-loads`;
}

/** Return the longest time that any of the hot-loads took, for `phases`. */
export function longest(loads, now) {
  return Math.max(0.001, ...loads.map((load) => (load.finished_at ?? now) - load.created_at));
}

/** Return a drawing of when each replica loaded a hot-load, on a scale of `scale` seconds. */
export function phases(load, now, scale) {
  const height = Math.max(10, load.replicas.length * 6);
  const thick = load.replicas.length ? height / load.replicas.length : height;
  const whole = ((load.finished_at ?? now) - load.created_at) / scale;
  const picture = svg("svg", { class: "phases", height, "aria-hidden": "true" });
  picture.append(svg("rect", { class: "track", x: 0, y: 0, width: percent(whole), height, rx: 2 }));
  load.replicas.forEach((replica, number) => {
    if (replica.started_at === null) return;
    const middle = number * thick + thick / 2;
    // After a restart a replica's times are newer than the hot-load's end.
    const end = Math.min(replica.finished_at ?? now, load.finished_at ?? now);
    const from = Math.max(0, (Math.min(replica.started_at, end) - load.created_at) / scale);
    const size = Math.max(0, (end - load.created_at) / scale - from);
    const words = `${replica.name}: began after ${span(from * scale)}, took ${span(size * scale)}`;
    const state = replica.state === "ERROR" ? "FAILED" : MOVING.has(load.state) ? "IN_PROGRESS" : "COMPLETED";
    picture.append(
      svg("line", { class: "wait", x1: 0, x2: percent(from), y1: middle, y2: middle }),
      svg(
        "rect",
        { class: `bar ${barClass(state)}`, x: percent(from), y: middle - thick / 2 + 1, width: percent(size), height: thick - 2, rx: 1 },
        svg("title", {}, words),
      ),
    );
  });
  return picture;
}

function percent(part) {
  return `${(100 * Math.min(1, part)).toFixed(2)}%`;
}
