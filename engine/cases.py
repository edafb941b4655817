# SPDX-License-Identifier: Apache-2.0
"""The cases of the engine table: what is served, with which settings, and the path it must take."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kinds import ALL, CONTEXT, DECODE, FAST, MERGED, PROMPT, TOKENS
from engine.words import SPECIAL_TOKENS, prompt

WINDOW = 128

FIRST_PROMPTS = {PROMPT: FAST, DECODE: ALL}
WITH_CONTEXT = {PROMPT: FAST, CONTEXT: FAST, DECODE: ALL}
NOT_CONTEXT = {PROMPT: FAST, CONTEXT: ALL, DECODE: ALL}


@dataclass(frozen=True)
class Arm:
    """One run of a case: which plugin, the flag or not, which of the test model's checkpoints."""

    fixed: bool
    flag: bool
    checkpoint: str = ""  # its folder below the multimodal one


STOCK = Arm(fixed=False, flag=False)
FIXED = Arm(fixed=True, flag=True)


@dataclass(frozen=True)
class Case:
    """`work` is served by two engines that differ in plugin and flag; the results must be equal.

    `paths` names each kind of forward that must occur in the second run, and the rows its KV-shared
    layers must see. Every answer has TOKENS tokens, unless `short` says why not. `stock_fault` is
    what the first run is known to fail with: then the second may fail likewise. `refusal` is what
    the second must fail with.
    """

    name: str
    promise: str
    work: Callable
    paths: dict[str, str] = field(default_factory=lambda: FIRST_PROMPTS)
    settings: dict = field(default_factory=dict)  # of vllm.LLM, over engine.arm.SETTINGS
    environ: dict[str, str] = field(default_factory=dict)
    text_only: bool = True
    replicas: int = 1  # processes, each with an engine of its own, of which vLLM makes a data-parallel one
    first: Arm = STOCK
    second: Arm = FIXED
    short: str = ""
    stock_fault: str = ""
    refusal: str = ""
    same_caches: bool = True  # every KV cache equal to the bit
    tolerance: float = 1e-4  # of a sampled logit, which lies in (-30, 30)
    quick: bool = False
    since: str = ""  # the patch of the series that brings it, where it fails without that one
    may_fall_back: bool = False  # all layers are right as well: for the fix after the series' first patches


# What is served. `engine` is an engine.arm.Engine.


def several_lengths(engine):
    edges = [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 17, 5 * WINDOW - 1]
    engine.greedy([prompt(n) for n in edges])


def a_padded_batch(engine):
    """Rows that only pad come last: behind a full one, where a row index too low would hit a token that is read."""
    engine.greedy([prompt(n) for n in (1, 77, WINDOW, WINDOW + 1, 3 * WINDOW)])


def a_mixed_batch(engine):
    engine.greedy([prompt(n) for n in (1, 77, WINDOW, WINDOW + 1, 300)])


def a_warm_batch(engine):
    if not engine.collect()[0]:
        raise RuntimeError("nothing was warmed up: this case shows nothing")
    a_mixed_batch_and_a_hit(engine)


def a_short_batch(engine):
    """Two prompt buckets, and answers that begin no block, so that a decode forward has one shape throughout."""
    engine.greedy([prompt(n) for n in (20, 300)])


def a_mixed_batch_and_a_hit(engine):
    a_mixed_batch(engine)
    engine.greedy([prompt(300)])


def one_long_answer(engine):
    engine.greedy([prompt(3 * WINDOW + 17)])


def shared_prefixes(engine):
    start = prompt(2 * WINDOW + 40)
    engine.greedy([start])
    engine.greedy([start])
    engine.greedy([start + prompt(n, seed=n)[1:] for n in (2, 60, 200)])


def a_busy_server(engine):
    start = prompt(2 * WINDOW)
    engine.greedy([prompt(n) for n in (30, 90, 120, 128, 900)])
    engine.greedy([start + prompt(n, seed=n)[1:] for n in (2, 60, 500)] + [prompt(20, seed=1)])
    engine.greedy([start + prompt(60, seed=60)[1:], prompt(300, seed=2)])


