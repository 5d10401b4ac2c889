// The conversation: streamed answers whose tokens carry numbers, plain and steered side by side, branches.

import { useState } from "preact/hooks";
import { type Scale, scaleOf, shown } from "../colour";
import { alike, Choice, ColourChoice, Field, Legend, Notice, rowAt, Tokens } from "../parts";
import { answer, isSteering, recordsOf, stop, watchable } from "../run";
import { addTurn, branches, changed, facts, featuresName, inlineName, isRecorded, offered, path, picked, pinned, type Run, selected, set, settings, siblings, sites, tick, turns, type Turn, view, watched } from "../state";
import { cosineOf } from "../tensors";
import { RecordedLine, RecordingNote } from "./captures";
import { Restored } from "./restored";
import { LiveTrace } from "./trace";

/** Whether an answer is still being read; its comparison with the plain model may follow. */
function isBusy(): boolean {
  void tick.value;
  return turns.value.some((turn) => turn.runs.some((run) => run.status === "waiting" || run.status === "streaming"));
}

async function ask(text: string): Promise<void> {
  const last = path.value.at(-1);
  const user = addTurn(last?.id ?? 0, "user", text);
  await answer(addTurn(user.id, "assistant", ""));
}

export function Chat() {
  const shownRuns = path.value.flatMap((turn) => turn.runs);
  const [text, setText] = useState("");
  const send = () => {
    if (!text.trim() || isBusy()) return;
    void ask(text);
    setText("");
  };
  return (
    <div class="chat">
      <div class="bar">
        <ColourChoice runs={shownRuns} />
        <Watched />
        <Reading />
        <FeaturesOf />
        <Sampling />
        <RecordingNote />
        {path.value.length > 0 && !isRecorded.value && (
          <button type="button" class="quiet" onClick={() => { stop(); turns.value = []; branches.value = {}; selected.value = null; picked.value = []; }}>
            New conversation
          </button>
        )}
      </div>
      {path.value.length === 0 && <Welcome onPick={(example) => void ask(example)} />}
      <ol class="turns" aria-label="Conversation">
        {path.value.map((turn) => (
          <TurnView key={turn.id} turn={turn} />
        ))}
      </ol>
      <Picked />
      {!isRecorded.value && (
        <form class="ask" onSubmit={(event) => { event.preventDefault(); send(); }}>
          <textarea aria-label="Your message" rows={2} value={text} placeholder="Ask the model; Enter sends, Shift+Enter begins a line" onInput={(event) => setText(event.currentTarget.value)} onKeyDown={(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } }} />
          {isBusy() ? (
            <button type="button" onClick={stop}>Stop</button>
          ) : (
            <button type="submit" disabled={!text.trim()}>{isSteering() ? (settings.value.compares ? "Send, plain and steered" : "Send, steered") : "Send"}</button>
          )}
        </form>
      )}
    </div>
  );
}

const EXAMPLES = ["How was your day?", "What is the capital of France?", "Tell me a short story about the sea."];

function Welcome({ onPick }: { onPick: (text: string) => void }) {
  if (isRecorded.value) return null;
  return (
    <section class="welcome">
      <p>
        Every token of an answer carries numbers: how surprising it was, how long its row of the stream is, what probes and vectors score it. Point at a token, or step through them with the arrow keys; a click or Enter pins one, and the others are compared with it.
      </p>
      <p class="examples">
        {EXAMPLES.map((example) => (
          <button type="button" key={example} class="quiet" disabled={!facts.value?.model} onClick={() => onPick(example)}>{example}</button>
        ))}
      </p>
    </section>
  );
}

function Watched() {
  const found = watchable();
  if (!found.length) return null;
  const key = (each: { kind: string; name: string }) => `${each.kind} ${each.name}`;
  const on = new Set(watched.value.map(key));
  return (
    <fieldset class="checks">
      <legend>Score every token</legend>
      {found.map((each) => (
        <label key={key(each)}>
          <input type="checkbox" checked={on.has(key(each))} onChange={() => (watched.value = on.has(key(each)) ? watched.value.filter((other) => key(other) !== key(each)) : [...watched.value, each])} />
          {each.kind === "probe" ? `probe ${each.name}` : `cosine to ${each.name}`}
        </label>
      ))}
    </fieldset>
  );
}

function FeaturesOf() {
  const found = offered("features", "sae");
  if (!found.length || !featuresName.value) return null;
  return <Choice label="Features of" value={settings.value.sae} options={[{ value: "", label: "no SAE" }, ...found.map((name) => ({ value: name, label: name }))]} onChange={(sae) => set({ sae })} />;
}

