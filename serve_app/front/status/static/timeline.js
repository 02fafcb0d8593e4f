// The states of each replica over time, the share it slept, and the list of changes.

import { $, h, keep, pill, setAttribute, setText, word } from "./dom.js";
import { because, clock, span, took } from "./format.js";

const SPANS = [["5 min", 300], ["15 min", 900], ["1 h", 3600]];
const LEGEND = ["awake", "draining", "asleep", "waking", "restarting", "failed", "silent", "unseen"];
const LOG_ROWS = 100;
const SHORTEST_S = 30;

let shown_s = SPANS[1][1];

export function setUpTimeline(redraw) {
  const choices = SPANS.map(([label, seconds]) => {
    const radio = h("input", { type: "radio", name: "span", value: String(seconds) });
    radio.checked = seconds === shown_s;
    radio.addEventListener("change", () => {
      shown_s = seconds;
      redraw();
    });
    return h("label", radio, label);
  });
  $("span").append(...choices);
  const samples = LEGEND.map((state) => h("li", h("span.sample", { "aria-hidden": "true" }, h("i", { "data-state": state })), word(state)));
  $("timeline-legend").append(...samples);
}

export function updateTimeline(state, now) {
  const first = Object.values(state.history)[0]?.at ?? now;
  const from = now - Math.min(shown_s, Math.max(SHORTEST_S, now - first)); // no room for what nobody saw
  const lanes = Object.entries(lanesOf(state, now)).map(([key, lane]) => [key, { ...lane, from, now }]);
  const models = Object.keys(state.models);
  const rows = lanes
    .filter(([, lane]) => lane.segments.some((segment) => segment.to > from))
    .sort(([, a], [, b]) => models.indexOf(a.model) - models.indexOf(b.model) || a.replica.localeCompare(b.replica));
  keep($("timeline"), [...rows, ["axis", { from, now }]], makeRow);
  const since = state.watched_since == null ? "" : `As this front saw it since ${clock(state.watched_since)}`;
  setText($("timeline-note"), `${since}, while somebody was watching.`);
}

/** "model replica" -> {model, replica, segments}; a segment is {state, from, to, reason}. */
function lanesOf(state, now) {
  const lanes = {};
  for (const [number, entry] of Object.entries(state.history)) {
    const lane = (lanes[`${entry.model} ${entry.replica}`] ??= { model: entry.model, replica: entry.replica, segments: [] });
    const last = lane.segments.at(-1);
    let at = entry.at;
    if (last) last.to = at;
    // A wake between two looks: it ended no later than now, and the replica says how long it took.
    if (entry.state === "awake" && entry.seconds != null && last && last.state !== "waking") {
      last.to = Math.max(last.from, at - entry.seconds);
      lane.segments.push({ key: `${number}w`, state: "waking", from: last.to, to: at, reason: entry.reason });
    }
    if (entry.state !== "gone") lane.segments.push({ key: number, state: entry.state, from: at, to: now, reason: entry.reason });
  }
  const several = new Map();
  for (const lane of Object.values(lanes)) several.set(lane.model, (several.get(lane.model) ?? 0) + 1);
  for (const lane of Object.values(lanes)) lane.label = several.get(lane.model) > 1 ? `${lane.model} ${lane.replica}` : lane.model;
  return lanes;
}

function makeRow(key) {
  if (key === "axis") return makeAxis();
  const who = h("span.who");
  const lane = h("div.lane", { role: "img" });
  const share = h("span.share");
  const row = h("div.row", who, lane, share);
  row.update = ({ label, segments, from, now }) => {
    setText(who, label);
    setAttribute(who, "title", label);
    const length = now - from;
    const visible = segments.filter((segment) => segment.to > from);
    keep(lane, visible.map((segment) => [segment.key, segment]), () => h("i"), (node, segment) => {
      const start = Math.max(segment.from, from);
      setAttribute(node, "data-state", segment.state);
      setAttribute(node, "title", `${word(segment.state)} from ${clock(segment.from)}, ${took(segment.to - segment.from)}: ${segment.reason}`);
      node.style.left = `${(100 * (start - from)) / length}%`;
      node.style.width = `${(100 * (segment.to - start)) / length}%`;
    });
    const seconds = (states) => visible.filter((one) => states(one.state)).reduce((sum, one) => sum + one.to - Math.max(one.from, from), 0);
    const seen = seconds((one) => one !== "unseen" && one !== "silent");
    const asleep = seen > 0 ? `asleep ${Math.round((100 * seconds((one) => one === "asleep")) / seen)} %` : "";
    setText(share, asleep);
    const wakes = visible.filter((one) => one.state === "waking").length;
    setAttribute(lane, "aria-label", `${label}: ${word(visible.at(-1)?.state ?? "gone")} now, ${asleep} of the time seen, ${wakes} wakes`);
  };
  return row;
}

function makeAxis() {
  const ticks = [0, 1 / 3, 2 / 3, 1].map((at) => {
    const tick = h("span");
    tick.style.left = `${100 * at}%`;
    if (at === 0) tick.style.transform = "none";
    return [at, tick];
  });
  const axis = h("div.axis", { "aria-hidden": "true" }, ...ticks.map(([, tick]) => tick));
  axis.update = ({ from, now }) => {
    for (const [at, tick] of ticks) setText(tick, at === 1 ? "now" : `−${span((1 - at) * (now - from)).replace(" 00 s", "")}`);
  };
  return axis;
}

// --- the list of changes ---

export function updateLog(state) {
  const entries = Object.values(state.history).slice(-LOG_ROWS).reverse();
  // Numbers are each front's own.
  keep($("log"), entries.map((each) => [each.at + each.replica, each]), makeEntry);
}

function makeEntry(key, entry) {
  const missed = entry.missed ? ` (and ${entry.missed} more between two looks)` : "";
  return h(
    "li",
    h("time", { datetime: new Date(entry.at * 1000).toISOString() }, clock(entry.at)),
    h("span.who", { title: `${entry.model} ${entry.replica}` }, `${entry.model} · ${entry.replica}`),
    h("span", pill(entry.state)),
    h("span.why", { title: entry.reason }, because(entry.state, entry.reason) + missed),
    h("span.took", entry.seconds == null ? "" : took(entry.seconds)),
  );
}
