# SPDX-License-Identifier: Apache-2.0
"""Loads the override sources on their own, with upstream's names stubbed, so that torch alone tests the fix."""

import logging
import sys
import types
from pathlib import Path

import pytest

VENDOR = Path(__file__).parents[2] / "vendor"


class RecordingLogger(logging.Logger):
    """vLLM's logger has `info_once`; this one keeps what it was given."""

    def __init__(self):
        super().__init__("fix")
        self.lines = []

    def info_once(self, message, *args):
        if (line := message % args) not in self.lines:
            self.lines.append(line)

    def warning(self, message, *args):
        self.lines.append(message % args)


def stub(**modules: dict) -> dict[str, types.ModuleType]:
    """Modules by dotted name ("__" for "."), each with the given attributes."""
    made = {}
    for name, attributes in modules.items():
        name = name.replace("__", ".")
        made[name] = types.ModuleType(name)
        vars(made[name]).update(attributes)
    return made


def load(relative: str, stubs: dict[str, types.ModuleType], upstream_names: dict) -> types.SimpleNamespace:
    """Run one override source as a module of its own.

    Args:
        relative: path below vendor/vllm_gaudi_overrides.
        stubs: what its imports find.
        upstream_names: names that the upstream file defines and the override uses.
    """
    path = VENDOR / "vllm_gaudi_overrides" / relative
    module = types.ModuleType(f"override_{path.stem}")
    vars(module).update(upstream_names)
    sys.modules[module.__name__] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(VENDOR))
        for name, made in stubs.items():
            patch.setitem(sys.modules, name, made)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def decoder_layer_forward(layer, positions, hidden_states, residual, per_layer_input=None, **kwargs):
    """What the base class of a decoder layer does in these tests: see the layers of test_fast_prefill_forward.py."""
    return layer.base_forward(positions, hidden_states, per_layer_input, **kwargs), None


class CausalLM:
    """What the base class of a text-only model does: `.model` is there once it is made, and gets what forward gets."""

    made = None

    def __init__(self, *, vllm_config, prefix=""):
        self.model = CausalLM.made

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        return input_ids, positions, intermediate_tensors, inputs_embeds, kwargs


def given(self, *args, **kwargs):
    """What an input processor does with a request: hands it on."""
    return args, kwargs


class PagedAttention:
    @staticmethod
    def split_kv_cache(kv_cache, num_kv_heads, head_size):
        return kv_cache


@pytest.fixture(scope="session")
def attention():
    """The override of attention/backends/hpu_attn.py."""
    stubs = stub(
        vllm={},
        vllm__v1={},
        vllm__v1__attention={},
        vllm__v1__attention__backend=dict(AttentionImpl=type("AttentionImpl", (), {}), AttentionLayer=object),
        vllm_gaudi={},
        vllm_gaudi__attention={},
        vllm_gaudi__attention__ops={},
        vllm_gaudi__attention__ops__hpu_paged_attn=dict(HPUPagedAttention=PagedAttention),
    )
    return load("attention/backends/hpu_attn.py", stubs, {"HPUAttentionMetadata": object})


@pytest.fixture
def model():
    """The override of models/gemma4.py; `.context.attn_metadata` is what its forward context holds."""
    context = types.SimpleNamespace(attn_metadata=None)
    config = types.SimpleNamespace()

    class LoraMask:
        mask = None

        @staticmethod
        def setLoraMask(mask):
            LoraMask.mask = mask

        @staticmethod
        def getLoraMask():
            return LoraMask.mask

    def run_decoder_layers(decoder_layers, layer_idx_start, positions, hidden_states, per_layer_inputs=None, **kwargs):
        for layer in decoder_layers:
            row = None if per_layer_inputs is None else per_layer_inputs[:, layer.index]
            hidden_states = layer(positions, hidden_states, row, **kwargs)
        return hidden_states

    logger, registered = RecordingLogger(), {}
    stubs = stub(
        vllm={},
        vllm__config=dict(VllmConfig=object, get_current_vllm_config=lambda: config),
        vllm__forward_context=dict(get_forward_context=lambda: context),
        vllm__model_executor={},
        vllm__model_executor__models={},
        vllm__model_executor__models__gemma4=dict(
            Gemma4Model=type("Gemma4Model", (), {}),
            Gemma4ForCausalLM=CausalLM,
            Gemma4DecoderLayer=type("Gemma4DecoderLayer", (), {"forward": decoder_layer_forward}),
        ),
        vllm__model_executor__models__registry=dict(
            ModelRegistry=types.SimpleNamespace(register_model=registered.__setitem__)
        ),
        vllm__sequence=dict(IntermediateTensors=object),
        vllm__v1={},
        vllm__v1__engine={},
        vllm__v1__engine__input_processor=dict(InputProcessor=type("InputProcessor", (), dict(process_inputs=given))),
        vllm_gaudi={},
        vllm_gaudi__extension={},
        vllm_gaudi__extension__logger=dict(logger=lambda: logger),
        vllm_gaudi__extension__ops=dict(LoraMask=LoraMask),
    )
    module = load("models/gemma4.py", stubs, {"_hpu_run_decoder_layers": run_decoder_layers})
    module.registered, module.text_base = registered, CausalLM
    module.context, module.config, module.log, module.lora = context, config, logger.lines, LoraMask
    return module
