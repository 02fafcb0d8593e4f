// The page: one snapshot of the server, drawn again when it changes and with the clock.

import { $, h, keep, setAttribute, setText, word } from "./dom.js";
import { adminKey, Feed } from "./feed.js";
import { bytes, count } from "./format.js";
import { updateMemory } from "./memory.js";
import { updateModels } from "./models.js";
import { setUpPlayground, updatePlayground } from "./playground.js";
import { sharedCards, updateShared } from "./shared.js";
import { setUpTimeline, updateLog, updateTimeline } from "./timeline.js";
import { updateWakes } from "./wakes.js";

const LINKS = { live: "live", connecting: "connecting", lost: "connection lost, trying again" };
const ORDER = ["awake", "draining", "waking", "asleep", "restarting", "failed"];
const CLOCK_MS = 500;

const feed = new Feed(draw, (link) => {
  setAttribute($("link"), "data-link", link);
  setText($("link"), LINKS[link]);
});

let pending = false;

function draw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    const state = feed.state;
    updateTiles(state);
    updateModels(state, feed.now());
    updateCards(state);
    updateWakes(state);
    updatePlayground(state);
    updateTimeline(state, feed.now());
    updateLog(state);
    announce(state);
  });
}

setInterval(() => {
  if (feed.state && !document.hidden) {
    updateModels(feed.state, feed.now());
    updateCards(feed.state);
    updateTimeline(feed.state, feed.now());
  }
}, CLOCK_MS);

function updateCards(state) {
  const shared = sharedCards(state.models);
  updateShared(shared, Object.keys(state.models), feed.now());
  updateMemory(state, shared);
}

// --- at a glance ---

function updateTiles(state) {
  const { sleepserve, ray, python } = state.about;
  setText($("versions"), `sleepserve ${sleepserve} · Ray ${ray} · Python ${python}`);
  const replicas = Object.values(state.models).flatMap((model) => Object.values(model.replicas ?? {}));
  const sum = (field) => replicas.reduce((total, replica) => total + field(replica), 0);
  const states = ORDER.map((name) => [name, replicas.filter((one) => one.state === name).length]).filter(([, n]) => n);
  const inFlight = sum((one) => one.in_flight);
  const given = sum((one) => one.device.wake_bytes);
  const mapped = sum((one) => one.mapped_bytes);
  const tiles = [
    ["Replicas", String(replicas.length), states.map(([name, n]) => `${n} ${name}`).join(", ") || "none runs"],
    ["Given back now", bytes(given), `${bytes(mapped)} mapped on devices`],
    ["In flight", String(inFlight), `${count(sum((one) => one.waiting_for_wake), "request")} waiting for a wake`],
    ["Wakes", String(sum((one) => one.wakes)), `${count(sum((one) => one.sleeps), "sleep")}, since these replicas started`],
  ];
  keep($("tiles"), tiles.map((tile) => [tile[0], tile]), makeTile);
  const awake = replicas.filter((one) => one.state === "awake").length;
  document.title = replicas.length ? `${awake}/${replicas.length} awake · sleepserve` : "sleepserve";
}

function makeTile(label) {
  const [value, detail] = [h("dd"), h("dd")];
  const tile = h("div", h("dt", label), value, detail);
  tile.update = ([, text, more]) => {
    setText(value, text);
    setText(detail, more);
  };
  return tile;
}

// --- for those who listen: settled states and failures, and not what was so before they came ---

let announced = null;

function announce(state) {
  const newest = Object.entries(state.history).at(-1);
  if (!newest) return;
  const [number, entry] = newest;
  if (announced !== null && number !== announced && entry.state !== "waking" && entry.state !== "draining") {
    setText($("announce"), `${entry.model} is ${word(entry.state)}`);
  }
  announced = number;
}

// --- the admin key ---

function showKey() {
  setText($("key-label"), adminKey.get() ? "Admin key set" : "Admin key");
}

$("key-field").value = adminKey.get();
$("key-field").addEventListener("input", (event) => {
  adminKey.set(event.target.value.trim());
  showKey();
});
$("key").addEventListener("keydown", (event) => {
  if (event.key === "Escape" || event.key === "Enter") {
    if (event.target !== $("key-field")) return;
    $("key").open = false;
    $("key").querySelector("summary").focus();
  }
});
showKey();

setUpTimeline(draw);
setUpPlayground();
