// What can be taken home: code that does the same, a link that restores the view, a recording as one HTML file.

import { signal } from "@preact/signals";
import type { Json } from "./api";
import { BASE, bare } from "./api";
import { branches, facts, followed, gates, type GateSpec, type Ids, type Item, items, keys, type Phase, settings, type Turn, turns, type View, view, VIEWS, want, watched } from "./state";
import { fromBase64, toBase64 } from "./tensors";

// ---- code

export interface Call { title: string; method: "GET" | "POST"; path: string; body: Json | null }

function origin(): string {
  return location.origin + BASE;
}

function usesKeys(): { api: boolean; headgate: boolean } {
  return { api: !!keys.value.api, headgate: !!keys.value.headgate };
}

export function curl({ method, path, body }: Call): string {
  const address = `${origin()}${path}`.replaceAll("'", "%27"); // a name in it may end the shell's quotes
  const lines = [`curl -s ${method === "GET" ? "" : "-N "}'${address}'`];
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

/** An item of a link; `row` is the vector in base64, float32. */
type LinkedItem = Omit<Item, "row" | "hash"> & { row?: string };

interface Linked {
  v: View;
  s: typeof settings.value;
  i: LinkedItem[];
  g: typeof gates.value;
  w: typeof watched.value;
  f: typeof followed.value;
  t: { id: number; parent: number; role: Turn["role"]; text: string; ids?: Ids }[];
  b: Record<number, number>;
}

/** The most bytes of vectors in a link, which programs that pass it on may cut off; and the most characters of a link. */
const ROW_BYTES = 64 * 1024;
const LINK_LENGTH = 1_000_000;

function encode(value: unknown): string {
  return toBase64(new TextEncoder().encode(JSON.stringify(value))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function decode(text: string): unknown {
  return JSON.parse(new TextDecoder().decode(fromBase64(text.replaceAll("-", "+").replaceAll("_", "/"))));
}

/** Items with vectors of this tab, in their order as long as there is room for them; and the names of those without room. */
function ownItems(): { items: Item[]; leftOut: string[] } {
  let room = ROW_BYTES;
  const own = items.value.filter((item) => item.kind !== "module");
  const fitting = own.filter((item) => (room -= item.row?.byteLength ?? 0) >= 0);
  return { items: fitting, leftOut: own.filter((item) => !fitting.includes(item)).map((item) => item.name) };
}

function linkedItem({ row, hash, ...item }: Item): LinkedItem {
  void hash;
  return item.kind !== "local" || !row ? item : { ...item, row: toBase64(new Uint8Array(row.buffer, row.byteOffset, row.byteLength)) };
}

function linked(): Linked {
  return {
    v: view.value,
    s: settings.value,
    i: [...items.value.filter((item) => item.kind === "module" && item.isOn), ...ownItems().items].map(linkedItem),
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

/** The link to what is shown; null if it is longer than browsers take. */
export function link(): string | null {
  const text = encode(linked());
  return text.length > LINK_LENGTH ? null : `${location.href.replace(/#.*$/, "")}#${text}`;
}

/** What a link to this view leaves out, as a sentence. */
export function leftOut(): string {
  const names = ownItems().leftOut.map((name) => `“${name}”`).join(", ");
  const captures = turns.value.some((turn) => turn.parent === 0 && turn.role === "assistant");
  return [names ? `It leaves out ${names}: it has room for ${ROW_BYTES / 1024} KiB of vectors; save them as files, or register them.` : "", captures ? "It leaves out the rows of captures that were opened." : ""].filter(Boolean).join(" ");
}

/** Whether the address held a link that could not be read. */
export const isDamaged = signal(false);

function isOneOf<T extends string>(value: unknown, of: readonly T[]): value is T {
  return of.includes(value as T);
}

const PHASES: readonly Phase[] = ["both", "prompt", "answer"];

/** Values of a link are checked one by one: whoever made it may have written anything into it. */
function check(isRight: boolean, what: string): void {
  if (!isRight) throw new Error(`the link's ${what} cannot be read`);
}

function itemOf({ name, isOn, scale, phase = "both", how = "add", kind = "module", site = "", about = "", row, sae, feature, lens, token }: LinkedItem): Item {
  check([name, site, about].every((each) => typeof each === "string") && Number.isFinite(scale) && isOneOf(phase, PHASES), "items");
  check(isOneOf(how, ["add", "ablate", "at most", "at least", "set"]) && isOneOf(kind, ["module", "local", "feature", "lens"]), "items");
  const item: Item = { name, isOn: !!isOn, scale, phase, how, kind, site, about, row: null };
  if (kind === "feature") {
    check(typeof sae === "string" && Number.isInteger(feature), "features");
    return { ...item, sae: sae!, feature: feature! };
  }
  if (kind === "lens") {
    check(typeof lens === "string" && typeof token === "string", "directions");
    return { ...item, lens: lens!, token: token! };
  }
  if (kind === "module") return item;
  const values = new Float32Array(fromBase64(String(row)).buffer);
  check(values.length > 0 && values.every(Number.isFinite) && /^\d+\.[a-z_]+$/.test(site), "vectors");
  return { ...item, row: values };
}

function gateOf({ name, isOn, reads, compare, threshold, phase = "both", pool, then, scope }: GateSpec): GateSpec {
  check([name, reads.name, reads.site, then.name].every((each) => typeof each === "string") && [threshold, then.scale].every(Number.isFinite) && isOneOf(phase, PHASES), "gates");
  check(isOneOf(reads.kind, ["probe", "cosine", "always"]) && isOneOf(then.kind, ["module", "observe"]) && isOneOf(compare, ["above", "below"]), "gates");
  check(isOneOf(pool, ["token", "ema", "last_prompt", "prompt_mean"]) && isOneOf(scope, ["this_token", "next_token", "rest_of_request"]), "gates");
  return { name, isOn: !!isOn, reads: { kind: reads.kind, name: reads.name, site: reads.site }, compare, threshold, phase, pool, then: { kind: then.kind, name: then.name, scale: then.scale }, scope };
}

/** Turns of a link: a parent has a smaller number than its children, so that each way through them ends. */
function turnsOf(list: Linked["t"]): Turn[] {
  check(new Set(list.map((turn) => turn.id)).size === list.length, "conversation");
  return list.map(({ id, parent, role, text, ids }) => {
    check(Number.isInteger(id) && Number.isInteger(parent) && 0 <= parent && parent < id && typeof text === "string" && isOneOf(role, ["system", "user", "assistant"]), "conversation");
    return { id, parent, role, text, runs: [], chosen: 0, ...(areIds(ids) ? { ids } : {}) };
  });
}

/** The chosen turn by its parent's number. */
function branchesOf(given: Linked["b"]): Linked["b"] {
  check(Object.entries(given).every(([parent, id]) => /^\d{1,15}$/.test(parent) && Number.isInteger(id)), "conversation");
  return { ...given };
}

function settingsOf(given: Partial<Linked["s"]>): Linked["s"] {
  const known = { ...settings.value } as Record<string, unknown>;
  for (const [name, value] of Object.entries(given)) {
    if (!Object.hasOwn(known, name) || name === "recordProbe" || typeof value !== typeof known[name]) continue;
    if (typeof value === "number") check(Number.isFinite(value), "settings");
    known[name] = value;
  }
  const found = known as Linked["s"];
  check(isOneOf(found.reads, ["none", "layer", "all"]) && /^\d{0,15}$/.test(found.seed), "settings");
  return found;
}

/** Restores what a link says, but that messages are recorded; one that is damaged restores nothing. Values of a link are texts and numbers, never code or HTML. */
export function restore(hash: string): boolean {
  isDamaged.value = false;
  if (hash.length < 2) return false;
  try {
    const found = decode(hash.slice(1)) as Linked;
    check(typeof found === "object" && found !== null && isOneOf(found.v ?? "chat", VIEWS), "content");
    const all = (found.i ?? []).map(itemOf);
    const restored = {
      settings: settingsOf(found.s ?? {}),
      gates: (found.g ?? []).map(gateOf),
      turns: turnsOf(found.t ?? []),
      watched: (found.w ?? []).map(({ kind, name }) => {
        check(isOneOf(kind, ["probe", "cosine"]) && typeof name === "string", "watched vectors");
        return { kind, name };
      }),
      branches: branchesOf(found.b ?? {}),
      followed: (found.f ?? []).filter((each) => typeof each.sae === "string" && Number.isInteger(each.id)).map(({ sae, id, label }) => ({ sae, id, label: String(label) })),
    };
    settings.value = restored.settings;
    gates.value = restored.gates;
    turns.value = restored.turns;
    watched.value = restored.watched;
    followed.value = restored.followed;
    branches.value = restored.branches;
    items.value = all.filter((item) => item.kind !== "module");
    want(all.filter((item) => item.kind === "module"));
    view.value = found.v ?? "chat";
    return true;
  } catch {
    isDamaged.value = true;
    return false;
  }
}

let storing: ReturnType<typeof setTimeout> | undefined;
export function keepHash(): void {
  clearTimeout(storing);
  storing = setTimeout(() => history.replaceState(null, "", link() ?? location.pathname + location.search), 300);
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
  const found = bare(JSON.parse(text, (_, value: unknown) => (value === NOT_A_NUMBER ? NaN : value)) as Recording);
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
