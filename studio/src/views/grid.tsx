// Layer × token on a canvas: norms, cosines to the layer before, and a lens where the server has one.

import { signal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { cellColour, scaleOf, type Scale, shown } from "../colour";
import { Alternatives, Choice, Field, GridLegend, Notice } from "../parts";
import { type ReadRow, readGrid, readRow } from "../run";
import { currentRun, facts, type Grid, inlineName, isRecorded, type Item, items, lensName, offered, type Run, set, settings, sites, tick, type Token, view } from "../state";
import { Restored } from "./restored";
import { cosineOf, norm } from "../tensors";
import { visible } from "../tokens";

export type Shows = "norm" | "cosine" | "probe" | "lens" | "rank";

/** The values of a grid, [layers][tokens]; scores are of one probe, or of the first one at each layer. */
export function valuesOf(grid: Grid, shows: Shows, probe = ""): number[][] {
  if (shows === "norm") return grid.norms;
  if (shows === "cosine") return grid.cosines;
  if (shows === "probe") return grid.layers.map((layer) => grid.probes.find((each) => each.layer === layer && (!probe || each.name === probe))?.values ?? new Array<number>(grid.numTokens).fill(NaN));
  const lens = grid.lens;
  if (!lens) return [];
  return grid.layers.map((layer) => {
    const row = new Array<number>(grid.numTokens).fill(NaN);
    const found = lens.layers[String(layer)];
    lens.positions.forEach((position, i) => {
      row[position] = shows === "rank" ? Math.log10(1 + (found?.token_ranks?.[i]?.[0] ?? NaN)) : Math.exp(found?.logprobs[i]?.[0] ?? NaN);
    });
    return row;
  });
}

const LABELS: Record<Shows, string> = {
  norm: "norm of the stream",
  cosine: "cosine to the layer before",
  probe: "score of a probe",
  lens: "probability of the lens’ first token",
  rank: "rank of the chosen token, log₁₀(1 + rank)",
};

export function GridView() {
  void tick.value;
  const found = currentRun.value;
  const [progress, setProgress] = useState("");
  const [error, setError] = useState("");
  const [cell, setCell] = useState<{ row: number; column: number } | null>(null);
  const [isHeld, setHeld] = useState(false); // a click holds a cell, so that the pointer can leave it
  const grid = found?.run.grid ?? null;
  const options: { value: Shows; label: string }[] = [{ value: "norm", label: LABELS.norm }, { value: "cosine", label: LABELS.cosine }];
  if (grid?.probes.length) options.push({ value: "probe", label: LABELS.probe });
  if (grid?.lens) options.push({ value: "lens", label: LABELS.lens });
  if (grid?.lens?.tokens.length) options.push({ value: "rank", label: LABELS.rank });
  const chosen = options.find((option) => option.value === settings.value.gridShows)?.value ?? "norm";
  const probe = grid?.probes.some((each) => each.name === settings.value.gridProbe) ? settings.value.gridProbe : "";
  const { values, scale } = useMemo(() => {
    const all = grid ? valuesOf(grid, chosen, probe) : [];
    // The first token’s row is many times as long as any other, and so are its scores.
    return { values: all, scale: scaleOf(chosen === "probe" ? all.flatMap((row) => row.slice(1)) : all.flat()) };
  }, [grid, chosen, probe]);
  if (!found) return <section class="empty"><h2>Grid</h2><p>Ask something under “Chat” first; this view then shows its tokens layer by layer.</p><Restored /></section>;
  const { run } = found;
  const read = async () => {
    setError("");
    try {
      await readGrid(run, setProgress);
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setProgress("");
  };
  const hooks = Object.keys(sites.value);
  return (
    <section class="grid-view">
      <div class="bar">
        <Choice label="Shows" value={chosen} options={options} onChange={(gridShows) => set({ gridShows })} />
        {chosen === "probe" && grid!.probes.length > 1 && <Choice label="Probe" value={probe} options={[{ value: "", label: "the first of each layer" }, ...grid!.probes.map(({ name }) => ({ value: name, label: name }))]} onChange={(gridProbe) => set({ gridProbe })} />}
        {!isRecorded.value && hooks.length > 0 && <Choice label="Hook point" value={settings.value.readHook} options={hooks.map((name) => ({ value: name, label: name }))} onChange={(readHook) => set({ readHook, readLayer: (sites.value[readHook] ?? [])[0] ?? -1 })} />}
        {!isRecorded.value && lensName.value && (
          <>
            <Choice label="Lens" value={settings.value.lens} options={[{ value: "", label: "none" }, ...offered("lens", "lens").map((name) => ({ value: name, label: name }))]} onChange={(lens) => set({ lens })} />
            {settings.value.lens && <Field label="Rank of the token"><input value={settings.value.lensToken} placeholder="such as “ Paris”" onChange={(event) => set({ lensToken: event.currentTarget.value })} /></Field>}
          </>
        )}
        {!isRecorded.value && (inlineName.value || lensName.value) && <button type="button" disabled={!!progress} onClick={() => void read()}>{grid ? "Read all layers again" : "Read all layers"}</button>}
        {scale && <span class="legend-line">{LABELS[chosen]} <GridLegend scale={scale} label={LABELS[chosen]} /></span>}
      </div>
      {run.kind === "steered" && !grid && <Notice text="These are the tokens of the steered answer. “Read all layers” reads them without steering; to see the steered stream, choose “Read rows: of all layers” in the chat and answer again." />}
      {!inlineName.value && !lensName.value && !isRecorded.value && <Notice text="This server sends no rows with its answers: it needs the consumer inline (--capture-consumers inline), and your key its permission." />}
      {chosen === "probe" && grid!.probes.length < grid!.layers.length && <Notice text="A probe reads one layer: other layers have no score. Hold a cell to see its vectors, features and lens." />}
      {chosen === "lens" && grid && !isWritten(grid) && <Notice text="So many tokens fit only as colours: point at a cell to read its tokens." />}
      <Notice text={progress} />
      <Notice kind="error" text={error} />
      {grid && scale && <Canvas grid={grid} run={run} values={values} scale={scale} cell={cell} onCell={setCell} isHeld={isHeld} onHold={setHeld} shows={chosen} />}
      {grid && cell && (
        <div class="columns">
          <Cell grid={grid} run={run} row={cell.row} column={cell.column} />
          {!isRecorded.value && inlineName.value && <Row run={run} layer={grid.layers[cell.row]!} hook={grid.hook} position={cell.column} isHeld={isHeld} />}
        </div>
      )}
    </section>
  );
}

const TEXT_WIDTH = 64;

/** Whether tokens can be written into the cells of a lens: a canvas is no wider than 32,000 pixels. */
function isWritten(grid: Grid): boolean {
  return grid.layers.length > 0 && TEXT_WIDTH * grid.numTokens + 60 <= 32_000;
}

export function tokensOf(run: Run): Token[] {
  return [...run.prompt, ...run.answer];
}

/** The row that was read last, and the one that others are compared with. */
export const lastRow = signal<ReadRow | null>(null);
const kept = signal<ReadRow | null>(null);

interface RowProps { run: Run; layer: number; hook: string; position: number; isHeld: boolean }

/** The row of a cell: what it is near to, its features, its lens, and steering that begins from it. */
function Row({ run, layer, hook, position, isHeld }: RowProps) {
  const [error, setError] = useState("");
  const [isReading, setReading] = useState(false);
  const read = async () => {
    setError("");
    setReading(true);
    try {
      lastRow.value = await readRow(run, layer, hook, position);
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setReading(false);
  };
  const found = lastRow.value;
  const isThis = found?.layer === layer && found.hook === hook && found.position === position;
  useEffect(() => { if (isHeld && !isThis) void read(); }, [isHeld, layer, hook, position]);
  return (
    <div class="panel" data-row={isThis ? `${layer}.${hook}@${position}` : ""}>
      <div class="bar">
        <button type="button" disabled={isReading} onClick={() => void read()}>{isReading ? "reading …" : `Read the row of ${layer}.${hook}, token ${position}`}</button>
        {isThis && <button type="button" class="quiet" onClick={() => (kept.value = found)}>Compare others with it</button>}
        {isThis && <SteerFrom found={found} token={tokensOf(run)[position]?.text ?? ""} />}
      </div>
      <Notice kind="error" text={error} />
      {isThis && <RowFacts found={found} />}
    </div>
  );
}

function SteerFrom({ found, token }: { found: ReadRow; token: string }) {
  if (!facts.value?.layers?.hook_points[found.hook]?.includes(found.layer)) return null;
  const site = `${found.layer}.${found.hook}`;
  const steer = () => {
    const name = `row ${site} of token ${found.position} “${visible(token).slice(0, 20)}”`;
    const item: Item = { name, kind: "local", isOn: true, how: "add", scale: 0.5, phase: "both", site, row: found.row, about: `norm ${shown(norm(found.row))}` };
    items.value = [...items.value.filter((other) => other.name !== name), item];
    view.value = "steer";
  };
  return <button type="button" class="quiet" onClick={steer}>Steer from here</button>;
}

function RowFacts({ found }: { found: ReadRow }) {
  const other = kept.value;
  const isOther = other && other.row.length === found.row.length && !(other.layer === found.layer && other.hook === found.hook && other.position === found.position);
  return (
    <>
      <small>Read without steering.</small>
      {isOther && (
        <table>
          <caption>Compared with {other.layer}.{other.hook}, token {other.position}</caption>
          <tbody>
            <tr data-compared="cosine"><th scope="row">cosine of both rows</th><td data-value={cosineOf(found.row, other.row)}>{shown(cosineOf(found.row, other.row))}</td></tr>
            <tr data-compared="norm"><th scope="row">norm, this − that</th><td data-value={norm(found.row) - norm(other.row)}>{shown(norm(found.row) - norm(other.row))}</td></tr>
          </tbody>
        </table>
      )}
      <h3>Nearest vectors</h3>
      {found.vectors.length === 0 && <p class="faint">None can be compared: registered vectors are read at their own op sites, those of this tab everywhere.</p>}
      <table><tbody>{found.vectors.map((each) => <tr key={each.name} data-vector={each.name}><th scope="row">{each.name}</th><td data-value={each.cosine}>{shown(each.cosine)}</td></tr>)}</tbody></table>
      {found.features && (
        <>
          <h3>Strongest features of {found.features.sae}</h3>
          <table><tbody>{found.features.list.map((each) => <tr key={each.id} data-strongest={each.id}><th scope="row">{each.id} {each.label}</th><td data-value={each.value}>{shown(each.value)}</td></tr>)}</tbody></table>
        </>
      )}
      {found.lens && (
        <>
          <h3>The lens {found.lens.name} reads</h3>
          <Alternatives list={found.lens.list} />
        </>
      )}
    </>
  );
}

interface CanvasProps { grid: Grid; run: Run; values: number[][]; scale: Scale; cell: { row: number; column: number } | null; onCell: (cell: { row: number; column: number }) => void; isHeld: boolean; onHold: (isHeld: boolean) => void; shows: Shows }

/** Room for names of tokens, which are written upright if there is a column for each. */
const TOPS = { upright: 24, slanted: 84 };
const LEFT = 44;

function Canvas({ grid, run, values, scale, cell, onCell, isHeld, onHold, shows }: CanvasProps) {
  void tick.value; // the theme changes it, too
  const colour = getComputedStyle(document.body).color;
  const canvas = useRef<HTMLCanvasElement>(null);
  const axis = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const tokens = tokensOf(run);
  const layers = grid.layers.length;
  const isText = shows === "lens" && isWritten(grid);
  const cellWidth = Math.max(isText ? TEXT_WIDTH : 2, Math.min(isText ? 90 : 26, Math.floor((width - LEFT - 60) / Math.max(1, grid.numTokens))));
  const cellHeight = isText ? 18 : Math.max(4, Math.min(18, Math.floor(520 / Math.max(1, layers))));
  useEffect(() => {
    const watcher = new ResizeObserver(() => setWidth(box.current?.clientWidth ?? 0));
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  const top = isText ? TOPS.upright : TOPS.slanted;
  const total = { width: cellWidth * grid.numTokens + 60, height: top + cellHeight * layers + 4 };
  useEffect(() => {
    drawAxis(axis.current!, grid.layers, cellHeight, top, total.height);
    draw(canvas.current!, { grid, tokens, values, scale, cellWidth, cellHeight, isText, top, total });
  }, [grid, values, scale, cellWidth, cellHeight, colour]);
  const place = (event: MouseEvent): { row: number; column: number } | null => {
    const from = canvas.current!.getBoundingClientRect();
    const column = Math.floor((event.clientX - from.left) / cellWidth);
    const row = layers - 1 - Math.floor((event.clientY - from.top - top) / cellHeight);
    return column >= 0 && column < grid.numTokens && row >= 0 && row < layers ? { row, column } : null;
  };
  const key = (event: KeyboardEvent) => {
    if (event.key === "Enter" && cell) onHold(!isHeld);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    onHold(false);
    const at = cell ?? { row: 0, column: -1 };
    onCell({ row: Math.max(0, Math.min(layers - 1, at.row + step[0]!)), column: Math.max(0, Math.min(grid.numTokens - 1, at.column + step[1]!)) });
  };
  return (
    <div class="canvas" ref={box} tabIndex={0} role="application" aria-label={`${LABELS[shows]} by layer and token, ${layers} layers, ${grid.numTokens} tokens. Use the arrow keys to step through cells, and Enter to read one.`} onKeyDown={key}>
      <canvas ref={axis} class="axis" aria-hidden="true" />
      <canvas ref={canvas} onMouseMove={(event) => { const at = place(event); if (at && !isHeld) onCell(at); }} onClick={(event) => { const at = place(event); if (at) { onHold(!(isHeld && at.row === cell?.row && at.column === cell.column)); onCell(at); } }} />
      {cell && <span class={isHeld ? "cursor held" : "cursor"} aria-hidden="true" style={{ left: `${LEFT + cellWidth * cell.column}px`, top: `${top + cellHeight * (layers - 1 - cell.row)}px`, width: `${cellWidth}px`, height: `${cellHeight}px` }} />}
    </div>
  );
}

interface Drawing { grid: Grid; tokens: Token[]; values: number[][]; scale: Scale; cellWidth: number; cellHeight: number; isText: boolean; top: number; total: { width: number; height: number } }

/** A canvas of that size, empty, in the text's colour. */
function cleared(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = width * devicePixelRatio > 16000 ? 1 : devicePixelRatio;
  canvas.width = Math.min(32000, width * ratio);
  canvas.height = height * ratio;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  context.fillStyle = style.color;
  context.font = `11px ${style.fontFamily}`;
  return context;
}

/** Numbers of layers; they stay where they are while tokens are scrolled. */
function drawAxis(canvas: HTMLCanvasElement, layers: number[], cellHeight: number, top: number, height: number): void {
  const context = cleared(canvas, LEFT, height);
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / cellHeight));
  layers.forEach((layer, row) => { if (row % every === 0) context.fillText(String(layer), LEFT - 6, top + cellHeight * (layers.length - row) - cellHeight / 2 + 4); });
}

function draw(canvas: HTMLCanvasElement, drawing: Drawing): void {
  const { grid, tokens, values, scale, cellWidth, cellHeight, isText, top, total } = drawing;
  const context = cleared(canvas, total.width, total.height);
  const layers = grid.layers.length;
  const image = new ImageData(Math.max(1, grid.numTokens), Math.max(1, layers));
  for (let row = 0; row < layers; row++) {
    for (let column = 0; column < grid.numTokens; column++) {
      const [red, green, blue] = cellColour(values[row]?.[column] ?? NaN, scale);
      const at = ((layers - 1 - row) * grid.numTokens + column) * 4;
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 255;
    }
  }
  const small = document.createElement("canvas");
  small.width = image.width;
  small.height = image.height;
  small.getContext("2d")!.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, top, cellWidth * grid.numTokens, cellHeight * layers);
  if (cellWidth >= 11) {
    context.textAlign = "left";
    tokens.forEach((token, column) => {
      context.save();
      context.translate(cellWidth * (column + 0.5) + (isText ? 0 : 3), top - 5);
      context.rotate(isText ? 0 : -Math.PI / 3);
      context.textAlign = isText ? "center" : "left";
      context.fillText(visible(token.text).slice(0, 12), 0, 0);
      context.restore();
    });
  }
  if (isText) drawLens(context, drawing);
}

function drawLens(context: CanvasRenderingContext2D, { grid, values, scale, cellWidth, cellHeight, top }: Drawing): void {
  context.textAlign = "center";
  grid.layers.forEach((layer, row) => {
    const found = grid.lens?.layers[String(layer)];
    grid.lens?.positions.forEach((position, i) => {
      const [red, green, blue] = cellColour(values[row]?.[position] ?? NaN, scale);
      context.fillStyle = red * 0.3 + green * 0.59 + blue * 0.11 > 130 ? "#111" : "#fff";
      const text = found?.tokens[i]?.[0]; // a lens may lack layers
      if (text !== undefined) context.fillText(visible(text).slice(0, Math.floor(cellWidth / 7)), cellWidth * (position + 0.5), top + cellHeight * (grid.layers.length - row) - 5);
    });
  });
}

function Cell({ grid, run, row, column }: { grid: Grid; run: Run; row: number; column: number }) {
  void tick.value;
  const layer = grid.layers[row];
  const token = tokensOf(run)[column];
  const lens = grid.lens?.layers[String(layer)];
  const at = grid.lens?.positions.indexOf(column) ?? -1;
  return (
    <div class="panel cell" role="status">
      <b>{layer}.{grid.hook}</b>, token {column} “{visible(token?.text ?? "")}”
      <table>
        <tbody>
          <tr data-value="norm"><th scope="row">norm</th><td data-value={grid.norms[row]?.[column]}>{shown(grid.norms[row]?.[column])}</td></tr>
          <tr data-value="cosine"><th scope="row">cosine to the layer before</th><td data-value={grid.cosines[row]?.[column]}>{shown(grid.cosines[row]?.[column])}</td></tr>
          {grid.probes.filter((each) => each.layer === layer).map((each) => <tr key={each.name} data-probe-score={each.name}><th scope="row">probe {each.name}</th><td data-value={each.values[column]}>{shown(each.values[column])}</td></tr>)}
          {lens?.token_ranks && at >= 0 && grid.lens!.tokens.map((name, i) => <tr key={name} data-value="rank"><th scope="row">rank of “{visible(name)}”</th><td data-value={lens.token_ranks![at]?.[i]}>{lens.token_ranks![at]?.[i] ?? "–"}</td></tr>)}
        </tbody>
      </table>
      {lens && at >= 0 && <Alternatives list={lens.tokens[at]!.map((text, i) => ({ text, logprob: lens.logprobs[at]![i] ?? null }))} />}
    </div>
  );
}
