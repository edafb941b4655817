# SPDX-License-Identifier: Apache-2.0
"""Checks that a vLLM, or a vllm-gaudi, has the names the fix relies on; reads the source, never imports it."""

import ast
import json
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graft import copies
from graft.errors import GraftError

GEMMA4 = "vllm/model_executor/models/gemma4.py"
ATTENTION = "vllm/model_executor/layers/attention/attention.py"
HPU_ATTN = "vllm_gaudi/attention/backends/hpu_attn.py"

Relied = tuple[tuple[str, str, Mapping[str, tuple[str, ...] | None]], ...]


def _attributes(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


# What the override sources take for granted beyond their imports, by package: (file, class, names), each name with the
# parameters that are given to it by name, or None for an attribute.
RELIED_ON: Mapping[str, Relied] = {
    "vllm": (
        (
            GEMMA4,
            "Gemma4Model",
            {
                # Defined again by the fix and called by the plugin's forward.
                "fast_prefill_forward": ("input_ids", "positions", "inputs_embeds", "per_layer_inputs"),
                "embed_input_ids": (),
                "get_per_layer_inputs": (),
                "project_per_layer_inputs": (),
                **_attributes("fast_prefill_enabled layers config positions hidden_states per_layer_inputs"),
                **_attributes("per_layer_model_projection per_layer_projection_scale per_layer_projection_norm"),
                **_attributes("per_layer_input_scale"),
            },
        ),
        (
            GEMMA4,
            "Gemma4DecoderLayer",
            {
                "forward": ("positions", "hidden_states", "residual", "per_layer_input"),
                **_attributes("self_attn input_layernorm"),
            },
        ),
        (
            GEMMA4,
            "Gemma4Attention",
            _attributes("attn rotary_emb qkv_proj q_size k_norm v_norm num_kv_heads head_dim"),
        ),
        (
            GEMMA4,
            "Gemma4ForCausalLM",
            {
                "forward": ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
                **_attributes("model"),
            },
        ),
        (
            "vllm/v1/engine/input_processor.py",
            "InputProcessor",
            {"process_inputs": ("request_id", "prompt", "params"), **_attributes("vllm_config")},
        ),
        ("vllm/model_executor/models/registry.py", "_ModelRegistry", {"register_model": ()}),
        (ATTENTION, "Attention", _attributes("kv_cache kv_cache_dtype impl")),
        (
            "vllm/config/vllm.py",
            "VllmConfig",
            _attributes(
                "model_config parallel_config scheduler_config cache_config lora_config kv_transfer_config"
                " speculative_config"
            ),
        ),
        ("vllm/config/parallel.py", "ParallelConfig", _attributes("pipeline_parallel_size")),
        ("vllm/config/model.py", "ModelConfig", _attributes("runner_type max_model_len")),
        ("vllm/config/scheduler.py", "SchedulerConfig", _attributes("max_num_seqs")),
        ("vllm/config/cache.py", "CacheConfig", _attributes("block_size")),
        ("vllm/forward_context.py", "ForwardContext", _attributes("attn_metadata")),
        ("vllm/logger.py", "_VllmLogger", {"info_once": ("msg",)}),
    ),
    "vllm_gaudi": (
        ("vllm_gaudi/extension/ops.py", "LoraMask", {"getLoraMask": (), "setLoraMask": ()}),
        ("vllm_gaudi/attention/ops/hpu_paged_attn.py", "HPUPagedAttention", {"split_kv_cache": ()}),
        ("vllm_gaudi/attention/ops/hpu_paged_attn.py", "HPUPagedAttentionMetadata", _attributes("block_list")),
        (
            HPU_ATTN,
            "HPUAttentionMetadata",
            _attributes(
                "slot_mapping seq_lens_tensor attn_bias window_attn_bias window_block_list block_size is_prompt"
            ),
        ),
        (
            HPU_ATTN,
            "HPUAttentionImpl",
            _attributes(
                "num_kv_heads head_size num_queries_per_kv scale sliding_window sinks alibi_slopes is_chunked_attention"
                " enable_fp8_attn k_cache v_cache use_merged_prefill kv_sharing_target_layer_name"
            ),
        ),
        (
            "vllm_gaudi/ops/hpu_rotary_embedding.py",
            "HPURotaryEmbedding",
            {"prepare_cos_sin": (), **_attributes("cos sin")},
        ),
    ),
}


@dataclass(frozen=True)
class Name:
    """A name the fix relies on and how a package has it. state: "same", "missing" or "signature"."""

    file: str
    symbol: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Vllm:
    """The source files of a vLLM."""

    path: Path
    version: str | None
    read: Callable[[str], str | None]


def survey(package: str, read: Callable[[str], str | None]) -> list[Name]:
    """How a package has each name the fix relies on. read: a file's text, by its path from the package's folder on."""
    wanted: dict[str, list[tuple[str, tuple[str, ...] | None]]] = {}
    for file, name in imports(package):
        wanted.setdefault(file, []).append((name, None))
    for file, owner, names in RELIED_ON[package]:
        wanted.setdefault(file, []).extend((f"{owner}.{name}", given) for name, given in names.items())
    found = []
    for file, symbols in wanted.items():
        for symbol, given in dict(symbols).items():
            found.append(_look(read, file, symbol, given))
    return found


def lacking(package: str, read: Callable[[str], str | None]) -> list[Name]:
    """The names that the override sources import from a package and it does not have: the copies would not load."""
    found = [_look(read, file, symbol, None) for file, symbol in imports(package)]
    return [name for name in found if name.state != "same"]


def imports(package: str, overrides: Path = copies.OVERRIDES) -> list[tuple[str, str]]:
    """What the override sources import from a package, as (file, name), each once."""
    found = []
    for file in copies.overridden(overrides):
        for node in ast.walk(ast.parse((overrides / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                place = node.module.replace(".", "/") + ".py"
                found += [(place, alias.name) for alias in node.names]
    return list(dict.fromkeys(found))


def _look(read: Callable[[str], str | None], file: str, symbol: str, given: tuple[str, ...] | None) -> Name:
    text = read(file)
    if text is None:
        text = read(file.removesuffix(".py") + "/__init__.py")
    if text is None:
        return Name(file, symbol, "missing", "there is no such file")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return Name(file, symbol, "missing", f"the file does not parse ({error})")
    owner, _, name = symbol.rpartition(".")
    if owner:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        if not classes:
            return Name(file, symbol, "missing", f"there is no class {owner}")
        functions, names = _members(classes[-1])
    else:
        functions, names = _top(tree)
    if name not in functions and name not in names:
        return Name(file, symbol, "missing", "it is not there")
    if given is None:
        return Name(file, symbol, "same")
    if name not in functions:
        return Name(file, symbol, "signature", "it is no function")
    arguments = functions[name].args
    takes = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    lacking = [parameter for parameter in given if parameter not in takes]
    if lacking:
        detail = f"it has no parameter {', '.join(lacking)} (it takes {', '.join(takes)})"
        return Name(file, symbol, "signature", detail)
    return Name(file, symbol, "same")


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _members(owner: ast.ClassDef) -> tuple[dict, set[str]]:
    """The methods of a class, and the attributes that it or its methods give a value or a type."""
    functions = {node.name: node for node in owner.body if isinstance(node, _FUNCTIONS)}
    names = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return functions, names


def _top(tree: ast.Module) -> tuple[dict, set[str]]:
    """The functions of a module, and all the names it binds at top level, in branches included."""
    functions, names = {}, set()
    blocks = [tree.body]
    while blocks:
        for node in blocks.pop():
            if isinstance(node, _FUNCTIONS):
                functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.If | ast.Try):
                blocks += [node.body, node.orelse, getattr(node, "finalbody", [])]
            else:
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                names |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return functions, names


def given(path: Path) -> Vllm:
    """The vLLM in a site-packages folder, a checkout, a wheel or an sdist.

    Raises:
        GraftError: there is none there.
    """
    try:
        if path.is_dir():
            return _folder(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = {name: name for name in archive.namelist()}
                return _archive(path, names, lambda name: archive.read(name))
        if path.is_file() and tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                members = {m.name.partition("/")[2]: m for m in archive if m.isreg()}
                return _archive(path, members, lambda member: archive.extractfile(member).read())
    except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise GraftError(f"{path} is damaged: {error}", "Download it again") from None
    raise GraftError(f"{path} is no vLLM", "Give site-packages, a checkout, a wheel or an sdist with --vllm")


def installed(python: Path) -> Vllm | None:
    """The vLLM of an interpreter's environment, or None."""
    code = (
        "import importlib.util, json; spec = importlib.util.find_spec('vllm');"
        "print(json.dumps(spec and list(spec.submodule_search_locations)))"
    )
    done = subprocess.run([python, "-I", "-B", "-c", code], capture_output=True, text=True)
    try:  # the interpreter itself may print at its start
        places = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    regular = [place for place in places or () if (Path(place) / "__init__.py").is_file()]
    return _folder(Path(regular[0]).parent) if regular else None


def _folder(path: Path) -> Vllm:
    root = path.parent if path.name == "vllm" and (path / "__init__.py").is_file() else path
    if not (root / "vllm" / "__init__.py").is_file():
        raise GraftError(f"{path} holds no vllm package", "Give the folder that holds it with --vllm")

    def read(name: str) -> str | None:
        file = root / name
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None

    described = [*sorted(root.glob("vllm-*.dist-info/METADATA")), root / "PKG-INFO"]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in described if file.is_file()]
    return Vllm(path, _version(texts[0]) if texts else None, read)


def _archive(path: Path, members: Mapping[str, object], extract: Callable) -> Vllm:
    """Reads what is needed at once: a compressed archive is slow to go through again."""
    files = {file for file, _ in imports("vllm")} | {file for file, _, _ in RELIED_ON["vllm"]}
    files |= {file.removesuffix(".py") + "/__init__.py" for file in files}
    texts = {name: extract(member).decode() for name, member in members.items() if name in files}
    described = [name for name in members if name == "PKG-INFO" or name.endswith(".dist-info/METADATA")]
    if not texts:
        raise GraftError(f"{path} holds no vllm package", "Give a wheel or an sdist of vLLM with --vllm")
    version = _version(extract(members[described[0]]).decode()) if described else None
    return Vllm(path, version, texts.get)


def _version(metadata: str) -> str | None:
    for line in metadata.splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ").split("+")[0]
    return None
