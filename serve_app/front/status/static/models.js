// Model cards: what each replica is doing, why, and what comes next.

import { $, facts, h, keep, pill, setAttribute, setPill, setText, word } from "./dom.js";
import { post } from "./feed.js";
import { because, bytes, clock, count, countdown, span, took } from "./format.js";
import { deviceBytes } from "./memory.js";

export function updateModels(state, now) {
  const models = Object.entries(state.models).map(([name, model]) => [name, { name, model, state, now }]);
  keep($("cards"), models, makeCard);
}

function makeCard(name) {
  const title = h("h3", name);
  const about = h("p.muted");
  const replicas = h("div");
  const message = h("p", { role: "status" });
  const orders = ORDERS.map((order) => orderButton(name, order, message));
  const card = h(
    "article.card",
    { "aria-label": `model ${name}` },
    h("div.card-head", title, about),
    replicas,
    h("div.orders", ...orders, message),
  );
  card.update = ({ model, state, now }) => {
    const all = Object.values(model.replicas ?? {});
    setText(about, aboutModel(model, all));
    setAttribute(about, "title", model.root);
    if (all.length) {
      const items = all.map((replica) => [replica.replica_id, { replica, model, state, now, alone: all.length === 1 }]);
      keep(replicas, items, makeReplica);
    } else {
      keep(replicas, [["none", model]], () => h("div.replica", h("p.empty")), (node) =>
        setText(node.firstElementChild, nobody(model)),
      );
    }
    const known = all.length > 0 && model.silent_since == null;
    for (const button of orders) button.update(all, known);
  };
  return card;
}

function aboutModel(model, replicas) {
  const length = replicas[0]?.max_model_len ?? model.max_model_len;
  const parts = [model.root.startsWith("/") ? model.root.split("/").slice(-2).join("/") : model.root];
  if (length) parts.push(`${length} tokens`);
  if (model.scale && (replicas.length !== 1 || model.scale.target !== 1)) {
    parts.push(`${replicas.length} of ${count(model.scale.target, "replica")}`);
  }
  return parts.join(" · ");
}

function nobody(model) {
  if (!model.asked) return "Asking the replicas…";
  if (model.silent_since != null) return `No answer: ${model.why_silent}`;
  if (model.scale?.gave_up) return `No replica could be started: ${model.scale.why || "the log of Serve's controller says why."}`;
  return model.scale?.target === 0 ? "No replica, as wanted. A request starts one." : "No replica runs.";
}

function makeReplica(id) {
  const state = pill("asleep");
  const name = h("span.replica-id", { title: `replica ${id}` }, id);
  const since = h("span.since");
  const reason = h("p.reason");
  const fill = h("i");
  const next = h("span");
  const [dl, values] = facts("weights", "device now", "last wake", "wakes · sleeps");
  const restarts = h("p.muted.note");
  const node = h(
    "div.replica",
    h("div.replica-top", state, name, since),
    reason,
    h("div.next", h("div.meter", { "aria-hidden": "true" }, fill), next),
    dl,
    restarts,
  );
  node.update = ({ replica, model, state: all, now, alone }) => {
    const silent = model.silent_since != null;
    setAttribute(node, "data-state", replica.state);
    node.classList.toggle("quiet", silent);
    setPill(state, silent ? "silent" : replica.state, pillText(replica, silent));
    name.hidden = alone;
    setText(since, sinceWhen(replica, all, now));
    const why = silent ? model.why_silent : replica.reason;
    setText(reason, silent ? why : because(replica.state, why));
    setAttribute(reason, "title", why);
    const [share, text] = whatNext(replica, now);
    fill.style.width = `${100 * share}%`;
    setText(next, text);
    setText(values[0], bytes(replica.weights_bytes));
    setText(values[1], bytes(deviceBytes(replica)));
    setText(values[2], took(replica.last_wake_s));
    setText(values[3], `${replica.wakes} · ${replica.sleeps}`);
    setText(restarts, replica.worker_restarts ? `Worker ${replica.worker_process_id}, after ${count(replica.worker_restarts, "restart")}` : "");
  };
  return node;
}

