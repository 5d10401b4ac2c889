// Requests of the page: their bodies, and what is read from their answers.

import type { CaptureResult, Chunk, Condition, Decision, Json, Message, TokenLogprob, Trace } from "./api";
import { ApiError } from "./api";
import { extent } from "./colour";
import { api, attentionName, changed, facts, featuresName, followed, gates, type GateSpec, type Grid, type Ids, inlineName, items, type Item, lensName, type Features, type Lens, messagesUpTo, type ProbeScores, offered, recorder, type Run, settings, sites, type Token, turns, type Turn, watched } from "./state";
import { cosineOf, cosinesTo, fromBase64, packed, readSafetensors, rowCosines, rowNorms, type Tensors } from "./tensors";
import { textOfBytes, textsOf } from "./tokens";

export function splitSite(site: string): [number, string] {
  const dot = site.indexOf(".");
  return [Number(site.slice(0, dot)), site.slice(dot + 1)];
}

// ---- bodies

/** Fields that steer a request by what is switched on. */
export function steeringFields(chosen: readonly Item[]): Json {
  const fields: Json = {};
  const added = chosen.filter((item) => item.how === "add");
  const modules = added.filter((item) => item.kind === "module" && item.phase === "both");
  if (modules.length) fields["steering_module_ref"] = modules.map((item) => [item.name, item.scale]);
  for (const [phase, prefix] of [["both", ""], ["prompt", "prefill_"], ["answer", "decode_"]] as const) {
    const ofModules = phase === "both" ? [] : added.filter((item) => item.kind === "module" && item.phase === phase);
    const operations = [...ofModules, ...chosen.filter((item) => item.how !== "add" && item.phase === phase)].flatMap(operationsOf);
    if (operations.length) fields[`${prefix}steering_ops`] = operations;
    const own = sumBySite(added.filter((item) => item.kind === "local" && item.phase === phase));
    const directions = added.filter((item) => item.kind === "lens" && item.phase === phase && item.scale !== 0).map((item) => ({ lens: item.lens, token: item.token, at: item.site, scale: item.scale }));
    if (own) fields[`${prefix}steering_vectors`] = own;
    else if (directions.length) fields[`${prefix}steering_vectors`] = directions;
    // A field has either rows or directions: beside rows, directions are operations that add them.
    if (own && directions.length) fields[`${prefix}steering_ops`] = [...((fields[`${prefix}steering_ops`] as Json[] | undefined) ?? []), ...directions.map(({ scale, ...vector }) => ({ at: vector.at, method: "additive", vector, scale }))];
    const edits = chosen.filter((item) => item.kind === "feature" && item.phase === phase && item.scale !== 0);
    if (edits.length) fields[`${prefix}steering_features`] = edits.map((item) => ({ sae: item.sae, feature: item.feature, add: item.scale }));
  }
  return fields;
}

/** Sites of the vectors that an item has in its phase. */
export function vectorSites(item: Item): string[] {
  if (item.kind === "feature") return [];
  if (item.kind !== "module") return [item.site];
  const module = facts.value?.steering?.modules[item.name];
  const contents = item.phase === "prompt" ? [module?.prefill] : item.phase === "answer" ? [module?.decode] : [module?.prefill, module?.decode];
  return [...new Set(contents.flatMap((content) => content?.sites ?? []))];
}

/** An item as operations, one at each of its sites. */
function operationsOf(item: Item): Json[] {
  const scale = item.scale;
  const how = { add: { method: "additive", scale }, ablate: { method: "ablate", scale }, "at most": { method: "clamp", max: scale }, "at least": { method: "clamp", min: scale }, set: { method: "set", value: scale } }[item.how];
  return vectorSites(item).map((site) => ({ at: site, ...how, vector: vectorOf(item, site) }));
}

function vectorOf(item: Item, site: string): unknown {
  if (item.kind === "module") return item.name;
  if (item.kind === "lens") return { lens: item.lens, token: item.token, at: site };
  const { dtype, data } = packed([0], [item.row!]);
  return { dtype, shape: [item.row!.length], data };
}

function sumBySite(chosen: readonly Item[]): Json | null {
  const sums = new Map<string, Float32Array>();
  for (const item of chosen) {
    if (!item.row || item.scale === 0) continue;
    const sum = sums.get(item.site) ?? new Float32Array(item.row.length);
    for (let i = 0; i < sum.length; i++) sum[i]! += item.scale * item.row[i]!;
    sums.set(item.site, sum);
  }
  if (!sums.size) return null;
  const hooks: Record<string, Json> = {};
  for (const hook of new Set([...sums.keys()].map((site) => splitSite(site)[1]))) {
    const of = [...sums].map(([site, row]) => ({ layer: splitSite(site)[0], hook: splitSite(site)[1], row })).filter((each) => each.hook === hook);
    hooks[hook] = packed(of.map((each) => each.layer), of.map((each) => each.row));
  }
  return hooks;
}

