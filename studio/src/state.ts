// What the page knows: the server's facts, the conversation, what is read and what steers. Signals; no component keeps its own copy.

import { computed, signal } from "@preact/signals";
import type { Tensor } from "./tensors";
import { Api, ApiError, bare, type Capturable, type Decision, type Dynamic, type Layers, type Message, type Probe, type Rule, type Sae, type Status, storedKeys, storeKeys, type Keys, UNREACHABLE, whenLost } from "./api";

export interface Facts {
  model: string;
  maxLength: number;
  capture: Capturable | null;
  captureRefused: string;
  layers: Layers | null;
  steering: Status | null;
  steeringRefused: string;
  probes: Probe[];
  saes: Sae[];
  rules: Rule[];
  dynamic: Dynamic | null;
  dynamicRefused: string;
}

export interface Token { text: string; id: number | null; logprob: number | null; top: { text: string; logprob: number | null }[] }

/** Values by position of a request, prompt first; NaN where there is none. */
export interface Series { label: string; values: number[]; threshold?: number }

/** Scores of a probe at the site that it reads. */
export interface ProbeScores { name: string; layer: number; values: number[] }

export interface Grid {
  hook: string;
  layers: number[];
  numTokens: number;
  norms: number[][];
  cosines: number[][];
  probes: ProbeScores[];
  lens: Lens | null;
}

/** Patterns of one layer: values are [queries][heads][keys]. */
export interface Attention { layer: number; queries: number[]; numHeads: number; numKeys: number; values: Float32Array }

/** What became of a request that was to be recorded only if a probe fired. */
export interface Recorded { consumer: string; decision: Decision; isStored: boolean; tag: string; name: string }

/** Strongest features of each row; ids and values are null where the row is not finite. */
export interface Features { sae: string; positions: number[]; ids: (number[] | null)[]; values: (number[] | null)[]; labels: Record<string, string> }

export interface Lens { name: string; layers: Record<string, { ids: number[][]; tokens: string[][]; logprobs: (number | null)[][]; token_logprobs?: number[][]; token_ranks?: number[][] }>; positions: number[]; tokens: string[] }

export interface Run {
  kind: "plain" | "steered";
  status: "waiting" | "streaming" | "done" | "stopped" | "failed";
  error: string;
  notice: string;
  path: string;
  body: Record<string, unknown>;
  prompt: Token[];
  answer: Token[];
  /** The answer as the conversation goes on with it: without special tokens, and without the reasoning. */
  text: string;
  series: Record<string, Series>;
  gates: Record<string, { strength: number[]; applied: number[] }>;
  grid: Grid | null;
  features: Features | null;
  attention: Attention | null;
  /** Mean norm of the stream over the answer, by site, where rows were read. */
  meanNorms: Record<string, number>;
  /** The rows at the layer that is shown, in order of `positions`; in no recording. */
  streamRows: { site: string; positions: number[]; tensor: Tensor } | null;
  recorded: Recorded | null;
  seconds: number;
}

export interface Turn { id: number; parent: number; role: "system" | "user" | "assistant"; text: string; runs: Run[]; chosen: number; /** Tokens that a link brought. */ ids?: Ids }

/** The tokens that an answer was made from, and its own. */
export interface Ids { prompt: number[]; answer: number[] }

export type Phase = "both" | "prompt" | "answer";
/** What is done with a direction: it is added, or a row's projection on it is removed, bounded or set. */
export type How = "add" | "ablate" | "at most" | "at least" | "set";
export interface Item { how: How; name: string; kind: "module" | "local" | "feature" | "lens"; isOn: boolean; scale: number; phase: Phase; site: string; row: Float32Array | null; about: string; /** Of an item that is a feature. */ sae?: string; feature?: number; /** Of an item that is a token's direction. */ lens?: string; token?: string; /** Of the registered content that `row` is; another content of the name has another. */ hash?: string | null }

export interface GateSpec {
  name: string;
  isOn: boolean;
  reads: { kind: "probe" | "cosine" | "always"; name: string; site: string };
  compare: "above" | "below";
  threshold: number;
  /** The rows on which it can fire. */
  phase: Phase;
  pool: "token" | "ema" | "last_prompt" | "prompt_mean";
  then: { kind: "module" | "observe"; name: string; scale: number };
  scope: "this_token" | "next_token" | "rest_of_request";
}

export const VIEWS = ["chat", "grid", "attention", "features", "steer", "dynamic", "captures", "server"] as const;
export type View = (typeof VIEWS)[number];

