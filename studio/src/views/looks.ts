// How views that show figures of the server ask for them again: while they are looked at, and at no cost that others notice.

import { useEffect } from "preact/hooks";

/** The share of time that one page lets the server spend on its figures. */
const SHARE = 1 / 1000;
const LEAST_MS = 5_000;
const MOST_MS = 60_000;

/** Calls `look` at once and then again and again: the longer an answer takes, the later the next call. A page that is hidden waits. */
export function useLooks(isOn: boolean, look: (isOver: () => boolean) => Promise<void>, inputs: unknown[]): void {
  useEffect(() => {
    if (!isOn) return;
    let isOver = false;
    let isLooking = false;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const again = async () => {
      if (isLooking) return; // the call that runs begins the next wait
      const began = performance.now();
      isLooking = true;
      try {
        if (!document.hidden) await look(() => isOver);
      } finally {
        isLooking = false;
      }
      if (isOver) return;
      timer = setTimeout(() => void again(), Math.min(MOST_MS, Math.max(LEAST_MS, (performance.now() - began) / SHARE)));
    };
    const seen = () => {
      if (document.hidden) return;
      clearTimeout(timer);
      void again();
    };
    void again();
    document.addEventListener("visibilitychange", seen);
    return () => {
      isOver = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [isOn, ...inputs]);
}