/** A gate as requests send it. */
export function gateOf(gate: GateSpec): Json {
  const bound = { [gate.compare]: gate.threshold };
  const pool = gate.pool === "ema" ? { ema: 0.5 } : gate.pool;
  const phase = { both: "always", prompt: "prompt", answer: "generated" }[gate.phase];
  const read =
    gate.reads.kind === "always"
      ? phase
      : gate.reads.kind === "probe"
        ? { probe: gate.reads.name, ...bound, ...(gate.pool === "token" ? {} : { pool }) }
        : { cosine: gate.reads.name, at: gate.reads.site, ...bound, ...(gate.pool === "token" ? {} : { pool }) };
  const when = gate.reads.kind === "always" || gate.phase === "both" ? read : { all: [phase, read] };
  const then = gate.then.kind === "observe" ? "observe" : { module: gate.then.name, scale: gate.then.scale };
  return { name: gate.name, when, then, scope: gate.scope };
}

/** A cosine's bound that nothing reaches: it is read and never fires. */
const NEVER = 2;

export function isOpSite(site: string): boolean {
  const [layer, hook] = splitSite(site);
  return facts.value?.layers?.op_hook_points[hook]?.includes(layer) ?? false;
}

/** Vectors whose cosine the server can read at each token. */
export function watchable(): { kind: "probe" | "cosine"; name: string }[] {
  const probes = (facts.value?.probes ?? []).filter((probe) => isOpSite(probe.at)).map((probe) => ({ kind: "probe" as const, name: probe.name }));
  const modules = items.value.filter((item) => item.kind === "module" && item.site && isOpSite(item.site) && hasVectors(item.name));
  return [...probes, ...modules.map((item) => ({ kind: "cosine" as const, name: item.name }))];
}

function hasVectors(name: string): boolean {
  const module = facts.value?.steering?.modules[name];
  return !!module && (module.decode.sites.length > 0 || module.prefill.sites.length > 0);
}

function watchGates(): Json[] {
  const known = watchable();
  return watched.value
    .filter((each) => known.some((other) => other.kind === each.kind && other.name === each.name))
    .map(({ kind, name }) => {
      if (kind === "probe") {
        const threshold = facts.value?.probes.find((probe) => probe.name === name)?.threshold ?? 0;
        return { name: `probe ${name}`, when: { probe: name, above: threshold }, then: "observe" };
      }
      const site = items.value.find((item) => item.kind === "module" && item.name === name)!.site;
      return { name: `cosine ${name}`, when: { cosine: name, at: site, above: NEVER }, then: "observe" };
    });
}

/** Fields that read an answer, and that have it recorded if that is chosen and `records`. */
function captureFields(records: boolean): Json {
  const { reads, readHook, readLayer, sae } = settings.value;
  const capture: Json = {};
  if (inlineName.value && reads !== "none") capture[inlineName.value] = { hooks: { [readHook]: reads === "all" ? "all" : [readLayer] }, positions: "all" };
  if (featuresName.value && sae) capture[featuresName.value] = { sae, positions: "all" };
  if (recorder.value && records) capture[recorder.value.consumer] = recordingSpec(recorder.value.probe);
  return Object.keys(capture).length ? { capture, capture_wait: true } : {};
}

/** What is recorded of a message if the chosen probe fires. */
function recordingSpec(probe: string): Json {
  const { readHook, readLayer, recordAbove, recordReads } = settings.value;
  const above = recordAbove.trim() ? { above: Number(recordAbove), pool: "token" } : {}; // the probe's own threshold is for the rows that it was made for
  return { hooks: { [readHook]: recordReads === "all" ? "all" : [readLayer] }, positions: "all", if_probe: { probe, ...above } };
}

/** The consumers that were asked to record a run. */
export function recordsOf(run: Run): string[] {
  return Object.entries((run.body["capture"] as Record<string, Json> | undefined) ?? {}).filter(([, spec]) => spec["if_probe"]).map(([name]) => name);
}

export function chatBody(messages: Message[], kind: Run["kind"]): Json {
  const { temperature, maxTokens, seed } = settings.value;
  const body: Json = {
    model: facts.value?.model ?? "",
    messages,
    max_tokens: maxTokens,
    temperature,
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: 5,
    return_token_ids: true,
    ...(seed.trim() ? { seed: Number(seed) } : {}),
    ...captureFields(true),
  };
  if (kind === "steered") Object.assign(body, steeringFields(items.value.filter((item) => item.isOn)));
  const all = [...(kind === "steered" ? gates.value.filter((gate) => gate.isOn).map(gateOf) : []), ...watchGates()];
  if (all.length) body["steering_gates"] = all;
  if (all.length || (facts.value?.layers && facts.value.rules.length)) body["return_steering_trace"] = true;
  return body;
}

export function isSteering(): boolean {
  return items.value.some((item) => item.isOn) || gates.value.some((gate) => gate.isOn);
}

// ---- answers

export function newRun(kind: Run["kind"], body: Json): Run {
  return { kind, status: "waiting", error: "", notice: "", path: "/v1/chat/completions", body, prompt: [], answer: [], text: "", series: Object.create(null) as Run["series"], gates: Object.create(null) as Run["gates"], grid: null, features: null, attention: null, meanNorms: Object.create(null) as Run["meanNorms"], streamRows: null, recorded: null, seconds: 0 };
}

