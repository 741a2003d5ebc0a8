"""Groups of parameters: kinds, one for each parameter, and whether they go to the log."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.demos.byte_lm.task import ByteTransformer
from sonde.parallel.parameter_roles import kinds_of, parameter_roles
from tests.batch_size.loops import Recording, attached, batch, flat_grad, mean_loss, small_model, train
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of


def kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each parameter, by its name with N for every number."""
    named = dict(model.named_parameters())
    found = kinds_of(list(named), parameter_roles(model, named))
    return {re.sub(r"\d+", "N", name): kind for name, kind in zip(named, found, strict=True)}


def gpt() -> ByteTransformer:
    torch.manual_seed(3)
    return ByteTransformer(context=6, width=8, depth=2, n_heads=2)


def resnet() -> nn.Module:
    def convolution(n: int, size: int) -> nn.Conv2d:
        return nn.Conv2d(n, 4, size, bias=False)

    block = nn.ModuleDict({"conv1": convolution(4, 3), "bn1": nn.BatchNorm2d(4)})
    block["downsample"] = nn.Sequential(convolution(4, 1), nn.BatchNorm2d(4))
    layers = {"conv1": convolution(3, 3), "bn1": nn.BatchNorm2d(4), "layer1": nn.Sequential(block)}
    return nn.ModuleDict(layers | {"fc": nn.Linear(4, 10)})


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a GPT": (
        gpt,
        {
            "embed.weight": "embeddings",
            "embed.position": "embeddings",
            "blocks.N.attention_norm.weight": "norms",
            "blocks.N.attention.queries_keys_values.weight": "attention",
            "blocks.N.attention.output.weight": "attention",
            "blocks.N.mlp_norm.bias": "norms",
            "blocks.N.mlp.N.weight": "mlp",
            "blocks.N.mlp.N.bias": "biases",
            "norm.weight": "norms",
            "head.weight": "head",
        },
    ),
    "a residual net": (
        resnet,
        {
            "convN.weight": "convolutions",
            "bnN.weight": "norms",
            "layerN.N.convN.weight": "convolutions",
            "layerN.N.bnN.bias": "norms",
            "layerN.N.downsample.N.bias": "norms",
            "fc.weight": "head",
            "fc.bias": "biases",
        },
    ),
    "recurrent": (
        lambda: nn.ModuleDict({"words": nn.Embedding(4, 4), "rnn": nn.LSTM(4, 4)}),
        {"words.weight": "embeddings", "rnn.weight_hh_lN": "recurrent", "rnn.bias_hh_lN": "biases"},
    ),
    "torch's own layers": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False),
        {
            "layers.N.self_attn.in_proj_weight": "attention",
            "layers.N.self_attn.in_proj_bias": "biases",
            "layers.N.linearN.weight": "mlp",
            "layers.N.normN.bias": "norms",
        },
    ),
    "layers without roles": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        {"N.weight": "linear", "N.bias": "biases"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_models(name: str) -> None:
    make, expected = MODELS[name]
    assert kinds(make()).items() >= expected.items()


def test_kinds_of_models_of_transformers() -> None:
    tf: Any = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    small = {"vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    short = small | {"num_hidden_layers": 1, "intermediate_size": 8}
    with torch.device("meta"):
        gpt2 = kinds(tf.GPT2LMHeadModel(tf.GPT2Config(**small, n_layer=2)))
        llama = kinds(tf.LlamaForCausalLM(tf.LlamaConfig(**short)))
        moe = kinds(tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**short, num_key_value_heads=1)))
        bert = kinds(tf.BertForSequenceClassification(tf.BertConfig(**short)))
    assert gpt2 | {"transformer.wte.weight": "embeddings", "transformer.h.N.attn.c_proj.weight": "attention"} == gpt2
    assert gpt2 | {"transformer.h.N.mlp.c_proj.weight": "mlp", "transformer.ln_f.bias": "norms"} == gpt2
    assert llama | {"lm_head.weight": "head", "model.layers.N.self_attn.o_proj.weight": "attention"} == llama
    assert llama | {"model.layers.N.mlp.gate_proj.weight": "mlp", "model.norm.weight": "norms"} == llama
    assert moe | {"model.layers.N.mlp.gate.weight": "routers"} == moe
    assert {kind for name, kind in moe.items() if ".experts." in name or ".shared_expert." in name} == {"experts"}
    assert bert | {"bert.encoder.layer.N.output.dense.weight": "mlp", "classifier.weight": "head"} == bert
    assert bert | {"bert.encoder.layer.N.attention.output.dense.weight": "attention"} == bert
    assert not {"other"} & {*gpt2.values(), *llama.values(), *moe.values(), *bert.values()}