def a_hit_among_others(engine):
    """One step starts four prompts, of which the second finds its first blocks cached and the others nothing."""
    start = prompt(2 * WINDOW)
    engine.greedy([start])
    before = len(engine.collect()[0])
    prompts = [prompt(90, seed=1), start + prompt(60, seed=2)[1:], prompt(100, seed=3), prompt(300, seed=4)]
    engine.greedy(prompts)
    step = engine.collect()[0][before:]
    kinds = [forward["kind"] for forward in step]
    started = step[: kinds.index(DECODE)]
    if sum(forward["filled"] for forward in started) != len(prompts) or kinds.count(CONTEXT) != 1:
        raise RuntimeError("the prompts did not share a step, or not one was a hit: this case shows nothing")


def sampled_with_logprobs(engine):
    """Random draws from seeds of their own, then greedy ones; three logprobs of each."""
    lengths = (77, WINDOW, 300)
    engine.sample([prompt(n) for n in lengths], seeds=(5, 6, 7), temperature=0.8, logprobs=3)
    engine.sample([prompt(n) for n in lengths], temperature=0, logprobs=3)
    drawn, best = engine.answers[0], engine.answers[4 * len(lengths)]
    if drawn == best:
        raise RuntimeError("nothing but the likeliest tokens was drawn: this case shows nothing")


def thousands_of_tokens(engine):
    """16 windows and more, then as many of which the first half is cached."""
    first = prompt(2 * 1050)
    engine.greedy([first])
    engine.greedy([first[:1050] + prompt(1050, seed=1)[1:]])


def unlike_replicas(engine):
    """Each has at some time fewer prompts in a step than the other, shorter ones, and none at all."""
    if engine.replica == 0:
        engine.greedy([prompt(40)])
        engine.greedy([prompt(n) for n in (10, 20, 30, 40, 150)])
    else:
        engine.greedy([prompt(n) for n in (50, 130, 300)])
        engine.greedy([prompt(20)])
    if engine.prompt_forwards() == len(engine.answers):
        raise RuntimeError("there was no dummy prompt: this case shows nothing")


def prefixes_from_a_connector(engine):
    """Nothing is cached here, so what a prompt finds comes from the connector."""
    start = prompt(2 * WINDOW + 40)
    engine.greedy([start])
    engine.greedy([start + prompt(n, seed=n)[1:] for n in (2, 200)])


def another_scale(engine):
    """Gemma 4's attention scale is 1, which forgetting it would not show."""
    from engine.probe import set_attention_scale

    engine.llm.collective_rpc(set_attention_scale, args=(0.7,))
    a_mixed_batch(engine)


def embeddings(engine):
    outputs = engine.llm.embed([{"prompt_token_ids": prompt(n)} for n in (40, 200)], use_tqdm=False)
    engine.answers += [output.outputs.embedding for output in outputs]


def preempted_with_a_hit(engine):
    """Three blocks each in a pool of nine: the last is preempted while it answers, and finds its first block cached.

    The runner then samples every token that it had answered with again, and the answer starts over, flag or not.
    """
    engine.greedy([prompt(length, seed) for length, seed in ((375, 11), (374, 12), (370, 13))])
    if not any(forward["kind"] == CONTEXT and forward["sampled"] > 1 for forward in engine.collect()[0]):
        raise RuntimeError("no prompt step sampled several tokens: this case shows nothing")


def chunked_prompts(engine):
    engine.greedy([prompt(n) for n in (WINDOW, 3 * WINDOW + 17, 4 * WINDOW, 40)])


def more_than_fits(engine):
    """Prompts of one block each that need a second one while they are answered."""
    prompts = [prompt(n) for n in (120, 125, 100, 127)]
    engine.greedy(prompts)
    if engine.prompt_forwards() == len(prompts):
        raise RuntimeError("no request was preempted: this case shows nothing")


