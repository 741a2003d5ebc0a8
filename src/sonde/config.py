"""Probes from a mapping or a YAML file, for trainers that are set up by one."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import nn

from sonde.batch_size.attach import GnsProbeConfig
from sonde.batch_size.forward_units import UnitsPerPiece
from sonde.batch_size.taps.ddp_buckets import CommHook
from sonde.console import stack_level
from sonde.policy.entropy_change import EntropyProbeConfig, Sampler
from sonde.policy.policy_entropy import PolicyEntropyProbeConfig
from sonde.policy.prompt_noise import PromptNoiseProbeConfig
from sonde.policy.scoring.rollouts import TokenStatistics
from sonde.probe import Partners, Probe, ProbeConfig, RolloutProbe
from sonde.records import LogOrPlaces, log_of

T = TypeVar("T")


@dataclass(frozen=True)
class ProbesConfig:
    """Which probes are wanted, and how; all are off by default. A further built-in probe is one more line here.

    Attributes:
        own: configurations of the user's own probes, by their keys.
    """

    gns_probe: GnsProbeConfig = field(default_factory=GnsProbeConfig)
    entropy_probe: EntropyProbeConfig = field(default_factory=EntropyProbeConfig)
    policy_entropy_probe: PolicyEntropyProbeConfig = field(default_factory=PolicyEntropyProbeConfig)
    prompt_noise_probe: PromptNoiseProbeConfig = field(default_factory=PromptNoiseProbeConfig)
    own: Mapping[str, ProbeConfig] = field(default_factory=dict)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        token_statistics: TokenStatistics | None = None,
        sampler: Sampler | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        comm_hook: CommHook | None = None,
        comm_state: object = None,
        units_per_piece: UnitsPerPiece = None,
        log: LogOrPlaces = None,
    ) -> dict[str, Probe | RolloutProbe]:
        """The probes that are enabled, by their keys.

        Args:
            model: to be measured.
            optimizer: its optimizer.
            token_statistics: scores responses; by default those of a causal language model.
            sampler: draws fresh responses for the entropy probe.
            grad_scaler: in use, as for `sonde.attach`.
            process_group: the ranks that hold different data; by default those of the model's wrapper.
            comm_hook: DDP's communication hook of the training, as for `sonde.attach`.
            comm_state: its state.
            units_per_piece: as for `sonde.attach`, where it is known only in code.
            log: of the run, or what `RunLog` takes; by default one without sinks.

        Raises:
            ValueError: for a probe that cannot work as it is configured, or an option outside its range.
        """
        if log is not None:
            log = log_of(log, every=self.gns_probe.log_every)
        self.warn_if_nothing_is_on()
        partners = Partners(
            model, optimizer, log, token_statistics, sampler, grad_scaler, process_group, comm_hook, comm_state
        )
        configs = self._by_key()
        if units_per_piece is not None:
            configs["gns_probe"] = replace(self.gns_probe, units_per_piece=units_per_piece)
        return {key: config.attach(partners) for key, config in configs.items() if config.enabled}

    def warn_if_nothing_is_on(self) -> None:
        """Say that no probe is on, since a run without measurements looks like one with them until it ends."""
        names = list(self._by_key())
        if not any(config.enabled for config in self._by_key().values()):
            message = (
                f"the configuration turns on no probe, so nothing is measured: write {names[0]}: {{enabled: true}}"
            )
            warnings.warn(f"{message}, or another of {', '.join(names)}", stacklevel=stack_level())

    def _by_key(self) -> dict[str, ProbeConfig]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "own"} | dict(self.own)


def probes_from_config(
    config: Mapping[str, Any] | str | Path, *, probes: Mapping[str, type[ProbeConfig]] | None = None
) -> ProbesConfig:
    """Read which probes are wanted.

    Args:
        config: a mapping such as `{"gns_probe": {"enabled": True}}`, or the path of a YAML file of that form;
            docs/configuration.md has every key. It may be the whole configuration of a training: other keys are the
            training's own. A key that looks like a probe's is refused.
        probes: keys of your own probes, and the dataclasses of their options.

    Returns:
        The configuration, whose `attach` makes the probes.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a key that is nearly a probe's, naming it, or a value of another kind or outside its range.

    Example:
        >>> config = probes_from_config({"gns_probe": {"enabled": True, "unit": "prompts"}, "learning_rate": 1e-3})
        >>> config.gns_probe.unit, config.entropy_probe.enabled
        ('prompts', False)
    """
    where: object = "the config"
    if isinstance(config, str | Path):
        where = config
        config = read_yaml(Path(config), "gns_probe: {enabled: true}")
    if not isinstance(config, Mapping):
        raise ValueError(
            f"a configuration must map keys to options, or be the path of a YAML file, got a {type(config).__name__}: "
            "pass {'gns_probe': {'enabled': True}}, say"
        )
    own: dict[str, Any] = dict(probes or {})
    built_in: dict[str, Any] = {name: kind for name, kind in get_type_hints(ProbesConfig).items() if name != "own"}
    if both := sorted(own.keys() & built_in):
        raise ValueError(f"{both[0]!r} is a key of sonde's own: choose another for your probe")
    kinds = built_in | own
    configs: dict[str, Any] = {}
    for key, options in config.items():
        if not _is_of_a_probe(key, options, kinds):
            continue
        name = known_name(key, list(kinds), where)
        if name in configs:
            raise ValueError(f"{where} holds {name!r} twice, with - and with _: keep one of the two")
        if not isinstance(options, Mapping):
            raise ValueError(
                f"{name} in {where} must map options to values, got {options!r}: write {name}: {{enabled: true}}"
            )
        configs[name] = options_from(kinds[name], options, f"{name} of {where}")
    mine = {name: configs.pop(name) if name in configs else kind() for name, kind in own.items()}
    return ProbesConfig(**configs, own=mine)


def _is_of_a_probe(key: object, value: object, kinds: Mapping[str, type]) -> bool:
    """Whether a key is meant for a probe: it is that of one, or nearly; or it is like one and holds a probe's options.

    Other keys are the training's own, such as `linear_probe: true` or `entropy_coef: 0.01`.
    """
    name, known = str(key).replace("-", "_").lower(), list(kinds)
    if get_close_matches(name, known, n=1, cutoff=0.9):  # of "gns_prob" 0.94, of "entropy_coef" 0.72
        return True
    like = [k for k in known if k.removesuffix("probe") == f"{name}_"] or get_close_matches(
        name, known, n=1, cutoff=0.7
    )
    options = {f.name for kind in like for f in fields(kinds[kind])}
    return isinstance(value, Mapping) and not options.isdisjoint(str(k).replace("-", "_") for k in value)


def read_yaml(path: Path, example: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file holds an empty one.

    Args:
        path: the file.
        example: a line of such a file, for messages.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is not YAML, or not a mapping.
    """
    import yaml  # here, since most users of sonde never need it

    if not path.is_file():
        raise FileNotFoundError(f"no config file at {path}: give a YAML file with options such as {example!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must map options to values, got a {type(content).__name__}: write lines such as {example!r}"
        )
    return content