let stopping = new AbortController();
export function stop(): void {
  stopping.abort();
  stopping = new AbortController();
}

/** Answers a user's turn: plain, steered, or both at once in one batch. */
export async function answer(turn: Turn): Promise<void> {
  const messages = messagesUpTo(turns.value.find((found) => found.id === turn.parent) ?? turn);
  const kinds: Run["kind"][] = isSteering() ? (settings.value.compares ? ["plain", "steered"] : ["steered"]) : ["plain"];
  turn.runs = kinds.map((kind) => newRun(kind, chatBody(messages, kind)));
  turn.chosen = turn.runs.length - 1;
  turns.value = [...turns.value];
  const signal = stopping.signal;
  const prompt = promptTokens(messages).catch(() => [] as Token[]);
  await Promise.all(turn.runs.map((run) => follow(run, prompt, signal)));
  turn.text = turn.runs[turn.chosen]!.text;
  turns.value = [...turns.value];
  const steered = turn.runs.find((run) => run.kind === "steered" && run.status === "done");
  if (steered && settings.value.compares) await scorePlain(steered, signal);
  changed();
}

/** Reads the tokens of an answer that a link restored, and of its prompt, without steering: as its run, with all numbers. */
export async function readAgain(turn: Turn, { prompt: before, answer: after }: Ids): Promise<void> {
  const ids = [...before, ...after];
  const watching = watchGates();
  const model = facts.value?.model ?? "";
  const body = { model, prompt: ids, max_tokens: 1, temperature: 0, prompt_logprobs: 5, ...captureFields(false), ...(watching.length ? { steering_gates: watching, return_steering_trace: true } : {}) };
  const found = await api.value.post<{ choices: { prompt_logprobs: (Record<string, Listed> | null)[]; steering_trace?: Trace }[]; capture_results?: Record<string, CaptureResult> }>("/v1/completions", body);
  const listed = found.choices[0]!.prompt_logprobs;
  const first = await api.value.post<{ prompt: string }>("/detokenize", { model, tokens: ids.slice(0, 1) }); // it has no log-probability, and so no text
  const tokens = ids.map((id, i) => (i === 0 ? { text: first.prompt, id, logprob: null, top: [] } : readToken(id, listed[i] ?? null)));
  const run = { ...newRun("plain", body), status: "done" as const, path: "/v1/completions", prompt: tokens.slice(0, before.length), text: turn.text };
  run.notice = "These are the numbers of the restored answer’s tokens, read without steering.";
  run.answer = tokens.slice(before.length);
  applyTraces(run, found.choices[0]!.steering_trace ? [found.choices[0]!.steering_trace] : []);
  addSurprise(run);
  if (found.capture_results) takeCaptures(run, found.capture_results);
  turn.runs = [run];
  turn.chosen = 0;
  turns.value = [...turns.value];
  changed();
}

interface Listed { logprob: number | null; decoded_token: string | null }

function readToken(id: number, listed: Record<string, Listed> | null): Token {
  const top = Object.values(listed ?? {}).sort((a, b) => (b.logprob ?? -Infinity) - (a.logprob ?? -Infinity)).slice(0, 5);
  const own = listed?.[String(id)];
  return { text: own?.decoded_token ?? `#${id}`, id, logprob: own?.logprob ?? null, top: top.map((each) => ({ text: each.decoded_token ?? "", logprob: each.logprob })) };
}

async function promptTokens(messages: Message[]): Promise<Token[]> {
  const found = await api.value.post<{ tokens: number[]; token_strs?: string[] | null }>("/tokenize", {
    model: facts.value?.model ?? "",
    messages: messages as unknown as Json[],
    return_token_strs: true,
  });
  const texts = textsOf(found.token_strs ?? found.tokens.map((id) => `#${id}`));
  return found.tokens.map((id, i) => ({ text: texts[i]!, id, logprob: null, top: [] }));
}

async function follow(run: Run, prompt: Promise<Token[]>, signal: AbortSignal): Promise<void> {
  const began = performance.now();
  const traces: Trace[] = [];
  let captured: Record<string, CaptureResult> | null = null;
  let numPrompt = -1;
  try {
    for await (const chunk of api.value.stream(run.path, run.body, signal)) {
      run.status = "streaming";
      run.seconds = (performance.now() - began) / 1000;
      numPrompt = chunk.usage?.prompt_tokens ?? chunk.prompt_token_ids?.length ?? numPrompt;
      captured = chunk.capture_results ?? captured;
      takeChoice(run, chunk, traces);
      if (!run.prompt.length && (await settled(prompt))) run.prompt = await prompt;
      applyTraces(run, traces);
      changed();
    }
    run.status = "done";
  } catch (error) {
    run.status = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) run.error = error instanceof Error ? error.message : String(error);
  }
  run.prompt = await prompt;
  if (numPrompt >= 0 && run.prompt.length !== numPrompt) {
    run.prompt = Array.from({ length: numPrompt }, () => ({ text: "?", id: null, logprob: null, top: [] }));
    run.notice = "The server's tokenizer route gives other tokens for this prompt than it generated from; they are shown as “?”.";
  }
  applyTraces(run, traces);
  addSurprise(run);
  if (captured) takeCaptures(run, captured);
  changed();
}

