// Tensors of answers: safetensors in base64, read into float32, and vectors written back in the forms of the API.

export interface Tensor { shape: number[]; data: Float32Array | Int32Array | BigInt64Array }
export type Tensors = Record<string, Tensor>;

export function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export function toBase64(bytes: Uint8Array): string {
  let binary = "";
  for (let i = 0; i < bytes.length; i += 0x8000) binary += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(binary);
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function values(dtype: string, bytes: Uint8Array<ArrayBuffer>): Tensor["data"] {
  const copy = bytes.slice().buffer; // aligned, whatever the offset was
  if (dtype === "F32") return new Float32Array(copy);
  if (dtype === "I32") return new Int32Array(copy);
  if (dtype === "I64") return new BigInt64Array(copy);
  if (dtype === "F64") return Float32Array.from(new Float64Array(copy));
  if (dtype === "I16") return Int32Array.from(new Int16Array(copy));
  if (dtype === "BF16") {
    const narrow = new Uint16Array(copy);
    const wide = new Uint32Array(narrow.length);
    for (let i = 0; i < narrow.length; i++) wide[i] = narrow[i]! << 16;
    return new Float32Array(wide.buffer);
  }
  if (dtype === "F16") return Float32Array.from(new Uint16Array(copy), half);
  throw new Error(`tensors of type ${dtype} cannot be shown`);
}

/** The tensors and the metadata of a file. Throws where it is damaged. */
export function readSafetensors(bytes: Uint8Array<ArrayBuffer>): { tensors: Tensors; metadata: Record<string, string> } {
  if (bytes.length < 8) throw new Error("this is no safetensors file: it is too short");
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  if (length > bytes.length - 8) throw new Error("this is no safetensors file: its header is longer than it is");
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length))) as Record<string, unknown>;
  const tensors: Tensors = Object.create(null) as Tensors;
  for (const [name, about] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const { dtype, shape, data_offsets: [begin, end] } = about as { dtype: string; shape: number[]; data_offsets: [number, number] };
    const data = values(dtype, bytes.subarray(8 + length + begin, 8 + length + end));
    if (data.length !== shape.reduce((product, size) => product * size, 1)) throw new Error(`the file is damaged: ${name} has ${data.length} values and the shape [${shape.join(", ")}]`);
    tensors[name] = { shape, data };
  }
  return { tensors, metadata: (header["__metadata__"] ?? {}) as Record<string, string> };
}

/** A file with one float32 tensor for each name, as `headgate vectors` and `--steering-modules` read it. */
export function writeSafetensors(rows: Record<string, Float32Array>, metadata: Record<string, string>): Uint8Array {
  const header: Record<string, unknown> = { __metadata__: metadata };
  let offset = 0;
  for (const [name, row] of Object.entries(rows)) {
    header[name] = { dtype: "F32", shape: [row.length], data_offsets: [offset, offset + row.byteLength] };
    offset += row.byteLength;
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (new TextEncoder().encode(text).length % 8)) % 8);
  const head = new TextEncoder().encode(text);
  const file = new Uint8Array(8 + head.length + offset);
  new DataView(file.buffer).setBigUint64(0, BigInt(head.length), true);
  file.set(head, 8);
  let at = 8 + head.length;
  for (const row of Object.values(rows)) {
    file.set(new Uint8Array(row.buffer, row.byteOffset, row.byteLength), at);
    at += row.byteLength;
  }
  return file;
}

/** Vectors of one hook point, packed as `steering_vectors` takes them. */
export function packed(layers: number[], rows: Float32Array[]): Record<string, unknown> {
  const width = rows[0]!.length;
  const all = new Float32Array(rows.length * width);
  rows.forEach((row, i) => all.set(row, i * width));
  return { dtype: "float32", shape: [rows.length, width], layer_indices: layers, data: toBase64(new Uint8Array(all.buffer)) };
}

export function norm(row: Float32Array): number {
  let sum = 0;
  for (let i = 0; i < row.length; i++) sum += row[i]! * row[i]!;
  return Math.sqrt(sum);
}

export function dot(a: Float32Array, b: Float32Array): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i]! * b[i]!;
  return sum;
}

export function cosineOf(a: Float32Array, b: Float32Array): number {
  return dot(a, b) / (norm(a) * norm(b) || NaN);
}

/** Norms of the rows of a tensor [rows, width]. */
export function rowNorms(tensor: Tensor): Float32Array {
  const [rows = 0, width = 0] = tensor.shape;
  const data = tensor.data as Float32Array;
  return Float32Array.from({ length: rows }, (_, i) => norm(data.subarray(i * width, (i + 1) * width)));
}

/** Cosines of the rows of two tensors of one shape. */
export function rowCosines(a: Tensor, b: Tensor): Float32Array {
  const [rows = 0, width = 0] = a.shape;
  const left = a.data as Float32Array;
  const right = b.data as Float32Array;
  return Float32Array.from({ length: rows }, (_, i) => {
    const x = left.subarray(i * width, (i + 1) * width);
    const y = right.subarray(i * width, (i + 1) * width);
    return cosineOf(x, y);
  });
}

/** Cosines of the rows of a tensor and one vector. */
export function cosinesTo(tensor: Tensor, vector: Float32Array): Float32Array {
  const [rows = 0, width = 0] = tensor.shape;
  const data = tensor.data as Float32Array;
  const size = norm(vector);
  return Float32Array.from({ length: rows }, (_, i) => {
    const row = data.subarray(i * width, (i + 1) * width);
    return dot(row, vector) / (norm(row) * size || NaN);
  });
}
