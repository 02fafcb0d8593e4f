// Bars of bytes: each device, and the host.

import { $, h, keep, setAttribute, setText } from "./dom.js";
import { bytes, count } from "./format.js";

/** `shared` has the devices that are drawn elsewhere. */
export function updateMemory(state, shared) {
  const devices = Object.entries(devicesOf(state.models)).filter(([id]) => !shared[id]);
  $("unshared").hidden = !devices.length && Object.keys(shared).length > 0;
  if (devices.length) keep($("devices"), devices, makeDevice);
  if (state.host?.total) {
    keep($("host"), [["host", hostOf(state.host)]], makeDevice);
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
  const parts = images.map((image) => ({ kind: "image", key: image.key, label: imageLabel(image), size: image.bytes }));
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
  const share = Math.round((100 * image.bytes) / image.device_bytes);
  return `image of ${name}${share < 100 ? `, compressed to ${share} %` : ""}, used by ${count(image.lessees, "replica")}`;
}

function makeDevice() {
  const title = h("h3");
  const summary = h("span.muted");
  const bar = makeBar();
  const parts = h("ul.parts");
  const note = h("p.muted.note");
  const warning = h("p.warn.note");
  const node = h("div.device", h("div.device-head", title, summary), bar, parts, note, warning);
  node.update = (device) => {
    setText(title, device.title);
    setAttribute(title, "title", device.hint);
    setText(summary, `${bytes(device.free)} free of ${bytes(device.total)}`);
    const ghost = { kind: "ghost", label: "what a wake would take", size: Math.min(device.ghost ?? 0, device.free) };
    bar.update(ghost.size > 0 ? [...device.parts, ghost] : device.parts, device.total, device.parts);
    const rows = [...device.parts, { kind: "free", label: "free", size: device.free }];
    if (ghost.size > 0) rows.push({ ...ghost, label: "of that, for a wake", size: device.ghost });
    keep(parts, rows.map((row) => [row.key ?? row.label, row]), makePart);
    setText(note, device.note ?? "");
    setText(warning, device.warning ?? "");
  };
  return node;
}

/** Parts of `total` bytes. One may have `text` in it, a `place` among the colours, and be `moving`; `told` is the same in words. */
export function makeBar() {
  const bar = h("div.bar", { role: "img" });
  bar.update = (parts, total, told) => {
    setAttribute(bar, "aria-label", told.map((part) => `${part.label} ${bytes(part.size)}`).join(", "));
    keep(bar, parts.map((part) => [part.key ?? part.label, part]), () => h("i"), (slice, part) => {
      setAttribute(slice, "data-kind", part.kind);
      setAttribute(slice, "title", `${part.label}: ${bytes(part.size)}`);
      setText(slice, part.text ?? "");
      setHue(slice, part.place);
      slice.toggleAttribute("data-moving", Boolean(part.moving));
      slice.style.width = `max(${(100 * part.size) / total}%, ${part.size > 0 ? 2 : 0}px)`;
    });
  };
  return bar;
}

/** Neighbours are far apart on the wheel of colours. */
export function setHue(node, place) {
  node.classList.toggle("hued", place != null);
  if (place != null) node.style.setProperty("--hue", (place * 137.5) % 360);
}

function makePart() {
  const swatch = h("i", { "aria-hidden": "true" });
  const label = h("span");
  const size = h("span");
  const row = h("li", swatch, label, size);
  row.update = (part) => {
    setAttribute(swatch, "data-kind", part.kind);
    setText(label, part.label);
    setAttribute(label, "title", part.label);
    setText(size, bytes(part.size));
  };
  return row;
}