async function settled(promise: Promise<unknown>): Promise<boolean> {
  const pending = {};
  return (await Promise.race([promise, Promise.resolve(pending)])) !== pending;
}

function takeChoice(run: Run, chunk: Chunk, traces: Trace[]): void {
  const choice = chunk.choices[0];
  if (!choice) return;
  run.text += choice.delta?.content ?? "";
  const listed = choice.logprobs?.content ?? [];
  const ids = choice.token_ids ?? [];
  if (listed.length) run.answer.push(...listed.map((each, i) => tokenOf(each, ids[i] ?? null)));
  else {
    const text = (choice.delta?.reasoning ?? choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? "");
    if (text) run.answer.push({ text, id: ids[0] ?? null, logprob: null, top: [] });
  }
  if (choice.steering_trace) traces.push(choice.steering_trace);
}

function textOfLogprob(each: { token: string; bytes: number[] | null }): string {
  return each.bytes?.length ? textOfBytes(each.bytes) : each.token;
}

function tokenOf(each: TokenLogprob, id: number | null): Token {
  const top = (each.top_logprobs ?? []).map((other) => ({ text: textOfLogprob(other), logprob: other.logprob }));
  return { text: textOfLogprob(each), id, logprob: each.logprob, top };
}

function filled(length: number): number[] {
  return new Array<number>(length).fill(NaN);
}

/** Writes the rows of traces that have not been written yet, and empties the list. */
function applyTraces(run: Run, traces: Trace[]): void {
  for (const trace of traces.splice(0)) {
    const length = Math.max(0, extent(trace.positions)[1]) + 1;
    const write = (values: number[], found: (number | null)[]) => {
      while (values.length < length) values.push(NaN);
      trace.positions.forEach((position, i) => (values[position] = found[i] ?? NaN));
    };
    for (const [name, found] of Object.entries(trace.scores)) {
      const series = (run.series[`score:${name}`] ??= { label: labelOfScore(name, run), values: [], ...thresholdOf(name) });
      write(series.values, found);
    }
    for (const [name, found] of Object.entries(trace.gates)) {
      if (name.startsWith("cosine ") || name.startsWith("probe ")) continue;
      const gate = (run.gates[name] ??= { strength: [], applied: [] });
      write(gate.strength, found.strength);
      write(gate.applied, found.applied);
    }
  }
}

/** What a score was read from, and where: a gate's name alone may mean another vector or site in another answer. */
function labelOfScore(name: string, run: Run): string {
  const probe = facts.value?.probes.find((each) => each.name === name);
  if (probe) return `probe ${name} at ${probe.at}`;
  const asked = run.body["steering_gates"] as { name: string; when: Condition }[] | undefined;
  const when = asked?.find((gate) => gate.name === name)?.when ?? facts.value?.rules.find((rule) => rule.name === name)?.when;
  const cosine = conditionsIn(when).find((each) => "cosine" in each) as { cosine: string | null; at: string } | undefined;
  if (!cosine) return `score of ${name}`;
  const read = `cosine to ${cosine.cosine ?? "a vector of its own"} at ${cosine.at}`;
  return name.startsWith("cosine ") ? read : `${read}, score of ${name}`;
}

/** The comparisons in a condition. */
function conditionsIn(when: Condition | undefined): Exclude<Condition, string>[] {
  if (when === undefined || typeof when === "string") return [];
  if ("not" in when) return conditionsIn(when.not);
  const parts = "any" in when ? when.any : "all" in when ? when.all : null;
  return parts ? parts.flatMap(conditionsIn) : [when];
}

function thresholdOf(name: string): { threshold?: number } {
  const gate = gates.value.find((each) => each.name === name || each.reads.name === name);
  if (gate && gate.reads.kind !== "always") return { threshold: gate.threshold };
  const found = facts.value?.probes.find((probe) => probe.name === name)?.threshold;
  return found === null || found === undefined ? {} : { threshold: found };
}

function addSurprise(run: Run): void {
  const values = [...run.prompt, ...run.answer].map((token) => (token.logprob === null ? NaN : -token.logprob));
  run.series["surprise"] = { label: "surprise (nats)", values };
}

