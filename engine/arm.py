# SPDX-License-Identifier: Apache-2.0
"""Run arms of cases, each in a fork of this process, and write what they did.

`python -m engine.arm`, with the bridge, the plugin and this repository on PYTHONPATH, imports vLLM
and the plugin once. Then for each line of standard input, a JSON object {case, flag, model, out,
environ}, it forks, serves the case, writes `out`/result.json and logits.npz, and answers with a
line: the exit status.
"""

import gc
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from engine.cases import BY_NAME
from engine.kinds import DECODE, TOKENS

SETTINGS = dict(
    dtype="float32",
    enforce_eager=True,
    max_model_len=1024,
    max_num_seqs=4,
    max_num_batched_tokens=1024,
    enable_prefix_caching=False,
    async_scheduling=False,
    num_gpu_blocks_override=48,
    seed=0,
    disable_log_stats=True,
)
ARCHITECTURE = "Gemma4ForConditionalGeneration"
NO_MEDIA = {"image": 0, "audio": 0, "video": 0}


class Engine:
    """vLLM's offline engine on the test model; keeps the tokens of every answer, in order."""

    def __init__(self, case, model, flag):
        from vllm import LLM

        settings = {**SETTINGS, **case.settings}
        if case.text_only:
            settings["limit_mm_per_prompt"] = NO_MEDIA
        self.model = str(model)
        self.fixed = is_fixed()
        self.replica = int(os.environ.get("VLLM_DP_RANK", 0))
        self.answers: list[list[int]] = []
        self.llm = LLM(self.model, kv_sharing_fast_prefill=flag, **settings)

    def greedy(self, prompts, images=None, adapters=None, **sampling):
        """Serve `prompts` (token ids) in one batch of requests."""
        self.sample(prompts, images, adapters, temperature=0, **sampling)

    def sample(self, prompts, images=None, adapters=None, seeds=(), **sampling):
        """Serve `prompts` with these SamplingParams, each with a seed of its own where there are `seeds`.

        Where logprobs are asked for, an answer of the likeliest tokens, one of the second likeliest
        and so on follow each answer.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        requests = [{"prompt_token_ids": tokens} for tokens in prompts]
        for request, image in zip(requests, images or (), strict=False):
            request["multi_modal_data"] = {"image": image}
        lora = None
        if adapters:
            adapter = LoRARequest("adapter", 1, f"{self.model}/lora")
            lora = [adapter if wanted else None for wanted in adapters]
        fixed = dict(max_tokens=TOKENS, ignore_eos=True, detokenize=False, **sampling)
        params = [SamplingParams(seed=seed, **fixed) for seed in seeds or [None] * len(prompts)]
        for output in self.llm.generate(requests, params, use_tqdm=False, lora_request=lora):
            answer = output.outputs[0]
            self.answers.append(list(answer.token_ids))
            for rank in range(1, 1 + (sampling.get("logprobs") or 0)):
                ranked = [{one.rank: token for token, one in place.items()} for place in answer.logprobs]
                self.answers.append([tokens[rank] for tokens in ranked])

    def prompt_forwards(self):
        """How many forwards over prompts there have been so far."""
        return sum(forward["kind"] != DECODE for forward in self.collect()[0])

    def collect(self):
        """(forwards, logits, cache digests) of the first rank."""
        from engine import probe

        return self.llm.collective_rpc(probe.collect)[0]


def run(case, model, flag):
    """({answers, forwards, caches, seconds, error}, logits per forward)."""
    result = {"answers": [], "forwards": [], "caches": [], "error": None, "fixed": is_fixed()}
    logits, engine = [], None
    begun = time.monotonic()
    try:
        engine = Engine(case, model, flag)
        case.work(engine)
    except Exception as error:  # the plugin's own faults are results here
        result["error"] = f"{type(error).__name__}: {error}".strip().rstrip(":")
        result["traceback"] = traceback.format_exc()
    if engine is not None:
        result["answers"] = engine.answers
        result["forwards"], logits, result["caches"] = engine.collect()
    result["seconds"] = time.monotonic() - begun
    return result, logits


def is_fixed():
    """Whether the merged copies are what this process has imported; None if only one of the two is."""
    from vllm_gaudi.attention.backends import hpu_attn
    from vllm_gaudi.models import gemma4

    merged = {"vllm_gaudi_overrides" in module.__file__ for module in (gemma4, hpu_attn)}
    return merged.pop() if len(merged) == 1 else None


def preload():
    """Import all that every arm needs."""
    from vllm import LLM, ModelRegistry  # noqa: F401
    from vllm.lora.request import LoRARequest  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    # A class that is registered by name only is imported by one more interpreter, to be looked at.
    ModelRegistry.register_model(ARCHITECTURE, ModelRegistry.models[ARCHITECTURE].load_model_cls())
    from vllm_gaudi.extension import runtime

    # Some releases read their settings on import; each arm has its own.
    runtime.RUNTIME_CONFIG = None
    gc.collect()
    gc.freeze()  # the plugin collects often; what the imports made need not be walked each time


def arm(job):
    """One arm, in the process it is given."""
    os.environ.update(job["environ"])
    case, out = BY_NAME[job["case"]], Path(job["out"])
    os.chdir(out)
    others = _fork_replicas(case.replicas)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result, logits = run(case, job["model"], job["flag"])
    replica = int(os.environ.get("VLLM_DP_RANK", 0))
    for other in others:
        os.waitpid(other, 0)
    np.savez(f"logits-{replica}.npz", *logits)
    Path(f"result-{replica}.json").write_text(json.dumps(result))
    if replica == 0:
        _join(case.replicas)


def _fork_replicas(count):
    """The children that serve as replicas 1 and on of a data-parallel engine. Each returns from here as well."""
    if count == 1:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(VLLM_DP_SIZE=str(count), VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port))
    children = []
    for replica in range(1, count):
        child = os.fork()
        if child == 0:
            os.environ.update(VLLM_DP_RANK=str(replica), VLLM_DP_RANK_LOCAL=str(replica))
            return []
        children.append(child)
    return children


def _join(count):
    """Write result.json and logits.npz from what each replica wrote, one after the other."""
    results = [json.loads(Path(f"result-{replica}.json").read_text()) for replica in range(count)]
    joined = results[0]
    for result in results[1:]:
        for name in ("answers", "forwards", "caches"):
            joined[name] += result[name]
        joined["error"] = joined["error"] or result["error"]
    rows = []
    for replica in range(count):
        with np.load(f"logits-{replica}.npz") as logits:
            rows += [logits[name] for name in logits.files]
    np.savez("logits.npz", *rows)
    Path("result.json").write_text(json.dumps(joined))


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    preload()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                arm(job)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # no exit handlers: they belong to the parent
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


if __name__ == "__main__":
    main()
