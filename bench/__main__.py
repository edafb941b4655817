# SPDX-License-Identifier: Apache-2.0
"""Measure prompt throughput with --kv-sharing-fast-prefill off and on, alternating, and print it beside the limit.

As vllm#60445 does: random prompts, one output token, offline LLM.generate. On a Gaudi give --model; with --source it
runs the plugin of that source on the CPU, with E2B's layer widths and a fifth of its depth. There --parts measures the
fix after each patch of the series that goes upstream.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.flops import E2B, E4B, GAUDI2, GAUDI3, Card, Shape, prompt_seconds
from bench.parts import Part, counted_table, measured_table, parts_of_the_series
from graft.errors import GraftError

NO_MEDIA = {"image": 0, "audio": 0, "video": 0}
DECODED = 32
BLOCK = 128


@dataclass(frozen=True)
class Arm:
    """One of the engines that are compared. part: what of the fix it has, without the flag nothing."""

    name: str
    part: Part | None

    @property
    def flag(self) -> bool:
        return self.part is not None


OFF, ON = Arm("off", None), Arm("on", Part())


@dataclass
class Point:
    """One length and batch cap. seconds: per arm, one entry per round for all prompts; decode: per step.

    cached: how many of a prompt's tokens are in the prefix cache. limits: times fewer FLOPs, per arm.
    """

    length: int
    cap: int
    prompts: int
    limits: dict[str, float]
    cached: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    decode: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def rate(self, arm: str) -> float:
        """Prompt tokens per second that were not cached, median over the rounds."""
        return self.prompts * (self.length - self.cached) / statistics.median(self.seconds[arm])

    def ratio(self, arm: str = ON.name) -> float:
        return self.rate(arm) / self.rate(OFF.name)

    def decode_ratio(self, arm: str = ON.name) -> float | None:
        """Median seconds of a decode step, by those of the first arm."""
        if arm not in self.decode:
            return None
        return statistics.median(self.decode[arm]) / statistics.median(self.decode[OFF.name])


class Failed(Exception):
    """A measurement that could not be made; says why."""


class Engine:
    """A bench.worker process."""

    def __init__(self, python: Path, environ: dict, settings: dict, vocabulary: int, log: Path):
        self.log = log
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [python, "-m", "bench.worker", json.dumps({"settings": settings, "vocabulary": vocabulary})],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self._answer()

    def ask(self, **task) -> dict:
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            said = self.log.read_text(errors="replace").splitlines()
            errors = [line for line in said if re.match(r"(\(.*\) )?(\w+\.)*\w*Error\b", line)]
            raise Failed(f"the engine ended with status {status}: {(errors or ['it said nothing of why'])[-1]}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Site:
    """Where engines run: the model and, per arm, the environment."""

    model: Path | str
    shape: Shape
    vocabulary: int
    environ: dict[str, dict[str, str]]
    settings: dict


def on_the_cpu(options, arms: list[Arm], scratch: Path) -> Site:
    """The plugin of --source behind the bridge, and a model of E2B's widths."""
    from engine import plugin
    from graft import copies, releases, versions

    tree = releases.find(options.source)
    release = versions.get(options.release) if options.release else plugin.release_of(tree)
    if release is None:
        raise Failed(f"{options.source} does not tell which release it is of; name it with --release")
    # A thread that waits for another must not count as work.
    threads = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE", "HPU_ON_CPU_GIB": "8"}
    threads["HPU_ON_CPU_ATTENTION"] = "fused"  # a card's attention is fused, too
    environ = {}
    for arm in arms:
        overrides = arm.part.overrides if arm.part and arm.part.overrides else copies.OVERRIDES
        own = scratch / arm.name
        own.mkdir()
        prepared = plugin.prepare(options.source, release, overrides, own, drifted=False)
        extra = threads | (arm.part.environ if arm.part else {})
        environ[arm.name] = plugin.environ(prepared, fixed=arm.flag, scratch=scratch, extra=extra)
    model = scratch / "model"
    subprocess.run(
        [options.python, "-m", "engine.model", model, "--shape", options.shape],
        env=environ[OFF.name],
        check=True,
        capture_output=True,
    )
    text = json.loads((model / "config.json").read_text())["text_config"]
    blocks = options.prompts * (max(options.lengths) // BLOCK + 2)
    settings = {
        "num_gpu_blocks_override": 4 * blocks,  # for each group of layers with one block table
        "dtype": options.dtype,
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a prompt that is left over from a step would be one with context
        "limit_mm_per_prompt": NO_MEDIA,
        "disable_log_stats": True,
    }
    return Site(model, Shape.of(text), text["vocab_size"] - 12, environ, settings)


def on_a_card(options, arms: list[Arm]) -> Site:
    """The vLLM and vllm-gaudi of the interpreter, as they are."""
    config = Path(options.model, "config.json")
    if config.is_file():
        text = json.loads(config.read_text())
        text = text.get("text_config", text)
        shape, vocabulary = Shape.of(text), text["vocab_size"]
    else:
        shape, vocabulary = (E4B if "E4B" in options.model else E2B), E2B.vocabulary
    environ = {arm.name: dict(os.environ) for arm in arms}
    # Text alone: with images allowed, vllm-gaudi v0.26.0 fails on the first batch of several prompts.
    settings = {"disable_log_stats": True, "limit_mm_per_prompt": NO_MEDIA}
    return Site(options.model, shape, vocabulary - 512, environ, settings)


@contextmanager
def engine(site: Site, options, cap: int, arm: Arm, scratch: Path):
    """An engine for prompts of every wanted length, with this batch cap."""
    longest = max(options.lengths)
    settings = {
        **site.settings,
        "model": str(site.model),
        "kv_sharing_fast_prefill": arm.flag,
        "max_model_len": longest + DECODED + 1,
        "max_num_seqs": options.prompts,
        "max_num_batched_tokens": cap * (longest + BLOCK),
        "enable_prefix_caching": options.cached_half,
        "seed": 0,
        **json.loads(options.settings),
    }
    environ = {**site.environ[arm.name], "VLLM_PROMPT_BS_BUCKET_MAX": str(cap)}
    log = scratch / f"cap-{cap}-{arm.name}.log"
    running = Engine(options.python, environ, settings, site.vocabulary, log)
    try:
        yield running
    finally:
        running.close()


def lengths(options) -> list[tuple[int, int]]:
    """Each prompt length with how much of it is cached: nothing, and with --cached-half its first half in blocks."""
    wanted = [(length, 0) for length in options.lengths]
    if options.cached_half:
        wanted += [(length, length // 2 // BLOCK * BLOCK) for length in options.lengths if length >= 2 * BLOCK]
    return wanted


def measure(site: Site, options, arms: list[Arm], scratch: Path, tell) -> list[Point]:
    """Every length and cap; `tell` hears of each round."""
    points = []
    for cap in options.caps:
        rows = []
        for length, cached in lengths(options):
            limits = {arm.name: arm.part.limit(site.shape, length, cached) if arm.part else 1.0 for arm in arms}
            rows.append(Point(length, cap, options.prompts, limits, cached))
        if options.together:
            with ExitStack() as stack:
                all_of_them = {arm: stack.enter_context(engine(site, options, cap, arm, scratch)) for arm in arms}
                for number in range(-1, options.rounds):  # the first one warms up
                    for arm in arms if number % 2 else reversed(arms):
                        _round(all_of_them[arm], rows, arm.name, number, options)
                        tell()
        else:
            for arm in arms:
                with engine(site, options, cap, arm, scratch) as one:
                    for number in range(-1, options.rounds):
                        _round(one, rows, arm.name, number, options)
                        tell()
        points += rows
    return points


def _round(one: Engine, rows: list[Point], name: str, number: int, options) -> None:
    for point in rows:
        seed = 1000 * point.length + number + (500 if point.cached else 0)
        task = {"length": point.length, "prompts": point.prompts, "seed": seed, "cached": point.cached}
        first = one.ask(**task, tokens=1)[options.clock]
        if number < 0:
            continue
        point.seconds.setdefault(name, []).append(first)
        if options.decode and not point.cached:
            # Few short prompts, so that a step's own cost shows; the first token is measured apart.
            # Less than a block, lest with --cached-half the second of these runs find the first one's prompts cached.
            most = BLOCK - 1 if options.cached_half else BLOCK
            few = {**task, "prompts": min(point.prompts, 4), "length": min(point.length, most)}
            begun = one.ask(**few, tokens=1)[options.clock]
            whole = one.ask(**few, tokens=1 + DECODED)[options.clock]
            point.decode.setdefault(name, []).append((whole - begun) / DECODED)
        if options.memory and name not in point.peak and not point.cached:
            point.peak[name] = one.ask(memory=point.length)["bytes"]


def table(points: list[Point], clock: str) -> Table:
    """clock: "wall", or "cpu" where seconds are those of the engine's threads."""
    unit = "tokens/s" if clock == "wall" else "tokens/CPU-s"
    view = Table(title="Prompt throughput, flag off and on")
    headings = ["prompt tokens", "batch cap", f"off, {unit}", f"on, {unit}", "ratio", "limit by FLOPs", "of it"]
    has_cached = any(p.cached for p in points)
    if has_cached:
        headings.insert(1, "of them cached")
    for name in headings:
        view.add_column(name, justify="right")
    extra = any(p.decode for p in points), any(p.peak for p in points)
    if extra[0]:
        view.add_column("decode step, on/off", justify="right")
    if extra[1]:
        view.add_column("peak bytes, on/off", justify="right")
    for p in points:
        row = [str(p.length), *([str(p.cached)] if has_cached else []), str(p.cap)]
        row += [f"{p.rate('off'):,.0f}", f"{p.rate('on'):,.0f}", f"{p.ratio():.2f}"]
        row += [f"{p.limits['on']:.2f}", f"{p.ratio() / p.limits['on']:.0%}"]
        if extra[0]:
            row.append(f"{p.decode_ratio():.3f}" if p.decode else "")
        if extra[1]:
            row.append(f"{p.peak['on'] / p.peak['off']:.3f}" if p.peak else "")
        view.add_row(*row)
    return view


def roofline(shape: Shape, points: list[Point], cards: list[Card], reached: float) -> Table:
    view = Table(title=f"Bounds of the whole model on a card, at {reached:.0%} of its peak arithmetic")
    view.add_column("card")
    for name in ("prompt tokens", "batch cap", "off, tokens/s", "on, tokens/s", "ratio"):
        view.add_column(name, justify="right")
    for card in cards:
        for p in (p for p in points if not p.cached):
            off, on = (prompt_seconds(shape, card, p.length, p.cap, flag, reached) for flag in (False, True))
            tokens = p.length * p.cap
            rates = f"{tokens / off:,.0f}", f"{tokens / on:,.0f}"
            view.add_row(card.name, str(p.length), str(p.cap), *rates, f"{off / on:.2f}")
    return view


def plot(points: list[Point], stem: Path) -> None:
    """Write `stem`.png and `stem`.svg: throughput over the prompt's length, and the ratio beside its limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, cap in enumerate(sorted({p.cap for p in points})):
        rows = sorted((p for p in points if p.cap == cap and not p.cached), key=lambda p: p.length)
        lengths, colour = [p.length for p in rows], f"C{number}"
        left.plot(lengths, [p.rate("off") for p in rows], "--o", color=colour, label=f"cap {cap}, off")
        left.plot(lengths, [p.rate("on") for p in rows], "-o", color=colour, label=f"cap {cap}, on")
        right.plot(lengths, [p.ratio() for p in rows], "-o", color=colour, label=f"cap {cap}")
    lengths = sorted({p.length for p in points})
    limits = {p.length: p.limits["on"] for p in points if not p.cached}
    right.plot(lengths, [limits[length] for length in lengths], ":", color="black", label="limit by FLOPs")
    left.set(xlabel="prompt tokens", ylabel="prompt tokens per second", ylim=(0, None))
    right.set(xlabel="prompt tokens", ylabel="on / off", ylim=(0, None))
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", help="on a Gaudi: what to serve, such as google/gemma-4-E2B-it")
    where.add_argument("--source", type=Path, help="on the CPU: a vllm-gaudi, as for `python -m engine`")
    parser.add_argument("--release", help="of --source, where it does not tell")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], help="prompt tokens (%(default)s)")
    parser.add_argument("--caps", type=int, nargs="+", default=[1, 8], help="prompt batch caps (%(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="per round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken (%(default)s)")
    parser.add_argument("--together", action="store_true", help="keep both engines, alternate by round (needs room)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        help="seconds to count: passed, or of the engine's own threads (default: cpu with --source, else wall)",
    )
    parser.add_argument("--cached-half", action="store_true", help="also prompts whose first half is cached")
    parser.add_argument(
        "--parts", nargs="*", metavar="PATCH", help="on the CPU: the fix after each patch of the series, or after these"
    )
    parser.add_argument("--decode", action="store_true", help="measure decode steps too")
    parser.add_argument("--memory", action="store_true", help="on the CPU: peak of live tensor bytes in a prompt step")
    parser.add_argument("--settings", default="{}", metavar="JSON", help="further arguments of vllm.LLM")
    parser.add_argument("--shape", choices=("e2b", "tiny"), default="e2b", help="of the CPU's model (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="on the CPU (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="on the CPU (%(default)s)")
    parser.add_argument("--reached", type=float, default=0.5, help="share of peak arithmetic assumed (%(default)s)")
    parser.add_argument("--card", nargs=3, action="append", metavar=("NAME", "TFLOPS", "TBPS"), help="for the bounds")
    parser.add_argument("--bounds", choices=("E2B", "E4B"), default="E2B", help="model of the bounds (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="STEM", help="write STEM.png and STEM.svg (matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.parts is not None and not options.source:
        parser.error("--parts goes with --source")
    options.clock = options.clock or ("cpu" if options.source else "wall")
    cards = [Card(n, float(f) * 1e12, float(m) * 1e12) for n, f, m in options.card or ()] or [GAUDI2, GAUDI3]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder, bar:
            scratch = Path(folder).resolve()
            arms = [OFF, ON]
            if options.parts is not None:
                parts = parts_of_the_series(scratch / "series")
                unknown = set(options.parts) - {part.name for part in parts}
                if unknown:
                    raise Failed(f"{unknown.pop()} is no patch of the series: {', '.join(p.name for p in parts)}")
                arms = [OFF, *(Arm(p.name, p) for p in parts if not options.parts or p.name in options.parts)]
            task = bar.add_task("measuring", total=len(arms) * (options.rounds + 1) * len(options.caps))
            site = on_the_cpu(options, arms, scratch) if options.source else on_a_card(options, arms)
            points = measure(site, options, arms, scratch, lambda: bar.advance(task))
    except (Failed, GraftError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    console = Console()
    if not console.is_terminal:
        console.width = 120
    whole = {"E2B": E2B, "E4B": E4B}[options.bounds]
    if options.parts is not None:
        console.print(measured_table([arm.part for arm in arms if arm.part], points))
        console.print(counted_table(parts, whole, options.lengths[0]))
    else:
        console.print(table(points, options.clock))
        console.print(roofline(whole, points, cards, options.reached))
    if options.json:
        options.json.write_text(json.dumps([asdict(p) for p in points], indent=2))
    if options.plot and options.parts is None:
        plot(points, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