/** Scores the answer's tokens without steering: how much more likely steering made each one. */
async function scorePlain(run: Run, signal: AbortSignal): Promise<void> {
  const ids = [...run.prompt, ...run.answer].map((token) => token.id);
  if (ids.some((id) => id === null) || !run.answer.length) return;
  try {
    const found = await api.value.post<{ choices: { prompt_logprobs: (Record<string, { logprob: number | null }> | null)[] }[] }>(
      "/v1/completions",
      { model: facts.value?.model ?? "", prompt: ids, max_tokens: 1, temperature: 0, prompt_logprobs: 0 },
      signal,
    );
    const listed = found.choices[0]?.prompt_logprobs ?? [];
    const values = filled(ids.length);
    run.answer.forEach((token, i) => {
      const position = run.prompt.length + i;
      const plain = listed[position]?.[String(token.id)]?.logprob ?? null; // null in place of NaN, too
      if (plain !== null && token.logprob !== null) values[position] = token.logprob - plain;
    });
    run.series["difference"] = { label: "log-probability: steered − plain", values };
  } catch (error) {
    if (!signal.aborted) run.notice = `The plain log-probabilities of this answer could not be read: ${error instanceof Error ? error.message : String(error)}`;
  }
}

// ---- rows

function takeFeatures(run: Run, result: CaptureResult): void {
  const found = result.payload as Run["features"];
  if (!found?.positions) {
    run.notice = `The features did not come with the answer: ${result.error ?? "the server gives no reason"}.`;
    return;
  }
  run.features = found;
  const total = run.prompt.length + run.answer.length;
  for (const each of followed.value) addFollowed(run, each);
  run.series["strongest"] = { label: `strongest feature of ${found.sae}`, values: placed(found.values.map((each) => each?.[0] ?? (each ? 0 : NaN)), found.positions, total) };
}

/** The activations of one feature by position; 0 where it is not among the strongest of a token. */
export function activationsOf(run: Run, feature: number): number[] {
  const found = run.features;
  const values = filled(run.prompt.length + run.answer.length);
  found?.positions.forEach((position, i) => {
    const place = found.ids[i]?.indexOf(feature) ?? -1;
    if (found.ids[i]) values[position] = place < 0 ? 0 : found.values[i]![place]!;
  });
  return values;
}

/** Lets a run show the activation of a feature, if it has that of its SAE. */
export function addFollowed(run: Run, { sae, id, label }: { sae: string; id: number; label: string }): void {
  if (run.features?.sae !== sae) return;
  run.series[`feature:${sae}:${id}`] = { label: `feature ${id} of ${sae}${label ? `: ${label}` : ""}`, values: activationsOf(run, id) };
}

function takeCaptures(run: Run, results: Record<string, CaptureResult>): void {
  const features = featuresName.value ? results[featuresName.value] : undefined;
  if (features) takeFeatures(run, features);
  takeRecorded(run, results);
  const inline = inlineName.value ? results[inlineName.value] : undefined;
  if (!inline) return;
  const tensors = rowsOf(inline);
  if (typeof tensors === "string") {
    run.notice = tensors;
    return;
  }
  const total = run.prompt.length + run.answer.length;
  const grid = gridOf(tensors, settings.value.readHook, total);
  const positions = positionsOf(tensors);
  const shownSite = `${settings.value.readLayer}.${settings.value.readHook}`;
  const own = tensors[shownSite];
  if (own) run.streamRows = { site: shownSite, positions, tensor: own };
  for (const [site, tensor] of Object.entries(tensors)) {
    if (!/^\d+\./.test(site)) continue;
    const norms = rowNorms(tensor);
    const first = run.prompt.length;
    const answered = Array.from(norms).filter((_, i) => positions[i]! >= first);
    if (answered.length) run.meanNorms[site] = answered.reduce((a, b) => a + b, 0) / answered.length;
  }
  const shownLayer = settings.value.readLayer;
  const row = grid.layers.indexOf(shownLayer);
  if (row >= 0) run.series["norm"] = { label: `stream norm at ${shownLayer}.${settings.value.readHook}`, values: grid.norms[row]! };
  if (grid.layers.length > 1) {
    grid.probes = readableProbes().filter((probe) => run.series[`score:${probe.name}`] && splitSite(probe.at)[1] === grid.hook).map((probe) => ({ name: probe.name, layer: splitSite(probe.at)[0], values: run.series[`score:${probe.name}`]!.values }));
    run.grid = grid;
  }
  for (const item of items.value) {
    const tensor = item.row && tensors[item.site];
    if (!tensor || !item.row || tensor.shape[1] !== item.row.length || run.series[`score:cosine ${item.name}`]) continue;
    run.series[`own:${item.name}`] = { label: `cosine to ${item.name} at ${item.site}`, values: placed(cosinesTo(tensor, item.row), positions, total) };
  }
}

/** Notes whether the request was recorded. A result that is an error says why as the run's notice. */
function takeRecorded(run: Run, results: Record<string, CaptureResult>): void {
  for (const [consumer, result] of Object.entries(results)) {
    const payload = result.payload as { stored?: boolean; if_probe?: Decision; paths?: string[]; layout?: string } | null;
    if (recordsOf(run).includes(consumer) && result.error) run.notice = `${payload?.if_probe ? "Not all rows were recorded" : "It was not recorded"}: ${result.error}.`;
    if (!payload?.if_probe) continue;
    const [tag = "", name = ""] = payload.layout === "request" ? (payload.paths?.[0] ?? "").split("/").slice(-2) : [];
    run.recorded = { consumer, decision: payload.if_probe, isStored: payload.stored === true, tag, name };
  }
}

