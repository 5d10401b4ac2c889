"""``headgate verify``: captured rows are complete, are the request's own, and equal those of eager mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.monitoring.verify_checks import (
    EAGER,
    PLAIN,
    SERVED,
    Answer,
    Float32Rows,
    Request,
    Rows,
    Runs,
    Scene,
    Stage,
    Status,
    Verdict,
    difference,
    equality,
    noise_of,
)

CAPTURED = "captured"
SITES: Document = {"post_mlp": [0, 1, -1], "pre_attn": [1], "final_norm": "all"}
"""Captured unless the user says otherwise: few, and among them two between which steering shows."""
CONSUMER = "memory"
MAX_BYTES = 8 << 30
MIN_COSINE = 0.999
"""Of a site's rows, on average, in models of 16 bits."""
MIN_ROW_COSINE = 0.975
"""Of a single row of theirs. Hugging Face's bfloat16 rows of SmolLM2 have cosines down to 0.994 with its float32 rows,
an angle of 6.3 degrees. Two right implementations in bfloat16 may each be that far off, in opposite directions."""
MAX_RELATIVE_ERROR = 1e-3
"""Of a row of a float32 model."""
LIKE_EAGER = "captured rows equal those of eager mode"
NEARER = 0.5
"""Rows of the same token may be so alike that rounding decides which is nearer: half as far is another's."""
MOE_SHARE = 0.01
"""Rows of a mixture of experts that may be further off: rounding may send a token to other experts."""


class CaptureChecks:
    """Implements `headgate.capture.monitoring.verify_checks.CheckPart`."""

    def section(self, given: Document, *, counts: bool) -> dict[str, object]:
        """The user's section with the memory consumer alone: nothing is written, and no limit is in the way."""
        kept = {name: value for name, value in given.items() if not name.startswith("max_request_")}
        consumer = {"name": CONSUMER, "params": {"max_bytes": MAX_BYTES}}
        return {"sites": SITES, **kept, "consumers": [consumer], "fire_counter": counts}

    def scenes(self, stage: Stage) -> Iterator[Scene]:
        """Everything of every request; in eager mode, their answers are part of the prompts."""
        requests: Sequence[Request] = stage.plain
        if stage.earlier is not None:
            requests = [
                Request(label=answer.label, prompt=answer.prompt + answer.tokens[:-1], max_tokens=1)
                for answer in stage.earlier.scenes[CAPTURED]
            ]
        yield Scene(name=CAPTURED, requests=[replace(request, captures=True) for request in requests])

    def judge(self, runs: Runs) -> Iterator[Verdict]:
        """Completeness, neighbours, equality with eager mode, and attribution."""
        served = runs[SERVED][0]
        captured, plain = served.scenes[CAPTURED], served.scenes[PLAIN]
        yield equality("a capture changes no answer", difference(plain, captured), noise=noise_of([served]))
        complete = judge_complete(captured)
        yield complete
        facts, eager = runs[EAGER][0].facts, runs[EAGER][0].scenes[CAPTURED]
        again = judge_complete(eager)
        if complete.status is not Status.PASSED or again.status is not Status.PASSED:
            reason = "" if again.status is Status.PASSED else f"eager mode: {again.figure}"
            yield Verdict(LIKE_EAGER, Status.FAILED, reason or "captures are not complete")
            return
        yield judge_rows(captured, eager, facts.dtype, is_moe=facts.num_experts > 0)
        yield judge_owners(captured, eager)


def judge_complete(answers: Sequence[Answer]) -> Verdict:
    """Nothing missing, foreign or dropped: each row's position and token are those of the request."""
    check = "captures are complete, none foreign"
    sites = {site for answer in answers if answer.rows for site in answer.rows.values}
    for index, answer in enumerate(answers):
        if (problem := _problem(answer, sites)) is not None:
            return Verdict(check, Status.FAILED, f"request {index}: {problem}")
    num_rows = sum(len(rows.positions) for answer in answers if (rows := answer.rows))
    if not num_rows or not sites:
        return Verdict(check, Status.FAILED, "nothing was captured")
    return Verdict(check, Status.PASSED, f"{num_rows} rows at {len(sites)} sites, none missing, foreign or dropped")


def _problem(answer: Answer, sites: set[str]) -> str | None:
    rows, expected = answer.rows, (answer.prompt + answer.tokens)[:-1]
    if rows is None or rows.status != "ok":
        return f"captured {rows.status}: {rows.error}" if rows else "no capture result"
    if rows.dropped:
        return f"{rows.dropped} rows were dropped"
    if rows.positions != list(range(len(expected))):
        return f"{len(rows.positions)} rows of other positions than 0 to {len(expected) - 1}"
    if rows.token_ids != expected:
        return "rows of other tokens than the request's"
    missing = sites - rows.values.keys()
    wrong = [site for site in rows.values if len(rows.at(site)) != len(expected)]
    if missing or wrong:
        return f"no rows, or too few, at {sorted(missing | set(wrong))}"
    infinite = [site for site in rows.values if not np.isfinite(rows.at(site)).all()]
    return f"values at {infinite[0]} are not finite" if infinite else None


