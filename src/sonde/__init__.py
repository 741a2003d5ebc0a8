"""sonde measures a PyTorch training run while it runs, changes nothing in it, and costs almost nothing."""

from sonde.clip import clip_grad_norm_, clip_grad_norm_distributed_, group_parameters_for_norm
from sonde.measure.rollouts import Rollouts, TokenStatistics
from sonde.measure.token_statistics import CausalLMStatistics
from sonde.probes.config import probes_from_config
from sonde.probes.entropy_change import EntropyChangeProbe
from sonde.probes.noise_scale import NoiseScaleProbe
from sonde.probes.policy_entropy import PolicyEntropyProbe
from sonde.probes.probe import Probe
from sonde.probes.prompt_noise import PromptNoiseProbe
from sonde.records import Sink
from sonde.runs.reader import Run, read_run
from sonde.runs.report import write_report
from sonde.runs.sinks import JsonlSink
from sonde.runs.tensorboard import TensorBoardSink
from sonde.stats.critical_batch import judge_batch, steps_and_examples
from sonde.stats.intervals import fieller_interval
from sonde.stats.noise_scale import noise_scale
from sonde.stats.reading import NoiseScaleReading
from sonde.version import __version__

attach = NoiseScaleProbe
"""The way in: `sonde.attach(model, optimizer, unit="sequences")`."""

__all__ = [
    "CausalLMStatistics",
    "EntropyChangeProbe",
    "JsonlSink",
    "NoiseScaleProbe",
    "NoiseScaleReading",
    "PolicyEntropyProbe",
    "Probe",
    "PromptNoiseProbe",
    "Rollouts",
    "Run",
    "Sink",
    "TensorBoardSink",
    "TokenStatistics",
    "__version__",
    "attach",
    "clip_grad_norm_",
    "clip_grad_norm_distributed_",
    "fieller_interval",
    "group_parameters_for_norm",
    "judge_batch",
    "noise_scale",
    "probes_from_config",
    "read_run",
    "steps_and_examples",
    "write_report",
]
