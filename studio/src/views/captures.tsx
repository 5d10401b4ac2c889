// A captured file of this machine, looked at in the page: nothing is sent anywhere.

import { useState } from "preact/hooks";
import { Choice, Field, Notice } from "../parts";
import { gridOf, positionsOf } from "../run";
import { type Run, selected, set, turns, branches, view } from "../state";
import { readSafetensors, type Tensors } from "../tensors";

export function Captures() {
  const [error, setError] = useState("");
  const [opened, setOpened] = useState<{ name: string; tensors: Tensors; metadata: Record<string, string> } | null>(null);
  const open = async (file: File | undefined) => {
    if (!file) return;
    setError("");
    setOpened(null);
    try {
      const found = readSafetensors(new Uint8Array(await file.arrayBuffer()));
      if (!found.tensors["positions"]) throw new Error("it has no positions, so it is no captured request");
      setOpened({ name: file.name, ...found });
    } catch (failed) {
      setError(`${file.name} could not be opened: ${failed instanceof Error ? failed.message : String(failed)}.`);
    }
  };
  return (
    <section class="panel">
      <h2>Open a captured request</h2>
      <p>A file that the consumer filesystem has written (layout “request”). It is read in this page and sent nowhere.</p>
      <Field label="File"><input type="file" accept=".safetensors" onChange={(event) => void open(event.currentTarget.files?.[0])} /></Field>
      <Notice kind="error" text={error} />
      {opened && <Opened {...opened} />}
    </section>
  );
}

function Opened({ name, tensors, metadata }: { name: string; tensors: Tensors; metadata: Record<string, string> }) {
  const sites = Object.keys(tensors).filter((each) => /^\d+\./.test(each));
  const hooks = [...new Set(sites.map((site) => site.slice(site.indexOf(".") + 1)))];
  const [hook, setHook] = useState(hooks[0] ?? "");
  const show = () => {
    const total = Math.max(-1, ...positionsOf(tensors)) + 1;
    const ids = Array.from(tensors["token_ids"]?.data ?? [], Number);
    const positions = positionsOf(tensors);
    const tokens = Array.from({ length: total }, () => ({ text: "?", id: null as number | null, logprob: null, top: [] }));
    positions.forEach((position, i) => (tokens[position] = { text: `#${ids[i] ?? "?"}`, id: ids[i] ?? null, logprob: null, top: [] }));
    const run: Run = { kind: "plain", status: "done", error: "", notice: "", path: "", body: {}, prompt: tokens, answer: [], text: "", series: {}, gates: {}, grid: gridOf(tensors, hook, total), features: null, attention: null, meanNorms: {}, seconds: 0 };
    const id = Math.max(0, ...turns.value.map((turn) => turn.id)) + 1;
    turns.value = [...turns.value, { id, parent: 0, role: "assistant", text: name, runs: [run], chosen: 0 }];
    branches.value = { ...branches.value, 0: id };
    selected.value = { turn: id, run: 0 };
    set({ colourBy: "norm" });
    view.value = "grid";
  };
  return (
    <>
      <table>
        <tbody>
          {Object.entries(metadata).filter(([, value]) => value.length < 200).map(([key, value]) => <tr key={key}><th scope="row">{key}</th><td>{value}</td></tr>)}
          <tr><th scope="row">sites</th><td>{sites.length}</td></tr>
          <tr><th scope="row">rows</th><td>{positionsOf(tensors).length}</td></tr>
        </tbody>
      </table>
      <div class="bar">
        <Choice label="Hook point" value={hook} options={hooks.map((value) => ({ value, label: value }))} onChange={setHook} />
        <button type="button" onClick={show}>Show layer by layer</button>
      </div>
    </>
  );
}