def judge_rows(found: Sequence[Answer], eager: Sequence[Answer], dtype: str, *, is_moe: bool) -> Verdict:
    """Row by row, what was captured while serving against what an engine in eager mode captures of the same tokens.

    In float32 by relative error, else by cosine.
    """
    check, is_exact = LIKE_EAGER, dtype == "float32"
    measures = [
        (_relative_errors if is_exact else _cosines)(*pair)
        for one, other in zip(found, eager, strict=True)
        for pair in _pairs(one.rows, other.rows)
    ]
    values = np.concatenate(measures)
    is_off = ~(values <= MAX_RELATIVE_ERROR) if is_exact else ~(values >= MIN_ROW_COSINE)
    worst = 1.0 if is_exact else _smallest_mean(found, eager)
    if is_exact:
        text = f"largest relative error {values.max():.1e} of {len(values)} vectors (allowed {MAX_RELATIVE_ERROR:.0e})"
    else:
        text = (
            f"smallest cosine {values.min():.4f} of {len(values)} vectors (at least {MIN_ROW_COSINE}), "
            f"smallest mean of a site {worst:.5f} (at least {MIN_COSINE})"
        )
    if not worst >= MIN_COSINE:
        return Verdict(check, Status.FAILED, text)
    if not is_off.any():
        return Verdict(check, Status.PASSED, text)
    text = f"{text}; {int(is_off.sum())} are off"
    if is_moe and is_off.mean() <= MOE_SHARE:
        return Verdict(check, Status.WARNING, f"{text}: other experts may have been chosen")
    return Verdict(check, Status.FAILED, text)


def _smallest_mean(found: Sequence[Answer], eager: Sequence[Answer]) -> float:
    """The mean cosine of the site where it is smallest."""
    by_answer = [
        [_cosines(*pair) for pair in _pairs(one.rows, other.rows)] for one, other in zip(found, eager, strict=True)
    ]
    return min(float(np.concatenate(of_site).mean()) for of_site in zip(*by_answer, strict=True))


def _pairs(found: Rows | None, eager: Rows | None) -> Iterator[tuple[Float32Rows, Float32Rows]]:
    assert found is not None  # noqa: S101  (both are complete)
    assert eager is not None  # noqa: S101
    for site in found.values:
        one, other = found.at(site), eager.at(site) if site in eager.values else np.zeros((0, 1), np.float32)
        yield one, other if one.shape == other.shape else np.full_like(one, np.nan)


def _relative_errors(found: Float32Rows, expected: Float32Rows) -> Float32Rows:
    """``[rows]``."""
    size = np.maximum(np.linalg.norm(expected, axis=1), np.finfo(np.float32).tiny)
    return np.linalg.norm(found - expected, axis=1) / size  # type: ignore[no-any-return]


def _cosines(found: Float32Rows, expected: Float32Rows) -> Float32Rows:
    """``[rows]``; of rows of zeros, 1 if both are."""
    sizes = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    products = np.einsum("ij,ij->i", found, expected)
    are_zero = ~found.any(axis=1) & ~expected.any(axis=1)
    return np.where(are_zero, 1.0, products / np.maximum(sizes, np.finfo(np.float32).tiny))


def judge_owners(found: Sequence[Answer], eager: Sequence[Answer]) -> Verdict:
    """No request's last row is nearer by far to another request's in eager mode than to its own."""
    check, strangers, sites = "captured rows are the request's own", [], []
    for site in found[0].rows.values if found[0].rows else ():
        ours = np.stack([answer.rows.at(site)[-1] for answer in found if answer.rows])
        theirs = np.stack([answer.rows.at(site)[-1] for answer in eager if answer.rows and site in answer.rows.values])
        apart = np.stack([np.linalg.norm(theirs - row, axis=1) for row in ours])
        is_other = apart.min(axis=1) < NEARER * apart.diagonal()
        strangers += [f"request {index} at {site}" for index in np.flatnonzero(is_other)]
        sites.append(site)
    if strangers:
        return Verdict(check, Status.FAILED, f"{strangers[0]}, and {len(strangers) - 1} more, are like another's")
    return Verdict(check, Status.PASSED, f"{len(found)} requests at {len(sites)} sites")
