// What can be taken home: code that does the same, a link that restores the view, a recording as one HTML file.

import type { Json } from "./api";
import { BASE } from "./api";
import { branches, facts, followed, gates, type How, type Ids, items, keys, type Phase, settings, type Turn, turns, type View, view, want, watched } from "./state";

// ---- code

export interface Call { title: string; method: "GET" | "POST"; path: string; body: Json | null }

function origin(): string {
  return location.origin + BASE;
}

function usesKeys(): { api: boolean; headgate: boolean } {
  return { api: !!keys.value.api, headgate: !!keys.value.headgate };
}

export function curl({ method, path, body }: Call): string {
  const lines = [`curl -s ${method === "GET" ? "" : "-N "}'${origin()}${path}'`];
  if (usesKeys().api) lines.push(`-H "Authorization: Bearer $API_KEY"`);
  if (usesKeys().headgate) lines.push(`-H "X-Headgate-Key: $HEADGATE_KEY"`);
  if (path.includes("/rows")) lines.push(`-o rows.safetensors`);
  if (!body) return lines.join(" \\\n  ");
  lines.push(`-H 'Content-Type: application/json'`, `-d @- <<'JSON'`);
  return `${lines.join(" \\\n  ")}\n${JSON.stringify(body, null, 1)}\nJSON`;
}

/** A JSON value as Python writes it. */
export function python(value: unknown, indent = 0): string {
  const pad = " ".repeat(indent + 4);
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`).replace(/(\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})/g, (pair) => surrogates(pair));
  if (Array.isArray(value)) return `[${value.map((each) => python(each, indent)).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, each]) => `${python(name)}: ${python(each, indent + 4)}`);
    const short = `{${entries.join(", ")}}`;
    return short.length < 90 ? short : `{\n${entries.map((entry) => pad + entry).join(",\n")},\n${" ".repeat(indent)}}`;
  }
  return String(value);
}

function surrogates(pair: string): string {
  const high = parseInt(pair.slice(2, 6), 16);
  const low = parseInt(pair.slice(8, 12), 16);
  const point = (high - 0xd800) * 0x400 + (low - 0xdc00) + 0x10000;
  return `\\U${point.toString(16).padStart(8, "0")}`;
}

const OPENAI = new Set(["model", "messages", "max_tokens", "temperature", "stream", "stream_options", "logprobs", "top_logprobs", "seed", "prompt"]);

export function openai({ path, body, method }: Call): string {
  if (!body || method !== "POST" || !/^\/v1\/(chat\/)?completions$/.test(path)) return openaiDirect(path, body);
  const own = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const rest = Object.keys(own).length ? `\n    extra_body=${python(own, 4)},` : "";
  return [
    ...openaiClient(),
    `answer = client.${path.includes("chat") ? "chat.completions" : "completions"}.create(`,
    ...known.map(([name, value]) => `    ${name}=${python(value, 4)},`),
    `${rest.trimStart() ? `    ${rest.trimStart()}` : ""}`,
    `)`,
    body["stream"] ? `for chunk in answer:\n    print(chunk.model_dump(exclude_none=True))` : `print(answer.model_dump(exclude_none=True))`,
  ].filter((line) => line !== "").join("\n");
}

function openaiClient(): string[] {
  const { api, headgate: own } = usesKeys();
  return [`import openai`, environment(), `client = openai.OpenAI(base_url=${python(`${origin()}/v1`)}, api_key=${api ? `API_KEY` : `"none"`}${own ? `, default_headers={"X-Headgate-Key": HEADGATE_KEY}` : ""})`];
}

/** A route that the openai client has no method for, by its calls of any address. */
function openaiDirect(path: string, body: Json | null): string {
  const call = body ? `client.post(${python(origin() + path)}, cast_to=httpx.Response, body=${python(body)})` : `client.get(${python(origin() + path)}, cast_to=httpx.Response)`;
  return [`import httpx`, ...openaiClient(), `answer = ${call}`, ...printed(path)].filter((line) => line !== "").join("\n");
}

function printed(path: string): string[] {
  return path.includes("/rows") ? [`from safetensors.numpy import load`, ``, `print({name: rows.shape for name, rows in load(answer.content).items()})`] : [`print(answer.text)`];
}

