# SPDX-License-Identifier: Apache-2.0
"""What each part of the fix saves and costs, part by part of the series that goes upstream."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from bench.flops import Fast, Shape, limit

if TYPE_CHECKING:
    from bench.__main__ import Point

# What a patch of the series brings, by its name without the number. The environment turns on what is off by default.
BRINGS = {
    "fast-prefill": {},
    "static-buffers": {"frees_buffers": True},
    "lora": {"lora": True},
    "last-kv-layer": {"last_kv_layer": True},
    "context": {"context": True},
    "text-only": {"text_only": True},
    "prompt-logprobs": {"refuses": True},
    "per-layer-inputs": {
        "per_layer_inputs": True,
        "environ": {"VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS": "1"},
    },
}
BATCHED_TOKENS = 8192  # max_num_batched_tokens of the buffers' size


@dataclass(frozen=True)
class Part:
    """The fix after a patch; without arguments as it is by default. lines: those it adds to the plugin's two files."""

    name: str = "on"
    overrides: Path | None = None
    lines: int = 0
    environ: dict[str, str] = field(default_factory=dict, hash=False)
    frees_buffers: bool = True
    lora: bool = True
    last_kv_layer: bool = True
    context: bool = True
    text_only: bool = True
    refuses: bool = True  # prompt_logprobs, which would be wrong
    per_layer_inputs: bool = False

    def limit(self, shape: Shape, length: int, cached: int = 0, *, lora: bool = False) -> float:
        """How many times fewer FLOPs a prompt of `length` tokens, `cached` of them in the cache, costs with the flag.

        lora: on a server with LoRA enabled, where the layers and projections run whole.
        """
        if (cached and not self.context) or (lora and not self.lora):
            return 1.0
        fast = Fast(False, False) if lora else Fast(self.last_kv_layer, self.per_layer_inputs)
        return limit(shape, length - cached, fast, cached)


def parts_of_the_series(folder: Path) -> list[Part]:
    """The fix after each patch of the series; the override sources of each are written below a folder.

    Raises:
        GraftError: the series does not fit the fix.
        KeyError: a patch is not in BRINGS.
    """
    from demo.plugin import merged_files, stock_files
    from graft import series

    nothing = dict.fromkeys(("frees_buffers", "lora", "last_kv_layer", "context", "text_only", "refuses"), False)
    part = Part("off", **nothing)
    stock = sum(text.count("\n") for text in stock_files().values())
    found = []
    for stage in series.stages():
        overrides = stage.write(folder / stage.name)
        brings = {**BRINGS[stage.name.partition("-")[2]]}
        environ = {**part.environ, **brings.pop("environ", {})}
        lines = sum(text.count("\n") for text in merged_files(overrides).values()) - stock
        part = dataclasses.replace(part, name=stage.name, overrides=overrides, lines=lines, environ=environ, **brings)
        found.append(part)
    return found


def buffer_bytes(shape: Shape, tokens: int) -> int:
    """Bytes of vLLM's static buffers with the flag, in bfloat16: positions, hidden states, per-layer inputs."""
    layers = len(shape.layer_types)
    return tokens * (8 + 2 * shape.hidden + 2 * layers * shape.per_layer)


def measured_table(parts: list[Part], points: list["Point"]) -> Table:
    """A row per part: prompt tokens per second by those without the flag, and how much of the counted limit that is."""
    view = Table(title="The fix after each patch, measured: tokens per second, by those without the flag")
    view.add_column("after the patch", no_wrap=True)
    for point in points:
        cached = f", {point.cached} cached" if point.cached else ""
        view.add_column(f"{point.length} tokens{cached}, cap {point.cap}", justify="right")
        view.add_column("limit", justify="right")
        view.add_column("of it", justify="right")
    for part in parts:
        row = [part.name]
        for point in points:
            ratio, most = point.ratio(part.name), point.limits[part.name]
            row += [f"{ratio:.2f}", f"{most:.2f}", f"{ratio / most:.0%}"]
        view.add_row(*row)
    return view


def counted_table(parts: list[Part], shape: Shape, length: int) -> Table:
    """A row per part: times fewer FLOPs of a whole model's prompt, the buffers left, and the lines the part costs."""
    view = Table(title=f"The fix after each patch, counted: times fewer FLOPs of a prompt of {length} tokens")
    view.add_column("after the patch", no_wrap=True)
    for heading in ("prompt", "cached half", "LoRA server", "text-only", "buffers, MB", "prompt_logprobs", "lines"):
        view.add_column(heading, justify="right")
    before = 0
    for part in parts:
        ratio = part.limit(shape, length)
        row = [part.name, f"{ratio:.2f}", f"{part.limit(shape, length, length // 2):.2f}"]
        row += [f"{part.limit(shape, length, lora=True):.2f}", f"{ratio:.2f}" if part.text_only else "fails"]
        row += [f"{0 if part.frees_buffers else buffer_bytes(shape, BATCHED_TOKENS) / 1e6:.0f}"]
        row += ["refused" if part.refuses else "let in", f"+{part.lines - before}"]
        view.add_row(*row)
        before = part.lines
    return view
