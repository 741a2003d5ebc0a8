"""sonde measures a PyTorch training run while it runs, changes nothing in it, and costs almost nothing."""

from sonde.batch_size.probe import NoiseScaleProbe, attach
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.critical_batch import judge_batch, steps_and_examples
from sonde.batch_size.stats.noise_scale import noise_scale
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.config import probes_from_config
from sonde.gradient_norm.clip import clip_grad_norm_, clip_grad_norm_distributed_, group_parameters_for_norm
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.log import PolicyLog
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.probe import Probe, RolloutProbe
from sonde.records import Metric, ReportSection, RunLog, Sink
from sonde.runs.reader import Run, read_run
from sonde.runs.report.write import write_report
from sonde.runs.sinks import JsonlSink
from sonde.runs.tensorboard import TensorBoardSink
from sonde.stats.intervals import fieller_interval
from sonde.version import __version__

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
