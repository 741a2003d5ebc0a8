"""Probes from a mapping or a YAML file: off by default, and nothing misspelt is passed over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde import (
    CausalLMStatistics,
    Partners,
    PolicyEntropyProbe,
    Probe,
    ProbesConfig,
    Rollouts,
    RunLog,
    probes_from_config,
)
from tests.small_policy import drawn, loss, optimizer_of, policy

ALL_ON = """
gns_probe: {enabled: true, unit: prompts, units-per-piece: 4, allowance: 1e2}
entropy_probe:
  enabled: true
  every: 2
  micro-batch-prompts: 4
policy_entropy_probe: {enabled: true}
"""


def attached(config: ProbesConfig, **options: Any) -> dict[str, Any]:
    model = policy()
    return config.attach(model, optimizer_of(model), **options)


def test_everything_is_off_by_default() -> None:
    for config in ({}, {"gns_probe": {}, "entropy_probe": {"every": 3}}):
        with pytest.warns(UserWarning, match="turns on no probe, so nothing is measured: write gns_probe: {enabled: "):
            assert attached(probes_from_config(config)) == {}


class Falsy(list[int]):
    """Token statistics that are empty, as a sequence."""

    def __call__(self, model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
        s, h = CausalLMStatistics()(model, rollouts)
        return s, h + 1.0


def test_token_statistics_are_used_whatever_their_truth() -> None:
    model = policy()
    on = probes_from_config({"policy_entropy_probe": {"enabled": True}})
    first, second = (
        on.attach(model, optimizer_of(model), token_statistics=each)["policy_entropy_probe"] for each in (None, Falsy())
    )
    E = drawn(model, 0, 4, seed=1)
    assert isinstance(first, PolicyEntropyProbe)
    assert isinstance(second, PolicyEntropyProbe)
    model_entropy = first.measure(E).token_weighted
    assert second.measure(E).token_weighted == pytest.approx(model_entropy + 1.0)


def test_a_yaml_file_makes_probes_that_work(tmp_path: Path) -> None:
    file = tmp_path / "probes.yaml"
    file.write_text(ALL_ON)
    config = probes_from_config(file)
    assert probes_from_config(str(file)) == config
    assert (config.gns_probe.unit, config.gns_probe.allowance, config.entropy_probe.every) == ("prompts", 100.0, 2)
    several = probes_from_config({"gns_probe": {"metric": ["sign", "euclidean"]}})
    assert several.gns_probe.metrics == ("sign", "euclidean")
    with pytest.raises(ValueError, match=r"metric in gns_probe .* must be one of euclidean, adam, sign, spectral, got"):
        probes_from_config({"gns_probe": {"metric": ["sign", "l1"]}})
    model = policy()
    optimizer = optimizer_of(model)
    probes = config.attach(model, optimizer, sampler=lambda m: drawn(m, 0, 6, seed=1))
    assert list(probes) == ["gns_probe", "entropy_probe", "policy_entropy_probe"]
    stepped = [probe for probe in probes.values() if isinstance(probe, Probe)]
    assert stepped == [probes["gns_probe"], probes["entropy_probe"]]
    forecasts = []
    for k in range(4):
        optimizer.zero_grad()
        for j in range(2):
            loss(model, drawn(model, 100 + 10 * k + 4 * j, 4, seed=k)).backward()
        for probe in stepped:
            probe.step()
        forecasts.append(probes["entropy_probe"].metrics())
        optimizer.step()
    assert [bool(f) for f in forecasts] == [True, False, True, False]
    assert forecasts[0]["entropy/delta_forecast"] != forecasts[2]["entropy/delta_forecast"]
    assert probes["gns_probe"].metrics()["gns/trace_cov"] is not None
    for probe in probes.values():
        probe.close()
        probe.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gns_prob": {}}, r"the config holds an unknown option 'gns_prob': did you mean 'gns_probe'\?"),
        ({"gns_prob": [1]}, r"did you mean 'gns_probe'\?"),
        ({"entropy_prob": None}, r"did you mean 'entropy_probe'\?"),
        ({"GNS_PROBE": {}}, r"did you mean 'gns_probe'\?"),
        ({"gns_probe": {}, "gns-probe": {}}, "the config holds 'gns_probe' twice, with - and with _"),
        ({"gns": {"enabled": True}}, r"the config holds an unknown option 'gns': did you mean 'gns_probe'\?"),
        ({"noise_probe": {"budget": 3}}, r"the config holds an unknown option 'noise_probe'"),
        ({"prompt-noise-prob": {}}, r"did you mean 'prompt_noise_probe'\?"),
        ({"gns_probe": True}, r"gns_probe in the config must map options to values, got True: write gns_probe: \{"),
        ({"gns_probe": {"budgt": 3}}, "gns_probe of the config holds an unknown option 'budgt': .* 'budget'"),
        (
            {"gns_probe": {"rules": "x"}},
            "gns_probe of the config holds 'rules', .* functions or objects .* rules= in code",
        ),
        ({"entropy_probe": {"sequence_weights": "x"}}, "sequence_weights in .* must be one of one, length, got"),
        ({"gns_probe": {"enabled": "yes"}}, "enabled in gns_probe of the config must be true or false, got 'yes'"),
        ({"gns_probe": {"tap": "hook"}}, "tap in .* must be one of leaf, comm_hook, got 'hook'"),
        ({"entropy_probe": {"enabled": True, "every": 0}}, "every must be a whole number from 1 up, got 0"),
        ({"entropy_probe": {"every": 1.5}}, "every in entropy_probe of the config must be a whole number, got 1.5"),
        ({"entropy_probe": {"budget": True}}, "budget in .* must be a number, got True"),
    ],
)
def test_what_is_misspelt_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        probes_from_config(config)


def test_files_that_do_not_serve(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config file at .*probes\.yaml: give a YAML file"):
        probes_from_config(tmp_path / "probes.yaml")
    (tmp_path / "probes.yaml").write_text("- gns_probe")
    with pytest.raises(ValueError, match=r"a configuration must map keys to options, .* got a list"):
        probes_from_config([{"gns_probe": {}}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must map options to values, got a list"):
        probes_from_config(tmp_path / "probes.yaml")


def test_the_whole_configuration_of_a_training_may_be_given() -> None:
    theirs = {
        "learning_rate": 1e-3,
        "entropy_coef": 0.01,
        "probability": 0.5,
        "model": {"gns": 1},
        "report_to": ["wandb"],
        "linear_probe": {"layer": 3, "enabled": True},
        "my_probe": {},
        "entropy": {"coef": 1},
        "entropy_loss": True,
        "probe": {"layer": 3},
        "probes": ["layer 3"],
    }
    config = probes_from_config({**theirs, "gns_probe": {"enabled": True}})
    assert config == probes_from_config({"gns_probe": {"enabled": True}})
    with pytest.warns(UserWarning, match="turns on no probe"):
        assert attached(probes_from_config(theirs)) == {}


@pytest.mark.parametrize(
    ("options", "partners", "said"),
    [
        ({}, {"sampler": None}, "sampler=None: pass sampler=, a function model -> sonde.Rollouts, or make"),
        ({}, {"sampler": 3}, "sampler=3: pass sampler=, a function model -> sonde.Rollouts"),
        ({"update": "gradient"}, {}, "forecasts the optimizer's steps on fresh responses, got update='gradient'"),
        ({}, {"optimizer": torch.optim.RMSprop}, "sonde cannot forecast the step of RMSprop: use around_step"),
    ],
)
def test_a_probe_that_cannot_work_as_configured_is_refused_at_once(
    options: Any, partners: dict[str, Any], said: str
) -> None:
    config, model = probes_from_config({"entropy_probe": {"enabled": True, **options}}), policy()
    given = {"sampler": lambda m: drawn(m, 0, 6, seed=1), **partners}
    optimizer = given.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=said):
        config.attach(model, optimizer, **given)


def test_every_option_can_be_reached() -> None:
    config = probes_from_config(
        {
            "entropy_probe": {
                "enabled": True,
                "clip_at": 5,
                "sequence_weights": "length",
                "precision": "model",
                "budget": 0.5,
            },
            "policy_entropy_probe": {"enabled": True, "micro_batch_prompts": 3},
            "prompt_noise_probe": {"enabled": True, "weighs": "tokens"},
        }
    )
    assert (config.entropy_probe.budget, config.entropy_probe.clip_at) == (0.5, 5.0)
    assert config.entropy_probe.sequence_weights == "length"
    probes = attached(config, sampler=lambda m: drawn(m, 0, 6, seed=1))
    assert list(probes) == ["entropy_probe", "policy_entropy_probe", "prompt_noise_probe"]
    model = policy()
    U = drawn(model, 100, 4, seed=1)
    assert probes["prompt_noise_probe"].measure(U).windows == 1
    assert probes["prompt_noise_probe"].metrics()["gns_prompts/prompts_per_window"] == 4.0


def test_what_is_known_in_code_goes_to_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the log goes
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    read = []
    probes = probes_from_config({"gns_probe": {"enabled": True, "every": 1}}).attach(
        model,
        optimizer,
        grad_scaler=scaler,
        units_per_piece=4,
        log=RunLog(lambda metrics, step: read.append(metrics), every=1),
    )
    for _ in range(2):
        for _ in range(2):
            scaler.scale(model(torch.randn(4, 3)).square().mean() / 2).backward()
        scaler.unscale_(optimizer)
        probes["gns_probe"].step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    reading = probes["gns_probe"].reading()
    assert reading.units_per_window == 8.0
    assert 0 < reading.trace_cov < 1e3  # and not a million times as much, by the scale
    probes["gns_probe"].close()
    assert read


@dataclass(frozen=True)
class LayerProbeConfig:
    """What a further built-in probe brings in its own file."""

    enabled: bool = False
    layer: str = "0"

    def attach(self, partners: Partners) -> LayerProbe:
        return LayerProbe(partners.model.get_submodule(self.layer))


class LayerProbe:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def step(self) -> None:
        pass

    def metrics(self) -> dict[str, float | None]:
        return {"layer/parameters": float(sum(p.numel() for p in self.layer.parameters()))}

    def close(self) -> None:
        pass


def test_a_probe_of_your_own_has_a_key_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = {"layer_probe": LayerProbeConfig}
    config = probes_from_config({"layer_probe": {"enabled": True, "layer": "1"}}, probes=mine)
    probes = config.attach(model, optimizer)
    assert {key: probe.metrics() for key, probe in probes.items()} == {"layer_probe": {"layer/parameters": 3.0}}
    with pytest.raises(ValueError, match="did you mean 'layer_probe'"):
        probes_from_config({"layer_prob": {}}, probes=mine)
    with pytest.raises(ValueError, match="layer in layer_probe of the config must be text, got 1"):
        probes_from_config({"layer_probe": {"layer": 1}}, probes=mine)
    with pytest.raises(ValueError, match="'gns_probe' is a key of sonde's own: choose another"):
        probes_from_config({}, probes={"gns_probe": LayerProbeConfig})
    with pytest.warns(UserWarning, match="or another of .*, layer_probe"):
        assert probes_from_config({}, probes=mine).attach(model, optimizer) == {}
