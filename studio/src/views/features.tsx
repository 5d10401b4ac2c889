// Features of SAEs: the strongest ones of an answer, searched by text, by token, with bars, and turned into steering.

import { useState } from "preact/hooks";
import { extent, shown } from "../colour";
import { Field, Notice } from "../parts";
import { Restored } from "./restored";
import { activationsOf, addFollowed } from "../run";
import { currentRun, facts, type Features, followed, isRecorded, items, type Run, set, settings, tick, turns, view } from "../state";
import { visible } from "../tokens";
import { tokensOf } from "./grid";

interface Found { id: number; label: string; most: number; at: number; tokens: number }

/** Each feature that a run's rows have, with its largest activation and where. The first row is left out: it is ten times as long as any other, and SAEs are not trained on it. */
export function listed(found: Features): Found[] {
  const byId = new Map<number, Found>();
  found.positions.forEach((position, i) => {
    if (position === 0) return;
    found.ids[i]?.forEach((id, k) => {
      const value = found.values[i]![k]!;
      const known = byId.get(id);
      if (!known) byId.set(id, { id, label: found.labels[String(id)] ?? "", most: value, at: position, tokens: 1 });
      else {
        known.tokens++;
        if (value > known.most) Object.assign(known, { most: value, at: position });
      }
    });
  });
  return [...byId.values()].sort((a, b) => b.most - a.most);
}

export function FeaturesView() {
  void tick.value;
  const text = settings.value.featureText;
  const [token, setToken] = useState<number | null>(null);
  const found = currentRun.value;
  const features = found?.run.features;
  if (!found || !features) return <section class="empty"><h2>Features</h2><p>Choose an SAE under “Features of” in the chat and ask; this view then lists the strongest features of the answer’s tokens.</p><Restored /></section>;
  const { run } = found;
  const words = text.toLowerCase();
  const only = token === null ? null : new Set(features.ids[features.positions.indexOf(token)] ?? []);
  const all = listed(features).filter((each) => (!only || only.has(each.id)) && (!words || each.label.toLowerCase().includes(words) || String(each.id) === words));
  const tokens = tokensOf(run);
  return (
    <section>
      <div class="bar">
        <Field label="Search labels and ids"><input type="search" value={text} onInput={(event) => set({ featureText: event.currentTarget.value })} /></Field>
        <Field label="At the token">
          <select value={token === null ? "" : String(token)} onChange={(event) => setToken(event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}>
            <option value="">any</option>
            {features.positions.map((position) => <option key={position} value={String(position)}>{position} {visible(tokens[position]?.text ?? "")}</option>)}
          </select>
        </Field>
        <small>{all.length} features of {features.sae}; of each token but the first, the strongest {Math.max(0, extent(features.ids.map((each) => each?.length ?? 0))[1])} were read</small>
      </div>
      {Object.keys(features.labels).length === 0 && <Notice text="This SAE has no labels; “headgate sae labels” stores them." />}
      <ul class="items features">
        {all.slice(0, 200).map((each) => <FeatureRow key={each.id} found={each} features={features} run={run} />)}
      </ul>
      {all.length > 200 && <p class="faint">and {all.length - 200} more: search to see them</p>}
    </section>
  );
}

function FeatureRow({ found, features, run }: { found: Found; features: Features; run: Run }) {
  const values = activationsOf(run, found.id);
  const canSteer = !isRecorded.value && !!facts.value?.saes.some((sae) => sae.name === features.sae);
  const colour = () => {
    const feature = { sae: features.sae, id: found.id, label: found.label };
    followed.value = [...followed.value.filter((other) => other.sae !== feature.sae || other.id !== feature.id), feature];
    for (const turn of turns.value) for (const other of turn.runs) addFollowed(other, feature);
    set({ colourBy: `feature:${features.sae}:${found.id}`, showsPrompt: true });
    view.value = "chat";
  };
  const steer = () => {
    const name = `feature ${found.id}${found.label ? ` (${found.label.slice(0, 40)})` : ""}`;
    items.value = [...items.value.filter((item) => item.name !== name), { name, kind: "feature", isOn: true, how: "add", scale: Math.max(1, Math.round(found.most)), phase: "both", site: "", row: null, about: `largest activation here ${shown(found.most)}`, sae: features.sae, feature: found.id }];
    view.value = "steer";
  };
  return (
    <li class="item" data-feature={found.id}>
      <b>{found.id}</b>
      <span>{found.label}</span>
      <span class="faint" data-most={found.most}>at most {shown(found.most)}, at “{visible(tokensOf(run)[found.at]?.text ?? "")}”; active at {found.tokens} tokens</span>
      <button type="button" class="quiet" onClick={colour}>Colour by it</button>
      {canSteer && <button type="button" class="quiet" onClick={steer}>Steer with it</button>}
      <Bars values={values} most={found.most} label={`Feature ${found.id} by token, at most ${shown(found.most)}`} />
    </li>
  );
}

/** A bar for each token; the first one, whose row is many times as long, is cut off. */
function Bars({ values, most, label }: { values: number[]; most: number; label: string }) {
  const height = (value: number) => 20 * Math.min(1, value / (most || 1));
  return (
    <svg class="bars" viewBox={`0 0 ${Math.max(1, values.length)} 20`} preserveAspectRatio="none" role="img" aria-label={label}>
      {values.map((value, i) => value > 0 && <rect key={i} x={i + 0.08} width={0.84} y={20 - height(value)} height={height(value)} data-bar={value} />)}
    </svg>
  );
}
