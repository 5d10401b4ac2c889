// Texts of tokens. Tokenizers name tokens in alphabets of their own; people read bytes.

const BYTE_OF = new Map<string, number>();
{
  // GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const isPlain = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    BYTE_OF.set(String.fromCodePoint(isPlain ? byte : next++), byte);
  }
}

function decoded(bytes: Uint8Array): string | null {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return null;
  }
}

/** The text of bytes, which of a token may be a part of a character: then they are written in hex. */
export function textOfBytes(bytes: ArrayLike<number>): string {
  const found = Uint8Array.from(bytes);
  return decoded(found) ?? Array.from(found, (byte) => `<${byte.toString(16).padStart(2, "0").toUpperCase()}>`).join("");
}

/** The texts of a tokenizer's own names (`return_token_strs` of /tokenize). */
export function textsOf(names: string[]): string[] {
  const isSentencePiece = names.some((name) => name.startsWith("▁"));
  return names.map((name) => {
    const byte = /^<0x([0-9A-F]{2})>$/.exec(name);
    if (byte) return textOfBytes([parseInt(byte[1]!, 16)]);
    if (isSentencePiece) return name.replaceAll("▁", " ");
    const bytes = Array.from(name, (character) => BYTE_OF.get(character));
    return bytes.every((found) => found !== undefined) ? textOfBytes(bytes as number[]) : name;
  });
}

/** A text in which blanks and line ends can be seen. */
export function visible(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}
