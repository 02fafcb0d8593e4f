// Cards that models share, by their keepers' accounts: who has what, who waits, and why the sleepers sleep.

import { $, h, keep, pill, setAttribute, setPill, setText } from "./dom.js";
import { bytes, count, span } from "./format.js";
import { makeBar, setHue } from "./memory.js";

const OF_TENANTS = { weights: "weights", kv: "KV cache", process: "process" };
const KINDS = { ...OF_TENANTS, others: "other processes", free: "free", budget: "end of the budget" };

/** Device id -> {name, card, replicas}; the card is the newest account of it, the replicas are by id. */
export function sharedCards(models) {
  const shared = {};
  for (const replica of Object.values(models).flatMap((model) => Object.values(model.replicas ?? {}))) {
    if (!replica.card) continue;
    const one = (shared[replica.device.id] ??= { name: replica.device.name, card: replica.card, replicas: {} });
    if (replica.card.seen_s > one.card.seen_s) one.card = replica.card;
    one.replicas[replica.replica_id] = replica;
  }
  return shared;
}

/** `models` are all names, in their order. */
export function updateShared(shared, models, now) {
  const cards = Object.entries(shared).map(([id, one]) => [id, { ...one, models, now }]);
  $("shared").hidden = !cards.length;
  keep($("shared-cards"), cards, makeCard);
}

function makeCard(id) {
  const title = h("h3", { title: id });
  const summary = h("span.muted");
  const bar = makeBar();
  const limit = h("i.limit");
  const legend = Object.entries(KINDS).map(([kind, label]) => h("li", h("i", { "data-kind": kind }), label));
  const tenants = h("ul.parts.tenants");
  const note = h("p.muted.note");
  const queue = h("ol.parts.queue", { "aria-label": "Queue" });
  const node = h(
    "div.device",
    h("div.device-head", title, summary),
    h("div.budgeted", bar, limit),
    h("ul.legend", { "aria-hidden": "true" }, ...legend),
    tenants,
    note,
    queue,
  );
  node.update = ({ name, card, replicas, models, now }) => {
    const { total, budget, held } = card;
    const free = Math.max(0, Math.min(budget, total - card.others) - held);
    setText(title, name);
    setText(summary, `${bytes(held)} of ${bytes(budget)} in use, ${bytes(free)} free`);
    const rows = card.tenants.map((tenant) => rowOf(tenant, card, replicas, models, now)).sort((a, b) => a.place - b.place);
    const others = { kind: "others", label: KINDS.others, size: card.others };
    const parts = [...rows.flatMap((row) => row.parts), others];
    const rest = [{ label: KINDS.free, size: free }, { label: "budget", size: budget }];
    bar.update(parts, total, [...parts.filter((part) => part.size > 0), ...rest]);
    limit.style.left = `${(100 * budget) / total}%`;
    keep(tenants, rows.map((row) => [row.id, row]), makeTenant);
    setText(note, card.waiting.length ? `${count(card.waiting.length, "model waits", "models wait")} for room:` : "Nobody waits for room.");
    keep(queue, card.waiting.map((wait) => [wait.replica_id, { ...wait, now }]), makeWait);
  };
  return node;
}

/** A tenant, and how it is told of. */
function rowOf({ model_id: model, replica_id: id, moving, ...tenant }, card, replicas, models, now) {
  const place = models.indexOf(model);
  const label = card.tenants.filter((one) => one.model_id === model).length > 1 ? `${model} ${id}` : model;
  const sizes = { weights: tenant.held - tenant.kv, kv: tenant.kv, process: tenant.residue };
  const parts = Object.entries(sizes).map(([kind, size]) => ({ kind, label: `${label}: ${OF_TENANTS[kind]}`, size, place, moving }));
  parts[0].text = label;
  const state = replicas[id]?.state ?? "gone";
  const most = tenant.kv < tenant.kv_most ? { kv: ` of ${bytes(tenant.kv_most)}` } : {};
  const has = parts.filter((part) => part.size > 0).map(({ kind, size }) => `${OF_TENANTS[kind]} ${bytes(size)}${most[kind] ?? ""}`);
  const slept = state === "asleep" && replicas[id].last_sleep;
  const why = slept ? [`${whySlept(slept)}, ${span(now - slept.at)} ago`] : [];
  const gave = replicas[id]?.kv_given_back_bytes;
  const given = gave ? [`KV cache given back ${bytes(gave)}`] : [];
  return { id, place, label, parts, state, told: [...why, ...has, ...given].join(" · ") };
}

function whySlept({ cause, for_model: model }) {
  const words = { command: "asked to", room: "idle" }[cause] ?? cause;
  return model ? `${words}, for ${model}` : words;
}

function makeTenant() {
  const swatch = h("i", { "data-kind": "weights" });
  const name = h("b");
  const state = pill("asleep");
  const told = h("p");
  const row = h("li", swatch, name, state, told);
  row.update = (tenant) => {
    setHue(swatch, tenant.place);
    setText(name, tenant.label);
    setPill(state, tenant.state);
    setText(told, tenant.told);
  };
  return row;
}

function makeWait() {
  const name = h("b");
  const fill = h("i");
  const long = h("span");
  const why = h("p");
  const row = h("li", { "data-state": "waking" }, name, h("div.meter", { "aria-hidden": "true" }, fill), long, why);
  row.update = ({ model_id: model, size, since, limit_s: limit, reason, turn, now }) => {
    setText(name, model);
    fill.style.width = `${Math.min(100, (100 * (now - since)) / limit)}%`;
    setText(long, `${span(now - since)} of ${span(limit)}, for ${bytes(size)}`);
    setText(why, reason && turn ? `${reason} in ${span(turn - now)}` : reason);
  };
  return row;
}
