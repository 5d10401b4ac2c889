// The trace under an answer: scores by token with their thresholds, shaded where a gate was applied.

import { extent, shown } from "../colour";
import { tick, type Run } from "../state";

const WIDTH = 600;
const HEIGHT = 64;

export function LiveTrace({ run }: { run: Run }) {
  void tick.value;
  const scores = Object.entries(run.series).filter(([name]) => name.startsWith("score:"));
  const applied = Object.entries(run.gates);
  if (!scores.length && !applied.length) return null;
  return (
    <div class="traces">
      {scores.map(([name, series]) => (
        <Line key={name} label={series.label} values={series.values} threshold={series.threshold} first={run.prompt.length} shaded={appliedTo(run)} />
      ))}
      {applied.map(([name, gate]) => {
        const rows = gate.applied.filter((value) => value > 0).length;
        const fired = gate.strength.filter((value) => value > 0).length;
        return <p class="figures" key={name} data-gate={name}><span>gate “{name}”: fired on {fired} of {gate.strength.filter(Number.isFinite).length} rows{rows ? `, steered ${rows}` : ", steered none"}</span></p>;
      })}
    </div>
  );
}

function appliedTo(run: Run): number[] {
  const all: number[] = [];
  for (const gate of Object.values(run.gates)) gate.applied.forEach((value, i) => { if (value > 0) all[i] = Math.max(all[i] ?? 0, value); });
  return all;
}

export function Line({ label, values, threshold, first, shaded = [] }: { label: string; values: number[]; threshold?: number | undefined; first: number; shaded?: number[] }) {
  void tick.value;
  // The first token's row is many times as long as any other: it would leave the others a flat line.
  const later = values.slice(1).filter(Number.isFinite);
  const isCut = later.length > 1 && Number.isFinite(values[0]);
  const finite = later.length > 1 ? later : values.filter(Number.isFinite);
  if (!finite.length) return null;
  const [least, most] = extent(finite);
  const range = `${shown(least)} to ${shown(most)}${isCut ? " without the first token" : ""}`;
  const low = Math.min(least, threshold ?? least);
  const high = Math.max(most, threshold ?? most, low + 1e-9);
  const x = (i: number) => (i / Math.max(1, values.length - 1)) * WIDTH;
  const y = (value: number) => HEIGHT - 4 - ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * (HEIGHT - 8);
  let line = "";
  values.forEach((value, i) => {
    if (Number.isFinite(value)) line += `${line === "" || !Number.isFinite(values[i - 1]) ? "M" : "L"}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
  });
  const step = WIDTH / Math.max(1, values.length - 1);
  return (
    <figure class="line">
      <figcaption>{label}: {range}{threshold === undefined ? "" : `, threshold ${shown(threshold)}`}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`${label} by token, from ${range}`}>
        {shaded.map((value, i) => value > 0 && <rect key={i} x={x(i) - step / 2} y={0} width={step} height={HEIGHT} class="applied" />)}
        <line x1={x(first - 0.5)} x2={x(first - 0.5)} y1={0} y2={HEIGHT} class="begin" />
        {threshold !== undefined && <line x1={0} x2={WIDTH} y1={y(threshold)} y2={y(threshold)} class="threshold" />}
        <path d={line} />
      </svg>
    </figure>
  );
}