def options_from(kind: type[T], given: Mapping[Any, Any], where: object) -> T:
    """A dataclass with the given values, and its defaults for the others.

    Args:
        kind: the dataclass. A field can be given if it is a number, text, path, switch or choice, or None. A list can
            be given where the field takes one kind of these or a sequence of it.
        given: values by option name, with `_` or `-`.
        where: the place where they were found, for messages.

    Raises:
        ValueError: for an option that does not exist, naming the nearest one, for one that takes functions or objects,
            or a value of another kind.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    known = [name for name in names if _plain_kinds(hints[name])]
    for key in given:
        if (name := str(key).replace("-", "_")) in set(names).difference(known):
            raise ValueError(
                f"{where} holds {name!r}, whose values are functions or objects of Python: leave it out there, and "
                f"pass {name}= in code"
            )
    values = {known_name(key, known, where): value for key, value in given.items()}
    return kind(**{name: _value(name, hints[name], value, where) for name, value in values.items()})


def known_name(key: object, known: list[str], where: object) -> str:
    """The option that a key names.

    Raises:
        ValueError: when there is none, naming the nearest.
    """
    name = str(key).replace("-", "_")
    if name not in known:
        nearest = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        meant = f"did you mean {nearest[0]!r}?" if nearest else f"the options are {', '.join(known)}"
        raise ValueError(f"{where} holds an unknown option {str(key)!r}: {meant}")
    return name


def _value(name: str, hint: Any, value: object, where: object) -> object:
    if value is None and type(None) in get_args(hint):
        return None
    takes_several = any(get_origin(kind) is Sequence for kind in get_args(hint))
    kinds = _plain_kinds(hint)
    for kind in kinds:
        with contextlib.suppress(TypeError, ValueError):
            if takes_several and isinstance(value, list):
                return tuple(_converted(kind, each) for each in value)
            return _converted(kind, value)
    expected = " or ".join(map(_in_words, kinds))
    raise ValueError(f"{name} in {where} must be {expected}, got {value!r}: change that line")


def _in_words(kind: Any) -> str:
    return f"one of {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else _CALLED[kind]


def _plain_kinds(hint: Any) -> list[Any]:
    """The kinds of value among those of a type hint that a file can hold: no functions, no objects of torch."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [kind for kind in kinds if get_origin(kind) is Literal or kind in _CALLED]


def _converted(hint: Any, value: Any) -> object:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError
        return value
    if hint is float and not isinstance(value, bool):
        return float(value)  # from text too: YAML 1.1 reads 1e-3 as text
    if hint is Path:
        return Path(value)
    if type(value) is not hint:  # True is an int to isinstance
        raise TypeError
    return value


_CALLED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}
