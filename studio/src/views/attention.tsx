// Attention patterns of a layer: its heads as small pictures, one of them large, and the strongest keys of a token.

import { useEffect, useRef, useState } from "preact/hooks";
import { cellColour, shown } from "../colour";
import { Choice, Notice } from "../parts";
import { readAttention } from "../run";
import { type Attention, attentionLayers, currentRun, isRecorded, set, settings, tick, type Token } from "../state";
import { visible } from "../tokens";
import { tokensOf } from "./grid";
import { Restored } from "./restored";

const SCALE = { low: 0, high: 1, isSigned: false };

export function AttentionView() {
  void tick.value;
  const [head, setHead] = useState(0);
  const [cell, setCell] = useState<{ query: number; key: number } | null>(null);
  const [error, setError] = useState("");
  const [isReading, setReading] = useState(false);
  const found = currentRun.value;
  if (isRecorded.value) return <section class="empty"><h2>Attention</h2><p>A recording has no attention patterns.</p></section>;
  if (!found) return <section class="empty"><h2>Attention</h2><p>Ask something under “Chat” first; this view then shows the attention of its tokens.</p><Restored /></section>;
  const layers = attentionLayers.value;
  if (!layers.length) return <section class="empty"><h2>Attention</h2><p>This server has the consumer attention, and captures no layer’s q and k: it needs them in --capture-sites.</p></section>;
  const { run } = found;
  const layer = layers.includes(settings.value.attentionLayer) ? settings.value.attentionLayer : layers[Math.floor(layers.length / 2)]!;
  const attention = run.attention;
  const read = async () => {
    setError("");
    setReading(true);
    try {
      await readAttention(run, layer);
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setReading(false);
  };
  const at = attention && head < attention.numHeads ? head : 0;
  return (
    <section>
      <div class="bar">
        <Choice label="Layer" value={String(layer)} options={layers.map((value) => ({ value: String(value), label: String(value) }))} onChange={(value) => set({ attentionLayer: Number(value) })} />
        <button type="button" disabled={isReading} onClick={() => void read()}>{isReading ? "reading …" : "Read its attention"}</button>
        {attention && <small>layer {attention.layer}: {attention.numHeads} heads, {attention.queries.length} tokens; the patterns are those of the tokens without steering</small>}
      </div>
      <Notice kind="error" text={error} />
      {attention && (
        <>
          <div class="heads" role="group" aria-label="Heads">
            {Array.from({ length: attention.numHeads }, (_, i) => (
              <button type="button" class="quiet head" key={i} aria-pressed={i === at} aria-label={`Head ${i}`} onClick={() => setHead(i)}>
                <Pattern attention={attention} head={i} size={92} />
                <span>{i}</span>
              </button>
            ))}
          </div>
          <div class="columns">
            <div class="panel">
              <h3>Head {at}: queries by row, keys by column</h3>
              <Pattern attention={attention} head={at} size={440} cell={cell} onCell={setCell} label={`Head ${at} of layer ${attention.layer}. Use the arrow keys to step through tokens.`} />
            </div>
            {cell && <Keys attention={attention} head={at} query={cell.query} tokens={tokensOf(run)} />}
          </div>
        </>
      )}
    </section>
  );
}

export function weight(attention: Attention, head: number, query: number, key: number): number {
  return attention.values[(query * attention.numHeads + head) * attention.numKeys + key]!;
}

interface PatternProps { attention: Attention; head: number; size: number; cell?: { query: number; key: number } | null; onCell?: (cell: { query: number; key: number }) => void; label?: string }

function Pattern({ attention, head, size, cell, onCell, label }: PatternProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { queries, numKeys } = attention;
  useEffect(() => {
    const image = new ImageData(numKeys, queries.length);
    queries.forEach((position, query) => {
      for (let key = 0; key < numKeys; key++) {
        // Square roots: a pattern has few large weights and many small ones.
        const value = key <= position ? Math.sqrt(weight(attention, head, query, key)) : NaN;
        image.data.set(Number.isNaN(value) ? [127, 127, 127, 40] : [...cellColour(value, SCALE), 255], (query * numKeys + key) * 4);
      }
    });
    const target = canvas.current!;
    target.width = numKeys;
    target.height = queries.length;
    target.getContext("2d")!.putImageData(image, 0, 0);
  }, [attention, head]);
  const style = { width: `${size}px`, aspectRatio: `${numKeys} / ${queries.length}` };
  if (!onCell) return <canvas ref={canvas} class="pattern" style={style} aria-hidden="true" />;
  const key = (event: KeyboardEvent) => {
    const step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const query = Math.max(0, Math.min(queries.length - 1, (cell?.query ?? -1) + step));
    onCell({ query, key: 0 });
  };
  const over = (event: MouseEvent) => {
    const from = canvas.current!.getBoundingClientRect();
    const place = (value: number, count: number) => Math.max(0, Math.min(count - 1, Math.floor(value * count)));
    onCell({ query: place((event.clientY - from.top) / from.height, queries.length), key: place((event.clientX - from.left) / from.width, numKeys) });
  };
  return (
    <div class="large" tabIndex={0} role="application" aria-label={label} onKeyDown={key}>
      <canvas ref={canvas} class="pattern" style={style} onMouseMove={over} onClick={over} />
    </div>
  );
}

function Keys({ attention, head, query, tokens }: { attention: Attention; head: number; query: number; tokens: Token[] }) {
  const position = attention.queries[query]!;
  const all = Array.from({ length: position + 1 }, (_, key) => ({ key, value: weight(attention, head, query, key) }));
  const strongest = all.sort((a, b) => b.value - a.value).slice(0, 10);
  return (
    <div class="panel" role="status">
      <h3>Keys of token {position} “{visible(tokens[position]?.text ?? "")}”</h3>
      <ol class="alternatives keys">
        {strongest.map(({ key, value }) => (
          <li key={key} data-key={key} data-value={value}><i style={{ width: `${(value * 12).toFixed(2)}em` }} /><span>{key} {visible(tokens[key]?.text ?? "")}</span> <small>{shown(value)}</small></li>
        ))}
      </ol>
    </div>
  );
}

