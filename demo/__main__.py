# SPDX-License-Identifier: Apache-2.0
"""`python -m demo`: fast prefill at work on real vLLM, or, with --release, what can be said of a release."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from graft.errors import GraftError

VOCAB = 4096


class Parser(argparse.ArgumentParser):
    """Exits 1 on a usage error; 2 means drift here."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}. Run `{self.prog} --help`.\n")


def at_least(least: int):
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number from {least}")
        return int(text)

    return number


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m demo", description="Show fast prefill at work on real vLLM, on the CPU.")
    parser.add_argument("--tokens", type=at_least(8), default=1024, help="length of the longest prompt (default: 1024)")
    parser.add_argument("--hidden", type=at_least(48), default=288, help="hidden size; E2B's is 1536 (default: 288)")
    parser.add_argument("--layers", type=at_least(10), default=35, help="decoder layers, 4 of 7 shared (default: 35)")
    parser.add_argument("--repeat", type=at_least(1), default=5, help="timed prefills per batch (default: 5)")
    parser.add_argument("--steps", type=at_least(1), default=16, help="tokens to decode (default: 16)")
    parser.add_argument("--release", help="merge into this release instead, such as 0.26")
    parser.add_argument("--source", type=Path, help="where that release's files are: a folder, a wheel or an sdist")
    options = parser.parse_args(argv)
    if options.layers % 5:
        parser.error("--layers must be a multiple of 5, as every fifth layer has full attention")
    if options.hidden % 48:
        parser.error("--hidden must be a multiple of 48, as head sizes are a sixth and a third of it")
    if options.source and not options.release:
        parser.error("--source goes with --release")
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    console = Console()
    try:
        if options.release:
            from demo import release

            for line in release.check(options.release, options.source):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            return 0
        with tempfile.TemporaryDirectory() as folder:
            return show(options, console, Path(folder))
    except GraftError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("demo: Interrupted.", file=sys.stderr)
        return 1


def show(options: argparse.Namespace, console: Console, folder: Path) -> int:
    """Run the demo; 1 if the flag changes what the model says."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine threads that spin slow each other down

    from demo import measure, model, plugin

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    work = measure.batches(options.tokens, VOCAB)
    with bar:
        task = bar.add_task("merging the fix into the stand-in", total=4 + len(work) * measure.runs(options.repeat))

        def step(next_description: str) -> None:
            bar.update(task, description=next_description, advance=1)

        plugin.use(plugin.make(folder / "site"))
        step("making random weights")
        shared = options.layers * 4 // 7
        config = model.text_config(
            layers=options.layers,
            shared=shared,
            hidden=options.hidden,
            mlp=4 * options.hidden,
            per_layer=options.hidden // 6,
            head=options.hidden // 6,
            full_head=options.hidden // 3,
            window=512,
            vocab=VOCAB,
            max_len=options.tokens + options.steps,
        )
        weights = model.reference(config)
        step("building vLLM's Gemma 4")
        most = max(batch.padded for batch in work)
        off = model.build(config, weights, fast_prefill=False, max_tokens=most)
        del weights
        on = model.build(config, off[0], fast_prefill=True, max_tokens=most)
        runners = measure.Runner(*off), measure.Runner(*on)
        step("counting on E2B's own sizes")
        e2b = measure.count_e2b(options.tokens)
        step("prefilling")
        outcomes = [
            measure.compare(*runners, batch, repeat=options.repeat, steps=options.steps, done=lambda: bar.advance(task))
            for batch in work
        ]
    report(console, options, shared, outcomes, e2b)
    return 0 if all(outcome.parity for outcome in outcomes) else 1


def report(console: Console, options: argparse.Namespace, shared: int, outcomes, e2b: tuple[int, int]) -> None:
    """Print the table and what it comes to."""
    table = Table(
        box=box.SIMPLE,
        padding=0,
        title=f"{options.layers} layers, {shared} of them KV-shared, hidden size {options.hidden}: flag off / on",
        caption="float32, random weights; seconds: medians; GFLOP: counted in the run;\n"
        "logits: largest difference of any sampled one; greedy: the tokens decoded",
    )
    for heading in ("prompts", "tokens", "padded", "seconds", "ratio", "GFLOP", "ratio", "logits", "greedy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            str(len(outcome.batch.prompts)),
            str(outcome.batch.tokens),
            str(outcome.batch.padded),
            "{:.2f} / {:.2f}".format(*outcome.seconds),
            f"{outcome.seconds[0] / outcome.seconds[1]:.2f}",
            "{:.1f} / {:.1f}".format(*(flops / 1e9 for flops in outcome.flops)),
            f"{outcome.flops[0] / outcome.flops[1]:.2f}",
            f"{outcome.difference:.0e}",
            "equal" if outcome.same_tokens else "DIFFER",
        )
    console.print(table)
    console.print(
        f"One prompt of {options.tokens} tokens on Gemma 4 E2B's own sizes, counted the same way: "
        f"{e2b[0] / 1e12:.2f} / {e2b[1] / 1e12:.2f} TFLOP, ratio {e2b[0] / e2b[1]:.2f}.",
        highlight=False,
        soft_wrap=True,
    )
    if all(outcome.parity for outcome in outcomes):
        worst = max(outcome.difference for outcome in outcomes)
        console.print(
            f"Parity: the same {options.steps} greedy tokens per prompt; the logits differ by {worst:.1e} at most.",
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print("[bold red]No parity:[/] the flag changes what the model says.")


if __name__ == "__main__":
    sys.exit(main())
