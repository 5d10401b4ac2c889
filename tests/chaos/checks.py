"""Whether everything that came of the requests is right: tokens, rows, results and files."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from headgate.consumers.reader import StoredCapture, open_captures
from tests.chaos.clients import Outcome
from tests.chaos.consumers import rows_of
from tests.chaos.workload import MAKE_FILES, STEERING, Shot
from tests.engine.hf_reference import HFReference, Reference, relative_error

MAX_ERROR = 1e-4
"""Of rows, relative to the largest value: as in the tests of parity, what float32 sums in another order differ by."""
MAX_BEHIND = 1e-3
"""Logits that a greedy token may lie behind the reference's best one."""


class References:
    """What Hugging Face computes for the same tokens, kept for those that come again."""

    def __init__(self, model: Path) -> None:
        self._model = HFReference(model, "llama")
        self._found: dict[tuple[Any, ...], Reference] = {}

    def of(self, shot: Shot, tokens: Sequence[int]) -> Reference:
        """Rows and logits of a request that generated `tokens`: a part of those of a longer one, if that is known."""
        about, length = (shot.prompt.index, shot.steering), len(shot.prompt.tokens) + len(tokens) - 1
        if (*about, *tokens[:-1]) not in self._found:
            steering = STEERING[shot.steering].steering() if shot.steering else None
            found = self._model.run(shot.prompt.tokens, tokens, steering)
            for num_known in range(len(tokens)):
                self._found[(*about, *tokens[:num_known])] = found
        found = self._found[(*about, *tokens[:-1])]
        return Reference({site: rows[:length] for site, rows in found.rows.items()}, found.logits[:length])

    def greedy(self, shot: Shot, known: Mapping[int, int]) -> list[int]:
        """The tokens of a request without an answer: those of its rows, by position, and else the most likely ones."""
        start, tokens = len(shot.prompt.tokens), list[int]()
        while len(tokens) < shot.max_tokens:
            position = start + len(tokens)
            if position not in known:
                # The reference leaves the last token out, which here is one that does not matter.
                known = {**known, position: int(self.of(shot, [*tokens, 0]).next_tokens[-1])}
            tokens.append(known[position])
        return tokens

    def forget(self) -> None:
        """Forget what was found: sampled tokens hardly come again, and their rows would fill the memory."""
        self._found.clear()


