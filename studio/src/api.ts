// Calls of the server: headgate's documented routes and vLLM's own, on the page's own origin and nowhere else.

export interface Consumer { name: string; consumer: string; location: string; reads_client_spec: boolean; overload: string; offers?: Record<string, string[]>; is_browsable?: boolean }
export interface HookMemory { layers: number; width: number; dtype: string; site_bytes: number }
export interface Capturable { consumers: Consumer[]; sites: Record<string, number[]>; memory?: { step_rows: number; hooks: Record<string, HookMemory> } }
export interface Layers { hook_points: Record<string, number[]>; op_hook_points: Record<string, number[]>; num_layers: number; hidden_size: number; dtype: string }
export interface Content { hash: string | null; sites: string[]; op_sites: string[]; norms?: Record<string, number> }
export interface Module { name: string; prefill: Content; decode: Content; version: number }
export interface Status { global: { tiers: Record<string, string[]>; prefill: Content; decode: Content }; modules: Record<string, Module>; slots: { capacity: number; reserved: number; waiting: number }[]; is_consistent: boolean }
export interface Probe { name: string; at: string; kind: string; classes: string[]; threshold: number | null; pooling: string }
export interface Sae { name: string; site: string; num_features: number; activation: string; decision: string }
/** A condition as clients write it; null stands for a vector that the rule itself brought. */
export type Condition = string | { any: Condition[] } | { all: Condition[] } | { not: Condition } | ({ above?: number; below?: number; pool?: string | { ema: number } } & ({ probe: string | { at: string } } | { cosine: string | null; at: string } | { sae: string; feature: number }));
export type Effect = string | { module: string; scale: number } | { features: { sae: string; feature: number }[] } | { ops: { at: string; method: string }[] };
export interface Rule { name: string; applies_to: string; when: Condition; then: Effect; scope: string; strength: unknown; observes: boolean }
export interface Controller { name: string; applies_to: string; probes: string[]; steps: number; actions: Record<string, number>; error: string | null }
export interface Dynamic { rules: { name: string; applies_to: string; observes: boolean; rows: number }[]; gates: Record<string, number>; requests_with_gates: number; controllers: Controller[] }
export interface Stored { tag: string; name: string; request_id: string; layout: string; written_at: string; model: string; status: string; num_rows: number; num_prompt_tokens: number; num_bytes: number; dropped_rows: number; sites: Record<string, number[]>; roles: string[] | null; if_probe: Decision | null; stage: [number, number] }
/** Why a request with a condition was recorded, or was not. */
export interface Decision { probe: string; site: string; above: number; pool: string; num_scored: number; num_not_finite: number; num_fired: number; highest: number | null; at: number | null; positions: number[]; scores: number[] }
export interface StoredPage { captures: Stored[]; count: number; next: string | null; damaged: string[] }
export interface StoredOne extends Stored { metadata: Json; positions: number[]; token_ids: number[]; tokens: string[] | null }
export interface Message { role: string; content: string }
export type Json = Record<string, unknown>;

/** JSON whose objects have no prototype: a name of somebody's choice, such as "constructor", is found in none of them. */
export function bare<T>(value: T): T {
  if (Array.isArray(value)) return value.map(bare) as T;
  if (value === null || typeof value !== "object") return value;
  const found = Object.create(null) as Record<string, unknown>;
  for (const [name, each] of Object.entries(value)) found[name] = bare(each);
  return found as T;
}

export interface CaptureResult { status: string; error: string | null; payload: unknown; num_rows: number; num_bytes: number; dropped_rows: number }
export interface Trace { positions: number[]; scores: Record<string, (number | null)[]>; gates: Record<string, { strength: (number | null)[]; applied: (number | null)[] }> }
export interface TokenLogprob { token: string; logprob: number | null; bytes: number[] | null; top_logprobs?: { token: string; logprob: number | null; bytes: number[] | null }[] }
export interface Choice { index: number; delta?: { content?: string; reasoning?: string; reasoning_content?: string }; logprobs?: { content: TokenLogprob[] | null } | null; finish_reason: string | null; token_ids?: number[] | null; steering_trace?: Trace }
export interface Chunk { choices: Choice[]; capture_results?: Record<string, CaptureResult>; prompt_token_ids?: number[] | null; usage?: { prompt_tokens: number; completion_tokens: number }; error?: { message: string; code?: number } }

export interface Keys { api: string; headgate: string }
const STORED = "headgate.keys";

/** Keys live in this tab alone: another tab, and this one once it is closed, have none. */
export function storedKeys(): Keys {
  try {
    const found = JSON.parse(sessionStorage.getItem(STORED) ?? "{}") as Partial<Keys>;
    return { api: String(found.api ?? ""), headgate: String(found.headgate ?? "") };
  } catch {
    return { api: "", headgate: "" };
  }
}

export function storeKeys(keys: Keys): void {
  try {
    if (keys.api || keys.headgate) sessionStorage.setItem(STORED, JSON.stringify(keys));
    else sessionStorage.removeItem(STORED);
  } catch {
    // A recorded page has no storage, and calls nothing.
  }
}

