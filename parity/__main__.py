# SPDX-License-Identifier: Apache-2.0
"""Send the same greedy requests to two servers and compare their answers token by token.

A SERVER is the URL of a running one, a command in quotes that starts one (then the other, on the same card), or a file
that --save wrote. Exit code: 0 equal, 1 a real difference, 2 nothing to compare.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity.client import Answer, Server, Unreachable, started
from parity.compare import DIFFERS, EQUAL, Finding, compare
from parity.requests import Request, built_in, from_file


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.second is None and options.save is None:
        parser.error("give two servers, or one and --save")
    try:
        return _run(options)
    except (Unreachable, ValueError, OSError) as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("parity: interrupted.", file=sys.stderr)
        return 2


def _run(options) -> int:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bar:
        requests, first = _answers(options.first, None, options, bar)
        if options.save:
            saved = {"requests": [asdict(r) for r in requests], "answers": [asdict(a) for a in first]}
            options.save.write_text(json.dumps(saved), encoding="utf-8")
        if options.second is None:
            return 0
        # The same token ids go to both, whatever the second server's tokenizer says.
        _, second = _answers(options.second, requests, options, bar)
    pairs = _pairs(first, second)
    findings = [compare(a, b, options.tie, options.drift) for a, b in pairs]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return 1 if any(finding.kind == DIFFERS for finding in findings) else 0


def _pairs(first: list[Answer], second: list[Answer]) -> list[tuple[Answer, Answer]]:
    """Answers to the same requests; those of a saved file may be to others."""
    named = {answer.name: answer for answer in second}
    pairs = [(answer, named[answer.name]) for answer in first if answer.name in named]
    if not pairs or len(pairs) != max(len(first), len(second)):
        raise ValueError("the two sides answered different requests. Record both with the same options.")
    return pairs


def _answers(server: str, requests: list[Request] | None, options, bar) -> tuple[list[Request], list[Answer]]:
    if server.endswith(".json") and Path(server).is_file():
        saved = json.loads(Path(server).read_text(encoding="utf-8"))
        return [Request(**r) for r in saved["requests"]], [Answer(**a) for a in saved["answers"]]
    task = bar.add_task(f"starting {server}" if not _is_url(server) else f"asking {server}", total=None)
    running = nullcontext(server) if _is_url(server) else started(server, options.port, options.wait)
    with running as url:
        found = Server(url, options.model, options.timeout)
        if requests is None:
            requests = _requests(found, options)
        bar.update(task, description=f"asking {found.root}", total=len(requests), completed=0)
        tell: Callable[[], None] = lambda: bar.advance(task)  # noqa: E731
        found.serve(_warming(requests), 1, lambda: None)
        return requests, found.serve(requests, options.max_tokens, tell)


def _warming(requests: list[Request]) -> list[Request]:
    """One request, so that no first-time cost of the server is in the measured ones."""
    return [Request("warming", "warming", "Hello", chat=False)] if requests else []


def _requests(server: Server, options) -> list[Request]:
    requests = []
    if options.built_in:
        requests += built_in(server.tokens(), server.max_length - options.max_tokens)
    for path in options.prompts:
        requests += from_file(path)
    if not requests:
        raise ValueError("there is nothing to ask. Give --prompts FILE, or leave --no-built-in out.")
    return requests


def _is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def _print(findings: list[Finding]) -> None:
    table = Table(title="Greedy answers, first server against second")
    table.add_column("request")
    for name in ("equal tokens", "first token, ms", "second's, ms", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("result", overflow="fold")
    for finding in findings:
        ratio = finding.first_seconds / finding.second_seconds if finding.second_seconds else float("nan")
        result = finding.kind if finding.kind == EQUAL else f"{finding.kind}: {finding.why}"
        table.add_row(
            finding.name,
            str(finding.tokens),
            f"{finding.first_seconds * 1000:.1f}",
            f"{finding.second_seconds * 1000:.1f}",
            f"{ratio:.2f}",
            result,
            style="bold red" if finding.kind == DIFFERS else "",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    ratios = [f.first_seconds / f.second_seconds for f in findings if f.second_seconds]
    counts = {kind: sum(f.kind == kind for f in findings) for kind in dict.fromkeys(f.kind for f in findings)}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    console.print(f"{told}. Median ratio of the times to the first token: {statistics.median(ratios):.2f}.")
    first = next((f for f in findings if f.kind == DIFFERS), None)
    if first:
        console.print(f"First real difference: {first.name}, {first.why}.", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", metavar="SERVER", help="such as the one without the flag")
    parser.add_argument("second", metavar="SERVER", nargs="?", help="such as the one with it")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the first server's answers for another day")
    parser.add_argument("--prompts", type=Path, action="append", default=[], metavar="FILE", help="a prompt per line")
    parser.add_argument("--no-built-in", dest="built_in", action="store_false", help="only --prompts")
    parser.add_argument("--model", help="where a server has several")
    parser.add_argument("--max-tokens", type=int, default=32, help="per answer (%(default)s)")
    parser.add_argument(
        "--tie",
        type=float,
        default=0.25,
        help="a divergence at which neither server prefers its token by more than this log probability is rounding "
        "(%(default)s: two steps of a bfloat16 between 16 and 32)",
    )
    parser.add_argument(
        "--drift", type=float, default=1.0, help="as far may log probabilities of equal tokens be apart (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="on which commands serve (%(default)s)")
    parser.add_argument("--wait", type=float, default=3600.0, help="seconds for a command to be ready (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