export const keys = signal<Keys>(storedKeys());
export const api = computed(() => new Api(keys.value));
export const facts = signal<Facts | null>(null);
export const unreachable = signal("");
export const view = signal<View>("chat");
export const settings = signal({
  temperature: 0,
  maxTokens: 64,
  seed: "",
  system: "",
  readHook: "post_mlp",
  readLayer: -1,
  reads: "layer" as "none" | "layer" | "all",
  compares: true,
  colourBy: "surprise",
  showsPrompt: false,
  lens: "",
  lensToken: "",
  sae: "",
  attentionLayer: -1,
  recordProbe: "",
  recordAbove: "",
  recordReads: "layer" as "layer" | "all",
  gridShows: "norm",
  gridProbe: "",
  featureText: "",
});
export const items = signal<Item[]>([]);
export const gates = signal<GateSpec[]>([]);
/** What is measured at each token beside the chosen layer: probes, and cosines to vectors. */
export const watched = signal<{ kind: "probe" | "cosine"; name: string }[]>([]);
/** Features whose activation every answer shows token by token. */
export const followed = signal<{ sae: string; id: number; label: string }[]>([]);
export const turns = signal<Turn[]>([]);
/** The chosen child of each turn; 0 is the root. */
export const branches = signal<Record<number, number>>({});
export const selected = signal<{ turn: number; run: number } | null>(null);
/** Answers that are compared, at most two. */
export const picked = signal<{ run: Run; title: string }[]>([]);
/** The token that others are compared with. */
export const pinned = signal<{ run: Run; position: number } | null>(null);
/** Grows when a run that is shown has changed within. */
export const tick = signal(0);
/** Whether the page shows a recording: then there is no server. */
export const isRecorded = signal(false);

let isPlanned = false;
export function changed(): void {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    tick.value++;
  });
}

export function set(change: Partial<typeof settings.value>): void {
  settings.value = { ...settings.value, ...change };
}

export function setKeys(found: Keys): void {
  storeKeys(found);
  keys.value = found;
  void loadFacts();
}

/** The turns from the first to the last of the chosen branch. */
export const path = computed<Turn[]>(() => {
  const found: Turn[] = [];
  for (let at = 0; ; ) {
    const children = turns.value.filter((turn) => turn.parent === at);
    const next = children.find((turn) => turn.id === branches.value[at]) ?? children.at(-1);
    if (!next) return found;
    found.push(next);
    at = next.id;
  }
});

export function siblings(turn: Turn): Turn[] {
  return turns.value.filter((other) => other.parent === turn.parent);
}

export function addTurn(parent: number, role: Turn["role"], text: string): Turn {
  const turn = { id: Math.max(0, ...turns.value.map((other) => other.id)) + 1, parent, role, text, runs: [], chosen: 0 };
  turns.value = [...turns.value, turn];
  branches.value = { ...branches.value, [parent]: turn.id };
  return turn;
}

export function messagesUpTo(turn: Turn): Message[] {
  const found: Message[] = [];
  for (let at: Turn | undefined = turn; at; at = turns.value.find((other) => other.id === at!.parent)) found.unshift({ role: at.role, content: at.text });
  if (settings.value.system.trim()) found.unshift({ role: "system", content: settings.value.system });
  return found;
}

/** The run that the views beside the chat show: the selected one, or that of the last answer. */
export const currentRun = computed<{ turn: Turn; run: Run } | null>(() => {
  void tick.value;
  const at = selected.value;
  const turn = path.value.find((found) => found.id === at?.turn) ?? path.value.filter((found) => found.runs.length).at(-1);
  if (!turn) return null;
  const run = turn.runs[at?.turn === turn.id ? at.run : turn.chosen] ?? turn.runs[0];
  return run ? { turn, run } : null;
});

function reasonOf(result: PromiseSettledResult<unknown>): string {
  if (result.status === "fulfilled") return "";
  return result.reason instanceof Error ? result.reason.message : String(result.reason);
}

export const inlineName = computed(() => consumerOf("inline"));
export const lensName = computed(() => consumerOf("lens"));
export const attentionName = computed(() => consumerOf("attention"));
export const browsable = computed(() => (facts.value?.capture?.consumers ?? []).filter((each) => each.is_browsable).map((each) => each.name));
export const featuresName = computed(() => consumerOf("features"));
/** The consumers that record what a probe fires on, once for each of their probes. */
export const recorders = computed(() => {
  const all = (facts.value?.capture?.consumers ?? []).filter((each) => each.reads_client_spec && each.offers?.["if_probe"]?.length);
  return all.flatMap(({ name, offers }) => offers!["if_probe"]!.map((probe) => ({ key: `${name}:${probe}`, consumer: name, probe, label: `probe ${probe}${all.length > 1 ? ` (${name})` : ""}` })));
});
/** The one that records the next messages; null if none does. */
export const recorder = computed(() => recorders.value.find((each) => each.key === settings.value.recordProbe) ?? null);

function consumerOf(kind: string): string | null {
  return facts.value?.capture?.consumers.find((each) => each.consumer === kind && each.reads_client_spec)?.name ?? null;
}