/** What the server answered in place of what was asked, as a sentence for people. */
export class ApiError extends Error {
  constructor(message: string, readonly status: number | null, readonly field: string | null = null) {
    super(message);
  }
}

export function sentence(status: number, message: string, field: string | null, retryAfter: string | null): string {
  const said = message.trim().replace(/\.$/, "") || "it gives no reason";
  switch (status) {
    case 400:
      return `The server refuses this request${field && !said.includes(field) ? `, because of ${field}` : ""}: ${said}.`;
    case 401:
      return `The server asks for a key: enter its API key under “Keys”. It says: ${said}.`;
    case 403:
      return `Your key does not allow this, or you have entered none under “Keys”. The server says: ${said}.`;
    case 404:
      return `This server does not have that: ${said}.`;
    case 408:
      return `The request took too long to reach the server: ${said}.`;
    case 413:
      return `The request is too large for this server: ${said}.`;
    case 429:
      return `Your quota is used up: ${said}.${again(retryAfter)}`;
    case 503:
      return `The server is too busy to answer now: ${said}.${again(retryAfter)}`;
    default:
      return `The server answered with status ${status}: ${said}.`;
  }
}

function again(seconds: string | null): string {
  return seconds ? ` Try again in ${seconds} s.` : "";
}

export const BASE = location.pathname.replace(/\/headgate\/.*$/, "");

function headers(keys: Keys, hasBody: boolean): Record<string, string> {
  const found: Record<string, string> = hasBody ? { "Content-Type": "application/json" } : {};
  if (keys.api) found["Authorization"] = `Bearer ${keys.api}`;
  if (keys.headgate) found["X-Headgate-Key"] = keys.headgate;
  return found;
}

/** Whatever a failed call was told, as an `ApiError`. */
async function refused(answer: Response): Promise<ApiError> {
  const text = await answer.text();
  let message = text;
  let field: string | null = null;
  try {
    const body = JSON.parse(text) as { error?: string | { message?: string; param?: string | null }; detail?: unknown };
    if (typeof body.error === "string") message = body.error;
    else if (body.error) {
      message = body.error.message ?? text;
      field = body.error.param ?? null;
    } else if (body.detail) message = String(body.detail);
  } catch {
    message = text.slice(0, 300);
  }
  return new ApiError(sentence(answer.status, message, field, answer.headers.get("retry-after")), answer.status, field);
}

export const BROKEN_OFF = "The connection to the server broke off in the middle of the answer.";
export const UNREACHABLE = "The server does not answer. It may have stopped, or be starting; the page asks again every few seconds.";

let lost: () => void = () => undefined;
/** Has `call` called whenever the server does not answer. */
export function whenLost(call: () => void): void {
  lost = call;
}

export class Api {
  constructor(readonly keys: Keys) {}

  private async send(path: string, body: Json | null, signal?: AbortSignal): Promise<Response> {
    const options: RequestInit = { headers: headers(this.keys, body !== null), cache: "no-store", credentials: "omit", redirect: "error" };
    if (body !== null) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    if (signal) options.signal = signal;
    let answer: Response;
    try {
      answer = await fetch(BASE + path, options);
    } catch (error) {
      if (signal?.aborted) throw error;
      lost();
      throw new ApiError(UNREACHABLE, null);
    }
    if (!answer.ok) throw await refused(answer);
    return answer;
  }

  async get<T>(path: string): Promise<T> {
    return (await (await this.send(path, null)).json()) as T;
  }

  async text(path: string): Promise<string> {
    return (await this.send(path, null)).text();
  }

  async bytes(path: string): Promise<Uint8Array<ArrayBuffer>> {
    return new Uint8Array(await (await this.send(path, null)).arrayBuffer());
  }

  async post<T>(path: string, body: Json, signal?: AbortSignal): Promise<T> {
    return (await (await this.send(path, body, signal)).json()) as T;
  }

  /** The events of a stream, one after the other. */
  async *stream(path: string, body: Json, signal: AbortSignal): AsyncGenerator<Chunk> {
    const answer = await this.send(path, body, signal);
    const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
    let pieces: string[] = [];
    let isComplete = false;
    for (;;) {
      let read: ReadableStreamReadResult<string>;
      try {
        read = await reader.read();
      } catch (error) {
        if (signal.aborted) throw error;
        throw new ApiError(BROKEN_OFF, null);
      }
      if (read.done && !isComplete) throw new ApiError(BROKEN_OFF, null); // as a proxy ends what its server no longer sends
      if (read.done) return;
      // The last event may be many megabytes of rows: joined once, when its end is here.
      if (!read.value.includes("\n")) {
        pieces.push(read.value);
        continue;
      }
      const lines = (pieces.join("") + read.value).split("\n");
      pieces = [lines.pop()!];
      for (const line of lines) {
        isComplete ||= line.trimEnd() === "data: [DONE]";
        if (!line.startsWith("data: ") || isComplete) continue;
        const chunk = JSON.parse(line.slice(6)) as Chunk;
        if (chunk.error) throw new ApiError(sentence(chunk.error.code ?? 500, chunk.error.message, null, null), chunk.error.code ?? null);
        yield chunk;
      }
    }
  }
}
