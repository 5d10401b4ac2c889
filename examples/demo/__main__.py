"""``make demo``: serve a chat model with stock vLLM, capture activations of real requests, check them, steer with them.

Usage, from the repository: ``.venv/bin/python -m examples.demo [--out FOLDER] [--dtype float32|bfloat16]``. Everything
goes into ``demo-output/``. The exit status is 1 if a capture failed or differs from Hugging Face's activations.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from pathlib import Path

from examples.demo import gate
from examples.demo.account import (
    console,
    section,
    show_ablated,
    show_check,
    show_files,
    show_gated,
    show_requests,
    show_steered,
)
from examples.demo.requests import ASKS, EVERY_HOOK, Answer, send_all
from examples.demo.server import Server, ServerError
from examples.demo.steer import LAYER, OP_SITES, Apart, Steered, SteeringDemoError, steer
from examples.model import ModelError, ensure_model
from headgate.consumers.reader import open_captures
from headgate.steering.files import vector_files

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative error of one vector: order of summation in fp32, 8 bits of mantissa in bf16."""


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for everything that is written")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32", help="what the model is served in")
    options = parser.parse_args()
    try:
        model = ensure_model()
        return run(model, options.out, options.dtype)
    except (ModelError, ServerError, SteeringDemoError) as error:
        console.print(f"[red]demo failed:[/red] {error}")
        return 1


def run(model: Path, out: Path, dtype: str) -> int:
    """Serve, ask, show; returns the exit status."""
    section("Serve", f"{model.name} in {dtype} with stock vLLM; all of it can be captured and steered")
    captures = out / "captures"
    shutil.rmtree(captures, ignore_errors=True)
    captures.mkdir(parents=True)
    answers, steered, apart, gated = serve_and_ask(model, out, captures, dtype)
    folder = open_captures(captures)
    show_requests(answers)
    show_files(folder, captures)
    failed = [answer for answer in answers if answer.ask.capture and answer.result.get("status") != "ok"]
    for answer in failed:
        console.print(f"[red]{answer.ask.name}: {answer.result or 'no capture_results in the response'}[/red]")
    if failed:
        return 1
    from examples.demo.check import compare  # torch and transformers take seconds to import: not before they are needed
    from examples.demo.picture import draw, draw_gate, draw_moods

    section("Check", "the request 'capital' again in Hugging Face transformers, with forward hooks")
    errors = compare(model, folder["capital"], dtype)
    is_right = show_check(errors, TOLERANCE[dtype])
    picture = out / "residual-stream.png"
    draw(folder["sea"], model, picture)
    section("Picture", f"{picture}: the residual stream of the request 'sea'")
    section("Steer", f"a vector made from 24 captured prompts, added at {LAYER}.post_mlp; all in one batch")
    has_shifted = show_steered(steered)
    is_ablated = show_ablated(apart)
    draw_moods(steered, LAYER, out / "steering.png")
    console.print(f"{out / 'steering.png'}: the same layer by layer; {out / 'joy.safetensors'}: the vector")
    section("Gate", f"a probe of anger at {gate.PROBE_LAYER}.post_mlp decides who is steered at {gate.LAYER}.post_mlp")
    has_gated = show_gated(gated)
    draw_gate(gated, model, out / "gate.png")
    console.print(f"{out / 'gate.png'}: the score token by token")
    return 0 if is_right and has_shifted and is_ablated and has_gated else 1


def serve_and_ask(
    model: Path, out: Path, captures: Path, dtype: str
) -> tuple[list[Answer], list[Steered], Apart, gate.Gated]:
    """Start the server, send the requests, steer, gate, stop the server."""
    capture = {
        "consumers": [{"name": "filesystem", "params": {"root": str(captures.resolve())}}],
        "sites": EVERY_HOOK,
    }
    server = Server(
        model,
        headgate={"capture": capture, "steering": {"op_sites": OP_SITES}},
        dtype=dtype,
        log=out / "server.log",
        still_starting=lambda passed_s: console.print(f"still starting, {passed_s:.0f} s (log: {out / 'server.log'})"),
    )
    started = time.monotonic()
    with console.status("vllm serve is starting ..."), server:
        console.print(f"ready after {time.monotonic() - started:.0f} s at {server.url} (log: {server.log})")
        console.print(f"sending {len(ASKS)} chat requests at once ...")
        asked = time.monotonic()
        answers = asyncio.run(send_all(server.url, model.name))
        took = time.monotonic() - asked
        console.print("making a vector of 24 contrast prompts and steering with it ...")
        vector, steered, apart = asyncio.run(steer(server.url, model.name, captures))
        console.print("asking in two moods, with a gate ...")
        gated = asyncio.run(gate.ask_in_two_moods(server.url, model.name, captures))
    num_prompt = sum(answer.num_prompt_tokens for answer in answers)
    num_answer = sum(answer.num_answer_tokens for answer in answers)
    console.print(f"served {num_prompt} prompt tokens and {num_answer} answer tokens in {took:.1f} s")
    vector_files.save(out / "joy.safetensors", vector)
    return answers, steered, apart, gated


if __name__ == "__main__":
    sys.exit(main())
