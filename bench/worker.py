# SPDX-License-Identifier: Apache-2.0
"""One engine that measures on demand: JSON settings as argument, then a JSON task per line, an answer per line.

{"length", "prompts", "tokens", "seed", "cached"}: answers {"wall", "cpu"}, the seconds for that many random prompts and
output tokens; the first `cached` tokens of all of them are the same and in the prefix cache. {"memory": length}:
answers {"bytes"}, the peak of live tensor bytes above those before, in one prompt.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path


def random_prompts(count: int, length: int, vocabulary: int, seed: int, shared: int = 0) -> list[dict]:
    """Prompts of `length` random tokens, the first `shared` of them the same in all."""
    draw = random.Random(seed)
    start = [draw.randrange(4, vocabulary) for _ in range(shared)]
    own = [[draw.randrange(4, vocabulary) for _ in range(length - shared)] for _ in range(count)]
    return [{"prompt_token_ids": start + tokens} for tokens in own]


class Worker:
    def __init__(self, settings: dict, vocabulary: int):
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.vocabulary = vocabulary
        self.llm = LLM(**settings)

    def generate(self, count: int, length: int, tokens: int, seed: int, cached: int = 0) -> dict[str, float]:
        """Seconds that `count` prompts of `length` random tokens take, with `tokens` output tokens each.

        What is cached of them is so beforehand, and that is not counted. On the clock, and of this process's threads on
        the CPU, which other work on the machine does not lengthen.
        """
        prompts = random_prompts(count, length, self.vocabulary, seed, cached)
        params = self.params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        if cached:
            start = {"prompt_token_ids": prompts[0]["prompt_token_ids"][:cached]}
            self.llm.generate([start], self.params(max_tokens=1, detokenize=False), use_tqdm=False)
        begun = time.perf_counter(), time.process_time()
        self.llm.generate(prompts, params, use_tqdm=False)
        return {"wall": time.perf_counter() - begun[0], "cpu": time.process_time() - begun[1]}

    def peak_bytes(self, length: int) -> int:
        """Peak of live bytes above those at the start, on the CPU's allocator."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.generate(1, length, 1, seed=7)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        changes = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0]
        live, peak = 0, 0
        for event in sorted(changes, key=lambda e: e["ts"]):
            live += event["args"]["Bytes"]
            peak = max(peak, live)
        return peak


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    given = json.loads(sys.argv[1])
    worker = Worker(given["settings"], given["vocabulary"])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        if "memory" in task:
            answer = {"bytes": worker.peak_bytes(task["memory"])}
        else:
            what = (task[name] for name in ("prompts", "length", "tokens", "seed", "cached"))
            answer = worker.generate(*what)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
