// Bars of bytes: each device, and the host.

import { h, keep, setAttribute, setText } from "./dom.js";
import { bytes, count } from "./format.js";

export function updateMemory(state) {
  const devices = Object.entries(devicesOf(state.models));
  if (devices.length) keep(document.getElementById("devices"), devices, makeBar, (node, device) => node.update(device));
  if (state.host?.total) {
    keep(document.getElementById("host"), [["host", hostOf(state.host)]], makeBar, (node, host) => node.update(host));
  }
}

/** Device id -> {title, total, free, parts}; a part is {kind, label, size}. */
function devicesOf(models) {
  const devices = {};
  for (const [name, model] of Object.entries(models)) {
    for (const replica of Object.values(model.replicas ?? {})) {
      const { id, name: card, total, free } = replica.device;
      const device = (devices[id] ??= { title: card, hint: id, total, free, parts: [], ghost: 0 });
      device.free = Math.min(device.free, free);
      device.parts.push(...partsOf(name, replica));
      device.ghost += replica.device.wake_bytes;
    }
  }
  for (const device of Object.values(devices)) {
    device.parts = merged(device.parts);
    const ours = device.parts.reduce((sum, part) => sum + part.size, 0);
    const others = Math.max(0, device.total - device.free - ours);
    device.parts.push({ kind: "others", label: "everything else", size: others });
    if (device.ghost > device.free) device.warning = "There is not room for all to be awake at once.";
  }
  return devices;
}

/** What a replica holds of its device now. */
export function deviceBytes(replica) {
  const left = replica.state === "asleep" ? replica.device_memory.left : null;
  return left ? Object.values(left).reduce((sum, part) => sum + part, 0) : replica.mapped_bytes;
}

function partsOf(name, replica) {
  const mapped = replica.mapped_bytes;
  const own = replica.device_memory.own;
  if (replica.state === "asleep") {
    return [{ kind: "left", label: `${name}: left while asleep`, size: deviceBytes(replica) }];
  }
  const weights = Math.min(mapped, replica.weights_bytes);
  const kv = Math.min(mapped - weights, replica.kv_bytes);
  const rest = mapped - weights - kv + Math.max(0, (own ?? mapped) - mapped);
  return [
    { kind: "weights", label: `${name}: weights`, size: weights },
    { kind: "kv", label: `${name}: KV cache`, size: kv },
    { kind: "process", label: `${name}: process and graphs`, size: rest },
  ];
}

/** Replicas of one model on one device count together. */
function merged(parts) {
  const byLabel = new Map();
  for (const part of parts) {
    const known = byLabel.get(part.label);
    if (known) known.size += part.size;
    else byLabel.set(part.label, { ...part });
  }
  return [...byLabel.values()].filter((part) => part.size > 0);
}

function hostOf(host) {
  const images = Object.values(host.images ?? {});
  const parts = images.map((image) => ({ kind: "image", label: imageLabel(image), size: image.bytes }));
  const held = images.reduce((sum, image) => sum + image.bytes, 0);
  parts.push({ kind: "others", label: "everything else", size: Math.max(0, host.total - host.available - held) });
  return {
    title: "this machine",
    total: host.total,
    free: host.available,
    parts,
    note: host.images ? "" : "The weight holder does not tell its images.",
    warning: images.some((image) => image.spilled) ? "An image was spilled to disk: wakes will be slow." : "",
  };
}

/** The key of an image begins with the checkpoint it was made of. */
function imageLabel(image) {
  const name = image.key.split("@")[0].split("/").at(-1);
  return `image of ${name}, used by ${count(image.lessees, "replica")}`;
}

function makeBar() {
  const title = h("h3");
  const summary = h("span", { class: "muted" });
  const bar = h("div", { class: "bar", role: "img" });
  const parts = h("ul", { class: "parts" });
  const note = h("p", { class: "muted note" });
  const warning = h("p", { class: "warn note" });
  const node = h("div", { class: "device" }, h("div", { class: "device-head" }, title, summary), bar, parts, note, warning);
  node.update = (device) => {
    setText(title, device.title);
    setAttribute(title, "title", device.hint);
    setText(summary, `${bytes(device.free)} free of ${bytes(device.total)}`);
    setAttribute(bar, "aria-label", device.parts.map((part) => `${part.label} ${bytes(part.size)}`).join(", "));
    const shown = device.parts.map((part) => [part.label, part]);
    const ghost = { kind: "ghost", label: "what a wake would take", size: Math.min(device.ghost ?? 0, device.free) };
    const slices = ghost.size > 0 ? [...shown, [ghost.label, ghost]] : shown;
    keep(bar, slices, () => h("i"), (slice, part) => {
      setAttribute(slice, "data-kind", part.kind);
      setAttribute(slice, "title", `${part.label}: ${bytes(part.size)}`);
      slice.style.width = `max(${(100 * part.size) / device.total}%, ${part.size > 0 ? 2 : 0}px)`;
    });
    const free = { kind: "free", label: "free", size: device.free };
    const asleep = ghost.size > 0 ? [["ghost", { ...ghost, label: "of that, for a wake", size: device.ghost }]] : [];
    keep(parts, [...shown, ["free", free], ...asleep], makePart, (row, part) => row.update(part));
    setText(note, device.note ?? "");
    note.hidden = !note.textContent;
    setText(warning, device.warning ?? "");
    warning.hidden = !warning.textContent;
  };
  return node;
}

function makePart() {
  const swatch = h("i", { "aria-hidden": "true" });
  const label = h("span");
  const size = h("span");
  const row = h("li", {}, swatch, label, size);
  row.update = (part) => {
    setAttribute(swatch, "data-kind", part.kind);
    setText(label, part.label);
    setAttribute(label, "title", part.label);
    setText(size, bytes(part.size));
  };
  return row;
}