function environment(): string {
  const { api, headgate: own } = usesKeys();
  const lines = [...(api ? [`API_KEY = os.environ["API_KEY"]`] : []), ...(own ? [`HEADGATE_KEY = os.environ["HEADGATE_KEY"]`] : [])];
  return lines.length ? [`import os`, ``, ...lines].join("\n") : "";
}

function client(): string {
  const found = [python(origin())];
  if (usesKeys().api) found.push("api_key=API_KEY");
  if (usesKeys().headgate) found.push("capture_key=HEADGATE_KEY", "steering_key=HEADGATE_KEY");
  return `Client(${found.join(", ")})`;
}

export function headgate({ path, body }: Call): string {
  const lines = [`from headgate.steering.client import Client, inline_rows`, environment(), `client = ${client()}`].filter((line) => line !== "");
  const fields = { ...body };
  delete fields["model"];
  delete fields["stream"];
  delete fields["stream_options"];
  const rest = (...leave: string[]) => Object.entries(fields).filter(([name]) => !leave.includes(name)).map(([name, value]) => `    ${name}=${python(value, 4)},`);
  if (path === "/v1/chat/completions") lines.push(`answer = client.chat(`, `    ${python(fields["messages"], 4)},`, ...rest("messages"), `)`, `print(answer.text)`);
  else if (path === "/v1/completions") lines.push(`answer = client.complete(`, `    ${python(fields["prompt"], 4)},`, ...rest("prompt"), `)`, `print(answer.captures)`);
  else if (path === "/v1/steering/modules/register") lines.push(`print(client.register(`, ...rest(), `))`);
  else if (path === "/v1/steering/rules/register") lines.push(`print(client.register_rule(`, ...rest(), `))`);
  else if (path === "/v1/steering") lines.push(`print(client.status())`);
  else if (path === "/v1/steering/modules/unregister") lines.push(`client.unregister(${python(fields["name"])})`);
  else return direct(path);
  if (body && "capture" in body && JSON.stringify(body["capture"]).startsWith('{"inline"')) lines.push(`rows = inline_rows(answer.capture_results["inline"])  # {"12.post_mlp": [rows, hidden], ...}`);
  return lines.join("\n");
}

/** A GET that headgate's client has no method for. */
function direct(path: string): string {
  const keys = [...(usesKeys().api ? [`"Authorization": f"Bearer {API_KEY}"`] : []), ...(usesKeys().headgate ? [`"X-Headgate-Key": HEADGATE_KEY`] : [])];
  const asked = `httpx.get(${python(origin() + path)}${keys.length ? `, headers={${keys.join(", ")}}` : ""})`;
  return [`import httpx`, environment(), `answer = ${asked}`, ...printed(path)].filter((line) => line !== "").join("\n");
}

// ---- link

interface Linked {
  v: View;
  s: typeof settings.value;
  i: { name: string; isOn: boolean; scale: number; phase: Phase; how: How }[];
  g: typeof gates.value;
  w: typeof watched.value;
  f: typeof followed.value;
  t: { id: number; parent: number; role: Turn["role"]; text: string; ids?: Ids }[];
  b: Record<number, number>;
}