/** The tensors of a result of `inline`, or a sentence that says why there are none. */
export function rowsOf(result: CaptureResult): Tensors | string {
  const payload = result.payload as { format?: string; data?: string } | null;
  if (payload?.format !== "safetensors" || !payload.data) return `The rows did not come with the answer: ${result.error ?? "the server gives no reason"}.`;
  return readSafetensors(fromBase64(payload.data)).tensors;
}

export function positionsOf(tensors: Tensors): number[] {
  return Array.from(tensors["positions"]?.data ?? [], Number);
}

export function placed(values: ArrayLike<number>, positions: number[], total: number): number[] {
  const found = filled(total);
  positions.forEach((position, i) => {
    if (position < total) found[position] = values[i]!;
  });
  return found;
}

/** Norms, and cosines to the layer before, of the rows at one hook point. */
export function gridOf(tensors: Tensors, hook: string, total: number): Grid {
  const layers = Object.keys(tensors).filter((name) => name.endsWith(`.${hook}`)).map((name) => splitSite(name)[0]).sort((a, b) => a - b);
  const positions = positionsOf(tensors);
  const norms: number[][] = [];
  const cosines: number[][] = [];
  layers.forEach((layer, i) => {
    const tensor = tensors[`${layer}.${hook}`]!;
    norms.push(placed(rowNorms(tensor), positions, total));
    const before = i > 0 ? tensors[`${layers[i - 1]}.${hook}`] : undefined;
    cosines.push(before ? placed(rowCosines(before, tensor), positions, total) : filled(total));
  });
  return { hook, layers, numTokens: total, norms, cosines, probes: [], lens: null };
}

/** A gate that never fires has this many comparisons at most: with fewer columns than a request has by default. */
const PROBES_AT_ONCE = 8;

/** Gates that read probes and change nothing; all of a list are traced. */
function probeGates(probes: { name: string }[]): Json {
  if (!probes.length) return {};
  const any = probes.map(({ name }) => ({ probe: name, above: 0 }));
  return { steering_gates: [{ name: "probe scores", when: { any }, then: "observe" }], return_steering_trace: true };
}

function readableProbes(): { name: string; at: string }[] {
  return (facts.value?.probes ?? []).filter((probe) => isOpSite(probe.at) && probe.classes.length <= 1);
}

/** The scores of probes that a trace has, at the layers of one hook point. */
function probesIn(trace: Trace | undefined, hook: string, total: number): ProbeScores[] {
  return readableProbes().filter((probe) => trace?.scores[probe.name] && splitSite(probe.at)[1] === hook).map((probe) => ({ name: probe.name, layer: splitSite(probe.at)[0], values: placed(trace!.scores[probe.name]!.map((score) => score ?? NaN), trace!.positions, total) }));
}

/**
 * Reads tokens again at all layers, without steering: the body, for the page and for its code. The server computes the
 * whole prompt for each part of it: so it ends with the part, which asks for rows alone.
 */
export function readBody(ids: number[], start: number, stop: number): Json {
  const { readHook, lens, lensToken } = settings.value;
  const positions = { start, stop };
  const capture: Json = {};
  if (inlineName.value) capture[inlineName.value] = { hooks: { [readHook]: "all" }, positions };
  if (lensName.value && lens) {
    capture[lensName.value] = { lens, layers: "all", positions, top: 5, ...(lensToken ? { tokens: [lensToken] } : {}) };
  }
  const isWhole = start === 0 && stop === ids.length;
  const scores = isWhole ? { prompt_logprobs: 0, ...probeGates(readableProbes().slice(0, PROBES_AT_ONCE)) } : {};
  return { model: facts.value?.model ?? "", prompt: ids.slice(0, stop), max_tokens: 1, temperature: 0, capture, capture_wait: true, ...scores };
}

/** The scores of further probes than one request reads. */
async function moreProbes(ids: number[], hook: string): Promise<ProbeScores[]> {
  const found: ProbeScores[] = [];
  const probes = readableProbes();
  for (let at = PROBES_AT_ONCE; at < probes.length; at += PROBES_AT_ONCE) {
    const body = { model: facts.value?.model ?? "", prompt: ids, max_tokens: 1, temperature: 0, ...probeGates(probes.slice(at, at + PROBES_AT_ONCE)) };
    const { choices } = await api.value.post<{ choices: { steering_trace?: Trace }[] }>("/v1/completions", { ...body, prompt_logprobs: 0 });
    found.push(...probesIn(choices[0]?.steering_trace, hook, ids.length));
  }
  return found;
}

const LIMIT = /may hold here, (\d+) bytes/;

