// Small parts that several views use.

import { cloneElement, type ComponentChildren, type VNode } from "preact";
import { useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Scale } from "./colour";
import { cellColour, shown, tint } from "./colour";
import { pinned, set, type Run, type Series, settings, tick, type Token } from "./state";
import { cosineOf } from "./tensors";
import { visible } from "./tokens";

/** A control with its label. */
export function Field({ label, children, hint }: { label: string; children: VNode<{ id?: string; "aria-describedby"?: string }>; hint?: string }) {
  const id = useId();
  const described = hint ? { "aria-describedby": `${id}-hint` } : {};
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {cloneElement(children, { id, ...described })}
      {hint && <small id={`${id}-hint`}>{hint}</small>}
    </div>
  );
}

export function Choice<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: readonly { value: T; label: string; isOff?: boolean }[]; onChange: (value: T) => void }) {
  return (
    <Field label={label}>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value as T)}>
        {options.map((option) => (
          <option key={option.value} value={option.value} disabled={option.isOff ?? false}>
            {option.label}
          </option>
        ))}
      </select>
    </Field>
  );
}

export function Notice({ text, kind = "info" }: { text: string; kind?: "info" | "error" }) {
  if (!text) return null;
  return (
    <p class={`notice ${kind}`} role={kind === "error" ? "alert" : "status"}>
      {text}
    </p>
  );
}

export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const element = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    element.current?.showModal();
  }, []);
  return (
    <dialog ref={element} onClose={onClose} aria-label={title}>
      <header>
        <h2>{title}</h2>
        <button type="button" class="quiet" onClick={() => element.current?.close()} aria-label="Close">
          ✕
        </button>
      </header>
      {children}
    </dialog>
  );
}

/** The scale beside what is coloured by it. */
export function Legend({ scale, label }: { scale: Scale | null; label: string }) {
  if (!scale) return null;
  const steps = Array.from({ length: 9 }, (_, i) => scale.low + ((scale.high - scale.low) * i) / 8);
  return (
    <span class="legend" role="img" aria-label={`${label}: from ${shown(scale.low)} to ${shown(scale.high)}`}>
      <span>{shown(scale.low)}</span>
      {steps.map((value) => (
        <i style={{ background: tint(value, scale) || "transparent" }} />
      ))}
      <span>{shown(scale.high)}</span>
    </span>
  );
}

export function GridLegend({ scale, label }: { scale: Scale | null; label: string }) {
  if (!scale) return null;
  const steps = Array.from({ length: 24 }, (_, i) => scale.low + ((scale.high - scale.low) * i) / 23);
  return (
    <span class="legend" role="img" aria-label={`${label}: from ${shown(scale.low)} to ${shown(scale.high)}`}>
      <span>{shown(scale.low)}</span>
      {steps.map((value) => (
        <i style={{ background: `rgb(${cellColour(value, scale).join(" ")})` }} />
      ))}
      <span>{shown(scale.high)}</span>
    </span>
  );
}

interface TokensProps {
  tokens: Token[];
  /** Position of the first of them in the request. */
  first: number;
  series: Record<string, Series>;
  colourBy: string;
  scale: Scale | null;
  label: string;
  /** The first token in which this answer differs from the one beside it; -1 if there is none. */
  mark?: number;
  onPick?: (position: number) => void;
  /** Whose tokens they are, if they can be compared with the pinned one. */
  run?: Run;
}

/** Tokens with their colours; the arrow keys and the pointer show the numbers of one. */
export function Tokens({ tokens, first, series, colourBy, scale, label, mark = -1, onPick, run }: TokensProps) {
  void tick.value; // runs grow in place
  const [at, setAt] = useState<number | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const card = useRef<HTMLDivElement>(null);
  const values = series[colourBy]?.values;
  // Thousands of spans: made anew when they change, and not when the pointer moves.
  const spans = useMemo(
    () =>
      tokens.map((each, i) => {
        const value = values?.[first + i];
        const background = scale && value !== undefined ? tint(value, scale) : "";
        return (
          <span key={i} data-i={i} class={i === mark ? "token marked" : "token"} style={background ? { background } : {}}>
            {each.text}
          </span>
        );
      }),
    [tokens, tick.value, values, first, scale?.low, scale?.high, mark],
  );
  useLayoutEffect(() => {
    const span = at === null ? null : box.current?.querySelector<HTMLElement>(`[data-i="${at}"]`);
    box.current?.querySelector(".token.at")?.classList.remove("at");
    span?.classList.add("at");
    box.current?.querySelector(".token.pinned")?.classList.remove("pinned");
    if (run && pinned.value?.run === run) box.current?.querySelector(`[data-i="${pinned.value.position - first}"]`)?.classList.add("pinned");
    if (!span || !card.current || !box.current) return;
    const width = card.current.offsetWidth;
    card.current.style.left = `${Math.max(0, Math.min(span.offsetLeft, box.current.clientWidth - width))}px`;
    card.current.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
  });
  const over = (event: Event) => {
    const index = (event.target as HTMLElement).dataset?.["i"];
    if (index !== undefined) setAt(Number(index));
  };
  const key = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[event.key];
    if (event.key === "Escape") setAt(null);
    else if (event.key === "Enter" && at !== null) onPick?.(first + at);
    else if (step) {
      event.preventDefault();
      setAt(Math.max(0, Math.min(tokens.length - 1, at === null ? 0 : at + step)));
    }
  };
  const token = at === null ? undefined : tokens[at];
  return (
    <div class="tokens" ref={box} tabIndex={0} role="group" aria-label={`${label}. Use the arrow keys to step through its tokens.`} onMouseOver={over} onClick={(event) => { over(event); const index = (event.target as HTMLElement).dataset?.["i"]; if (index !== undefined) onPick?.(first + Number(index)); }} onMouseLeave={() => setAt(null)} onKeyDown={key} onBlur={() => setAt(null)}>
      {spans}
      {token && at !== null && (
        <div class="card" ref={card} role="status">
          <TokenNumbers token={token} position={first + at} series={series} run={run} />
        </div>
      )}
    </div>
  );
}

