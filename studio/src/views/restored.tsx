// What a view offers for a conversation that a link restored: its texts are here, its numbers are not.

import { useState } from "preact/hooks";
import { Notice } from "../parts";
import { readAgain } from "../run";
import { facts, isRecorded, path, type Turn } from "../state";

/** Reads the numbers of a restored answer: of the last one, if none is named. */
export function Restored({ turn }: { turn?: Turn }) {
  const [error, setError] = useState("");
  const [isReading, setReading] = useState(false);
  const found = turn ?? path.value.filter((each) => each.role === "assistant").at(-1);
  // A capture that was opened is no answer: its turn has no question.
  const ids = found?.parent ? found.ids : undefined;
  if (isRecorded.value || !found || found.runs.length > 0 || !ids) return null;
  const read = async () => {
    setError("");
    setReading(true);
    try {
      await readAgain(found, ids);
    } catch (failed) {
      setError(failed instanceof Error ? failed.message : String(failed));
    }
    setReading(false);
  };
  return (
    <>
      <button type="button" class="quiet" disabled={isReading || !facts.value?.model} onClick={() => void read()}>{isReading ? "reading …" : turn ? "Read its numbers" : "Read the numbers of the restored answer"}</button>
      <Notice kind="error" text={error} />
    </>
  );
}
