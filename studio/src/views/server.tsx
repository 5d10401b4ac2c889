// The server's figures, from /metrics, while they are looked at.

import { useState } from "preact/hooks";
import { shown } from "../colour";
import type { HookMemory } from "../api";
import { Field, Notice } from "../parts";
import { api, facts, isRecorded } from "../state";
import { useLooks } from "./looks";

export interface Sample { name: string; labels: Record<string, string>; value: number }

/** The samples of a page in Prometheus' text format. */
export function parseMetrics(text: string): Sample[] {
  const found: Sample[] = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels: Record<string, string> = Object.create(null) as Record<string, string>;
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name!] = value!.replace(/\\(.)/g, (_, c: string) => (c === "n" ? "\n" : c));
    found.push({ name: match[1]!, labels, value: Number(match[3]) });
  }
  return found;
}

interface Reading { at: number; samples: Sample[] }

function sum(samples: Sample[], name: string, labels: Record<string, string> = {}): number {
  return samples.filter((sample) => sample.name === name && Object.entries(labels).every(([key, value]) => sample.labels[key] === value)).reduce((total, sample) => total + sample.value, 0);
}

export function ServerView() {
  const [readings, setReadings] = useState<Reading[]>([]);
  const [error, setError] = useState("");
  useLooks(!isRecorded.value, async (isOver) => {
    try {
      const samples = parseMetrics(await api.value.text("/metrics"));
      if (isOver()) return;
      setError("");
      setReadings((before) => [...before.slice(-90), { at: performance.now() / 1000, samples }]);
    } catch (failed) {
      if (!isOver()) setError(failed instanceof Error ? failed.message : String(failed));
    }
  }, [api.value]);
  if (isRecorded.value) return <section class="empty"><h2>Server</h2><p>A recording has no server.</p></section>;
  const last = readings.at(-1);
  const rate = (name: string): number[] => readings.slice(1).map((reading, i) => Math.max(0, (sum(reading.samples, name) - sum(readings[i]!.samples, name)) / (reading.at - readings[i]!.at || 1)));
  const now = (name: string) => (last ? sum(last.samples, name) : NaN);
  const rules = last?.samples.filter((sample) => sample.name === "headgate_steering_rule_rows_total") ?? [];
  return (
    <section>
      <Notice kind="error" text={error} />
      <div class="cards">
        <Figure label="Requests running" value={now("vllm:num_requests_running")} line={readings.map((each) => sum(each.samples, "vllm:num_requests_running"))} />
        <Figure label="Requests waiting" value={now("vllm:num_requests_waiting")} />
        <Figure label="Tokens per second" value={rate("vllm:generation_tokens_total").at(-1) ?? NaN} line={rate("vllm:generation_tokens_total")} />
        <Figure label="KV cache in use" value={now("vllm:kv_cache_usage_perc") * 100} unit="%" />
        <Figure label="Captured" value={(rate("headgate_capture_bytes_total").at(-1) ?? NaN) / 1e9} unit="GB/s" line={rate("headgate_capture_bytes_total")} />
        <Figure label="Captured rows" value={now("headgate_capture_rows_total")} />
        <Figure label="Dropped rows" value={now("headgate_capture_dropped_rows_total")} isBad={now("headgate_capture_dropped_rows_total") > 0} />
        <Figure label="Stalls of the engine" value={now("headgate_capture_stalls_total")} isBad={now("headgate_capture_stalls_total") > 0} />
        <Figure label="Vector slots in use" value={now("headgate_steering_slots_reserved")} of={now("headgate_steering_slots")} />
        <Figure label="Requests that wait for slots" value={now("headgate_steering_requests_waiting")} />
        <Figure label="Modules" value={now("headgate_steering_modules")} />
        <Figure label="Global vectors" value={now("headgate_steering_global_vectors")} />
      </div>
      {last && <Consumers samples={last.samples} />}
      {rules.length > 0 && (
        <table class="wide">
          <caption>Rules, rows on which they acted</caption>
          <tbody>{rules.map((rule) => <tr key={rule.labels["rule"]}><th scope="row">{rule.labels["rule"]}</th><td>{rule.value}</td></tr>)}</tbody>
        </table>
      )}
      <Sites />
    </section>
  );
}

