// Gates of the next request and rules of the operator, as sentences, and what fired.

import { signal } from "@preact/signals";
import { useState } from "preact/hooks";
import type { Condition, Dynamic, Effect, Json, Rule } from "../api";
import { shown } from "../colour";
import { Choice, Field, Notice } from "../parts";
import { gateOf, isOpSite } from "../run";
import { api, facts, type GateSpec, gates, isRecorded, items, loadFacts, type Phase } from "../state";
import { useLooks } from "./looks";

const POOLS: Record<GateSpec["pool"], string> = { token: "at a token", ema: "in its moving average", last_prompt: "at the prompt’s last token", prompt_mean: "in the mean over the prompt" };
const PHASES: Record<Phase, string> = { both: "anywhere", prompt: "in the prompt", answer: "in the answer" };
const SCOPES: Record<GateSpec["scope"], string> = { this_token: "at that token", next_token: "at the next token", rest_of_request: "for the rest of the request" };

/** The last body that registered a rule, for its code. */
export const lastRule = signal<Json | null>(null);

/** A gate as a sentence. */
export function sentenceOf(gate: GateSpec): string {
  const { reads, then } = gate;
  const what = reads.kind === "probe" ? `the probe ${reads.name}` : `the cosine to ${reads.name} at ${reads.site}`;
  const where = gate.phase === "both" ? "" : ` ${PHASES[gate.phase]}`;
  const when = reads.kind === "always" ? `At every token${where}` : `When ${what} is ${gate.compare} ${gate.threshold} ${POOLS[gate.pool]}${where}`;
  const effect = then.kind === "observe" ? "only note it" : `add ${then.name} × ${then.scale}`;
  return `${when}, ${effect} ${SCOPES[gate.scope]}.`;
}

function phaseOf(when: string): string {
  return { always: "anywhere", prompt: "in the prompt", generated: "in the answer" }[when] ?? when;
}

/** A registered condition in words, as a clause. */
function wordsOf(when: Condition): string {
  if (typeof when === "string") return `the token is ${phaseOf(when)}`;
  if ("any" in when) return when.any.map(inner).join(" or ");
  if ("all" in when) {
    const [phases, others] = [when.all.filter((each) => typeof each === "string"), when.all.filter((each) => typeof each !== "string")];
    const areCompared = others.every((each) => !("not" in each && typeof each.not === "string"));
    if (phases.length === 1 && others.length && areCompared) return `${others.map(inner).join(" and ")} ${phaseOf(phases[0]!)}`;
    return when.all.map(inner).join(" and ");
  }
  if ("not" in when) return typeof when.not === "string" ? `the token is not ${phaseOf(when.not)}` : `not ${inner(when.not)}`;
  const what = "probe" in when ? (typeof when.probe === "string" ? `the probe ${when.probe}` : `a probe of its own at ${when.probe.at}`) : "cosine" in when ? `the cosine to ${when.cosine ?? "a vector of its own"} at ${when.at}` : `feature ${when.feature} of ${when.sae}`;
  const bound = when.above !== undefined ? ` is above ${shown(when.above)}` : when.below !== undefined ? ` is below ${shown(when.below)}` : " is above its own threshold";
  const pool = typeof when.pool === "object" ? "ema" : ((when.pool ?? "token") as GateSpec["pool"]);
  return `${what}${bound} ${POOLS[pool]}`;
}

function inner(when: Condition): string {
  return typeof when === "object" && ("any" in when || "all" in when) ? `(${wordsOf(when)})` : wordsOf(when);
}

function effectOf(then: Effect): string {
  if (typeof then === "string") return "only note it";
  if ("module" in then) return `add ${then.module} × ${shown(then.scale)}`;
  if ("features" in then) return `change ${then.features.map(({ sae, feature }) => `feature ${feature} of ${sae}`).join(", ")}`;
  const adds = then.ops.every(({ method }) => method === "additive");
  return adds ? `add its own vectors at ${then.ops.map(({ at }) => at).join(", ")}` : then.ops.map(({ at, method }) => `${method.replaceAll("_", " ")} at ${at}`).join(", ");
}

