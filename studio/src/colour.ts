// Colour scales that people with any colour vision can read: one hue by strength, two hues around zero, cividis for grids.

export interface Scale { low: number; high: number; isSigned: boolean }

/** A scale over values: without the outermost fiftieth, since one attention sink would hide all others. */
export function scaleOf(values: Iterable<number>): Scale | null {
  const found = Array.from(values).filter(Number.isFinite).sort((a, b) => a - b);
  if (!found.length) return null;
  const at = (share: number) => found[Math.min(found.length - 1, Math.round(share * (found.length - 1)))]!;
  const low = at(found.length > 40 ? 0.02 : 0);
  const high = at(found.length > 40 ? 0.98 : 1);
  if (low < 0) {
    const bound = Math.max(-low, high) || 1;
    return { low: -bound, high: bound, isSigned: true };
  }
  return { low, high: high > low ? high : low + (Math.abs(low) || 1), isSigned: false };
}

/** The least and the largest of many numbers; a spread of them would be arguments, more than there may be. */
export function extent(values: readonly number[]): [number, number] {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

export function shareOf(value: number, scale: Scale): number {
  return Math.min(1, Math.max(0, (value - scale.low) / (scale.high - scale.low)));
}

/** The background of a token: translucent, so that text stays readable in light and dark. */
export function tint(value: number, scale: Scale): string {
  if (!Number.isFinite(value)) return "";
  const share = shareOf(value, scale);
  if (!scale.isSigned) return `rgb(36 112 214 / ${(share * 0.5).toFixed(3)})`;
  const strength = Math.abs(share - 0.5) * 2 * 0.55;
  return share < 0.5 ? `rgb(36 112 214 / ${strength.toFixed(3)})` : `rgb(224 122 20 / ${strength.toFixed(3)})`;
}

const CIVIDIS = [[0, 32, 77], [0, 43, 104], [42, 63, 108], [78, 83, 107], [107, 103, 110], [134, 124, 116], [164, 147, 112], [196, 172, 99], [228, 200, 79], [255, 234, 70]] as const;
const AROUND_ZERO = [[33, 92, 168], [96, 146, 203], [176, 204, 229], [245, 245, 245], [246, 203, 154], [230, 145, 56], [170, 84, 10]] as const;

/** Red, green and blue of a cell of a grid. */
export function cellColour(value: number, scale: Scale): [number, number, number] {
  if (!Number.isFinite(value)) return [127, 127, 127];
  const stops = scale.isSigned ? AROUND_ZERO : CIVIDIS;
  const place = shareOf(value, scale) * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(place));
  const [from, to] = [stops[index]!, stops[index + 1]!];
  const rest = place - index;
  return [0, 1, 2].map((i) => Math.round(from[i]! + (to[i]! - from[i]!) * rest)) as [number, number, number];
}

export function shown(value: number | undefined | null): string {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(2);
  return size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : value.toFixed(3);
}