def _kinds_under(wrapper: str) -> list[str]:
    model: Any = gpt()
    if wrapper == "FSDP2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of((2,)))
        model = fully_shard(model, mesh=mesh_of((2,)))
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, dtype=torch.int64))  # leaves the outermost module's parameters gathered
    else:
        model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    with attached(model, groups="kinds") as probe:
        return list(probe._tracker.groups)


@pytest.mark.parametrize("wrapper", ["FSDP2", "compiled in DDP"])
def test_kinds_under_wrappers(ranks2: Ranks, wrapper: str) -> None:
    assert ranks2(_kinds_under, wrapper) == [["embeddings", "norms", "attention", "mlp", "biases", "head"]] * 2


def by_hand(groups: Callable[[str], str]) -> dict[str, tuple[float, float]]:
    """tr Σ and |G|² of each group of `small_model` in the first window of `train`."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    pieces = [flat_grad(model, mean_loss(model, *batch(4, generator))) for _ in range(3)]
    sizes = [p.numel() for p in model.parameters()]
    parts = {name: [g.split(sizes)[i] for g in pieces] for i, (name, _) in enumerate(model.named_parameters())}
    joined: dict[str, list[Tensor]] = {}
    for name, of_pieces in parts.items():
        before = joined.get(groups(name), [torch.empty(0, dtype=torch.float64)] * 3)
        joined[groups(name)] = [torch.cat(pair) for pair in zip(before, of_pieces, strict=True)]
    return {
        name: window_by_hand(of_pieces, [1.0] * 3, [4.0] * 3, torch.stack(of_pieces).sum(0))
        for name, of_pieces in joined.items()
    }


def of_no_name(name: str) -> str:
    """The first layer's group has an empty name, as that of a model's own parameters."""
    return "" if name.startswith("0") else name.split(".")[0]


ORACLES: dict[Any, Callable[[str], str]] = {
    None: lambda name: "all",
    "blocks": lambda name: name.split(".")[0],
    "parameters": str,
    "kinds": lambda name: "norms" if name.startswith("2") else "linear" if name.endswith("weight") else "biases",
    of_no_name: of_no_name,
}


@pytest.mark.parametrize("groups", ORACLES)
def test_each_group_is_as_by_hand(groups: Any) -> None:
    model, expected = small_model(), by_hand(ORACLES[groups])
    with attached(model, groups=groups) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=1)
        reading = probe.reading()
    assert list(reading.groups) == list(expected)
    for name, (trace_cov, grad_sq) in expected.items():
        assert reading.groups[name].trace_cov == pytest.approx(trace_cov, rel=1e-5)
        assert reading.groups[name].grad_sq == pytest.approx(grad_sq, rel=1e-5, abs=1e-5 * trace_cov)
    assert sum(g.trace_cov or 0.0 for g in reading.groups.values()) == pytest.approx(reading.trace_cov, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "are_written"),
    [
        ({"groups": "parameters"}, False),
        ({"groups": "parameters", "log_groups": True}, True),
        ({"groups": "kinds"}, True),
        ({"groups": "blocks", "log_groups": False}, False),
        ({"groups": None}, True),
    ],
    ids=str,
)
def test_whether_groups_go_to_the_log(options: dict[str, Any], are_written: bool) -> None:
    model, sink = small_model(), Recording()
    log = sonde.RunLog(sink, every=2, log_windows=True)
    with attached(model, log=log, **options) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=23)
        names = set(probe.reading().groups)
    assert names
    (header,) = sink.of_kind("header")
    written = [
        set(r["groups"]) for kind in ("window", "reading", "details") for r in sink.of_kind(kind) if "groups" in r
    ]
    if are_written:
        assert set(header["setup"]["groups"]) == names
        assert all(each == names for each in written)
        assert len(written) > 23
    else:
        assert header["setup"]["groups"] == []
        assert not any(written)


def test_long_lists_of_groups_go_to_the_log_on_request_only() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(129)))  # 258 parameters
    for log_groups, expected in ((None, 0), (True, 258)):
        sink = Recording()
        with attached(model, groups=str, log=sonde.RunLog(sink), log_groups=log_groups):
            assert len(sink.of_kind("header")[0]["setup"]["groups"]) == expected