class Judge:
    """Collects whatever is wrong, as texts.

    Attributes:
        wrongs: Everything that is wrong so far, however slow the machine is.
        lates: What took too long, or may have failed for that reason.
        num_rows: Rows that were compared.
        stock: The clear tokens of stock vLLM's answers, by prompt.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self.stock: Sequence[Sequence[int]] = ()
        self.wrongs: list[str] = []
        self.lates: list[str] = []
        self.num_rows = 0

    def forget(self) -> None:
        """Forget the references of a server that has ended."""
        self._references.forget()

    def wrong(self, text: str, about: Outcome | None = None) -> None:
        """Note something."""
        self.wrongs.append(_text(text, about))

    def late(self, text: str, about: Outcome | None = None) -> None:
        """Note something that is wrong unless the machine is too slow to judge."""
        self.lates.append(_text(text, about))

    def tokens(self, outcome: Outcome) -> None:
        """Tokens of an answer: stock's if it is not steered, and the reference's best ones if it is greedy."""
        shot = outcome.shot
        for index in range(shot.num_samples):
            tokens = outcome.tokens.get(index, [])
            if outcome.end == "answered" and not outcome.error and len(tokens) != shot.max_tokens:
                self.wrong(f"sample {index} has {len(tokens)} tokens: {tokens}", outcome)
            if shot.num_samples > 1 or not tokens:
                continue
            if shot.steering is None:
                clear = self.stock[shot.prompt.index]
                if tokens[: len(clear)] != clear[: len(tokens)]:
                    self.wrong(f"stock answers {clear}, this {tokens}", outcome)
            logits = self._references.of(shot, tokens).logits[len(shot.prompt.tokens) - 1 :]
            behind = logits.max(-1).values - logits.gather(1, torch.tensor([tokens]).T)[:, 0]
            if float(behind.max()) > MAX_BEHIND:
                self.wrong(f"tokens {tokens} are not the best ones: {behind.tolist()}", outcome)

    def results(self, outcome: Outcome) -> None:
        """Every result that says ``ok``: its rows are all there, and right."""
        shot = outcome.shot
        for name, job in shot.jobs.items():
            result = (outcome.results or {}).get(name)
            if result is None:
                self.wrong(f"{name}: no result", outcome)
            elif result["status"] == "ok":
                expected = len(job.expected_positions()) * shot.num_samples
                if (result["num_rows"], result["dropped_rows"], result["error"]) != (expected, 0, None):
                    self.wrong(f"{name}: {expected} rows were expected", outcome)
                payloads = result["payload"] if shot.num_samples > 1 else [result["payload"]]
                for sample, payload in enumerate(payloads):
                    self._payload(outcome, name, sample, payload)

    def _payload(self, outcome: Outcome, name: str, sample: int, payload: Any) -> None:
        shot, tokens = outcome.shot, outcome.tokens[sample]
        if name in MAKE_FILES:
            for path in payload["paths"]:
                if not Path(path).exists():
                    self.wrong(f"{name}: {path} is not there", outcome)
        elif name == "inline":
            rows = safetensors.torch.load(base64.b64decode(payload["data"], validate=True))
            positions, token_ids = rows.pop("positions").tolist(), rows.pop("token_ids").tolist()
            sequence = [*shot.prompt.tokens, *tokens]
            if token_ids != [sequence[position] for position in positions]:
                self.wrong(f"{name}: token_ids {token_ids}", outcome)
            self.rows(shot, name, tokens, positions, rows, outcome)
        else:
            positions, rows = rows_of(payload)
            self.rows(shot, name, tokens, positions, rows, outcome)

    def rows(
        self,
        shot: Shot,
        name: str,
        tokens: Sequence[int],
        positions: Sequence[int],
        rows: Mapping[str, torch.Tensor],
        about: Outcome | None,
    ) -> None:
        """Positions, sites and values of one sample's rows."""
        job = shot.jobs[name]
        where = f"{name}: {shot.key}"
        if list(positions) != job.expected_positions() or set(rows) != job.expected_sites(3):
            self.wrong(f"{where}: positions {list(positions)} of {sorted(rows)}", about)
            return
        reference = {site.name: value for site, value in self._references.of(shot, tokens).rows.items()}
        for site, found in rows.items():
            error = relative_error(found, reference[site][torch.tensor(list(positions))])
            self.num_rows += len(found)
            if not error <= MAX_ERROR:
                self.wrong(f"{where}: {site} differs by {error:.2g}", about)

    def files(self, name: str, root: Path, shots: Mapping[str, Outcome], excused: Iterable[str]) -> int:
        """Everything that the reader finds below `root`; and that nothing is missing of what was ``ok``."""
        seen = set[tuple[str, int]]()
        for capture in open_captures(root) if root.exists() else ():
            sample = int(capture.metadata["sample_index"])
            if (capture.request_id, sample) in seen:
                self.wrong(f"{name}: {capture!r} is there twice")
            seen.add((capture.request_id, sample))
            if capture.request_id in shots:
                self._file(name, capture, sample, shots[capture.request_id])
            else:
                self.wrong(f"{name}: {capture!r} is of no request")
        excused = set(excused)
        for key, outcome in shots.items():
            result = (outcome.results or {}).get(name)
            if result is None:
                continue
            if result["status"] == "ok" or (result["status"] == "pending" and key not in excused):
                missing = {(key, index) for index in range(outcome.shot.num_samples)} - seen
                if missing:
                    note = self.wrong if result["status"] == "ok" else self.late
                    note(f"{name}: {result['status']}, but the reader does not find {missing}", outcome)
        return len(seen)

    def _file(self, name: str, capture: StoredCapture, sample: int, outcome: Outcome) -> None:
        shot, positions = outcome.shot, capture.positions.tolist()
        known = dict(zip(positions, capture.token_ids.tolist(), strict=True))
        tokens = outcome.tokens.get(sample, [])
        if len(tokens) < shot.max_tokens:  # the whole answer was not seen
            if capture.metadata["status"] == "abort":
                return self._aborted(name, capture, outcome)
            tokens = self._references.greedy(shot, known)
        sequence = [*shot.prompt.tokens, *tokens]
        if any(sequence[position] != token for position, token in known.items()):
            self.wrong(f"{name}: {capture!r} has tokens {known}", outcome)
        rows = {site.name: capture[site] for site in capture.sites}
        self.rows(shot, name, tokens, positions, rows, outcome)
        return None

    def _aborted(self, name: str, capture: StoredCapture, outcome: Outcome) -> None:
        """A request whose client went away: the rows up to there."""
        shot, positions = outcome.shot, capture.positions.tolist()
        known = dict(zip(positions, capture.token_ids.tolist(), strict=True))
        num_tokens = int(capture.metadata["num_tokens"]) - len(shot.prompt.tokens)
        wanted = [one for one in shot.jobs[name].expected_positions() if one in known]
        if positions != wanted:
            self.wrong(f"{name}: {capture!r}, aborted after {num_tokens} tokens, has {positions}", outcome)
        if positions:
            tokens = self._references.greedy(shot, known)
            reference = {site.name: rows for site, rows in self._references.of(shot, tokens).rows.items()}
            for site in capture.sites:
                error = relative_error(capture[site], reference[site.name][torch.tensor(positions)])
                self.num_rows += len(positions)
                if not error <= MAX_ERROR:
                    self.wrong(f"{name}: {capture!r}: {site.name} differs by {error:.2g}", outcome)


def _text(text: str, about: Outcome | None) -> str:
    return text if about is None else f"{text}\n  {about}"
