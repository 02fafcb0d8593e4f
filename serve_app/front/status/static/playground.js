// One request, streamed: a chat or a plain completion.

import { h, keep, setText } from "./dom.js";
import { events, post } from "./feed.js";
import { count, took } from "./format.js";

const $ = (name) => document.getElementById(`play-${name}`);
let running = null;
let states = {};

export function setUpPlayground() {
  document.getElementById("play").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) document.getElementById("play").requestSubmit();
  });
}

export function updatePlayground(state) {
  const names = Object.keys(state.models);
  keep($("model"), names.map((name) => [name, name]), (name) => h("option", { value: name }, name));
  states = state.models;
}

async function send() {
  const model = $("model").value;
  const text = $("prompt").value;
  const chat = $("mode").value === "chat";
  const body = { model, max_tokens: Number($("tokens").value) || 64, stream: true, stream_options: { include_usage: true } };
  if (chat) body.messages = [{ role: "user", content: text }];
  else body.prompt = text;
  const slept = !Object.values(states[model]?.replicas ?? {}).some((one) => one.state === "awake");
  begin(slept);
  const started = performance.now();
  let first = null;
  let tokens = 0;
  let stopped = false;
  try {
    const response = await post(chat ? "v1/chat/completions" : "v1/completions", body, { signal: running.signal });
    for await (const chunk of chunks(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const piece = chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? "";
      if (piece) {
        first ??= performance.now();
        append(piece);
        setText($("stats"), `First token after ${took((first - started) / 1000)}${slept ? ", with a wake" : ""}…`);
      }
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) fail(error);
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("output").setAttribute("aria-busy", "false");
  }
  if (first !== null) setText($("stats"), summary(started, first, tokens, slept, stopped));
  else if (stopped) setText($("stats"), "Stopped before the first token.");
}

function begin(slept) {
  running = new AbortController();
  $("output").classList.remove("bad");
  $("output").replaceChildren();
  $("output").setAttribute("aria-busy", "true");
  $("send").disabled = true;
  $("stop").disabled = false;
  setText($("stats"), slept ? "Waits for a wake…" : "Waits for the first token…");
}

function append(piece) {
  const output = $("output");
  const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 20;
  output.append(piece);
  if (atEnd) output.scrollTop = output.scrollHeight;
}

function fail(error) {
  const output = $("output");
  output.classList.toggle("bad", !output.textContent);
  if (!output.textContent) output.textContent = error.message;
  setText($("stats"), `Failed: ${error.message}`);
}

function summary(started, first, tokens, slept, stopped) {
  const end = performance.now();
  const parts = [`First token after ${took((first - started) / 1000)}${slept ? ", with a wake" : ""}`];
  if (tokens) parts.push(count(tokens, "token"));
  if (tokens > 1 && end > first) parts.push(`${((tokens - 1) / ((end - first) / 1000)).toFixed(1)} tokens/s`);
  if (stopped) parts.push("stopped");
  return parts.join(" · ");
}

/** The JSON objects of a stream, up to [DONE]; what else it has are keep-alives. */
async function* chunks(response) {
  for await (const event of events(response)) {
    if (event === "data: [DONE]") return;
    if (event.startsWith("data: ")) yield JSON.parse(event.slice("data: ".length));
  }
}