function pillText(replica, silent) {
  if (silent) return word("silent");
  if (replica.state === "asleep" && replica.held) return "asleep, held";
  if (replica.state === "asleep" && replica.deep) return "asleep, deep";
  return word(replica.state);
}

/** Of the last change that was seen, if it is still the state. */
function sinceWhen(replica, state, now) {
  const entry = Object.values(state.history).findLast((one) => one.replica === replica.replica_id && one.model === replica.model_id);
  if (!entry || entry.state !== replica.state || now - entry.at < 1) return "";
  return `for ${span(now - entry.at)}`;
}

/** How full the meter is, and what happens next in words. */
function whatNext(replica, now) {
  const waiting = replica.waiting_for_wake ? `, ${count(replica.waiting_for_wake, "request")} waiting` : "";
  switch (replica.state) {
    case "waking":
      return [1, (replica.last_wake_s == null ? "waking" : `took ${took(replica.last_wake_s)} last time`) + waiting];
    case "draining":
      return [1, (replica.in_flight ? `finishing ${count(replica.in_flight, "request")}` : "giving memory back") + waiting];
    case "restarting":
      return [1, "its worker failed, another is starting" + waiting];
    case "failed":
      return [0, "Ray Serve replaces it"];
    case "asleep":
      if (replica.held) return [0, "held: only Wake ends it"];
      return [0, whatWakes(replica)];
    default:
      return awakeNext(replica, now);
  }
}

function whatWakes(replica) {
  const from = replica.weights_from ? "from host memory" : "from disk";
  return replica.worker_process_id ? `a request wakes it, ${from}` : `its process has ended: a request starts another, ${from}`;
}

function awakeNext(replica, now) {
  if (replica.in_flight) return [1, `${count(replica.in_flight, "request")} in flight`];
  const from = replica.idle_timeout_from;
  const until = from === "schedule" && replica.schedule.until;
  if (replica.idle_timeout_s == null) return [1, `idle; stays awake ${until ? `for ${span(until - now)} ` : ""}(${from})`];
  const left = replica.quiet_since + replica.idle_timeout_s - now;
  const share = Math.min(1, Math.max(0, left / replica.idle_timeout_s || 0));
  return [share, left > 0 ? `sleeps in ${countdown(left)}` : "sleeps any moment"];
}

// --- orders ---

const ORDERS = [
  { label: "Sleep", doing: "Going to sleep…", path: "sleep", fields: {}, useful: (all) => all.some((one) => one.state !== "asleep") },
  { label: "Hold asleep", doing: "Going to sleep…", path: "sleep", fields: { hold: true }, useful: (all) => !all.every((one) => one.held) },
  { label: "Wake", doing: "Waking…", path: "wake_up", fields: {}, useful: (all) => all.some((one) => one.state !== "awake" || one.held) },
];

function orderButton(name, order, message) {
  let busy = false;
  const say = (text, bad) => {
    setText(message, text);
    message.toggleAttribute("data-bad", bad);
  };
  const button = h("button", { type: "button", "aria-label": `${order.label}: ${name}` }, order.label);
  button.addEventListener("click", async () => {
    if (busy || button.getAttribute("aria-disabled") === "true") return;
    busy = true;
    say(order.doing, false);
    try {
      await post(order.path, { model: name, ...order.fields });
      say(`Done at ${clock(Date.now() / 1000)}.`, false);
    } catch (error) {
      say(error.message, true);
    } finally {
      busy = false;
    }
  });
  // Not `disabled`: that would take the focus from who just pressed it.
  button.update = (all, known) =>
    setAttribute(button, "aria-disabled", known && order.useful(all) && !all.every((one) => one.state === "failed") ? null : "true");
  return button;
}