def structured_answers(engine):
    """One request at a time: a grammar is compiled beside the scheduler, so several would be batched by chance."""
    from vllm.sampling_params import StructuredOutputsParams

    # No word of the vocabulary is the start of one of these: t1, t2 and t3 are none.
    words = StructuredOutputsParams(regex=f"(t[123][0-9]){{{TOKENS}}}")
    for length in (50, 140):
        engine.greedy([prompt(length)], structured_outputs=words)
    if not all(10 <= token < 40 for answer in engine.answers for token in answer):
        raise RuntimeError("the grammar was not followed: this case shows nothing")
    engine.greedy([prompt(70)])


def _picture():
    from PIL import Image

    picture = Image.new("RGB", (96, 64))
    picture.putdata([(x * 2, y * 3, (x * y) % 256) for y in range(64) for x in range(96)])
    return picture


def an_image(engine):
    tokens = [*prompt(30), SPECIAL_TOKENS["<|image|>"], *prompt(60)[1:]]
    engine.greedy([tokens], images=[_picture()])
    engine.greedy([prompt(150)])


def an_image_with_context(engine):
    """The second time the image and what follows it are cached; the third the image comes after a cached start."""
    tokens = [*prompt(30), SPECIAL_TOKENS["<|image|>"], *prompt(230)[1:]]
    engine.greedy([tokens], images=[_picture()])
    engine.greedy([[*tokens, *prompt(40, seed=40)[1:]]], images=[_picture()])
    start = prompt(2 * WINDOW)
    engine.greedy([start])
    engine.greedy([[*start, SPECIAL_TOKENS["<|image|>"], *prompt(60)[1:]]], images=[_picture()])


def an_adapter_with_context(engine):
    start = prompt(WINDOW + 40)
    for _ in range(2):
        engine.greedy([start], adapters=[True])
    engine.greedy([start + prompt(60, seed=60)[1:]], adapters=[True])


def a_padded_batch_split(engine):
    a_padded_batch(engine)
    _must_have_split(engine)


def an_image_split(engine):
    an_image(engine)
    _must_have_split(engine)


def _must_have_split(engine):
    rows = [(f["projected_rows"], f["batch"]) for f in engine.collect()[0] if f["kind"] == PROMPT]
    if engine.fixed and not all(projected == [batch] for projected, batch in rows):
        raise RuntimeError(f"the per-layer inputs were not split, but projected of {rows}: this case shows nothing")


def with_and_without_adapter(engine):
    engine.greedy([prompt(n) for n in (60, 140)], adapters=[True, False])


def without_adapter(engine):
    engine.greedy([prompt(n) for n in (60, 140)])


def repetitions(engine):
    phrase = prompt(12)[1:]
    engine.greedy([[2, *phrase * 8], [2, *phrase * 13]])


def prompt_logprobs(engine):
    engine.greedy([prompt(40)], prompt_logprobs=3)


