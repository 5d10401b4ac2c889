// What steers: registered modules and vectors of this tab, with strengths and phases; a vector from two lists of prompts.

import { signal } from "@preact/signals";
import { useState } from "preact/hooks";
import type { CaptureResult, Json } from "../api";
import { shown } from "../colour";
import { Choice, Field, Notice } from "../parts";
import { isOpSite, rowsOf, splitSite, vectorSites } from "../run";
import { download } from "../share";
import { api, currentRun, facts, type How, inlineName, isRecorded, type Item, items, loadFacts, misfit, offered, type Phase, set, settings, sites, tick } from "../state";
import { dot, norm, packed, readSafetensors, writeSafetensors } from "../tensors";

/** The last body that registered a vector, for its code. */
export const lastRegistered = signal<Json | null>(null);

function change(item: Item, by: Partial<Item>): void {
  items.value = items.value.map((other) => (other === item ? { ...item, ...by, ...(misfit(item) ? { isOn: false } : {}) } : other));
}

export function Steer() {
  void tick.value;
  const [text, setText] = useState("");
  if (isRecorded.value) return <section class="empty"><h2>Steer</h2><p>A recording steers nothing.</p></section>;
  const listed = items.value.filter((item) => item.isOn || item.name.toLowerCase().includes(text.toLowerCase()));
  return (
    <div class="columns">
      <section class="panel">
        <h2>What steers the next answer</h2>
        {facts.value?.steeringRefused && <Notice text={facts.value.steeringRefused} />}
        {items.value.length === 0 && facts.value && !facts.value.steeringRefused && <p>No module is registered. Make a vector of two lists of prompts, or open a file.</p>}
        {items.value.length > 6 && <Field label="Search"><input type="search" value={text} onInput={(event) => setText(event.currentTarget.value)} /></Field>}
        <ul class="items">
          {listed.map((item) => <ItemView key={`${item.kind} ${item.name}`} item={item} />)}
        </ul>
        {items.value.length > 0 && <label class="check"><input type="checkbox" checked={settings.value.compares} onChange={() => set({ compares: !settings.value.compares })} />Answer plain beside steered</label>}
        <OpenFile />
      </section>
      <div>
        <Make />
        <Direction />
      </div>
    </div>
  );
}

/** ‖s v‖ / ‖h‖, with the mean norm of the stream over the answer that was read last: the largest over the sites that were read. */
export function doseOf(item: Item): { site: string; value: number } | null {
  if (item.how !== "add") return null;
  const means = currentRun.value?.run.meanNorms ?? {};
  const module = item.kind === "module" ? facts.value?.steering?.modules[item.name] : undefined;
  const content = item.phase === "prompt" ? module?.prefill : module?.decode;
  const norms = content?.norms ?? (item.row ? { [item.site]: norm(item.row) } : {});
  const doses = Object.entries(norms).filter(([site]) => means[site]).map(([site, size]) => ({ site, value: (Math.abs(item.scale) * size) / means[site]! }));
  return doses.sort((x, y) => y.value - x.value)[0] ?? null;
}

/** Largest scale of a slider: activations of features, and rows of the head, which are short. */
const RANGES: Record<Item["kind"], number> = { module: 10, local: 10, feature: 100, lens: 500 };

/** What can be done with a direction v̂, whose part in a row h is p = h · v̂; the scale with which each begins. */
const HOWS: Record<How, { label: string; number: string; begins: number }> = {
  add: { label: "add it", number: "Scale", begins: 2 },
  ablate: { label: "remove the part along it", number: "Share", begins: 1 },
  "at most": { label: "limit p from above", number: "p at most", begins: 0 },
  "at least": { label: "limit p from below", number: "p at least", begins: 0 },
  set: { label: "set p", number: "p", begins: 0 },
};

/** The mean projection p of an answer's rows on an item's direction, where both are known. */
function projectionOf(item: Item): number | null {
  const found = currentRun.value?.run.streamRows;
  if (!found || !item.row || found.site !== item.site || found.tensor.shape[1] !== item.row.length) return null;
  const rows = found.positions.map((_, i) => (found.tensor.data as Float32Array).subarray(i * item.row!.length, (i + 1) * item.row!.length)).slice(currentRun.value!.run.prompt.length);
  return rows.length ? rows.reduce((total, row) => total + dot(row, item.row!), 0) / rows.length / norm(item.row) : null;
}

