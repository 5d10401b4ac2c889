// The dialog that gives a view's code, link and recording.

import { useState } from "preact/hooks";
import { Dialog, Notice } from "./parts";
import { attentionBody, readBody, rowBody } from "./run";
import { type Call, curl, download, headgate, leftOut, link, openai, recording } from "./share";
import { currentRun, isRecorded, view } from "./state";
import { lastRule } from "./views/dynamic";
import { lastRow } from "./views/grid";
import { lastListed, lastRows } from "./views/captures";
import { lastRegistered } from "./views/steer";

/** The calls that a view's numbers come from. */
function callsOf(): Call[] {
  const found = currentRun.value;
  const chat: Call[] = found ? found.turn.runs.map((run) => ({ title: run.kind === "plain" ? "The plain answer" : "The steered answer", method: "POST", path: run.path, body: run.body })) : [];
  switch (view.value) {
    case "grid": {
      const ids = found ? [...found.run.prompt, ...found.run.answer].map((token) => token.id) : [];
      if (!ids.length || ids.some((id) => id === null)) return [];
      const row = lastRow.value;
      return [
        { title: "All layers of these tokens", method: "POST", path: "/v1/completions", body: readBody(ids as number[], 0, ids.length) },
        ...(row && row.position < ids.length ? [{ title: "One row", method: "POST" as const, path: "/v1/completions", body: rowBody(ids as number[], row.layer, row.hook, row.position) }] : []),
      ];
    }
    case "attention": {
      const ids = found ? [...found.run.prompt, ...found.run.answer].map((token) => token.id) : [];
      if (!ids.length || ids.some((id) => id === null) || !found?.run.attention) return [];
      return [{ title: "Attention of these tokens", method: "POST", path: "/v1/completions", body: attentionBody(ids as number[], found.run.attention.layer) }];
    }
    case "steer":
      return [{ title: "What is registered", method: "GET", path: "/v1/steering", body: null }, ...(lastRegistered.value ? [{ title: "Register the vector", method: "POST" as const, path: "/v1/steering/modules/register", body: lastRegistered.value }] : []), ...chat];
    case "dynamic":
      return [{ title: "What acts, and how often", method: "GET", path: "/v1/steering/dynamic", body: null }, ...(lastRule.value ? [{ title: "Register the rule", method: "POST" as const, path: "/v1/steering/rules/register", body: lastRule.value }] : []), ...chat];
    case "captures":
      return [[lastListed.value, "The list of captures"], [lastRows.value, "The rows that were read last"]].flatMap(([path, title]) => (path ? [{ title: title!, method: "GET" as const, path, body: null }] : []));
    case "server":
      return [{ title: "The server’s figures", method: "GET", path: "/metrics", body: null }];
    default:
      return chat;
  }
}

export function TakeHome({ onClose }: { onClose: () => void }) {
  const [language, setLanguage] = useState<"curl" | "openai" | "headgate">("curl");
  const [error, setError] = useState("");
  const write = { curl, openai, headgate }[language];
  const calls = callsOf();
  const address = isRecorded.value ? null : link();
  const save = async () => {
    try {
      download("headgate-recording.html", await recording(), "text/html");
    } catch (failed) {
      setError(`The recording could not be made: ${failed instanceof Error ? failed.message : String(failed)}`);
    }
  };
  return (
    <Dialog title="Take it home" onClose={onClose}>
      <div role="group" aria-label="Language" class="tabs">
        {(["curl", "openai", "headgate"] as const).map((name) => (
          <button type="button" key={name} aria-pressed={language === name} onClick={() => setLanguage(name)}>{{ curl: "curl", openai: "openai client", headgate: "headgate client" }[name]}</button>
        ))}
      </div>
      {calls.length === 0 && <p>Ask something first: then its calls are here as code.</p>}
      {calls.map((call) => {
        const code = write(call);
        return <Code key={call.title} title={call.title} code={code} />;
      })}
      {!isRecorded.value && (
        <p class="actions">
          {address && <Copy text={address} label="Copy a link to this view" />}
          <button type="button" onClick={() => void save()}>Save as one HTML file</button>
        </p>
      )}
      {!isRecorded.value && <Notice text={address ? leftOut() : "This conversation is too long for a link; the HTML file has it all."} />}
      <p><small>Keys are in neither of them. A link holds the conversation’s texts and tokens, and what steers, with the vectors of this tab; a recording also the numbers of its tokens.</small></p>
      <Notice kind="error" text={error} />
    </Dialog>
  );
}

function Code({ title, code }: { title: string; code: string }) {
  return (
    <section class="code">
      <h3>{title} <Copy text={code} label="Copy" /></h3>
      <pre tabIndex={0} aria-label={title}>{code}</pre>
    </section>
  );
}

function Copy({ text, label }: { text: string; label: string }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea"); // pages without TLS have no clipboard
      area.value = text;
      (document.querySelector("dialog[open]") ?? document.body).append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return <button type="button" onClick={() => void copy()}>{isDone ? "Copied" : label}</button>;
}