/** Layers whose attention can be read: both q and k are captured. */
export const attentionLayers = computed(() => (sites.value["q"] ?? []).filter((layer) => sites.value["k"]?.includes(layer)));

/** Names that requests of a consumer may choose from. */
export function offered(kind: string, field: string): string[] {
  return facts.value?.capture?.consumers.find((each) => each.consumer === kind)?.offers?.[field] ?? [];
}

/** Hook points that can be captured, and their layers. */
export const sites = computed(() => facts.value?.capture?.sites ?? {});

whenLost(() => {
  if (!isRecorded.value) unreachable.value = UNREACHABLE; // main asks again until it answers
});

let loading = 0;
/** Asks the server what it has. What it refuses is kept as the reason, and not shown. */
export async function loadFacts(): Promise<void> {
  if (isRecorded.value) return;
  const turn = ++loading;
  const from = api.value;
  const [models, capture, layers, status, probes, saes, rules, dynamic] = await Promise.allSettled([
    from.get<{ data: { id: string; max_model_len?: number }[] }>("/v1/models"),
    from.get<Capturable>("/v1/capture/consumers"),
    from.get<Layers>("/v1/steering/layers"),
    from.get<Status>("/v1/steering"),
    from.get<{ probes: Probe[] }>("/v1/steering/probes"),
    from.get<{ saes: Sae[] }>("/v1/steering/saes"),
    from.get<{ rules: Rule[] }>("/v1/steering/rules"),
    from.get<Dynamic>("/v1/steering/dynamic"),
  ]);
  if (turn !== loading) return;
  if (models.status === "rejected") {
    unreachable.value = reasonOf(models);
    if (!(models.reason instanceof ApiError) || models.reason.status === null) return;
  } else unreachable.value = "";
  const got = <T,>(result: PromiseSettledResult<T>): T | null => (result.status === "fulfilled" ? result.value : null);
  const model = got(models)?.data[0];
  facts.value = bare({
    model: model?.id ?? "",
    maxLength: model?.max_model_len ?? 0,
    capture: got(capture),
    captureRefused: reasonOf(capture),
    layers: got(layers),
    steering: got(status),
    steeringRefused: reasonOf(status),
    probes: got(probes)?.probes ?? [],
    saes: got(saes)?.saes ?? [],
    rules: got(rules)?.rules ?? [],
    dynamic: got(dynamic),
    dynamicRefused: reasonOf(dynamic),
  });
  settle();
}

/** Brings choices in line with what the server has. */
function settle(): void {
  const hooks = Object.keys(sites.value);
  const hook = hooks.includes(settings.value.readHook) ? settings.value.readHook : (hooks.find((name) => name === "post_mlp") ?? hooks[0] ?? "post_mlp");
  const layers = sites.value[hook] ?? [];
  const layer = layers.includes(settings.value.readLayer) ? settings.value.readLayer : (layers[Math.floor(layers.length / 2)] ?? -1);
  const known = (kind: string, field: string, chosen: string) => (offered(kind, field).includes(chosen) ? chosen : "");
  set({ readHook: hook, readLayer: layer, lens: known("lens", "lens", settings.value.lens), sae: known("features", "sae", settings.value.sae), recordProbe: recorder.value?.key ?? "" });
  const modules = facts.value?.steering?.modules ?? {};
  const kept = items.value.filter((item) => item.kind !== "module" || Object.hasOwn(modules, item.name)).map((item) => (misfit(item) ? { ...item, isOn: false } : item));
  for (const module of Object.values(modules)) {
    const known = kept.findIndex((item) => item.kind === "module" && item.name === module.name);
    if (known >= 0) {
      const item = kept[known]!;
      if (item.row && item.hash !== module.decode.hash) kept[known] = { ...item, row: null, about: "" };
      continue;
    }
    const planned = wanted.find((each) => each.name === module.name);
    const site = module.decode.sites[0] ?? module.prefill.sites[0] ?? module.decode.op_sites[0] ?? "";
    kept.push({ name: module.name, kind: "module", isOn: false, scale: 2, phase: "both", how: "add", about: "", row: null, ...planned, site });
  }
  items.value = kept;
}

/** Why a vector of this tab cannot steer here, if its file or link is of another model. */
export function misfit({ kind, row, site }: Pick<Item, "kind" | "row" | "site">): string {
  const layers = facts.value?.layers;
  if (!layers || kind !== "local" || !row) return "";
  const [layer = "", hook = ""] = site.split(".");
  if (!layers.hook_points[hook]?.includes(Number(layer))) return `This server does not steer at ${site}.`;
  return row.length === layers.hidden_size ? "" : `It has ${row.length} values, and the rows of this model ${layers.hidden_size}.`;
}

/** Modules that a link named, until the server is known to have them. */
export let wanted: Item[] = [];
export function want(list: typeof wanted): void {
  wanted = list;
}