function encode(value: unknown): string {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function decode(text: string): unknown {
  const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return JSON.parse(new TextDecoder().decode(Uint8Array.from(binary, (c) => c.charCodeAt(0))));
}

function linked(): Linked {
  return {
    v: view.value,
    s: settings.value,
    i: items.value.filter((item) => item.kind === "module" && item.isOn).map(({ name, isOn, scale, phase, how }) => ({ name, isOn, scale, phase, how })),
    g: gates.value,
    w: watched.value,
    f: followed.value,
    t: turns.value.map(linkedTurn),
    b: branches.value,
  };
}

/** A turn with the tokens of its answer and of the prompt, from which its numbers can be read again. */
function linkedTurn({ id, parent, role, text, runs, chosen, ids }: Turn): Linked["t"][number] {
  const [run] = runs.slice(chosen);
  const found = run ? { prompt: run.prompt.map((token) => token.id), answer: run.answer.map((token) => token.id) } : ids;
  return { id, parent, role, text, ...(areIds(found) ? { ids: found } : {}) };
}

/** Whether all tokens of a prompt and an answer are known. */
function areIds(found: { prompt: unknown[]; answer: unknown[] } | undefined): found is Ids {
  return [found?.prompt, found?.answer].every((each) => Array.isArray(each) && each.length > 0 && each.every(Number.isInteger));
}

export function link(): string {
  return `${location.href.replace(/#.*$/, "")}#${encode(linked())}`;
}

/** Restores what a link says, but that messages are recorded; one that is damaged restores nothing. Values of a link are texts and numbers, never code or HTML. */
export function restore(hash: string): boolean {
  if (hash.length < 2) return false;
  try {
    const found = decode(hash.slice(1)) as Linked;
    const known = { ...settings.value } as Record<string, unknown>;
    for (const [name, value] of Object.entries(found.s ?? {})) if (typeof value === typeof known[name] && name !== "recordProbe") known[name] = value;
    settings.value = known as typeof settings.value;
    gates.value = (found.g ?? []).filter((gate) => typeof gate.name === "string" && gate.reads && gate.then).map((gate) => ({ ...gate, phase: gate.phase ?? "both" }));
    watched.value = (found.w ?? []).filter((each) => typeof each.name === "string");
    followed.value = (found.f ?? []).filter((each) => typeof each.sae === "string" && Number.isInteger(each.id)).map(({ sae, id, label }) => ({ sae, id, label: String(label) }));
    turns.value = (found.t ?? []).filter((turn) => typeof turn.text === "string").map(({ ids, ...turn }) => ({ ...turn, runs: [], chosen: 0, ...(areIds(ids) ? { ids } : {}) }));
    branches.value = found.b ?? {};
    want((found.i ?? []).filter((item) => typeof item.name === "string").map(({ name, isOn, scale, phase, how }) => ({ name, isOn: !!isOn, scale: Number(scale), phase, how: how ?? "add" })));
    view.value = found.v;
    return true;
  } catch {
    return false;
  }
}

let storing: ReturnType<typeof setTimeout> | undefined;
export function keepHash(): void {
  const text = encode(linked());
  clearTimeout(storing);
  storing = setTimeout(() => history.replaceState(null, "", `#${text}`), 300);
}

// ---- recording

export const RECORDING = "recording";
const NOT_A_NUMBER = "\u0000NaN";

interface Recording { facts: typeof facts.value; settings: typeof settings.value; turns: Turn[]; branches: Record<number, number>; view: View; items: { name: string }[] }

function numbers(name: string, value: unknown): unknown {
  if (typeof value === "number") return Number.isFinite(value) ? Number(value.toPrecision(6)) : NOT_A_NUMBER;
  if (name === "streamRows") return null;
  return value instanceof Float32Array ? undefined : value;
}

async function hashOf(text: string): Promise<string | null> {
  if (!globalThis.crypto?.subtle) return null;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return `'sha256-${btoa(String.fromCharCode(...digest))}'`;
}

/** One HTML file with the page, what it shows, and no way to call anybody. Without keys. */
export async function recording(): Promise<string> {
  const [script, style] = await Promise.all(["studio.js", "studio.css"].map(async (name) => (await fetch(new URL(name, location.href.replace(/#.*$/, "")))).text()));
  const state: Recording = { facts: facts.value, settings: settings.value, turns: turns.value, branches: branches.value, view: view.value, items: [] };
  const data = JSON.stringify(state, numbers).replaceAll("<", "\\u003c");
  const code = script!.replaceAll("</script", "<\\/script");
  const hash = await hashOf(code);
  const policy = `default-src 'none'; script-src ${hash ?? "'unsafe-inline'"}; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'`;
  return [
    `<!doctype html>`,
    `<html lang="en"><head><meta charset="utf-8">`,
    `<meta http-equiv="Content-Security-Policy" content="${policy}">`,
    `<meta name="viewport" content="width=device-width, initial-scale=1"><title>headgate studio: a recording</title>`,
    `<style>${style!.replaceAll("</style", "<\\/style")}</style></head>`,
    `<body><div id="page"></div><script type="application/json" id="${RECORDING}">${data}</script><script>${code}</script></body></html>`,
  ].join("\n");
}

/** The state in a recorded page; false in one that a server has sent. */
export function openRecording(): boolean {
  const text = document.getElementById(RECORDING)?.textContent;
  if (!text) return false;
  const found = JSON.parse(text, (_, value: unknown) => (value === NOT_A_NUMBER ? NaN : value)) as Recording;
  facts.value = found.facts;
  settings.value = found.settings;
  turns.value = found.turns;
  branches.value = found.branches;
  view.value = found.view;
  return true;
}

export function download(name: string, content: string | Uint8Array, type: string): void {
  const url = URL.createObjectURL(new Blob([content as BlobPart], { type }));
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