function ItemView({ item }: { item: Item }) {
  const [error, setError] = useState("");
  const module = item.kind === "module" ? facts.value?.steering?.modules[item.name] : undefined;
  const where = item.kind === "feature" ? [] : module ? [...new Set([...module.prefill.sites, ...module.decode.sites, ...module.prefill.op_sites, ...module.decode.op_sites])] : [item.site];
  const hasOperations = !!module && module.prefill.op_sites.length + module.decode.op_sites.length > 0;
  const isFree = item.kind !== "module" || (!hasOperations && where.every(isOpSite));
  const canOperate = item.kind !== "feature" && !hasOperations && vectorSites(item).length > 0 && vectorSites(item).every(isOpSite);
  const projection = item.how === "add" ? null : projectionOf(item);
  const dose = doseOf(item);
  const gone = item.kind === "module" ? "Unregister" : "Forget";
  const forget = async () => {
    try {
      if (item.kind === "module") await api.value.post("/v1/steering/modules/unregister", { name: item.name });
      items.value = items.value.filter((other) => other !== item);
      await loadFacts();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
  };
  return (
    <li class="item">
      <label class="check"><input type="checkbox" checked={item.isOn} disabled={!!misfit(item)} onChange={() => change(item, { isOn: !item.isOn })} /><b>{item.name}</b></label>
      <Lengths item={item} />
      <small>{item.kind === "feature" ? `feature ${item.feature} of ${item.sae}` : item.kind === "lens" ? `what the lens ${item.lens} reads as “${item.token}” at ${item.site}` : `${item.kind === "module" ? "registered" : "in this tab only"}, at ${where.slice(0, 4).join(", ")}`}{where.length > 4 ? ` and ${where.length - 4} more` : ""}{item.about ? `; ${item.about}` : ""}</small>
      {canOperate && <Choice<How> label="Do" value={item.how} onChange={(how) => change(item, { how, scale: HOWS[how].begins })} options={Object.entries(HOWS).map(([value, { label }]) => ({ value: value as How, label }))} />}
      <Strength item={item} />
      {projection !== null && <span class="dose" data-projection={projection}>p was {shown(projection)} on average in the answer that was read last</span>}
      <Choice<Phase> label="Acts on" value={item.phase} onChange={(phase) => change(item, { phase })} options={[{ value: "both", label: "prompt and answer" }, { value: "prompt", label: "the prompt", isOff: !isFree }, { value: "answer", label: "the answer", isOff: !isFree }]} />
      <span class="dose" data-dose={dose?.value} title="‖s v‖ / ‖h‖: the length of what is added, relative to the mean length of the stream over the answer that was read last">{dose === null ? "" : `relative dose ${shown(dose.value)} at ${dose.site}`}</span>
      {item.kind === "local" && item.row && <Save item={item} />}
      <button type="button" class="quiet" onClick={() => void forget()} aria-label={`${gone} ${item.name}`}>{gone}</button>
      <Notice kind="error" text={misfit(item)} />
      <Notice kind="error" text={error} />
    </li>
  );
}

/** The number of an item: a scale on a slider, a share, or a bound of the projection. */
function Strength({ item }: { item: Item }) {
  const { number } = HOWS[item.how];
  const label = `${number} of ${item.name}`;
  const entered = (event: { currentTarget: HTMLInputElement }) => change(item, { scale: Number(event.currentTarget.value) || 0, isOn: true });
  if (item.how === "add") return <Field label={`Scale ${item.scale}`}><input type="range" aria-label={label} min={-RANGES[item.kind]} max={RANGES[item.kind]} step={item.kind === "lens" ? 5 : 0.25} value={item.scale} onInput={entered} /></Field>;
  if (item.how === "ablate") return <Field label={`Share ${item.scale}`}><input type="range" aria-label={label} min={0} max={1} step={0.05} value={item.scale} onInput={entered} /></Field>;
  return <Bound key={item.how} label={number} name={label} value={item.scale} onEnter={(scale) => change(item, { scale, isOn: true })} />;
}

/** A number that is typed: what is no number yet, such as a minus sign, changes nothing. */
function Bound({ label, name, value, onEnter }: { label: string; name: string; value: number; onEnter: (value: number) => void }) {
  const [text, setText] = useState(String(value));
  const enter = (event: { currentTarget: HTMLInputElement }) => {
    setText(event.currentTarget.value);
    if (Number.isFinite(event.currentTarget.valueAsNumber)) onEnter(event.currentTarget.valueAsNumber);
  };
  return <Field label={label}><input type="number" step="any" aria-label={name} value={text} onInput={enter} onBlur={() => setText(String(value))} /></Field>;
}

/** The lengths of a registered module's vectors by site. */
function Lengths({ item }: { item: Item }) {
  const module = item.kind === "module" ? facts.value?.steering?.modules[item.name] : undefined;
  const lengths = Object.entries({ ...module?.prefill.norms, ...module?.decode.norms });
  if (!lengths.length) return null;
  const most = Math.max(...lengths.map(([, length]) => length), 1e-9);
  const sites = lengths.map(([site, length]) => `${site} ${shown(length)}`);
  return (
    <span class="lengths" title={sites.join(", ")}>
      <svg viewBox={`0 0 ${lengths.length * 6} 20`} role="img" aria-label={`Lengths of the vectors: ${sites.slice(0, 8).join(", ")}${sites.length > 8 ? ` and ${sites.length - 8} more` : ""}`} width={lengths.length * 6} height={20}>
        {lengths.map(([site, length], i) => <rect key={site} x={i * 6} width={5} y={20 - (20 * length) / most} height={(20 * length) / most} class="toward" />)}
      </svg>
      {lengths.length === 1 ? `length ${shown(lengths[0]![1])}` : `${lengths.length} vectors, lengths up to ${shown(most)}`}
    </span>
  );
}

function Save({ item }: { item: Item }) {
  const [error, setError] = useState("");
  const [layer, hook] = splitSite(item.site);
  const register = async () => {
    const body = { name: item.name, vectors: { [hook]: packed([layer], [item.row!]) } };
    try {
      await api.value.post("/v1/steering/modules/register", body);
      lastRegistered.value = body;
      items.value = items.value.filter((other) => other !== item);
      await loadFacts();
      items.value = items.value.map((other) => (other.kind === "module" && other.name === item.name ? { ...other, isOn: item.isOn, how: item.how, scale: item.scale, row: item.row, about: item.about, hash: facts.value?.steering?.modules[item.name]?.decode.hash ?? null } : other));
      setError("");
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
  };
  const save = () => download(`${item.name.replace(/[^\w.-]+/g, "_")}.safetensors`, writeSafetensors({ [`vectors/${item.site}`]: item.row! }, { "headgate.steering": "1", made_by: "headgate studio" }), "application/octet-stream");
  return (
    <>
      <button type="button" onClick={() => void register()}>Register on the server</button>
      <button type="button" class="quiet" onClick={save}>Save as a file</button>
      <Notice kind="error" text={error} />
    </>
  );
}

function OpenFile() {
  const [error, setError] = useState("");
  const open = async (file: File | undefined) => {
    if (!file) return;
    setError("");
    try {
      const { tensors } = readSafetensors(new Uint8Array(await file.arrayBuffer()));
      const made: Item[] = [];
      for (const [name, tensor] of Object.entries(tensors)) {
        const site = /(?:vectors\/)?(\d+\.[a-z_]+)$/.exec(name)?.[1];
        if (!site || tensor.shape.length !== 1) continue;
        if (!(tensor.data instanceof Float32Array) || !tensor.data.every(Number.isFinite)) throw new Error(`${name} has values that are no finite floating-point numbers`);
        made.push({ name: `${file.name.replace(/\.safetensors$/, "")} ${site}`, kind: "local", isOn: false, how: "add", scale: 1, phase: name.startsWith("prefill_") ? "prompt" : name.startsWith("decode_") ? "answer" : "both", site, row: tensor.data, about: "" });
      }
      if (!made.length) throw new Error("it has no tensor with the name of a site, such as vectors/12.post_mlp");
      const wrong = made.map((item) => misfit(item)).find(Boolean);
      if (wrong) throw new Error(wrong.replace(/\.$/, ""));
      items.value = [...items.value.filter((item) => !made.some((other) => other.name === item.name && item.kind === "local")), ...made];
    } catch (failed) {
      setError(`${file.name} could not be opened: ${failed instanceof Error ? failed.message : String(failed)}.`);
    }
  };
  return (
    <>
      <Field label="Open a file of vectors (.safetensors)"><input type="file" accept=".safetensors" onChange={(event) => void open(event.currentTarget.files?.[0])} /></Field>
      <Notice kind="error" text={error} />
    </>
  );
}

/** The direction of a token by a lens, as something that steers. */
function Direction() {
  const layers = facts.value?.layers?.hook_points["post_mlp"] ?? [];
  const lenses = [...new Set(["logit", ...offered("lens", "lens")])];
  const [lens, setLens] = useState("logit");
  const [token, setToken] = useState("");
  const [layer, setLayer] = useState(-1);
  if (!layers.length) return null;
  const chosen = layers.includes(layer) ? layer : layers[Math.floor((layers.length * 2) / 3)]!;
  const add = () => {
    const site = `${chosen}.post_mlp`;
    const name = `“${token}” by ${lens} at ${site}`;
    items.value = [...items.value.filter((item) => item.name !== name), { name, kind: "lens", isOn: true, how: "add", scale: 100, phase: "both", site, row: null, about: "", lens, token }];
  };
  return (
    <section class="panel">
      <h2>Steer toward a token</h2>
      <p>The direction along which a lens reads the token more strongly after a layer. The text is one token; most words begin with a space.</p>
      <form class="bar" aria-label="Direction of a token" onSubmit={(event) => { event.preventDefault(); if (token) add(); }}>
        <Field label="Token"><input value={token} placeholder="such as “ Paris”" onInput={(event) => setToken(event.currentTarget.value)} /></Field>
        {lenses.length > 1 && <Choice label="By the lens" value={lens} options={lenses.map((value) => ({ value, label: value }))} onChange={setLens} />}
        <Choice label="After layer" value={String(chosen)} options={layers.map((value) => ({ value: String(value), label: String(value) }))} onChange={(value) => setLayer(Number(value))} />
        <button type="submit" disabled={!token}>Add</button>
      </form>
    </section>
  );
}

const GLAD = ["the weather", "my morning", "my work", "the train ride", "dinner with friends", "a letter from home"];

function Make() {
  const [toward, setToward] = useState(GLAD.map((topic) => `I feel wonderful and full of joy when I think about ${topic}.`).join("\n"));
  const [away, setAway] = useState(GLAD.map((topic) => `I feel terrible and full of sorrow when I think about ${topic}.`).join("\n"));
  const [name, setName] = useState("joy");
  const [site, setSite] = useState("");
  const [progress, setProgress] = useState("");
  const [error, setError] = useState("");
  const [made, setMade] = useState<Made | null>(null);
  const layers = facts.value?.layers;
  const possible = Object.entries(sites.value).flatMap(([hook, found]) => found.filter((layer) => layers?.hook_points[hook]?.includes(layer)).map((layer) => `${layer}.${hook}`));
  const { readLayer, readHook } = settings.value;
  const chosen = possible.includes(site) ? site : possible.includes(`${readLayer}.${readHook}`) ? `${readLayer}.${readHook}` : (possible[Math.floor(possible.length / 2)] ?? "");
  if (!facts.value) return null;
  if (!inlineName.value || !layers || !possible.length) {
    return (
      <section class="panel">
        <h2>Make a vector</h2>
        <p>{!layers ? "This server does not steer." : !inlineName.value ? "It takes rows from the answers: the server needs the consumer inline, and your key its permission." : "No site of this server can be both captured and steered."}</p>
      </section>
    );
  }
  const lines = (text: string) => text.split("\n").map((line) => line.trim()).filter(Boolean);
  const run = async () => {
    setError("");
    setMade(null);
    try {
      const lists = [lines(toward), lines(away)] as const;
      if (!lists[0].length || !lists[1].length) throw new Error("Both lists need a prompt, one on each line.");
      if (!name.trim()) throw new Error("The vector needs a name.");
      let done = 0;
      const rows = await Promise.all(lists.map((list) => inTurn(list, async (prompt) => {
        const row = await lastRow(prompt, chosen);
        setProgress(`${++done} of ${lists[0].length + lists[1].length} prompts read`);
        return row;
      })));
      const vector = difference(mean(rows[0]!), mean(rows[1]!));
      const size = norm(vector);
      if (!size) throw new Error("Both lists have the same mean row, so there is no direction between them.");
      const along = (list: Float32Array[]) => list.map((row) => dot(row, vector) / size);
      setMade({ toward: along(rows[0]!), away: along(rows[1]!), site: chosen, name: name.trim(), direction: vector.map((value) => value / size) });
      const item: Item = { name: name.trim(), kind: "local", isOn: true, how: "add", scale: 2, phase: "both", site: chosen, row: vector, about: `of ${lists[0].length} and ${lists[1].length} prompts, norm ${shown(size)}` };
      items.value = [...items.value.filter((other) => other.kind !== "local" || other.name !== item.name), item];
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setProgress("");
  };
  return (
    <section class="panel">
      <h2>Make a vector</h2>
      <p>It is the mean of the last rows of the first prompts, less that of the second ones.</p>
      <Field label="Prompts that show it, one a line"><textarea rows={6} value={toward} onInput={(event) => setToward(event.currentTarget.value)} /></Field>
      <Field label="Prompts that show the opposite"><textarea rows={6} value={away} onInput={(event) => setAway(event.currentTarget.value)} /></Field>
      <div class="bar">
        <Field label="Name"><input value={name} onInput={(event) => setName(event.currentTarget.value)} /></Field>
        <Choice label="Site" value={chosen} options={possible.map((value) => ({ value, label: value }))} onChange={setSite} />
        <button type="button" disabled={!!progress} onClick={() => void run()}>Make it</button>
      </div>
      <Notice text={progress} />
      <Notice kind="error" text={error} />
      {made && <Separation {...made} />}
      {made && <AsProbe {...made} />}
    </section>
  );
}

async function lastRow(prompt: string, site: string): Promise<Float32Array> {
  const [layer, hook] = splitSite(site);
  const consumer = inlineName.value!;
  const body = { model: facts.value!.model, messages: [{ role: "user", content: prompt }], max_tokens: 1, temperature: 0, capture: { [consumer]: { hooks: { [hook]: [layer] }, positions: "last_prompt" } } };
  const found = await api.value.post<{ capture_results: Record<string, CaptureResult> }>("/v1/chat/completions", body);
  const tensors = rowsOf(found.capture_results[consumer]!);
  if (typeof tensors === "string") throw new Error(tensors);
  return tensors[site]!.data as Float32Array;
}

/** Eight at a time: the server batches them, and a browser opens no more connections anyway. */
async function inTurn<T>(list: string[], each: (item: string) => Promise<T>): Promise<T[]> {
  const found = new Array<T>(list.length);
  let next = 0;
  const worker = async () => {
    while (next < list.length) {
      const index = next++;
      found[index] = await each(list[index]!);
    }
  };
  await Promise.all(Array.from({ length: Math.min(8, list.length) }, worker));
  return found;
}

function mean(rows: Float32Array[]): Float64Array {
  const sum = new Float64Array(rows[0]!.length);
  for (const row of rows) for (let i = 0; i < sum.length; i++) sum[i]! += row[i]! / rows.length;
  return sum;
}

function difference(a: Float64Array, b: Float64Array): Float32Array {
  return Float32Array.from(a, (value, i) => value - b[i]!);
}

/** Projections of prompts on a vector of length 1. */
interface Made { toward: number[]; away: number[]; site: string; name: string; direction: Float32Array }

/** Registers the direction as a probe, whose threshold lies in the middle between both lists. */
function AsProbe({ toward, away, site, name, direction }: Made) {
  const [error, setError] = useState("");
  const [done, setDone] = useState("");
  const [layer, hook] = splitSite(site);
  if (!facts.value?.layers?.op_hook_points[hook]?.includes(layer)) return <small>As a probe for gates it would need an op site (--steering-op-sites).</small>;
  const middle = (list: number[]) => list.reduce((a, b) => a + b, 0) / list.length;
  const register = async () => {
    setError("");
    const { dtype, data } = packed([layer], [direction]);
    const threshold = (middle(toward) + middle(away)) / 2;
    try {
      await api.value.post("/v1/steering/probes/register", { name, at: site, weight: { dtype, shape: [direction.length], data }, threshold, pooling: "last_prompt" });
      setDone(`The probe ${name} is registered, with the threshold ${shown(threshold)}.`);
      await loadFacts();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
  };
  return (
    <>
      <button type="button" class="quiet" onClick={() => void register()}>Register the direction as a probe</button>
      <Notice text={done} />
      <Notice kind="error" text={error} />
    </>
  );
}

function Separation({ toward, away, site }: Made) {
  const all = [...toward, ...away];
  const low = Math.min(...all);
  const span = Math.max(...all) - low || 1;
  const dots = (values: number[], kind: string) => values.map((value, i) => <circle key={`${kind}${i}`} cx={10 + ((value - low) / span) * 380} cy={kind === "toward" ? 12 : 28} r={5} class={kind} />);
  return (
    <figure class="line">
      <figcaption>Projections of the prompts’ rows at {site} on the vector: those that show it above, the others below. They are the prompts that it was made of.</figcaption>
      <svg viewBox="0 0 400 40" role="img" aria-label={`Projections: from ${shown(Math.min(...toward))} to ${shown(Math.max(...toward))} with it, from ${shown(Math.min(...away))} to ${shown(Math.max(...away))} without`}>{dots(toward, "toward")}{dots(away, "away")}</svg>
    </figure>
  );
}