interface NumbersProps { token: Token; position: number; series: Record<string, Series>; run?: Run | undefined }

/** The series of a name in the runs that have one; empty if they were read from different sources, as their labels say. */
export function alike(runs: Run[], name: string): Series[] {
  const found = runs.flatMap((run) => run.series[name] ?? []);
  return found.every((each) => each.label === found[0]!.label) ? found : [];
}

export function TokenNumbers({ token, position, series, run }: NumbersProps) {
  void tick.value;
  const found = Object.entries(series).filter(([, each]) => Number.isFinite(each.values[position]));
  const pin = pinned.value;
  const other = run && pin && !(pin.run === run && pin.position === position) ? pin : null;
  const cosine = other ? cosineOfRows(run!, position, other.run, other.position) : NaN;
  return (
    <>
      <b>{visible(token.text)}</b> <small>position {position}{token.id === null ? "" : `, id ${token.id}`}</small>
      <table>
        {other && <thead><tr><td /><th scope="col">here</th><th scope="col">− pinned</th></tr></thead>}
        <tbody>
          {found.map(([name, each]) => (
            <tr key={name} data-series={name}>
              <th scope="row">{each.label}</th>
              <td data-value={each.values[position]}>{shown(each.values[position])}</td>
              {other && <Difference value={each.values[position]! - (alike([run!, other.run], name)[1]?.values[other.position] ?? NaN)} />}
            </tr>
          ))}
          {Number.isFinite(cosine) && <tr data-series="pinned-cosine"><th scope="row">cosine to the pinned token’s row</th><td data-value={cosine}>{shown(cosine)}</td></tr>}
        </tbody>
      </table>
      {token.top.length > 0 && <Alternatives list={token.top} />}
    </>
  );
}

/** Tokens with their probabilities; a log-probability that the server could not compute is null. */
export function Alternatives({ list }: { list: { text: string; logprob: number | null }[] }) {
  return (
    <ol class="alternatives">
      {list.map(({ text, logprob }, i) => {
        const share = logprob === null ? NaN : Math.exp(logprob);
        return <li key={i} data-logprob={logprob}><i style={{ width: `${(share * 6 || 0).toFixed(2)}em` }} /><span>{visible(text)}</span> <small>{Number.isFinite(share) ? `${(share * 100).toFixed(1)} %` : "–"}</small></li>;
      })}
    </ol>
  );
}

function Difference({ value }: { value: number }) {
  return <td class="difference" data-difference={value}>{value > 0 ? "+" : ""}{shown(value)}</td>;
}

/** The row of a token at the layer that is read; null if it was not. */
export function rowAt(run: Run, position: number): Float32Array | null {
  const found = run.streamRows;
  const at = found?.positions.indexOf(position) ?? -1;
  const width = found?.tensor.shape[1] ?? 0;
  return at < 0 ? null : (found!.tensor.data as Float32Array).subarray(at * width, (at + 1) * width);
}

function cosineOfRows(run: Run, position: number, other: Run, at: number): number {
  const [a, b] = [rowAt(run, position), rowAt(other, at)];
  return a && b && run.streamRows!.site === other.streamRows!.site ? cosineOf(a, b) : NaN;
}

/** What tokens may be coloured by, over all runs that are shown. */
export function ColourChoice({ runs }: { runs: Run[] }) {
  void tick.value;
  const found = new Map<string, string>();
  for (const run of runs) for (const [name, series] of Object.entries(run.series)) found.set(name, series.label);
  if (!found.size) found.set("surprise", "surprise (nats)");
  const options = [{ value: "", label: "nothing" }, ...Array.from(found, ([value, label]) => ({ value, label }))];
  const value = found.has(settings.value.colourBy) ? settings.value.colourBy : "";
  return <Choice label="Colour by" value={value} options={options} onChange={(colourBy) => set({ colourBy })} />;
}