/** Reads the tokens of a run at all layers, in as many calls as the server's limit of bytes asks for. */
export async function readGrid(run: Run, progress: (text: string) => void): Promise<void> {
  const ids = [...run.prompt, ...run.answer].map((token) => token.id);
  if (ids.some((id) => id === null)) throw new ApiError("The ids of these tokens are not known, so they cannot be read again.", null);
  const total = ids.length;
  const { readHook } = settings.value;
  const layers = sites.value[readHook] ?? [];
  const grid: Grid = { hook: readHook, layers, numTokens: total, norms: layers.map(() => filled(total)), cosines: layers.map(() => filled(total)), probes: [], lens: null };
  let step = total;
  for (let start = 0; start < total; ) {
    const stopAt = Math.min(total, start + step);
    progress(`reading tokens ${start + 1} to ${stopAt} of ${total}`);
    const body = readBody(ids as number[], start, stopAt);
    const found = await api.value.post<{ capture_results: Record<string, CaptureResult>; choices: { steering_trace?: Trace; prompt_logprobs?: (Record<string, { logprob: number }> | null)[] | null }[] }>("/v1/completions", body);
    if (step === total) {
      // Its rows may be refused; this is of the whole prompt all the same.
      takePromptLogprobs(run, found.choices[0]?.prompt_logprobs ?? []);
      grid.probes = [...probesIn(found.choices[0]?.steering_trace, readHook, total), ...(await moreProbes(ids as number[], readHook))];
    }
    const result = inlineName.value ? found.capture_results[inlineName.value] : undefined;
    if (result) {
      const tensors = rowsOf(result);
      if (typeof tensors === "string") {
        const limit = LIMIT.exec(tensors);
        const perToken = (layers.length * (facts.value?.layers?.hidden_size ?? 4096) * (facts.value?.layers?.dtype === "float32" ? 4 : 2)) || 1;
        const next = limit ? Math.max(1, Math.min(Math.floor(Number(limit[1]) / perToken), Math.floor(step / 2))) : 0;
        if (!next || step === 1) throw new ApiError(tensors, null);
        step = next;
        continue;
      }
      mergeGrid(grid, gridOf(tensors, readHook, total), start, stopAt);
    }
    grid.lens = mergeLens(grid.lens, lensName.value ? found.capture_results[lensName.value] : undefined);
    start = stopAt;
  }
  run.grid = grid;
  addSurprise(run);
  const row = grid.layers.indexOf(settings.value.readLayer);
  // What was read is the stream without steering.
  if (row >= 0 && run.kind === "plain") run.series["norm"] = { label: `stream norm at ${settings.value.readLayer}.${readHook}`, values: grid.norms[row]! };
  changed();
}

/** One row of a run's tokens, read again without steering, and what the server says of it. */
export interface ReadRow {
  layer: number;
  hook: string;
  position: number;
  row: Float32Array;
  vectors: { name: string; cosine: number }[];
  features: { sae: string; list: { id: number; value: number; label: string }[] } | null;
  lens: { name: string; list: { text: string; logprob: number | null }[] } | null;
}

/** SAEs of the consumer `features` that read a site. */
function saesAt(site: string): string[] {
  return offered("features", "sae").filter((name) => facts.value?.saes.some((sae) => sae.name === name && sae.site === site));
}

function vectorsAt(site: string): Item[] {
  if (!isOpSite(site)) return [];
  return items.value.filter((item) => item.kind === "module" && facts.value?.steering?.modules[item.name]?.prefill.sites.includes(site));
}

export function rowBody(ids: number[], layer: number, hook: string, position: number): Json {
  const site = `${layer}.${hook}`;
  const capture: Json = { [inlineName.value ?? "inline"]: { hooks: { [hook]: [layer] }, positions: [position] } };
  const sae = saesAt(site)[0];
  if (featuresName.value && sae) capture[featuresName.value] = { sae, positions: [position], top: 10 };
  if (lensName.value && hook === "post_mlp") capture[lensName.value] = { lens: settings.value.lens || "logit", layers: [layer], positions: [position], top: 10 };
  const cosines = vectorsAt(site).map((item) => ({ name: `cosine ${item.name}`, when: { cosine: item.name, at: site, above: NEVER }, then: "observe" }));
  const asked = cosines.length ? { steering_gates: cosines, return_steering_trace: true } : {};
  return { model: facts.value?.model ?? "", prompt: ids.slice(0, position + 1), max_tokens: 1, temperature: 0, capture, capture_wait: true, ...asked };
}

export async function readRow(run: Run, layer: number, hook: string, position: number): Promise<ReadRow> {
  const ids = [...run.prompt, ...run.answer].slice(0, position + 1).map((token) => token.id);
  if (ids.some((id) => id === null)) throw new ApiError("The ids of these tokens are not known, so they cannot be read again.", null);
  const site = `${layer}.${hook}`;
  const found = await api.value.post<{ capture_results: Record<string, CaptureResult>; choices: { steering_trace?: Trace }[] }>("/v1/completions", rowBody(ids as number[], layer, hook, position));
  const tensors = rowsOf(found.capture_results[inlineName.value!]!);
  if (typeof tensors === "string") throw new ApiError(tensors, null);
  const row = (tensors[site]!.data as Float32Array).slice(0, tensors[site]!.shape[1]);
  return { layer, hook, position, row, vectors: cosinesOf(row, site, position, found.choices[0]?.steering_trace), features: strongestOf(found), lens: lensOf(found, layer) };
}