/** A registered rule as a sentence. */
export function sentenceOfRule(rule: Rule): string {
  const when = rule.when === "always" ? "At every token" : typeof rule.when === "string" ? `At every token ${phaseOf(rule.when)}` : `When ${wordsOf(rule.when)}`;
  const soft = rule.strength === "binary" ? "" : `, with the strength ${JSON.stringify(rule.strength).replace(/[{}"]/g, "").replaceAll(":", " ")}`;
  return `${when}, ${effectOf(rule.then)} ${SCOPES[rule.scope as GateSpec["scope"]] ?? rule.scope}${soft}; for ${WHOM[rule.applies_to] ?? rule.applies_to}.`;
}

export function DynamicView() {
  if (isRecorded.value) return <section class="empty"><h2>Dynamic</h2><p>A recording steers nothing.</p></section>;
  const remove = (gate: GateSpec) => (gates.value = gates.value.filter((other) => other !== gate));
  return (
    <div class="columns">
      <section class="panel">
        <h2>Gates of the next request</h2>
        {gates.value.length === 0 && <p>None. A gate turns steering on where a probe or a cosine passes a threshold, within the same forward pass.</p>}
        <ul class="items">
          {gates.value.map((gate, i) => (
            <li class="item" key={gate.name}>
              <label class="check"><input type="checkbox" checked={gate.isOn} onChange={() => (gates.value = gates.value.map((other, k) => (k === i ? { ...gate, isOn: !gate.isOn } : other)))} /><b>{gate.name}</b></label>
              <span>{sentenceOf(gate)}</span>
              <button type="button" class="quiet" onClick={() => remove(gate)} aria-label={`Remove the gate ${gate.name}`}>Remove</button>
            </li>
          ))}
        </ul>
        <NewGate />
      </section>
      <div>
        <Rules />
        <Controllers />
        <Probes />
      </div>
    </div>
  );
}

function NewGate() {
  const cosines = items.value.filter((item) => item.kind === "module" && item.site && isOpSite(item.site));
  const probes = (facts.value?.probes ?? []).filter((probe) => isOpSite(probe.at));
  const modules = items.value.filter((item) => item.kind === "module");
  const sources = [...probes.map((probe) => ({ value: `probe ${probe.name}`, label: `the probe ${probe.name}` })), ...cosines.map((item) => ({ value: `cosine ${item.name}`, label: `the cosine to ${item.name}` })), { value: "always ", label: "always" }];
  const [source, setSource] = useState("");
  const [compare, setCompare] = useState<GateSpec["compare"]>("above");
  const [threshold, setThreshold] = useState("0");
  const [phase, setPhase] = useState<Phase>("both");
  const [pool, setPool] = useState<GateSpec["pool"]>("token");
  const [target, setTarget] = useState("observe");
  const [scale, setScale] = useState("2");
  const [scope, setScope] = useState<GateSpec["scope"]>("rest_of_request");
  if (!facts.value?.layers) return <Notice text={facts.value?.steeringRefused ?? ""} />;
  if (!probes.length && !cosines.length) return <p class="faint">Gates read probes and registered vectors at op sites (--steering-op-sites); this server has none of them yet.</p>;
  const chosen = sources.some((each) => each.value === source) ? source : sources[0]!.value;
  const add = () => {
    const space = chosen.indexOf(" ");
    const kind = chosen.slice(0, space) as GateSpec["reads"]["kind"];
    const name = chosen.slice(space + 1);
    const numbers = [threshold, scale].map(Number);
    let number = gates.value.length + 1;
    while (gates.value.some((gate) => gate.name === `gate ${number}`)) number++;
    const gate: GateSpec = {
      name: `gate ${number}`,
      isOn: true,
      reads: { kind, name, site: kind === "cosine" ? items.value.find((item) => item.kind === "module" && item.name === name)!.site : "" },
      compare,
      threshold: numbers[0]! || 0,
      phase,
      pool,
      then: target === "observe" ? { kind: "observe", name: "", scale: 0 } : { kind: "module", name: target, scale: numbers[1]! || 0 },
      scope,
    };
    gates.value = [...gates.value, gate];
  };
  return (
    <form class="bar" onSubmit={(event) => { event.preventDefault(); add(); }} aria-label="New gate">
      <Choice label="When" value={chosen} options={sources} onChange={setSource} />
      {!chosen.startsWith("always") && <Choice label="is" value={compare} options={[{ value: "above", label: "above" }, { value: "below", label: "below" }]} onChange={setCompare} />}
      {!chosen.startsWith("always") && <Field label="Threshold"><input type="number" step="any" required value={threshold} onInput={(event) => setThreshold(event.currentTarget.value)} /></Field>}
      {!chosen.startsWith("always") && <Choice label="read" value={pool} options={Object.entries(POOLS).map(([value, label]) => ({ value: value as GateSpec["pool"], label }))} onChange={setPool} />}
      <Choice<Phase> label="where" value={phase} options={Object.entries(PHASES).map(([value, label]) => ({ value: value as Phase, label }))} onChange={setPhase} />
      <Choice label="then" value={target} options={[{ value: "observe", label: "only note it (shadow)" }, ...modules.map((item) => ({ value: item.name, label: `add ${item.name}` }))]} onChange={setTarget} />
      {target !== "observe" && <Field label="times"><input type="number" step="any" required value={scale} onInput={(event) => setScale(event.currentTarget.value)} /></Field>}
      <Choice label="for" value={scope} options={Object.entries(SCOPES).map(([value, label]) => ({ value: value as GateSpec["scope"], label }))} onChange={setScope} />
      <button type="submit">Add the gate</button>
    </form>
  );
}

