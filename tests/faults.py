# SPDX-License-Identifier: Apache-2.0
"""Put faults into the fix, one at a time, and see that the tests catch each.

Each fault is a small edit of an override source, made in a copy of the project; then the tests of the fix and of the
model run there and must fail. Prints a table in Markdown; exit 1 if a fault goes unnoticed or no longer applies.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[1]
ATTENTION = "vendor/vllm_gaudi_overrides/attention/backends/hpu_attn.py"
MODEL = "vendor/vllm_gaudi_overrides/models/gemma4.py"


@dataclass(frozen=True)
class Fault:
    name: str
    edits: tuple[tuple[str, str, str], ...]  # path, what stands there, what to put in its place


FAULTS = (
    Fault("the row before the last token's", ((MODEL, "(query_lens.long() - 1)", "(query_lens.long() - 2)"),)),
    Fault(
        "a padding row indexes outside itself",
        ((MODEL, "(query_lens.long() - 1).clamp(min=0)", "(query_lens.long() - 1)"),),
    ),
    Fault(
        "keys before the prompt are not masked",
        ((ATTENTION, "masked_fill(token < 0,", "masked_fill(token < -(1 << 40),"),),
    ),
    Fault(
        "one key too many in the window (> for >=)",
        (
            (
                ATTENTION,
                "min(padded_len, sliding_window or padded_len)",
                "min(padded_len, sliding_window + 1 if sliding_window else padded_len)",
            ),
        ),
    ),
    Fault(
        "the first rows' per-layer inputs",
        ((MODEL, "per_layer_inputs.index_select(0, rows) if", "per_layer_inputs[:rows.shape[0]] if"),),
    ),
    Fault(
        "the rotary embedding is not prepared for the rows",
        ((MODEL, "        rotary_emb.prepare_cos_sin(positions)", "        pass"),),
    ),
    Fault("the rotary cache is not dropped", ((MODEL, "        del rotary_emb.cos, rotary_emb.sin", "        pass"),)),
    Fault("the scale is forgotten", ((ATTENTION, "keys.permute(0, 2, 3, 1)) * scale", "keys.permute(0, 2, 3, 1))"),)),
    Fault(
        "the target's cache is written",
        (
            (
                ATTENTION,
                "    keys = key_cache.index_select",
                "    key_cache[slots[0, 0]] = query[0, :, 0]\n    keys = key_cache.index_select",
            ),
        ),
    ),
    Fault(
        "K/V from the layer's own tensors",
        (
            (
                ATTENTION,
                "return self._forward_last_token_prefill(query, kv_cache, attn_metadata)",
                "return self._forward_last_token_prefill(query, kv_cache if key is None else "
                "(key.view(-1, self.num_kv_heads, self.head_size), value.view(-1, self.num_kv_heads, self.head_size), "
                "None, None), attn_metadata)",
            ),
        ),
    ),
    Fault(
        "the fast path is taken on decode",
        (
            (MODEL, '    if not attn_metadata.is_prompt:\n        return "the step decodes"\n', ""),
            (
                MODEL,
                "    if attn_metadata.seq_lens_tensor is None or attn_metadata.slot_mapping is None:\n"
                '        return "the runner gave no query lengths or no slot mapping"\n',
                "",
            ),
        ),
    ),
    Fault(
        "the context is left out",
        (
            (ATTENTION, "        slots = torch.cat((context_slots, slots), dim=1)\n", ""),
            (ATTENTION, "        bias = torch.cat((context_seen, bias", "        bias = (bias"),
            (ATTENTION, "step_seen.gather(1, token.clamp(min=0))), dim=1)", "step_seen.gather(1, token.clamp(min=0)))"),
        ),
    ),
    Fault(
        "the first token's row of the context mask",
        ((ATTENTION, "index_select(0, last.view(-1).clamp(min=0))", "index_select(0, last.view(-1) * 0)"),),
    ),
    Fault(
        "the whole context for a sliding layer",
        ((ATTENTION, "if block_list is not None and self.sliding_window:", "if False:"),),
    ),
    Fault(
        "the last KV layer writes keys without rotary embedding",
        (
            (
                MODEL,
                "attention.rotary_emb(positions, attention.k_norm(key).flatten(-2), None)[0]",
                "attention.k_norm(key).flatten(-2)",
            ),
        ),
    ),
    Fault(
        "the last KV layer writes values without their norm",
        ((MODEL, "write_prompt_kv(key, attention.v_norm(value),", "write_prompt_kv(key, value,"),),
    ),
    Fault(
        "a small KV cache is not minded",
        ((MODEL, "context_slots > 0 and (len(slots) > 1 or min(slots) < context_slots)", "False"),),
    ),
    Fault(
        "the per-layer inputs of other layers",
        ((MODEL, "per_layer_model_projection.weight[:first_", "per_layer_model_projection.weight[-first_"),),
    ),
    Fault(
        "a text-only checkpoint's ids are not flattened",
        ((MODEL, "            input_ids = input_ids.flatten()\n", "            pass\n"),),
    ),
    Fault(
        "prompt_logprobs are let in",
        ((MODEL, 'getattr(params, "prompt_logprobs", None) is not None', "False"),),
    ),
    Fault(
        "the LoRA mask keeps the batch's rows",
        ((MODEL, "LoraMask.setLoraMask(mask.index_select(0, rows) if mask is not None else None)", "pass"),),
    ),
)


def copy_with(fault: Fault, folder: Path) -> str | None:
    """Copy the project's tracked and new files with the fault in; the reason if the fault does not apply."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)
    for path, old, new in fault.edits:
        text = (folder / path).read_text()
        if text.count(old) != 1:
            return f"{old!r} stands {text.count(old)} times in {path}"
        (folder / path).write_text(text.replace(old, new))
    return None


def failures(folder: Path, tests: list[str]) -> list[str]:
    """Names of the tests that fail in a copy of the project; one of each test file is enough."""
    found = []
    for test in tests:
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", test]
        words.append("--ignore=tests/model/test_patches.py")  # its patches do not fit a fix with a fault in it
        run = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        found += [
            line.partition(" - ")[0].partition(" ")[2]
            for line in run.stdout.splitlines()
            if line.startswith(("FAILED ", "ERROR "))
        ]
        if run.returncode not in (0, 1):
            raise SystemExit(f"faults: pytest could not run {test}:\n{run.stdout}{run.stderr}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s faults --", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", help="faults whose name holds this")
    parser.add_argument("tests", nargs="*", default=["tests/fix", "tests/model"], help="what must catch them")
    options = parser.parse_args()
    missed = 0
    print("| fault | caught by |\n|---|---|", flush=True)
    for fault in FAULTS:
        if options.only and options.only not in fault.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            reason = copy_with(fault, Path(folder))
            caught = [] if reason else failures(Path(folder), options.tests)
        missed += not caught
        shown = "<br>".join(f"`{name}`" for name in caught) or f"**nothing** {reason or ''}"
        print(f"| {fault.name} | {shown} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