function Reading() {
  if (!inlineName.value) return null;
  const { reads, readHook, readLayer } = settings.value;
  const layers = sites.value[readHook] ?? [];
  return (
    <>
      <Choice label="Read rows" value={reads} onChange={(value) => set({ reads: value })} options={[{ value: "none", label: "none" }, { value: "layer", label: "of one layer" }, { value: "all", label: "of all layers" }]} />
      {reads !== "none" && Object.keys(sites.value).length > 1 && (
        <Choice label="Hook point" value={readHook} options={Object.keys(sites.value).map((name) => ({ value: name, label: name }))} onChange={(value) => set({ readHook: value, readLayer: (sites.value[value] ?? [])[0] ?? -1 })} />
      )}
      {reads !== "none" && (
        <Choice label="Layer" value={String(readLayer)} options={layers.map((layer) => ({ value: String(layer), label: String(layer) }))} onChange={(value) => set({ readLayer: Number(value) })} />
      )}
    </>
  );
}

function Sampling() {
  const { temperature, maxTokens, seed, system, compares } = settings.value;
  return (
    <details class="more">
      <summary>Settings</summary>
      <div class="panel">
        <Field label="Temperature"><input type="number" min={0} max={2} step={0.1} value={temperature} onChange={(event) => set({ temperature: Math.max(0, Number(event.currentTarget.value) || 0) })} /></Field>
        <Field label="Tokens at most"><input type="number" min={1} value={maxTokens} onChange={(event) => set({ maxTokens: Math.max(1, Math.round(Number(event.currentTarget.value)) || 1) })} /></Field>
        <Field label="Seed"><input inputMode="numeric" maxLength={15} value={seed} onChange={(event) => set({ seed: event.currentTarget.value.replace(/\D/g, "").slice(0, 15) })} /></Field>
        <Field label="System message"><textarea rows={2} value={system} onChange={(event) => set({ system: event.currentTarget.value })} /></Field>
        <label class="check"><input type="checkbox" checked={compares} onChange={() => set({ compares: !compares })} />Answer plain beside steered</label>
      </div>
    </details>
  );
}

function TurnView({ turn }: { turn: Turn }) {
  const [isEditing, setEditing] = useState(false);
  const [draft, setDraft] = useState(turn.text);
  void tick.value;
  const resend = () => {
    setEditing(false);
    const user = addTurn(turn.parent, "user", draft);
    void answer(addTurn(user.id, "assistant", ""));
  };
  return (
    <li class={`turn ${turn.role}`}>
      <div class="head">
        <b>{turn.role === "user" ? "You" : turn.role === "system" ? "System" : facts.value?.model || "Model"}</b>
        <Branches turn={turn} />
        {!isRecorded.value && turn.role === "user" && !isEditing && (
          <button type="button" class="quiet" disabled={isBusy()} onClick={() => { setDraft(turn.text); setEditing(true); }}>Edit</button>
        )}
        {!isRecorded.value && turn.role === "assistant" && (
          <button type="button" class="quiet" disabled={isBusy()} onClick={() => void answer(addTurn(turn.parent, "assistant", ""))}>Answer again</button>
        )}
      </div>
      {turn.role === "user" && !isEditing && <p class="text">{turn.text}</p>}
      {isEditing && (
        <form onSubmit={(event) => { event.preventDefault(); resend(); }}>
          <textarea aria-label="Edit your message" rows={3} value={draft} onInput={(event) => setDraft(event.currentTarget.value)} />
          <button type="submit">Send as a new branch</button> <button type="button" class="quiet" onClick={() => setEditing(false)}>Cancel</button>
        </form>
      )}
      {turn.role === "assistant" && turn.runs.length === 0 && <p class="text faint">{turn.text} <Restored turn={turn} /></p>}
      {turn.role === "assistant" && turn.runs.length > 0 && <Runs turn={turn} />}
    </li>
  );
}

function Branches({ turn }: { turn: Turn }) {
  const all = siblings(turn);
  if (all.length < 2) return null;
  const at = all.indexOf(turn);
  const go = (step: number) => (branches.value = { ...branches.value, [turn.parent]: all[at + step]!.id });
  return (
    <span class="branches">
      <button type="button" class="quiet" disabled={at === 0} onClick={() => go(-1)} aria-label="Branch before">‹</button>
      {at + 1}/{all.length}
      <button type="button" class="quiet" disabled={at === all.length - 1} onClick={() => go(1)} aria-label="Next branch">›</button>
    </span>
  );
}

