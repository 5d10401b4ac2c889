// Gates of the next request and rules of the operator, as sentences, and what fired.

import { useState } from "preact/hooks";
import { Choice, Field, Notice } from "../parts";
import { splitSite } from "../run";
import { facts, type GateSpec, gates, isRecorded, items, loadFacts } from "../state";

const POOLS: Record<GateSpec["pool"], string> = { token: "at a token", ema: "in its moving average", last_prompt: "at the prompt’s last token", prompt_mean: "in the mean over the prompt" };
const SCOPES: Record<GateSpec["scope"], string> = { this_token: "at that token", next_token: "at the next token", rest_of_request: "for the rest of the request" };

/** A gate as a sentence. */
export function sentenceOf(gate: GateSpec): string {
  const { reads, then } = gate;
  const what = reads.kind === "probe" ? `the probe ${reads.name}` : `the cosine to ${reads.name} at ${reads.site}`;
  const when = reads.kind === "always" ? "At every token" : `When ${what} is ${gate.compare} ${gate.threshold} ${POOLS[gate.pool]}`;
  const effect = then.kind === "observe" ? "only note it" : `add ${then.name} × ${then.scale}`;
  return `${when}, ${effect} ${SCOPES[gate.scope]}.`;
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
      <Rules />
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
      {!chosen.startsWith("always") && <Field label="Threshold"><input type="number" step="any" value={threshold} onInput={(event) => setThreshold(event.currentTarget.value)} /></Field>}
      {!chosen.startsWith("always") && <Choice label="read" value={pool} options={Object.entries(POOLS).map(([value, label]) => ({ value: value as GateSpec["pool"], label }))} onChange={setPool} />}
      <Choice label="then" value={target} options={[{ value: "observe", label: "only note it (shadow)" }, ...modules.map((item) => ({ value: item.name, label: `add ${item.name}` }))]} onChange={setTarget} />
      {target !== "observe" && <Field label="times"><input type="number" step="any" value={scale} onInput={(event) => setScale(event.currentTarget.value)} /></Field>}
      <Choice label="for" value={scope} options={Object.entries(SCOPES).map(([value, label]) => ({ value: value as GateSpec["scope"], label }))} onChange={setScope} />
      <button type="submit">Add the gate</button>
    </form>
  );
}

function isOpSite(site: string): boolean {
  const [layer, hook] = splitSite(site);
  return facts.value?.layers?.op_hook_points[hook]?.includes(layer) ?? false;
}

function Rules() {
  const found = facts.value;
  const rows = new Map((found?.dynamic?.rules ?? []).map((rule) => [rule.name, rule.rows]));
  return (
    <section class="panel">
      <h2>Rules of the operator <button type="button" class="quiet" onClick={() => void loadFacts()}>Look again</button></h2>
      {found?.dynamicRefused && <Notice text={found.dynamicRefused} />}
      {found?.dynamic && found.rules.length === 0 && <p>None is registered.</p>}
      <ul class="items">
        {(found?.rules ?? []).map((rule) => (
          <li class="item" key={rule.name}>
            <b>{rule.name}</b>
            <span>
              {`Reads ${rule.probes.join(", ") || "nothing"}, ${rule.observes ? "only notes where it would act" : `acts at ${rule.sites.join(", ")}`}, ${rule.scope.replaceAll("_", " ")}; for ${rule.applies_to === "all" ? "every request" : rule.applies_to === "opt_out" ? "requests that do not decline it" : "requests that name it"}.`}
            </span>
            <small>{rows.get(rule.name) ?? 0} rows {rule.observes ? "it would have steered" : "steered"}</small>
          </li>
        ))}
      </ul>
      {found?.dynamic && Object.keys(found.dynamic.gates).length > 0 && (
        <>
          <h3>Rows that gates steered, since the server started</h3>
          <table><tbody>{Object.entries(found.dynamic.gates).map(([name, count]) => <tr key={name}><th scope="row">{name}</th><td>{count}</td></tr>)}</tbody></table>
        </>
      )}
    </section>
  );
}
