// Captures that the server stores, listed and opened over its routes; and a captured file of this machine, which is sent nowhere.

import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Decision, Json, Stored, StoredOne, StoredPage } from "../api";
import { extent, scaleOf, shown } from "../colour";
import { Choice, Field, Legend, Notice, Tokens } from "../parts";
import { visible } from "../tokens";
import { gridOf, newRun, placed, positionsOf, splitSite } from "../run";
import { download } from "../share";
import { addTurn, api, branches, browsable, facts, isRecorded, type Run, type Recorded, recorder, recorders, selected, set, settings, tick, type Token, turns, view } from "../state";
import { readSafetensors, rowNorms, type Tensors } from "../tensors";
import { Line } from "./trace";

/** What the list was asked last, for its code. */
export const lastListed = signal("");
/** The rows that were read last, for their code. */
export const lastRows = signal("");

interface Opened {
  name: string;
  /** By position; positions without a row have no text. */
  tokens: Token[];
  firstOfAnswer: number;
  positions: number[];
  sites: string[];
  /** Of the rows at all sites; null if that is not known. */
  bytes: number | null;
  metadata: Json;
  /** Reads the rows at some sites. */
  read: (sites: string[]) => Promise<Tensors>;
  /** Where the whole file can be read, if it is not here already. */
  path: string | null;
}

function reason(failed: unknown): string {
  return failed instanceof Error ? failed.message : String(failed);
}

/** More positions than any model has are those of a damaged file. */
const MOST_TOKENS = 2 ** 24;

function tokensOf(positions: number[], ids: number[], texts: string[] | null): Token[] {
  if (!positions.every((position) => Number.isInteger(position) && 0 <= position && position < MOST_TOKENS)) throw new Error("its positions are no numbers of tokens");
  const tokens: Token[] = Array.from({ length: Math.max(-1, extent(positions)[1]) + 1 }, () => ({ text: "·", id: null, logprob: null, top: [] }));
  positions.forEach((position, i) => (tokens[position] = { text: texts?.[i] ?? `#${ids[i]} `, id: ids[i] ?? null, logprob: null, top: [] }));
  return tokens;
}

export function Captures() {
  const [opened, setOpened] = useState<Opened | null>(null);
  return (
    <>
      {!isRecorded.value && facts.value?.capture && <Recording onOpen={setOpened} />}
      {!isRecorded.value && <OnServer onOpen={setOpened} />}
      {opened && <OpenedView key={opened.name} opened={opened} />}
      <OwnFile onOpen={setOpened} />
    </>
  );
}

// ---- only what a probe fires on