/** Index of the first token in which two answers differ; -1 if there is none. */
export function firstDifference(runs: Run[]): number {
  const [a, b] = runs;
  if (!a || !b) return -1;
  const length = Math.max(a.answer.length, b.answer.length);
  for (let i = 0; i < length; i++) if (a.answer[i]?.text !== b.answer[i]?.text) return i;
  return -1;
}

/** One scale for the tokens of several answers; null, and so no colour, if they were read from different sources. */
function scaleOfAll(runs: Run[], name: string, withPrompt: boolean): Scale | null {
  const isAlike = alike(runs, name).length > 0;
  return isAlike ? scaleOf(runs.flatMap((run) => (run.series[name]?.values ?? []).slice(withPrompt ? 0 : run.prompt.length))) : null;
}

function Runs({ turn }: { turn: Turn }) {
  void tick.value;
  const name = settings.value.colourBy;
  const scale = scaleOfAll(turn.runs, name, settings.value.showsPrompt);
  const difference = firstDifference(turn.runs);
  const label = turn.runs.map((run) => run.series[name]?.label).find((found) => found) ?? name;
  return (
    <>
      <div class={`runs n${turn.runs.length}`}>
        {turn.runs.map((run, i) => (
          <RunView key={i} run={run} turn={turn} index={i} scale={scale} difference={difference} />
        ))}
      </div>
      {turn.runs.length === 2 && (
        <details class="compared">
          <summary>Compare both answers</summary>
          <Compared runs={turn.runs as [Run, Run]} titles={["plain", "steered"]} />
        </details>
      )}
      <div class="under">
        {scale && <span class="legend-line">{label} <Legend scale={scale} label={label} /></span>}
        <label class="check"><input type="checkbox" checked={settings.value.showsPrompt} onChange={() => set({ showsPrompt: !settings.value.showsPrompt })} />Show the prompt’s tokens</label>
      </div>
    </>
  );
}

/** Means over both answers, and how alike their mean rows are. */
function Compared({ runs, titles }: { runs: [Run, Run]; titles: [string, string] }) {
  void tick.value;
  const [one, other] = runs;
  if (one.status !== "done" || other.status !== "done") return null;
  const mean = (run: Run, name: string) => meanOf((run.series[name]?.values ?? []).slice(run.prompt.length).filter(Number.isFinite));
  const both = Object.keys(other.series).filter((name) => one.series[name] && Number.isFinite(mean(one, name) - mean(other, name)));
  const names = both.filter((name) => alike(runs, name).length > 0);
  const apart = both.filter((name) => !names.includes(name)).map((name) => `${one.series[name]!.label} and ${other.series[name]!.label}`);
  const rows = runs.map(meanRow);
  const cosine = rows[0] && rows[1] && one.streamRows?.site === other.streamRows?.site ? cosineOf(rows[0], rows[1]) : NaN;
  return (
    <table>
      {apart.length > 0 && <caption>Not compared: {apart.join("; ")}.</caption>}
      <thead><tr><th scope="col">mean over the answer</th><th scope="col">{titles[0]}</th><th scope="col">{titles[1]}</th><th scope="col">difference</th></tr></thead>
      <tbody>
        {names.map((name) => (
          <tr key={name} data-mean={name}>
            <th scope="row">{other.series[name]!.label}</th>
            <td data-value={mean(one, name)}>{shown(mean(one, name))}</td>
            <td data-value={mean(other, name)}>{shown(mean(other, name))}</td>
            <td data-value={mean(other, name) - mean(one, name)}>{shown(mean(other, name) - mean(one, name))}</td>
          </tr>
        ))}
        {Number.isFinite(cosine) && <tr data-mean="cosine"><th scope="row">cosine of the mean rows at {one.streamRows!.site}</th><td colSpan={3} data-value={cosine}>{shown(cosine)}</td></tr>}
      </tbody>
    </table>
  );
}