/** How long counts are remembered. */
const LATELY_MS = 120_000;

interface Counted { at: number; counts: Record<string, number> }

/** Rows by rule and gate, asked for again and again while the view is open. */
function useCounts(): Counted[] {
  const [found, setFound] = useState<Counted[]>([]);
  useLooks(!!facts.value?.dynamic, async (isOver) => {
    try {
      const dynamic = await api.value.get<Dynamic>("/v1/steering/dynamic");
      if (isOver()) return;
      const counts = Object.fromEntries([...dynamic.rules.map((rule) => [`rule ${rule.name}`, rule.rows] as const), ...Object.entries(dynamic.gates).map(([name, rows]) => [`gate ${name}`, rows] as const)]);
      const now = performance.now();
      setFound((before) => [...before.filter((each) => now - each.at < LATELY_MS), { at: now, counts }]);
    } catch {
      // The reason stands in the view already: facts are asked by the same key.
    }
  }, [facts.value?.dynamic, api.value]);
  return found;
}

function Rules() {
  const found = facts.value;
  const counted = useCounts();
  const rows = new Map((found?.dynamic?.rules ?? []).map((rule) => [`rule ${rule.name}`, rule.rows]));
  for (const [name, count] of Object.entries(found?.dynamic?.gates ?? {})) rows.set(`gate ${name}`, count);
  for (const [name, count] of Object.entries(counted.at(-1)?.counts ?? {})) rows.set(name, count);
  const lately = (name: string) => (counted[0] ? (rows.get(name) ?? 0) - (counted[0].counts[name] ?? 0) : 0);
  const ofGates = [...rows].filter(([name, count]) => name.startsWith("gate ") && count > 0);
  return (
    <section class="panel">
      <h2>Rules of the operator <button type="button" class="quiet" onClick={() => void loadFacts()}>Look again</button></h2>
      {found?.dynamicRefused && <Notice text={found.dynamicRefused} />}
      {found?.dynamic && found.rules.length === 0 && <p>None is registered.</p>}
      <ul class="items">
        {(found?.rules ?? []).map((rule) => <RuleView key={rule.name} rule={rule} rows={rows.get(`rule ${rule.name}`) ?? 0} lately={lately(`rule ${rule.name}`)} />)}
      </ul>
      {found?.dynamic && <NewRule />}
      {ofGates.length > 0 && (
        <>
          <h3>Rows that gates of requests steered</h3>
          <table>
            <thead><tr><th scope="col">gate</th><th scope="col">since the server started</th><th scope="col">lately</th></tr></thead>
            <tbody>{ofGates.map(([name, count]) => <tr key={name} data-gate={name.slice(5)}><th scope="row">{name.slice(5)}</th><td>{count}</td><td>{lately(name) || "–"}</td></tr>)}</tbody>
          </table>
        </>
      )}
      <p><small>“Lately” is the last two minutes, since this view was opened.</small></p>
    </section>
  );
}

const WHOM: Record<string, string> = { all: "every request", opt_out: "requests that do not decline it", opt_in: "requests that name it" };

