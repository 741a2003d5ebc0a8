"""What each parameter is for, as users of transformers think of it, by the types and names of its modules.

The nearest module that says something decides, so that a feed-forward layer inside `attn_layers` is an "mlp". What one
parameter's own path cannot say is decided with the whole list: see `kinds_of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from sonde.parallel.wrappers import block_of, clean_name

_NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTION_TYPES = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_RECURRENT_TYPES = (nn.RNNBase, nn.RNNCellBase)
_NORM_NAME = re.compile(r"norm|^ln(_|\d|$)|_ln$|^bn\d*$")
_BIAS_NAME = re.compile(r"bias$|^bias_")
_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("routers", re.compile(r"^router$|expert_gate$")),
    ("experts", re.compile(r"expert")),
    ("embeddings", re.compile(r"embed(?!_out)|^w[tp]e$|_token$|^pos_emb")),
    ("attention", re.compile(r"attn|attention|^(q|k|v|qkv|o)_proj$|^to_(q|k|v|kv|qkv|out)$")),
    ("mlp", re.compile(r"mlp|ffn|^ff$|feed_?forward|denserelu|^(up|down|gate)_proj$|^c_fc$")),
)
"""What a part of a path says, in lower case."""
_TYPE_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"attention|attn")),
    ("mlp", re.compile(r"mlp|feedforward")),
)
"""What the name of a module's type says, unless it is the type of a whole block or model."""
_WHOLE_TYPES = re.compile(r"block|layer|model|coder|transformer|stack|for[a-z]+$")
_HEADS = {
    "lm_head", "head", "heads", "embed_out", "output", "output_layer", "output_projection", "classifier", "score",
    "fc", "proj_out", "qa_outputs", "cls", "value_head", "v_head", "unembed", "unembedding",
}  # fmt: skip
"""Names of the last layer, where no number comes before them in the path: a layer of a block may be an "output" too."""


def parameter_roles(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The role of each parameter, as far as its own module and path say it.

    Args:
        model: wrapped or not.
        parameters: of the model, by name.

    Returns:
        For each of them "norms", "biases", "routers", "experts", "head", "embeddings", "attention", "mlp",
        "convolutions", "recurrent"; "linear" for any other matrix, and "other".
    """
    types = {clean_name(name): type(module).__name__.lower() for name, module in model.named_modules()}
    owners: dict[int, tuple[list[str], nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            owners.setdefault(id(parameter), (clean_name(name).split("."), module))
    paths = [".".join(owners[id(p)][0]) if id(p) in owners else name for name, p in parameters.items()]
    moe = _parents_of_experts(paths)
    return [
        _role(path.split("."), owners[id(p)][1] if id(p) in owners else None, p.dim(), types, moe)
        for path, p in zip(paths, parameters.values(), strict=True)
    ]


def _parents_of_experts(paths: Iterable[str]) -> set[str]:
    """The modules that hold experts, by path."""
    before = (re.split(r"(?:^|\.)[^.]*expert", path.lower(), maxsplit=1) for path in paths)
    return {parts[0] for parts in before if len(parts) > 1}


def _role(path: Sequence[str], owner: nn.Module | None, n_dims: int, types: Mapping[str, str], moe: set[str]) -> str:
    parts = [part.lower() for part in path]
    owner_type = type(owner).__name__.lower()
    if isinstance(owner, _NORM_TYPES) or "norm" in owner_type or (n_dims < 2 and any(map(_NORM_NAME.search, parts))):
        return "norms"
    if n_dims < 2 and _BIAS_NAME.search(parts[-1]):
        return "biases"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embeddings"
    for i in range(len(parts) - 1, -1, -1):
        if word := _word(parts, i, types.get(".".join(path[: i + 1]), ""), moe):
            # A feed-forward layer of an expert is the expert's.
            return "experts" if word == "mlp" and any("expert" in part for part in parts[:i]) else word
    if isinstance(owner, _CONVOLUTION_TYPES):
        return "convolutions"
    if isinstance(owner, _RECURRENT_TYPES):
        return "recurrent"
    return "linear" if n_dims >= 2 else "other"


def _word(parts: Sequence[str], i: int, type_name: str, moe: set[str]) -> str:
    """What part i of a path says; empty where it says nothing."""
    part = parts[i]
    if part == "gate" and ".".join(parts[:i]) in moe:
        return "routers"
    if part in _HEADS and not any(before.isdigit() for before in parts[:i]):
        return "head"
    words = [word for word, pattern in _WORDS if pattern.search(part)]
    if not (words or _WHOLE_TYPES.search(type_name)):
        words = [word for word, pattern in _TYPE_WORDS if pattern.search(type_name)]
    return words[0] if words else ""


def kinds_of(names: Sequence[str], roles: Sequence[str]) -> list[str]:
    """The kind of each parameter of a whole model.

    Any other matrix of a numbered block is "mlp" if the block has attention. The model's last matrix is the "head" if
    it stands behind all numbered blocks.

    Args:
        names: of the parameters, in the model's order.
        roles: of each, from `parameter_roles`.

    Example:
        >>> names = ["layers.0.attn.qkv.weight", "layers.0.fc1.weight", "layers.0.fc1.bias", "out.weight"]
        >>> kinds_of(names, ["attention", "linear", "biases", "linear"])
        ['attention', 'mlp', 'biases', 'head']
    """
    blocks = [block_of(name) for name in names]
    with_attention = {block for block, role in zip(blocks, roles, strict=True) if role == "attention"}
    numbered = [i for i, block in enumerate(blocks) if block.rpartition(".")[2].isdigit()]
    matrices = [i for i, role in enumerate(roles) if role not in ("norms", "biases", "other")]
    kinds = list(roles)
    for i in numbered:
        if roles[i] == "linear" and blocks[i] in with_attention:
            kinds[i] = "mlp"
    if numbered and matrices and matrices[-1] > numbered[-1] and roles[matrices[-1]] == "linear":
        kinds[matrices[-1]] = "head"
    return kinds