/** Two answers of any branches that were picked, side by side. */
function Picked() {
  void tick.value;
  const found = picked.value;
  if (!found.length) return null;
  const runs = found.map((each) => each.run);
  const name = settings.value.colourBy;
  const scale = scaleOfAll(runs, name, false);
  return (
    <section class="panel picked" aria-label="Compared answers">
      <h3>Compared answers <button type="button" class="quiet" onClick={() => (picked.value = [])}>Clear</button></h3>
      {found.length < 2 && <p class="faint">“{found[0]!.title}” is picked. Pick another answer, of this branch or another one.</p>}
      <div class={`runs n${found.length}`}>
        {found.map(({ run, title }) => (
          <section class="run" key={title} aria-label={title}>
            <h3>{title}</h3>
            <Tokens tokens={run.answer} first={run.prompt.length} series={run.series} colourBy={name} scale={scale} label={title} mark={firstDifference(runs)} run={run} />
          </section>
        ))}
      </div>
      {found.length === 2 && <Compared runs={runs as [Run, Run]} titles={[found[0]!.title, found[1]!.title]} />}
    </section>
  );
}

/** Picks an answer for comparison, or lays it back. */
function Pick({ run, turn }: { run: Run; turn: Turn }) {
  const isPicked = picked.value.some((each) => each.run === run);
  const pick = () => {
    const number = turns.value.filter((other) => other.role === "assistant").indexOf(turn) + 1;
    const title = `answer ${number}${turn.runs.length > 1 ? `, ${run.kind}` : ""}`;
    picked.value = isPicked ? picked.value.filter((each) => each.run !== run) : [...picked.value.slice(-1), { run, title }];
  };
  return <button type="button" class="quiet" aria-pressed={isPicked} onClick={pick}>{isPicked ? "Do not compare it" : "Compare it"}</button>;
}

function meanOf(values: number[]): number {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function meanRow(run: Run): Float32Array | null {
  const rows = run.answer.map((_, i) => rowAt(run, run.prompt.length + i)).filter((row) => row !== null);
  if (!rows.length) return null;
  return Float32Array.from(rows[0]!, (_, i) => meanOf(rows.map((row) => row[i]!)));
}

function RunView({ run, turn, index, scale, difference }: { run: Run; turn: Turn; index: number; scale: Scale | null; difference: number }) {
  void tick.value;
  const isCompared = turn.runs.length > 1;
  const { colourBy, showsPrompt } = settings.value;
  const pick = (position: number) => {
    selected.value = { turn: turn.id, run: index };
    pinned.value = pinned.value?.run === run && pinned.value.position === position ? null : { run, position };
    changed();
  };
  const differences = (run.series["difference"]?.values ?? []).filter(Number.isFinite);
  return (
    <section class={`run ${run.kind}`} data-status={run.status} aria-label={run.kind === "plain" ? "Plain answer" : "Steered answer"}>
      {(isCompared || run.kind === "steered") && <h3>{run.kind === "plain" ? "Plain" : "Steered"}</h3>}
      {showsPrompt && run.prompt.length > 0 && <Tokens tokens={run.prompt} first={0} series={run.series} colourBy={colourBy} scale={scale} label="Tokens of the prompt" onPick={pick} run={run} />}
      <Tokens tokens={run.answer} first={run.prompt.length} series={run.series} colourBy={colourBy} scale={scale} label={`Answer, ${run.kind}`} mark={difference} onPick={pick} run={run} />
      {run.status === "waiting" && <p class="faint" role="status">waiting for the first token …</p>}
      {run.status === "stopped" && <p class="faint">stopped{recordsOf(run).length > 0 && "; it may be recorded all the same, up to where it was stopped"}</p>}
      <Notice kind="error" text={run.error} />
      <Notice text={run.notice} />
      <LiveTrace run={run} />
      <p class="figures">
        {run.answer.length > 0 && <span>{run.answer.length} tokens{run.seconds > 0 ? `, ${shown(run.answer.length / run.seconds)} per second` : ""}</span>}
        <RecordedLine run={run} />
        {isCompared && difference >= 0 && run.kind === "steered" && <span>differs from token {difference + 1} on</span>}
        {differences.length > 0 && <span title="Mean over the answer of the log-probability of each token with steering, less its log-probability without, after the same tokens">steering made its tokens {shown(differences.reduce((a, b) => a + b, 0) / differences.length)} nats likelier on average</span>}
      </p>
      {run.status === "done" && (
        <p class="actions">
          <Pick run={run} turn={turn} />
          <button type="button" class="quiet" onClick={() => { selected.value = { turn: turn.id, run: index }; view.value = "grid"; }}>Layer by layer</button>
          {isCompared && !isRecorded.value && turn.chosen !== index && <button type="button" class="quiet" onClick={() => { turn.chosen = index; turn.text = run.text; turns.value = [...turns.value]; }}>Go on from this answer</button>}
          {isCompared && turn.chosen === index && <small>the conversation goes on from this answer</small>}
        </p>
      )}
    </section>
  );
}
