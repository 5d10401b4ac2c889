// The page: its views, its keys, and how it keeps in touch with the server.

import "./studio.css";
import { effect } from "@preact/signals";
import { Component, type ComponentChildren, render } from "preact";
import { useState } from "preact/hooks";
import { Dialog, Field, Notice } from "./parts";
import { isDamaged, keepHash, openRecording, restore } from "./share";
import { branches, changed, facts, attentionName, featuresName, followed, gates, isRecorded, items, keys, loadFacts, setKeys, settings, turns, unreachable, type View, view, watched } from "./state";
import { TakeHome } from "./takehome";
import { AttentionView } from "./views/attention";
import { Captures } from "./views/captures";
import { Chat } from "./views/chat";
import { DynamicView } from "./views/dynamic";
import { FeaturesView } from "./views/features";
import { GridView } from "./views/grid";
import { ServerView } from "./views/server";
import { Steer } from "./views/steer";

const VIEWS: { view: View; label: string; show: () => preact.JSX.Element; isThere?: () => boolean }[] = [
  { view: "chat", label: "Chat", show: () => <Chat /> },
  { view: "grid", label: "Grid", show: () => <GridView /> },
  { view: "attention", label: "Attention", show: () => <AttentionView />, isThere: () => !isRecorded.value && !!attentionName.value },
  { view: "features", label: "Features", show: () => <FeaturesView />, isThere: () => isRecorded.value || !!featuresName.value },
  { view: "steer", label: "Steer", show: () => <Steer /> },
  { view: "dynamic", label: "Dynamic", show: () => <DynamicView /> },
  { view: "captures", label: "Captures", show: () => <Captures /> },
  { view: "server", label: "Server", show: () => <ServerView /> },
];

function App() {
  const [dialog, setDialog] = useState<"keys" | "home" | null>(null);
  const shownViews = VIEWS.filter((each) => each.isThere?.() ?? true);
  const current = shownViews.find((each) => each.view === view.value) ?? shownViews[0]!;
  return (
    <>
      <header class="top">
        <h1>headgate <span>studio</span></h1>
        <nav aria-label="Views">
          {shownViews.map((each) => (
            <button type="button" key={each.view} aria-current={each === current ? "page" : undefined} onClick={() => (view.value = each.view)}>{each.label}</button>
          ))}
        </nav>
        <span class="model" title={facts.value?.model}>{isRecorded.value ? "recorded: " : ""}{facts.value?.model}</span>
        <button type="button" class="quiet" onClick={() => setDialog("home")}>Take it home</button>
        {!isRecorded.value && <button type="button" class="quiet" onClick={() => setDialog("keys")}>Keys{keys.value.api || keys.value.headgate ? " ✓" : ""}</button>}
        <Theme />
      </header>
      <main id="main">
        <h2 class="hidden">{current.label}</h2>
        <Notice kind="error" text={unreachable.value} />
        <Notice kind="error" text={isDamaged.value ? "This link cannot be read, so nothing was restored: it was cut off, or is of another release." : ""} />
        <Guarded key={current.view}>{current.show()}</Guarded>
      </main>
      {dialog === "keys" && <KeysDialog onClose={() => setDialog(null)} />}
      {dialog === "home" && <TakeHome onClose={() => setDialog(null)} />}
    </>
  );
}

/** A view that says why it cannot be shown; the others go on. */
class Guarded extends Component<{ children: ComponentChildren }, { error: string }> {
  override state = { error: "" };
  static override getDerivedStateFromError(error: unknown): { error: string } {
    return { error: String(error) };
  }
  override render() {
    return this.state.error ? <Notice kind="error" text={`This view cannot be shown: ${this.state.error}`} /> : this.props.children;
  }
}

/** Keys travel in headers, which hold printable characters of ASCII. */
const KEY = "[\\x20-\\x7e]*";

function KeysDialog({ onClose }: { onClose: () => void }) {
  const [found, setFound] = useState(keys.value);
  return (
    <Dialog title="Keys" onClose={onClose}>
      <form onSubmit={(event) => { event.preventDefault(); setKeys(found); event.currentTarget.closest("dialog")?.close(); }}>
        <Field label="API key of the server" hint="its --api-key; sent as Authorization"><input type="password" autocomplete="off" pattern={KEY} title="letters, digits and signs of ASCII" value={found.api} onInput={(event) => setFound({ ...found, api: event.currentTarget.value.trim() })} /></Field>
        <Field label="headgate key" hint="with the roles capture and steer; sent as X-Headgate-Key"><input type="password" autocomplete="off" pattern={KEY} title="letters, digits and signs of ASCII" value={found.headgate} onInput={(event) => setFound({ ...found, headgate: event.currentTarget.value.trim() })} /></Field>
        <p><small>Keys stay in this tab, are sent to this server alone, and are gone when the tab is closed. A server on your own machine may need none.</small></p>
        <button type="submit">Use these keys</button>
      </form>
    </Dialog>
  );
}

const THEMES = ["auto", "light", "dark"] as const;
function Theme() {
  const [theme, setTheme] = useState<(typeof THEMES)[number]>("auto");
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  return (
    <button type="button" class="quiet" aria-label={`Colours: ${theme}. Change to ${next}.`} onClick={() => { setTheme(next); document.documentElement.dataset["theme"] = next; changed(); }}>
      {{ auto: "◐", light: "☀", dark: "☾" }[theme]}
    </button>
  );
}

function start(): void {
  isRecorded.value = openRecording();
  if (!isRecorded.value) {
    restore(location.hash);
    effect(() => {
      void [view.value, settings.value, items.value, gates.value, watched.value, followed.value, turns.value, branches.value];
      keepHash();
    });
    let isOpen = false;
    effect(() => {
      void [view.value, turns.value];
      if (isOpen) isDamaged.value = false; // one goes on without the link
      isOpen = true;
    });
    void loadFacts();
    setInterval(() => { if (!document.hidden && (unreachable.value || !facts.value)) void loadFacts(); }, 3000);
    addEventListener("hashchange", () => { if (restore(location.hash)) void loadFacts(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed); // canvases are drawn again
  const page = document.getElementById("page")!;
  page.textContent = "";
  render(<App />, page);
}

start();
