// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count == null) return "–";
  let power = 0;
  while (Math.abs(count) >= 1000 && power < UNITS.length - 1) {
    count /= 1024;
    power += 1;
  }
  const digits = power === 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2;
  return `${count.toFixed(digits)} ${UNITS[power]}`;
}

/** What something took: "8.4 ms", "283 ms", "1.24 s". */
export function took(seconds) {
  if (seconds == null) return "–";
  const ms = seconds * 1000;
  if (ms < 0.1) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  return seconds < 60 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : span(seconds);
}

/** How long: "7 s", "4 m 12 s", "3 h 5 m". */
export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} m`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Left on a clock: "4:12". */
export function countdown(seconds) {
  const whole = Math.max(0, Math.ceil(seconds));
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = String(whole % 60).padStart(2, "0");
  return whole < 3600 ? `${minutes}:${rest}` : `${Math.floor(whole / 3600)}:${String(minutes).padStart(2, "0")}:${rest}`;
}

export function clock(epochSeconds, withSeconds = true) {
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) parts.second = "2-digit";
  return new Date(epochSeconds * 1000).toLocaleTimeString("en-GB", parts);
}

/** Why a replica is in its state, from the words of its lifecycle. */
export function because(state, reason) {
  const by = reason === "asked to" ? "an operator" : reason.replace(/^request (\S{16})\S+$/, "request $1…");
  if (state === "asleep" || state === "draining") return reason === "asked to" ? "Sent to sleep by an operator" : sentence(reason);
  if (state !== "awake" && state !== "waking") return sentence(reason);
  if (!/^(asked to|request )/.test(reason)) return reason === "start" ? "Awake since its start" : sentence(reason);
  return state === "awake" ? `Woken by ${by}` : `Waking for ${by}`;
}

const sentence = (text) => (text.charAt(0).toUpperCase() + text.slice(1)).replace(">=", "≥");

export const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

/** The value below which a share of the sorted list lies; nearest rank. */
export function quantile(sorted, share) {
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}