function Recording({ onOpen }: { onOpen: (opened: Opened) => void }) {
  void tick.value;
  const [error, setError] = useState("");
  const { recordProbe, recordAbove, recordReads, readHook, readLayer } = settings.value;
  const found = turns.value.flatMap((turn) => turn.runs.filter((run) => run.recorded).map((run) => ({ run, recorded: run.recorded!, question: turns.value.find((other) => other.id === turn.parent)?.text ?? "" })));
  if (!recorders.value.length)
    return (
      <section class="panel">
        <h2>Record only what a probe fires on</h2>
        <p>The server has no probes for this: name their files at its start, --capture-consumers 'filesystem:root=FOLDER,probes={`{"NAME": "FILE.safetensors"}`}'. Probes that are registered while it runs cannot be named here.</p>
      </section>
    );
  const open = async ({ consumer, tag, name }: Recorded) => {
    setError("");
    try {
      onOpen(await openStored(consumer, { tag, name }));
    } catch (failed) {
      setError(reason(failed));
    }
  };
  return (
    <section class="panel" aria-label="Recording">
      <h2>Record only what a probe fires on</h2>
      <div class="bar">
        <Choice label="Record messages on which fires" value={recordProbe} options={[{ value: "", label: "nothing: record none" }, ...recorders.value.map(({ key, label }) => ({ value: key, label }))]} onChange={(value) => set({ recordProbe: value })} />
        {recordProbe && <Field label="Above (empty: its own threshold)"><input type="number" step="any" value={recordAbove} onInput={(event) => set({ recordAbove: event.currentTarget.value })} /></Field>}
        {recordProbe && <Choice label="Rows" value={recordReads} options={[{ value: "layer", label: `of ${readLayer}.${readHook}` }, { value: "all", label: `${readHook} of all layers` }]} onChange={(value) => set({ recordReads: value })} />}
      </div>
      {recordProbe && <p>The next messages of this tab are recorded on the server, prompt and answer, if {recorder.value?.probe} fires {recordAbove.trim() ? "on a token that the model reads; the first one of the prompt does not count" : "on the rows that it was made for: those of tokens that the model reads but the prompt’s first, or that of the prompt’s last"}. Of others nothing is left.</p>}
      <Notice kind="error" text={error} />
      {found.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Messages of this tab">
          <table class="wide">
            <thead><tr>{["message", "recorded", "fired", "highest", ""].map((name) => <th scope="col" key={name}>{name || <span class="hidden">open</span>}</th>)}</tr></thead>
            <tbody>
              {found.map(({ run, recorded, question }, i) => (
                <tr key={i} data-recorded={recorded.isStored}>
                  <th scope="row">{question.slice(0, 80)}{run.kind === "steered" ? " (steered)" : ""}</th>
                  <td>{recorded.isStored ? "yes" : "no"}</td>
                  <td data-positions={recorded.decision.positions.join(",")}>{firedText(recorded.decision, run)}</td>
                  <td data-value={recorded.decision.highest}>{recorded.decision.highest === null ? "–" : `${shown(recorded.decision.highest)} at ${tokenAt(run, recorded.decision.at!)}`}</td>
                  <td>{recorded.isStored && recorded.name && <button type="button" class="quiet" onClick={() => void open(recorded)} aria-label={`Open the recorded message ${i + 1}`}>Open</button>}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

function tokenAt(run: Run | null, position: number): string {
  const token = run && [...run.prompt, ...run.answer][position];
  return token ? `${position} “${visible(token.text)}”` : String(position);
}

function firedText({ probe, num_fired, num_scored, positions }: Decision, run: Run | null): string {
  const listed = positions.slice(0, 8).map((position) => tokenAt(run, position)).join(", ");
  return `${probe} on ${num_fired} of ${num_scored}${listed ? `: ${listed}` : ""}${num_fired > 8 ? ", …" : ""}`;
}

/** What a capture's metadata say of its condition; those of a file are texts. Null if they say nothing. */
function decisionOf(value: unknown): Decision | null {
  try {
    const found = (typeof value === "string" ? JSON.parse(value) : value) as Decision | null | undefined;
    return Array.isArray(found?.positions) && Array.isArray(found.scores) ? found : null;
  } catch {
    return null;
  }
}

/** Reminds in the chat that messages are recorded. */
export function RecordingNote() {
  if (!recorder.value || isRecorded.value) return null;
  return <span><small>Messages on which {recorder.value.probe} fires are recorded.</small> <button type="button" class="quiet" onClick={() => set({ recordProbe: "" })}>Stop recording</button></span>;
}

/** One line under an answer: whether it was recorded. */
export function RecordedLine({ run }: { run: Run }) {
  if (!run.recorded) return null;
  const { decision, isStored } = run.recorded;
  const highest = decision.highest === null ? "no finite score" : `highest score ${shown(decision.highest)}, threshold ${shown(decision.above)}`;
  return <span data-stored={isStored}>{isStored ? `recorded: ${firedText(decision, run)}` : `not recorded: ${decision.probe} did not fire (${highest})`}</span>;
}

// ---- the server's

function base(consumer: string): string {
  return `/v1/capture/${encodeURIComponent(consumer)}/captures`;
}

function OnServer({ onOpen }: { onOpen: (opened: Opened) => void }) {
  const [asked, setAsked] = useState({ tag: "", site: "", role: "", probe: "" });
  const [consumer, setConsumer] = useState("");
  const [found, setFound] = useState<StoredPage | null>(null);
  const [error, setError] = useState("");
  const chosen = browsable.value.includes(consumer) ? consumer : (browsable.value[0] ?? "");
  const look = async (after: string | null) => {
    setError("");
    const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value.trim()).map(([name, value]) => [name, value.trim()]));
    if (after) query.set("after", after);
    const path = `${base(chosen)}${query.size ? `?${query.toString()}` : ""}`;
    try {
      const page = await api.value.get<StoredPage>(path);
      lastListed.value = path;
      setFound((before) => ({ ...page, captures: [...(after && before ? before.captures : []), ...page.captures] }));
    } catch (failed) {
      setError(reason(failed));
    }
  };
  useEffect(() => { if (chosen) void look(null); }, [chosen, api.value]);
  if (!facts.value?.capture) return <Notice text={facts.value?.captureRefused ?? ""} />;
  if (!chosen) return <section class="panel"><h2>Captures of this server</h2><p>It stores none that your key may see. The consumer filesystem does: --capture-consumers filesystem:root=FOLDER.</p></section>;
  const open = async (one: Stored) => {
    setError("");
    try {
      onOpen(await openStored(chosen, one));
    } catch (failed) {
      setError(reason(failed));
    }
  };
  const ask = (name: keyof typeof asked) => (event: { currentTarget: HTMLInputElement }) => setAsked({ ...asked, [name]: event.currentTarget.value });
  return (
    <section class="panel">
      <h2>Captures of this server</h2>
      <form class="bar" onSubmit={(event) => { event.preventDefault(); void look(null); }} aria-label="Filter captures">
        {browsable.value.length > 1 && <Choice label="Consumer" value={chosen} options={browsable.value.map((value) => ({ value, label: value }))} onChange={setConsumer} />}
        <Field label="Tag"><input value={asked.tag} onInput={ask("tag")} /></Field>
        <Field label="Site"><input value={asked.site} placeholder="12.post_mlp" onInput={ask("site")} /></Field>
        <Field label="Role"><input value={asked.role} placeholder="user" onInput={ask("role")} /></Field>
        <Field label="Probe that fired"><input value={asked.probe} onInput={ask("probe")} /></Field>
        <button type="submit">Look</button>
      </form>
      <Notice kind="error" text={error} />
      {found?.damaged.map((text) => <Notice key={text} kind="error" text={text} />)}
      {found && found.captures.length === 0 && <p>None is here{Object.values(asked).some((value) => value.trim()) ? " that fits" : ""}. You see those of your own requests.</p>}
      {found && found.captures.length > 0 && <Listed list={found.captures} onOpen={(one) => void open(one)} />}
      {found?.next && <button type="button" class="quiet" onClick={() => void look(found.next)}>Older ones</button>}
    </section>
  );
}

function sitesText(sites: Stored["sites"]): string {
  return Object.entries(sites).map(([hook, layers]) => (layers.length > 4 ? `${hook} (${layers.length} layers)` : layers.length ? `${hook} ${layers.join(", ")}` : hook)).join("; ");
}

function Listed({ list, onOpen }: { list: Stored[]; onOpen: (one: Stored) => void }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="List of captures">
      <table class="wide">
        <thead><tr>{["request", "tag", "written", "rows", "sites", "roles", "fired", "MB", ""].map((name) => <th scope="col" key={name}>{name || <span class="hidden">open</span>}</th>)}</tr></thead>
        <tbody>
          {list.map((one) => (
            <tr key={`${one.tag}/${one.name}`} data-capture={`${one.tag}/${one.name}`}>
              <th scope="row">{one.request_id}{one.stage[1] > 1 ? ` (stage ${one.stage[0]} of ${one.stage[1]})` : ""}</th>
              <td>{one.tag}</td>
              <td>{one.written_at.slice(0, 19).replace("T", " ")}</td>
              <td>{one.num_rows}{one.dropped_rows ? ` (${one.dropped_rows} dropped)` : ""}</td>
              <td>{sitesText(one.sites)}</td>
              <td>{one.roles?.join(", ") ?? "–"}</td>
              <td data-fired={one.if_probe?.positions.join(",")}>{one.if_probe ? firedText(one.if_probe, null) : "–"}</td>
              <td>{(one.num_bytes / 1e6).toFixed(2)}</td>
              <td><button type="button" class="quiet" onClick={() => onOpen(one)} aria-label={`Open ${one.request_id}`}>Open</button></td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

async function openStored(consumer: string, { tag, name }: { tag: string; name: string }): Promise<Opened> {
  const path = `${base(consumer)}/${encodeURIComponent(tag)}/${encodeURIComponent(name)}`;
  const one = await api.value.get<StoredOne>(path);
  const read = async (sites: string[]) => {
    const rows = `${path}/rows?sites=${sites.map(encodeURIComponent).join(",")}`;
    const { tensors } = readSafetensors(await api.value.bytes(rows));
    lastRows.value = rows;
    return tensors;
  };
  return {
    name: `${tag}/${one.request_id}`,
    tokens: tokensOf(one.positions, one.token_ids, one.tokens),
    firstOfAnswer: one.num_prompt_tokens,
    positions: one.positions,
    sites: one.metadata["sites"] as string[],
    bytes: one.num_bytes,
    metadata: one.metadata,
    read,
    path: `${path}/rows`,
  };
}

// ---- a file of this machine

function OwnFile({ onOpen }: { onOpen: (opened: Opened | null) => void }) {
  const [error, setError] = useState("");
  const open = async (file: File | undefined) => {
    if (!file) return;
    setError("");
    onOpen(null);
    try {
      const { tensors, metadata } = readSafetensors(new Uint8Array(await file.arrayBuffer()));
      if (!tensors["positions"]) throw new Error("it has no positions, so it is no captured request");
      const positions = positionsOf(tensors);
      const ids = Array.from(tensors["token_ids"]?.data ?? [], Number);
      const sites = Object.keys(tensors).filter((each) => /^(\d+\.|final_norm$)/.test(each));
      const numPrompt = Number(metadata["num_prompt_tokens"] ?? NaN);
      onOpen({ name: file.name, tokens: tokensOf(positions, ids, null), firstOfAnswer: Number.isFinite(numPrompt) ? numPrompt : 0, positions, sites, bytes: null, metadata, read: () => Promise.resolve(tensors), path: null });
    } catch (failed) {
      setError(`${file.name} could not be opened: ${reason(failed)}.`);
    }
  };
  return (
    <section class="panel">
      <h2>Open a captured request of this computer</h2>
      <p>A file that the consumer filesystem has written (layout “request”). It is read in this page and sent nowhere.</p>
      <Field label="File"><input type="file" accept=".safetensors" onChange={(event) => void open(event.currentTarget.files?.[0])} /></Field>
      <Notice kind="error" text={error} />
    </section>
  );
}

// ---- one of them

const HIDDEN_FIELDS = new Set(["sites", "notes", "shapes", "format", "format_version", "hidden_size", "dtype", "num_layers", "phases", "engine_request_id"]);

function shownValue(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function OpenedView({ opened }: { opened: Opened }) {
  void tick.value;
  const { sites, tokens, positions } = opened;
  const [site, setSite] = useState(sites[Math.floor(sites.length / 2)] ?? "");
  const [norms, setNorms] = useState<{ site: string; values: number[] } | null>(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const during = async (work: () => Promise<void>) => {
    setError("");
    setBusy(true);
    try {
      await work();
    } catch (failed) {
      setError(reason(failed));
    }
    setBusy(false);
  };
  const hook = site.includes(".") ? splitSite(site)[1] : "";
  const ofHook = hook ? sites.filter((each) => each.endsWith(`.${hook}`)) : [];
  const chosen = useRef(site);
  chosen.current = site;
  const plot = () => during(async () => {
    const tensor = (await opened.read([site]))[site];
    if (chosen.current !== site) return; // another was chosen meanwhile, and its answer may have been faster
    if (!tensor) throw new Error(`it has no rows of ${site}`);
    setNorms({ site, values: placed(rowNorms(tensor), positions, tokens.length) });
  });
  const layers = () => during(async () => showLayers(opened, hook, await opened.read(ofHook)));
  const save = () => during(async () => download(`${opened.name.replace(/[^\w.-]+/g, "_")}.safetensors`, await api.value.bytes(opened.path!), "application/octet-stream"));
  useEffect(() => { if (site) void plot(); }, [site]);
  const label = norms ? `norm at ${norms.site}` : "";
  const fired = decisionOf(opened.metadata["if_probe"]);
  const series = { ...(norms ? { norm: { label, values: norms.values } } : {}), ...(fired ? { fired: { label: `probe ${fired.probe} fired`, values: placed(fired.scores, fired.positions, tokens.length) } } : {}) };
  const scale = norms ? scaleOf(norms.values) : null;
  const share = opened.bytes === null ? "" : ` (${((opened.bytes * ofHook.length) / Math.max(1, sites.length) / 1e6).toFixed(1)} MB)`;
  return (
    <section class="panel" aria-label="Opened capture" data-opened={opened.name}>
      <h2>{opened.name}</h2>
      <div class="bar">
        <Choice label="Site" value={site} options={sites.map((value) => ({ value, label: value }))} onChange={setSite} />
        {ofHook.length > 0 && <button type="button" disabled={isBusy} onClick={() => void layers()}>Show layer by layer{share}</button>}
        {opened.path && <button type="button" class="quiet" disabled={isBusy} onClick={() => void save()}>Download{opened.bytes === null ? "" : ` (${(opened.bytes / 1e6).toFixed(1)} MB)`}</button>}
        {scale && <span class="legend-line">{label} <Legend scale={scale} label={label} /></span>}
      </div>
      <Notice kind="error" text={error} />
      {norms && <Line label={`${label} by token`} values={norms.values} first={opened.firstOfAnswer} />}
      <details>
        <summary>Metadata</summary>
        <div class="scroll" tabIndex={0} role="region" aria-label="Metadata">
          <table>
            <tbody>
              {Object.entries(opened.metadata).filter(([name]) => !HIDDEN_FIELDS.has(name)).map(([name, value]) => <tr key={name}><th scope="row">{name}</th><td>{shownValue(value).slice(0, 300)}</td></tr>)}
              <tr><th scope="row">sites</th><td>{sites.length > 12 ? `${sites.slice(0, 6).join(", ")} and ${sites.length - 6} more` : sites.join(", ")}</td></tr>
            </tbody>
          </table>
        </div>
      </details>
      <Tokens tokens={tokens} first={0} series={series} colourBy="norm" scale={scale} label="Tokens of the capture" />
    </section>
  );
}

/** Puts a capture into the conversation as an answer without a question, and shows its grid. */
function showLayers(opened: Opened, hook: string, tensors: Tensors): void {
  const run = newRun("plain", {});
  Object.assign(run, { status: "done", path: "", prompt: opened.tokens.slice(0, opened.firstOfAnswer), answer: opened.tokens.slice(opened.firstOfAnswer), grid: gridOf(tensors, hook, opened.tokens.length) });
  const turn = addTurn(0, "assistant", opened.name);
  turn.runs = [run];
  turns.value = [...turns.value];
  branches.value = { ...branches.value, 0: turn.id };
  selected.value = { turn: turn.id, run: 0 };
  set({ colourBy: "norm" });
  view.value = "grid";
}