function RuleView({ rule, rows, lately }: { rule: Rule; rows: number; lately: number }) {
  const [error, setError] = useState("");
  const forget = async () => {
    try {
      await api.value.post("/v1/steering/rules/unregister", { name: rule.name });
      await loadFacts();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
  };
  return (
    <li class="item" data-rule={rule.name}>
      <b>{rule.name}</b>
      <span>{sentenceOfRule(rule)}</span>
      <small data-rows={rows} data-lately={lately}>{rows} rows {rule.observes ? "it would have steered" : "steered"}{lately ? `, ${lately} of them lately` : ""}</small>
      <button type="button" class="quiet" onClick={() => void forget()} aria-label={`Unregister the rule ${rule.name}`}>Unregister</button>
      <Notice kind="error" text={error} />
    </li>
  );
}

/** A gate of this page, registered for the requests of others. */
function NewRule() {
  const [chosen, setChosen] = useState("");
  const [name, setName] = useState("");
  const [whom, setWhom] = useState("opt_out");
  const [isShadow, setShadow] = useState(true);
  const [error, setError] = useState("");
  const gate = gates.value.find((each) => each.name === chosen) ?? gates.value[0];
  if (!gate) return <p class="faint">A gate of this page can be registered as a rule, which acts on the requests of everybody.</p>;
  const register = async () => {
    const { when, then, scope } = gateOf(gate) as { when: unknown; then: unknown; scope: string };
    const body = { name: name.trim() || gate.name.replaceAll(" ", "-"), applies_to: whom, when, then: isShadow ? "observe" : then, scope };
    setError("");
    try {
      await api.value.post("/v1/steering/rules/register", body);
      lastRule.value = body;
      await loadFacts();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
  };
  return (
    <form class="bar" aria-label="New rule" onSubmit={(event) => { event.preventDefault(); void register(); }}>
      <Choice label="Make a rule of" value={gate.name} options={gates.value.map((each) => ({ value: each.name, label: each.name }))} onChange={setChosen} />
      <Field label="Name"><input value={name} placeholder={gate.name.replaceAll(" ", "-")} onInput={(event) => setName(event.currentTarget.value)} /></Field>
      <Choice label="For" value={whom} options={Object.entries(WHOM).map(([value, label]) => ({ value, label }))} onChange={setWhom} />
      <label class="check"><input type="checkbox" checked={isShadow} onChange={() => setShadow(!isShadow)} />only note it (shadow)</label>
      <button type="submit">Register the rule</button>
      <Notice kind="error" text={error} />
    </form>
  );
}

/** Controllers that the operator configured, and what they did. */
function Controllers() {
  const list = facts.value?.dynamic?.controllers ?? [];
  if (!list.length) return null;
  return (
    <section class="panel">
      <h2>Controllers</h2>
      <ul class="items">
        {list.map((each) => (
          <li class="item" key={each.name} data-controller={each.name}>
            <b>{each.name}</b>
            <span>{`Reads ${each.probes.join(", ") || "nothing"} in Python; for ${WHOM[each.applies_to] ?? each.applies_to}.`}</span>
            <small>{each.steps} steps; actions: {Object.entries(each.actions).map(([outcome, count]) => `${count} ${outcome}`).join(", ") || "none"}</small>
            <Notice kind="error" text={each.error ? `It was switched off: ${each.error}` : ""} />
          </li>
        ))}
      </ul>
    </section>
  );
}

function Probes() {
  const list = facts.value?.probes ?? [];
  const [error, setError] = useState("");
  const forget = async (name: string) => {
    setError("");
    try {
      await api.value.post("/v1/steering/probes/unregister", { name });
      await loadFacts();
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
  };
  if (!facts.value?.layers) return null;
  return (
    <section class="panel">
      <h2>Probes</h2>
      {list.length === 0 && <p>None is registered. “Make a vector” under “Steer” can register its direction as one.</p>}
      <ul class="items">
        {list.map((probe) => (
          <li class="item" key={probe.name} data-probe={probe.name}>
            <b>{probe.name}</b>
            <span>{probe.kind}, at {probe.at}{probe.threshold === null ? "" : `, threshold ${shown(probe.threshold)}`}{probe.classes.length > 1 ? `: ${probe.classes.join(", ")}` : ""}</span>
            <button type="button" class="quiet" onClick={() => void forget(probe.name)} aria-label={`Unregister the probe ${probe.name}`}>Unregister</button>
          </li>
        ))}
      </ul>
      <Notice kind="error" text={error} />
    </section>
  );
}
