// How long wakes took: those that were seen, and the phases of the last one.

import { $, facts, h, keep, s, setAttribute, setText } from "./dom.js";
import { bytes, quantile, took } from "./format.js";

const BARS = 40;

export function updateWakes(state) {
  const models = Object.entries(state.models)
    .map(([name, model]) => [name, wakesOf(name, model, state)])
    .filter(([, wakes]) => wakes.last != null);
  if (models.length) keep($("wakes"), models, makeWake);
}

function wakesOf(name, model, state) {
  const replicas = Object.values(model.replicas ?? {}).filter((replica) => replica.last_wake_s != null);
  const seen = Object.values(state.history).filter((one) => one.model === name && one.state === "awake" && one.seconds != null);
  const newest = seen.at(-1);
  const replica = replicas.find((one) => one.replica_id === newest?.replica) ?? replicas[0];
  return { seconds: seen.map((one) => one.seconds), last: replica?.last_wake_s, report: replica?.last_wake };
}

function makeWake(name) {
  const [dl, values] = facts("last", "median", "95 %", "seen");
  const spark = s("svg", { class: "spark", role: "img", preserveAspectRatio: "none", viewBox: `0 0 ${BARS * 8} 34` });
  const rows = [["engine resumed", "waking"], ["copy to device", "weights"], ["check of the bytes", "asleep"]].map(([label, kind]) => {
    const fill = h("i", kind === "weights" ? { "data-kind": kind } : { "data-state": kind });
    const value = h("dd");
    return { nodes: [h("dt", label), h("div.lane", { "aria-hidden": "true" }, fill), value], fill, value };
  });
  const phases = h("dl.phases", ...rows.flatMap((row) => row.nodes));
  const note = h("p.muted.note");
  const node = h("div.wake", h("h3", name), dl, spark, phases, note);
  node.update = ({ seconds, last, report }) => {
    const sorted = [...seconds].sort((a, b) => a - b);
    setText(values[0], took(last));
    setText(values[1], sorted.length ? took(quantile(sorted, 0.5)) : "–");
    setText(values[2], sorted.length ? took(quantile(sorted, 0.95)) : "–");
    setText(values[3], String(sorted.length));
    drawSpark(spark, seconds.slice(-BARS));
    phases.hidden = note.hidden = report == null;
    if (report == null) return;
    const times = [last, report.link_s, report.check_s];
    const most = Math.max(...times) || 1;
    rows.forEach((row, i) => {
      row.fill.style.width = `${(100 * times[i]) / most}%`;
      setText(row.value, took(times[i]));
    });
    const verdict = report.intact ? "all as packed" : "NOT as packed";
    setText(note, `${bytes(report.copied_bytes)} at ${report.link_gb_per_s.toFixed(1)} GB/s; ${report.checked_segments} segments checked, ${verdict}.`);
    note.classList.toggle("warn", !report.intact);
  };
  return node;
}

function drawSpark(spark, seconds) {
  spark.toggleAttribute("hidden", seconds.length < 2);
  spark.style.display = seconds.length < 2 ? "none" : "";
  const key = seconds.join();
  if (spark.drawn === key) return;
  spark.drawn = key;
  const most = Math.max(...seconds, 1e-9);
  setAttribute(spark, "aria-label", `the last ${seconds.length} wakes, oldest first: ${seconds.map(took).join(", ")}`);
  const bars = seconds.map((one, i) => {
    const height = Math.max(2, (32 * one) / most);
    return s("rect", { x: i * 8, y: 34 - height, width: 6, height, rx: 1.5, fill: "currentColor" }, s("title", {}, took(one)));
  });
  spark.replaceChildren(...bars);
}