function Figure({ label, value, unit = "", of, line, isBad = false }: { label: string; value: number; unit?: string; of?: number; line?: number[]; isBad?: boolean }) {
  const high = Math.max(...(line ?? []), 1e-9);
  const path = (line ?? []).map((each, i, all) => `${i ? "L" : "M"}${((i / Math.max(1, all.length - 1)) * 100).toFixed(1)},${(22 - (each / high) * 20).toFixed(1)}`).join("");
  return (
    <div class={`figure${isBad ? " bad" : ""}`} data-figure={label}>
      <span>{label}</span>
      <b>{Number.isInteger(value) ? value : shown(value)}{of !== undefined && Number.isFinite(of) ? ` of ${of}` : ""} {unit}</b>
      {line && line.length > 1 && <svg viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true"><path d={path} /></svg>}
    </div>
  );
}

function Consumers({ samples }: { samples: Sample[] }) {
  const names = [...new Set(samples.filter((sample) => sample.name === "headgate_capture_consumer_rows_total").map((sample) => sample.labels["consumer"]!))];
  if (!names.length) return null;
  const columns: [string, string][] = [["requests", "headgate_capture_consumer_requests_total"], ["rows", "headgate_capture_consumer_rows_total"], ["MB", "headgate_capture_consumer_bytes_total"], ["MB queued", "headgate_capture_consumer_queue_bytes"], ["dropped rows", "headgate_capture_consumer_dropped_rows_total"], ["errors", "headgate_capture_consumer_errors_total"], ["stalls", "headgate_capture_consumer_stalls_total"]];
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Consumers">
      <table class="wide">
        <caption>Consumers</caption>
        <thead><tr><th scope="col">name</th>{columns.map(([label]) => <th scope="col" key={label}>{label}</th>)}</tr></thead>
        <tbody>
          {names.map((name) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              {columns.map(([label, metric]) => <td key={label}>{shownCount(sum(samples, metric, { consumer: name }) / (label.startsWith("MB") ? 1e6 : 1))}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function shownCount(value: number): string {
  return Number.isInteger(value) ? String(value) : shown(value);
}

function Sites() {
  const capture = facts.value?.capture;
  const [budget, setBudget] = useState("256");
  if (!capture) return <Notice text={facts.value?.captureRefused ?? ""} />;
  const memory = capture.memory?.hooks ?? {};
  const known = [...new Set([...Object.keys(capture.sites), ...Object.keys(memory)])];
  const counted = (hook: string) => (hook in capture.sites ? Math.max(1, capture.sites[hook]!.length) : 0);
  const now = known.reduce((total, hook) => total + counted(hook) * (memory[hook]?.site_bytes ?? 0), 0);
  const free = Number(budget) * MIB;
  return (
    <section class="panel sizer">
      <h2>Sites and their memory</h2>
      <p>
        Each captured site has room on the device for one step, {capture.memory?.step_rows ?? "?"} rows; with room on a GPU, for two. The sites of this server take {shown(now / MIB)} MiB for one step. It is memory that the KV cache does not get. Sites are chosen at start-up, with --capture-sites; whether a model has a hook point, “headgate doctor” says.
      </p>
      <Field label="Memory to spend, MiB"><input type="number" min={0} value={budget} onInput={(event) => setBudget(event.currentTarget.value)} /></Field>
      <div class="scroll" tabIndex={0} role="region" aria-label="Memory by site">
        <table class="wide">
          <thead><tr>{["hook point", "captured layers", "values of a row", "MiB of a site", "MiB of all layers", "layers that fit"].map((name) => <th scope="col" key={name}>{name}</th>)}</tr></thead>
          <tbody>
            {known.map((hook) => {
              const size = memory[hook];
              const layers = capture.sites[hook];
              return (
                <tr key={hook} data-hook={hook} class={layers ? "" : "faint"}>
                  <th scope="row">{hook}</th>
                  <td>{!layers ? "none" : layers.length > 8 ? `${layers[0]} … ${layers.at(-1)} (${layers.length})` : layers.join(", ") || "one"}</td>
                  <td>{size ? `${size.width} ${size.dtype}` : ""}</td>
                  <td data-value={size?.site_bytes}>{size ? shown(size.site_bytes / MIB) : ""}</td>
                  <td>{size ? shown((size.layers * size.site_bytes) / MIB) : ""}</td>
                  <td data-fits={size ? fits(free, size) : undefined}>{size && Number.isFinite(free) ? (fits(free, size) === size.layers ? `all ${size.layers}` : `${fits(free, size)} of ${size.layers}`) : ""}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </section>
  );
}

const MIB = 2 ** 20;

function fits(free: number, size: HookMemory): number {
  return Math.min(size.layers, Math.max(0, Math.floor(free / size.site_bytes)));
}
