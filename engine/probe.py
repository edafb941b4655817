# SPDX-License-Identifier: Apache-2.0
"""Record, in each process that runs the model, what every forward did.

vLLM loads `install` as a general plugin, so it also reaches spawned workers. For each call of the
model runner it notes the kind of batch, the rows that went through each decoder layer, the
operations that would have stalled the device, and the logits of the sampled positions.
"""

import hashlib
from dataclasses import asdict, dataclass, field

import torch

from engine.kinds import CONTEXT, DECODE, MERGED, PROMPT


@dataclass
class Forward:
    """One forward of the model over a bucketed batch of `batch` x `length` token places."""

    kind: str
    warmup: bool
    batch: int
    length: int
    filled: int  # sequences that are not padding
    sampled: int  # logits rows that are not padding
    own_rows: list[int] = field(default_factory=list)  # per layer with a KV cache of its own
    shared_rows: list[int] = field(default_factory=list)  # per KV-shared layer
    projected_rows: list[int] = field(default_factory=list)  # per projection of the per-layer inputs
    host_reads: list[str] = field(default_factory=list)


class Probe:
    def __init__(self):
        self.forwards: list[Forward] = []
        self.logits: list[torch.Tensor] = []  # per forward [sampled, vocabulary], float32
        self.current: Forward | None = None

    def watch_runner(self, runner_class):
        """Have every runner of `runner_class` recorded."""
        load, execute = runner_class.load_model, runner_class._execute_model_generic

        def load_model(runner, *args, **kwargs):
            result = load(runner, *args, **kwargs)
            self.watch_layers(runner.get_model())
            self.watch_host(runner.model)
            return result

        def execute_model_generic(runner, token_ids, position_ids, attn_metadata, indices, *args, **kw):
            self.current = _describe(
                token_ids, attn_metadata, indices, kw.get("warmup_mode", False), runner.use_merged_prefill
            )
            result = execute(runner, token_ids, position_ids, attn_metadata, indices, *args, **kw)
            self.forwards.append(self.current)
            if not self.current.warmup:
                self.logits.append(result[-1][: self.current.sampled].detach().float().clone())
            self.current = None
            return result

        runner_class.load_model = load_model
        runner_class._execute_model_generic = execute_model_generic

    def watch_layers(self, model):
        """Count the rows that enter each decoder layer and that projection, outside of what is compiled."""
        for layer in _callables(model):
            plain = getattr(layer, "_orig_mod", layer)
            shared = plain.self_attn.attn.kv_sharing_target_layer_name is not None
            self._count_rows(layer, shared)
        text = _text_model(model)
        project = text.project_per_layer_inputs

        def projected(inputs_embeds, *args, **kwargs):
            if self.current is not None:
                self.current.projected_rows.append(inputs_embeds.shape[0])
            return project(inputs_embeds, *args, **kwargs)

        text.project_per_layer_inputs = projected

    def _count_rows(self, layer, shared):
        forward = layer.forward

        def counted(positions, hidden_states, *args, **kwargs):
            if self.current is not None:
                rows = self.current.shared_rows if shared else self.current.own_rows
                rows.append(hidden_states.numel() // hidden_states.shape[-1])
            return forward(positions, hidden_states, *args, **kwargs)

        layer.forward = counted

    def watch_host(self, adapter):
        """Note what stalls the device between the start and the end of the model's forward."""
        import hpu_on_cpu

        forward = adapter.forward

        def watched(*args, **kwargs):
            if self.current is None:
                return forward(*args, **kwargs)
            hpu_on_cpu.HOST_READS.append(self.current.host_reads.append)
            try:
                return forward(*args, **kwargs)
            finally:
                hpu_on_cpu.HOST_READS.clear()

        adapter.forward = watched


PROBE = Probe()


def _describe(token_ids, metadata, indices, warmup, merged):
    if not metadata.is_prompt:
        kind = DECODE
    elif merged:
        kind = MERGED
    else:
        kind = PROMPT if metadata.block_list is None else CONTEXT
    batch, length = token_ids.shape
    lengths = metadata.seq_lens_tensor
    filled = batch if lengths is None else int((lengths > 0).sum())
    sampled = int((indices >= 0).sum())
    return Forward(kind, warmup, batch, length, filled, sampled)


def _text_model(model):
    return next(m for m in model.modules() if hasattr(m, "start_layer") and hasattr(m, "layers"))


def _callables(model):
    """The decoder layers as they are called: the compiled wrapper of a layer where there is one."""
    text = _text_model(model)
    lists = [text.layers]
    for part in ("self_decoder", "cross_decoder"):
        if hasattr(text, part):
            lists.append(getattr(text, part).decoder_layers)
    found = {id(layer): layer for layers in lists for layer in layers}.values()
    wrapped = {id(layer._orig_mod) for layer in found if hasattr(layer, "_orig_mod")}
    return [layer for layer in found if id(layer) not in wrapped]


def install():
    """Entry point of the general plugin."""
    from vllm_gaudi.platform import HpuPlatform
    from vllm_gaudi.v1.worker import hpu_model_runner

    _keep_float32(HpuPlatform, hpu_model_runner)
    PROBE.watch_runner(hpu_model_runner.HPUModelRunner)


def _keep_float32(platform, runner_module):
    """The platform turns float32 into bfloat16; results are compared to the last bits here."""
    check = platform.check_and_update_config.__func__

    def keep(cls, config):
        dtype = config.model_config.dtype if config.model_config is not None else None
        check(cls, config)
        if dtype == torch.float32:
            config.model_config.dtype = dtype

    platform.check_and_update_config = classmethod(keep)
    runner_module.HPU_TORCH_DTYPE_TO_STR_DTYPE[torch.float32] = "auto"


# What the driver asks of each worker through collective_rpc.


def collect(worker):
    """(forwards as dicts, logits per forward, sha256 of each KV cache tensor) of this worker."""
    caches = {}
    for layer in worker.model_runner.kv_caches:
        for tensor in layer if isinstance(layer, tuple) else (layer,):
            if tensor is not None:
                caches[tensor.data_ptr()] = tensor
    digests = [hashlib.sha256(_bytes(tensor)).hexdigest()[:16] for tensor in caches.values()]
    return [asdict(f) for f in PROBE.forwards], [x.numpy() for x in PROBE.logits], digests


def set_attention_scale(worker, scale):
    """Give every decoder layer's attention this scale."""
    for layer in _callables(worker.model_runner.get_model()):
        getattr(layer, "_orig_mod", layer).self_attn.attn.impl.scale = scale


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