# Blocks in which four requests of 1,024 tokens and a block more each leave one over, vLLM's null block. The plugin adds
# one for padding.
ROOMY = 4 * (1024 // 128 + 1) + 1


def one_token_beside_a_prompt(engine):
    engine.greedy([prompt(512, seed=5), prompt(1)])
    _must_have_sampled_several(engine, PROMPT)


def one_token_behind_a_hit(engine):
    hit = prompt(2 * WINDOW + 1)
    engine.greedy([hit])
    engine.greedy([prompt(512, seed=5), hit])
    _must_have_sampled_several(engine, CONTEXT)


def _must_have_sampled_several(engine, kind):
    if all(f["sampled"] <= f["batch"] for f in engine.collect()[0] if f["kind"] == kind):
        raise RuntimeError(f"no {kind} forward sampled several tokens of a prompt: this case shows nothing")


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
ASKED = {"VLLM_FAST_PREFILL_WITH_CONTEXT": "1"}
CONNECTOR = {
    "kv_transfer_config": {
        "kv_connector": "BlockStore",
        "kv_connector_module_path": "engine.connector",
        "kv_role": "kv_both",
    }
}
SPLIT = {"VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS": "1"}
CAP_8 = {"VLLM_PROMPT_BS_BUCKET_MAX": "8"}
WIDE = {"max_num_seqs": 8, "max_num_batched_tokens": 4096}
CHUNKS = {"max_num_batched_tokens": 128}

CASES = (
    Case(
        "lengths",
        "prompts of 1 token, around the window, and of several windows",
        several_lengths,
        settings={"max_num_batched_tokens": 2048},
        quick=True,
    ),
    Case("answer", "64 tokens after one prompt", one_long_answer),
    Case(
        "batch",
        "batch cap 8: padding rows and mixed lengths in one forward",
        a_padded_batch,
        settings=WIDE,
        environ=CAP_8,
        quick=True,
    ),
    Case(
        "full-batch",
        "batch cap 8, every row full: query length equals padded length",
        lambda engine: engine.greedy([prompt(256, seed) for seed in range(8)]),
        settings=WIDE,
        environ=CAP_8,
    ),
    Case(
        "prefix",
        "prefix-cache hits, whole and in part",
        shared_prefixes,
        WITH_CONTEXT,
        settings={"enable_prefix_caching": True},
        quick=True,
    ),
    Case(
        "chunks",
        "chunked prefill: first, middle and last chunks",
        chunked_prompts,
        WITH_CONTEXT,
        settings=CHUNKS,
        quick=True,
    ),
    Case(
        "chunks-async",
        "chunked prefill under async scheduling: one discarded row per chunk",
        chunked_prompts,
        WITH_CONTEXT,
        settings={**CHUNKS, "async_scheduling": True},
    ),
    Case(
        "preemption",
        "preempted and resumed: only the last row of what is run again is sampled",
        more_than_fits,
        settings={"num_gpu_blocks_override": 7, "max_model_len": 256},
    ),
    Case(
        "preemption-hit",
        "preempted and resumed with a prefix-cache hit: several tokens of one prompt step are sampled",
        preempted_with_a_hit,
        NOT_CONTEXT,
        settings={"num_gpu_blocks_override": 10, "max_model_len": 512, "enable_prefix_caching": True},
        quick=True,
    ),
    Case(
        "split-inputs",
        "VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS=1, with batch cap 8, padding rows and mixed lengths",
        a_padded_batch_split,
        settings=WIDE,
        environ={**CAP_8, **SPLIT},
        same_caches=False,
        since="per-layer-inputs",
    ),
    Case(
        "split-inputs-image",
        "VLLM_FAST_PREFILL_SPLIT_PER_LAYER_INPUTS=1, with an image prompt",
        an_image_split,
        environ=SPLIT,
        text_only=False,
        same_caches=False,
        since="per-layer-inputs",
    ),
    Case(
        "small-pool",
        "prefix-cache hits where the KV cache is a block too small to rule preemption out",
        shared_prefixes,
        NOT_CONTEXT,
        settings={"enable_prefix_caching": True, "num_gpu_blocks_override": ROOMY - 1},
        quick=True,
    ),
    Case(
        "small-pool-asked",
        "prefix-cache hits in that cache, with VLLM_FAST_PREFILL_WITH_CONTEXT=1",
        shared_prefixes,
        WITH_CONTEXT,
        settings={"enable_prefix_caching": True, "num_gpu_blocks_override": ROOMY - 1},
        environ=ASKED,
    ),
    Case(
        "roomy-pool",
        "prefix-cache hits in a KV cache of a block more: nothing can be preempted",
        shared_prefixes,
        WITH_CONTEXT,
        settings={"enable_prefix_caching": True, "num_gpu_blocks_override": ROOMY},
    ),
    Case(
        "chunks-forbidden",
        "chunked prefill in a large KV cache, with VLLM_FAST_PREFILL_WITH_CONTEXT=0",
        chunked_prompts,
        NOT_CONTEXT,
        settings=CHUNKS,
        environ={"VLLM_FAST_PREFILL_WITH_CONTEXT": "0"},
    ),
    Case(
        "async",
        "async scheduling",
        a_mixed_batch,
        settings={"async_scheduling": True},
    ),
    Case(
        "server",
        "as a server runs by default: prefix caching, chunks, async scheduling, with batch cap 4",
        a_busy_server,
        WITH_CONTEXT,
        settings={
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "async_scheduling": True,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 80,
        },
        environ={"VLLM_PROMPT_BS_BUCKET_MAX": "4"},
        quick=True,
    ),
    Case(
        "bfloat16",
        "bfloat16: equal within the rounding of one",
        a_mixed_batch,
        settings={"dtype": "bfloat16"},
        tolerance=0.25,
    ),
    Case("structured", "structured output: a grammar of 64 words, then a free answer", structured_answers),
    Case(
        "image",
        "an image prompt, then a text prompt, through the multimodal path",
        an_image,
        text_only=False,
        quick=True,
    ),
    Case(
        "image-context",
        "image prompts with a prefix-cache hit, before and behind the image",
        an_image_with_context,
        WITH_CONTEXT,
        settings={"enable_prefix_caching": True},
        text_only=False,
    ),
    Case(
        "lora",
        "LoRA: one request with an adapter, one without",
        with_and_without_adapter,
        settings={"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
        quick=True,
    ),
    Case(
        "lora-context",
        "LoRA and prefix-cache hits",
        an_adapter_with_context,
        WITH_CONTEXT,
        settings={"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "enable_prefix_caching": True},
    ),
    Case(
        "lora-idle",
        "LoRA enabled, no request uses it",
        without_adapter,
        settings={"enable_lora": True, "max_lora_rank": 8, "max_loras": 1},
    ),
    Case(
        "merged-one",
        "merged prefill, one prompt at a time",
        one_long_answer,
        {MERGED: ALL, DECODE: ALL},
        environ={"VLLM_MERGED_PREFILL": "true"},
    ),
    Case(
        "merged-many",
        "merged prefill, several prompts in one row",
        a_mixed_batch,
        {MERGED: ALL, DECODE: ALL},
        environ={"VLLM_MERGED_PREFILL": "true", **CAP_8},
        settings=WIDE,
    ),
    Case(
        "contiguous",
        "contiguous paged attention on",
        a_mixed_batch,
        environ={"VLLM_CONTIGUOUS_PA": "true"},
    ),
    Case(
        "scattered",
        "contiguous paged attention off",
        a_mixed_batch,
        environ={"VLLM_CONTIGUOUS_PA": "false"},
    ),
    Case(
        "ngram",
        "n-gram speculation: decode forwards with several rows; the flag has no effect",
        repetitions,
        {PROMPT: ALL, DECODE: ALL},
        settings=NGRAM,
    ),
    Case(
        "ngram-one-token",
        "n-gram speculation: a prompt of one token is padded with drafts, and all its rows are sampled",
        one_token_beside_a_prompt,
        {PROMPT: ALL, DECODE: ALL},
        settings={**NGRAM, "max_num_batched_tokens": 512},
    ),
    Case(
        "ngram-hit",
        "n-gram speculation: the same of a prompt that is cached but for its last token",
        one_token_behind_a_hit,
        {PROMPT: ALL, CONTEXT: ALL, DECODE: ALL},
        settings={**NGRAM, "max_num_batched_tokens": 512, "enable_prefix_caching": True},
    ),
    Case(
        "warm-up",
        "warm-up of every bucket in lazy mode, then prompts",
        a_warm_batch,
        WITH_CONTEXT,
        environ={"VLLM_SKIP_WARMUP": "false", "PT_HPU_LAZY_MODE": "1"},
        settings={
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 2,
            "enforce_eager": False,
            "enable_prefix_caching": True,
        },
    ),
    Case(
        "lazy",
        "lazy mode, HPU graphs wrapped around the model",
        a_mixed_batch,
        environ={"PT_HPU_LAZY_MODE": "1"},
        settings={"enforce_eager": False},
    ),
    Case(
        "compiled",
        "regional compilation of the layers",
        a_short_batch,
        settings={"enforce_eager": False},
    ),
    Case(
        "two-ranks",
        "tensor parallel over two ranks",
        a_short_batch,
        settings={"tensor_parallel_size": 2},
        tolerance=2e-4,
    ),
    Case(
        "data-parallel",
        "two replicas in lockstep: batches padded to the other's, dummy prompts; vLLM told that there are experts",
        unlike_replicas,
        settings={"distributed_executor_backend": "uni", "hf_overrides": {"text_config": {"num_experts": 2}}},
        replicas=2,
    ),
    Case(
        "connector",
        "prefixes that come from a KV connector, with VLLM_FAST_PREFILL_WITH_CONTEXT=1 and room for all",
        prefixes_from_a_connector,
        NOT_CONTEXT,
        settings=CONNECTOR,
        environ=ASKED,
    ),
    Case(
        "connector-preemption",
        "preempted, and resumed with a prefix from a KV connector: several tokens of one prompt step are sampled",
        preempted_with_a_hit,
        NOT_CONTEXT,
        settings={**CONNECTOR, "num_gpu_blocks_override": 10, "max_model_len": 512},
        environ=ASKED,
    ),
    Case(
        "text-class",
        "the text-only class, whose text model the plugin leaves as it is, and a prefix-cache hit",
        a_mixed_batch_and_a_hit,
        WITH_CONTEXT,
        settings={"hf_overrides": {"architectures": ["Gemma4ForCausalLM"]}, "enable_prefix_caching": True},
        since="text-only",
    ),
    Case(
        "text-checkpoint",
        "a text-only checkpoint, held against the multimodal one: without the flag v0.26.0 cannot serve it",
        a_mixed_batch_and_a_hit,
        WITH_CONTEXT,
        settings={"enable_prefix_caching": True},
        second=Arm(fixed=True, flag=True, checkpoint="text"),
        since="text-only",
    ),
    Case(
        "text-checkpoint-off",
        "a text-only checkpoint without the flag: as the stock plugin does",
        a_short_batch,
        {PROMPT: ALL, DECODE: ALL},
        first=Arm(fixed=False, flag=False, checkpoint="text"),
        second=Arm(fixed=True, flag=False, checkpoint="text"),
        stock_fault="must match the size of tensor b",
    ),
    Case(
        "pooling",
        "embeddings: every token is needed; this path of the runner is not recorded, only its results",
        embeddings,
        {},
        settings={"runner": "pooling", "convert": "embed"},
        short="an embedding is no answer",
    ),
    Case(
        "hit-and-miss",
        "a prompt with a prefix-cache hit and three without start in one step, with batch cap 4",
        a_hit_among_others,
        WITH_CONTEXT,
        settings={"enable_prefix_caching": True, "max_num_batched_tokens": 2048},
        environ={"VLLM_PROMPT_BS_BUCKET_MAX": "4"},
        quick=True,
    ),
    Case("sampled", "tokens drawn at temperature 0.8 from seeds, logprobs of all", sampled_with_logprobs),
    Case(
        "long",
        "prompts of 2,100 tokens, without context and with half of it cached",
        thousands_of_tokens,
        WITH_CONTEXT,
        settings={
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 2,
            "num_gpu_blocks_override": 80,
            "enable_prefix_caching": True,
        },
    ),
    Case("scale", "another attention scale than Gemma 4's, set in both runs", another_scale),
    Case(
        "fp8-cache",
        "an FP8 KV cache is refused when the server starts",
        a_short_batch,
        settings={"kv_cache_dtype": "fp8_inc"},
        refusal="FP8 KV cache",
        stock_fault="cast_to_fp8_v2",  # the stand-in for the bridge has no FP8 operators
    ),
    Case(
        "prompt-logprobs",
        "prompt logprobs asked for offline are refused",
        prompt_logprobs,
        refusal="prompt_logprobs cannot be had with --kv-sharing-fast-prefill",
        stock_fault="mat1 and mat2 shapes cannot be multiplied",
        since="prompt-logprobs",
    ),
    Case(
        "flag-off",
        "the fix installed, the flag off: bit for bit the stock plugin",
        a_mixed_batch,
        {PROMPT: ALL, DECODE: ALL},
        second=Arm(fixed=True, flag=False),
        tolerance=0.0,
        quick=True,
    ),
    Case(
        "stock-flag",
        "why the fix exists: the stock plugin with the flag fails on the first prompt",
        a_mixed_batch,
        second=Arm(fixed=False, flag=True),
        refusal="AssertionError",
        quick=True,
    ),
)

BY_NAME = {case.name: case for case in CASES}
