// Builds the page: node build.mjs [OUT]. The files are those that the wheel ships; the same sources give the same bytes.
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "capture", "engine", "server", "page");
await mkdir(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { studio: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
});
await copyFile(join(here, "src", "index.html"), join(out, "index.html"));
