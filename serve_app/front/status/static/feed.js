// The server's snapshot, kept up to date; and orders to it.

import { $ } from "./dom.js";

const LOST_AFTER_MS = 3000; // streams end now and then, and are there again at once
const SILENT_AFTER_MS = 15000; // heartbeats come every 5 s
const PAUSE_MS = 200; // before an ended stream is asked for again, then doubled
const REFUSED_PAUSE_MS = 2000;

/** RFC 7386, in place. */
export function mergePatch(target, patch) {
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete target[key];
    else if (typeof value !== "object" || Array.isArray(value)) target[key] = value;
    else {
      const inner = target[key];
      const into = typeof inner === "object" && inner !== null && !Array.isArray(inner) ? inner : {};
      target[key] = mergePatch(into, value);
    }
  }
  return target;
}

/** Calls `onState(state)` with every change and `onLink("live" | "connecting" | "lost")`. */
export class Feed {
  constructor(onState, onLink) {
    this.state = null;
    this.skew = 0; // the server's clock minus ours, seconds
    this.pause = PAUSE_MS;
    this.onState = onState;
    this.onLink = onLink;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    if (!document.hidden) this.open();
    setInterval(() => this.checkSilence(), 5000);
  }

  /** Seconds since the epoch, by the server's clock. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  open() {
    this.close();
    const aborter = (this.source = new AbortController());
    const current = () => this.source === aborter && !aborter.signal.aborted;
    const hear = (kind, data) => current() && this.take(kind === "change" ? mergePatch(this.state, data) : data);
    listen("status/events", aborter.signal, hear)
      .catch((error) => error)
      .then((error) => current() && this.failed(error?.status));
    this.heardAt = Date.now();
  }

  /** Nobody looks: the server need not ask the replicas for us. */
  close() {
    clearTimeout(this.lost);
    this.lost = undefined;
    this.source?.abort();
    this.source = null;
  }

  take(state) {
    this.state = state;
    this.skew = state.time - Date.now() / 1000;
    this.heardAt = Date.now();
    this.pause = PAUSE_MS;
    clearTimeout(this.lost);
    this.lost = undefined;
    this.onLink("live");
    this.onState(state);
  }

  /** The stream has ended: by itself, without an answer, or with that HTTP status in place of one. */
  failed(status) {
    this.lost ??= setTimeout(() => this.onLink("lost"), LOST_AFTER_MS);
    const source = this.source;
    setTimeout(() => source === this.source && this.reopen(), status ? REFUSED_PAUSE_MS : this.pause);
    this.pause = Math.min(2 * this.pause, REFUSED_PAUSE_MS);
    if ((status === 401 || status === 403) && this.refusedKey !== adminKey.get()) {
      this.refusedKey = adminKey.get(); // once for each, so that the panel can be closed
      $("key").open = true;
    }
  }

  reopen() {
    const lost = this.lost;
    this.lost = undefined; // keep its clock running
    this.open();
    this.lost = lost;
  }

  checkSilence() {
    if (!document.hidden && Date.now() - this.heardAt > SILENT_AFTER_MS) {
      this.onLink("lost");
      this.reopen();
    }
  }
}

const KEY = "sleepserve admin key";

export const adminKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

const authorization = () => (adminKey.get() ? { Authorization: `Bearer ${adminKey.get()}` } : {});

/**
 * Server-sent events until the stream ends: `onEvent(kind, data)`. Throws with `status` after an HTTP error.
 * Not EventSource, which sends no headers and so no key.
 */
async function listen(path, signal, onEvent) {
  const response = await fetch(path, { headers: authorization(), signal, cache: "no-store" });
  if (!response.ok) throw Object.assign(new Error(`HTTP ${response.status}`), { status: response.status });
  for await (const event of events(response)) {
    const [, kind, data] = /^event: (.*)\ndata: (.*)$/.exec(event) ?? [];
    if (kind) onEvent(kind, JSON.parse(data));
  }
}

/** The server-sent events of a response, as text. */
export async function* events({ body }) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const parts = (text + part.value).split("\n\n");
    text = parts.pop();
    yield* parts;
  }
}

/** POST JSON, with the key if there is one. Throws an Error with words for the reader. */
export async function post(path, body, options = {}) {
  const headers = { "Content-Type": "application/json", ...authorization() };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  if (response.status === 401) {
    $("key").open = true;
    throw new Error(adminKey.get() ? "The admin key is not accepted." : "Needs the admin key: enter it at the top.");
  }
  throw new Error(told.error?.message ?? `HTTP ${response.status}`);
}