function cosinesOf(row: Float32Array, site: string, position: number, trace: Trace | undefined): ReadRow["vectors"] {
  const at = trace?.positions.indexOf(position) ?? -1;
  const registered = vectorsAt(site).map(({ name }) => ({ name, cosine: trace?.scores[`cosine ${name}`]?.[at] ?? NaN }));
  const own = items.value.filter((item) => item.kind === "local" && item.row?.length === row.length).map((item) => ({ name: `${item.name} (made at ${item.site})`, cosine: cosineOf(row, item.row!) }));
  return [...registered, ...own].filter((each) => Number.isFinite(each.cosine)).sort((a, b) => Math.abs(b.cosine) - Math.abs(a.cosine));
}

function strongestOf(found: { capture_results: Record<string, CaptureResult> }): ReadRow["features"] {
  const result = featuresName.value ? (found.capture_results[featuresName.value]?.payload as Features | undefined) : undefined;
  if (!result?.positions) return null;
  return { sae: result.sae, list: (result.ids[0] ?? []).map((id, i) => ({ id, value: result.values[0]![i]!, label: result.labels[String(id)] ?? "" })) };
}

function lensOf(found: { capture_results: Record<string, CaptureResult> }, layer: number): ReadRow["lens"] {
  const result = lensName.value ? (found.capture_results[lensName.value]?.payload as { lens: string; layers: Lens["layers"] } | undefined) : undefined;
  const of = result?.layers?.[String(layer)];
  return of ? { name: result!.lens, list: of.tokens[0]!.map((text, i) => ({ text, logprob: of.logprobs[0]![i] ?? null })) } : null;
}

export function attentionBody(ids: number[], layer: number): Json {
  const wanted = { layers: [layer], heads: "all", queries: "all_prompt" };
  return { model: facts.value?.model ?? "", prompt: ids, max_tokens: 1, temperature: 0, capture: { [attentionName.value ?? "attention"]: wanted }, capture_wait: true };
}

/** Reads the attention patterns of a run's tokens at one layer, without steering. */
export async function readAttention(run: Run, layer: number): Promise<void> {
  const ids = [...run.prompt, ...run.answer].map((token) => token.id);
  if (ids.some((id) => id === null)) throw new ApiError("The ids of these tokens are not known, so they cannot be read again.", null);
  const found = await api.value.post<{ capture_results: Record<string, CaptureResult> }>("/v1/completions", attentionBody(ids as number[], layer));
  const tensors = rowsOf(found.capture_results[attentionName.value!]!);
  if (typeof tensors === "string") throw new ApiError(tensors, null);
  const tensor = tensors[`${layer}.attention`];
  const queries = Array.from(tensors["queries"]?.data ?? [], Number);
  if (!tensor || tensor.shape.length !== 3) throw new ApiError("The answer has no attention of this layer.", null);
  run.attention = { layer, queries, numHeads: tensor.shape[1]!, numKeys: tensor.shape[2]!, values: tensor.data as Float32Array };
  changed();
}

function mergeGrid(into: Grid, from: Grid, start: number, stopAt: number): void {
  from.layers.forEach((layer, i) => {
    const row = into.layers.indexOf(layer);
    if (row < 0) return;
    for (let at = start; at < stopAt; at++) {
      into.norms[row]![at] = from.norms[i]![at]!;
      into.cosines[row]![at] = from.cosines[i]![at]!;
    }
  });
}

function mergeLens(before: Lens | null, result: CaptureResult | undefined): Lens | null {
  if (!result) return before;
  const payload = result.payload as (Omit<Lens, "name" | "tokens"> & { lens: string }) | null;
  if (!payload?.layers) throw new ApiError(`The lens did not answer: ${result.error ?? "the server gives no reason"}.`, null);
  const { lensToken } = settings.value;
  if (!before) return { name: payload.lens, layers: payload.layers, positions: payload.positions, tokens: lensToken ? [lensToken] : [] };
  const join = <T,>(a: T[] | undefined, b: T[] | undefined) => [...(a ?? []), ...(b ?? [])];
  const layers: Lens["layers"] = {};
  for (const [layer, old] of Object.entries(before.layers)) {
    const more = payload.layers[layer]!;
    layers[layer] = { ids: join(old.ids, more.ids), tokens: join(old.tokens, more.tokens), logprobs: join(old.logprobs, more.logprobs), token_logprobs: join(old.token_logprobs, more.token_logprobs), token_ranks: join(old.token_ranks, more.token_ranks) };
  }
  return { ...before, layers, positions: [...before.positions, ...payload.positions] };
}

/** The prompt's own log-probabilities, which a stream does not have. */
function takePromptLogprobs(run: Run, listed: (Record<string, { logprob: number }> | null)[]): void {
  run.prompt.forEach((token, i) => {
    const found = listed[i]?.[String(token.id)]?.logprob;
    if (found !== undefined) token.logprob = found;
  });
}

