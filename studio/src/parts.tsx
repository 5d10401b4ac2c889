// Small parts that several views use.

import { cloneElement, type ComponentChildren, type VNode } from "preact";
import { useId, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Scale } from "./colour";
import { cellColour, shown, tint } from "./colour";
import { set, type Run, type Series, settings, tick, type Token } from "./state";
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
}

/** Tokens with their colours; the arrow keys and the pointer show the numbers of one. */
export function Tokens({ tokens, first, series, colourBy, scale, label, mark = -1, onPick }: TokensProps) {
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
          <TokenNumbers token={token} position={first + at} series={series} />
        </div>
      )}
    </div>
  );
}

export function TokenNumbers({ token, position, series }: { token: Token; position: number; series: Record<string, Series> }) {
  void tick.value;
  const found = Object.entries(series).filter(([, each]) => Number.isFinite(each.values[position]));
  return (
    <>
      <b>{visible(token.text)}</b> <small>position {position}{token.id === null ? "" : `, id ${token.id}`}</small>
      <table>
        <tbody>
          {found.map(([name, each]) => (
            <tr key={name} data-series={name}>
              <th scope="row">{each.label}</th>
              <td data-value={each.values[position]}>{shown(each.values[position])}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {token.top.length > 0 && (
        <ol class="alternatives">
          {token.top.map((other) => (
            <li key={other.text}>
              <i style={{ width: `${(Math.exp(other.logprob) * 6).toFixed(2)}em` }} />
              <span>{visible(other.text)}</span> <small>{(Math.exp(other.logprob) * 100).toFixed(1)} %</small>
            </li>
          ))}
        </ol>
      )}
    </>
  );
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
