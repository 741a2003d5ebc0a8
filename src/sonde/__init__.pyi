"""The public names of sonde, and where each is defined. `__init__.py` imports a name when it is first used."""

from sonde import integrations as integrations
from sonde.batch_size.attach import attach
from sonde.batch_size.measure import Measurement, measure
from sonde.batch_size.per_example.covered import PerExampleSquares
from sonde.batch_size.per_example.gradients import OuterProducts
from sonde.batch_size.per_example.norms import PerExampleNorms
from sonde.batch_size.per_example.rules import NotCoveredError
from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.noise_scale import WindowEstimate, noise_scale
from sonde.batch_size.stats.reading import GroupReading, NoiseScaleReading
from sonde.decision.decide import Decision, Wanted, decide
from sonde.decision.facts import Facts
from sonde.decision.law import Tradeoff, steps_and_examples
from sonde.gradient_norm.clip import clip_grad_norm_, clip_grad_norm_distributed_, group_parameters_for_norm
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.two_steps import clip_grads_with_norm_, get_total_norm
from sonde.log.sinks import JsonlSink
from sonde.log.trackers import FunctionSink, MlflowSink, TensorBoardSink, TrackioSink, WandbSink
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.log import PolicyLog
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe, PromptNoiseReading
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_comparison import EntropyComparison
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.policy.stats.policy_entropy import PolicyEntropy
from sonde.probe import Probe, ReportSection, RolloutProbe
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.runs.report.write import write_report
from sonde.runs.run import Run
from sonde.schedule.batch_schedule import BatchSchedule
from sonde.sink import Sink
from sonde.stats.columns import Metric
from sonde.stats.intervals import RatioInterval, fieller_interval
from sonde.version import __version__

__all__ = [
    "BatchSchedule",
    "CausalLMStatistics",
    "Decision",
    "EntropyChangeOptions",
    "EntropyChangeProbe",
    "EntropyComparison",
    "EntropyForecast",
    "Facts",
    "FunctionSink",
    "GroupReading",
    "JsonlSink",
    "Measurement",
    "Metric",
    "MlflowSink",
    "NoiseScaleOptions",
    "NoiseScaleProbe",
    "NoiseScaleReading",
    "NormPlan",
    "NotCoveredError",
    "OuterProducts",
    "PerExampleNorms",
    "PerExampleSquares",
    "PolicyEntropy",
    "PolicyEntropyProbe",
    "PolicyLog",
    "Probe",
    "PromptNoiseProbe",
    "PromptNoiseReading",
    "RatioInterval",
    "ReportSection",
    "RolloutProbe",
    "Rollouts",
    "Run",
    "RunLog",
    "Sink",
    "TensorBoardSink",
    "TokenStatistics",
    "TrackioSink",
    "Tradeoff",
    "WandbSink",
    "Wanted",
    "WindowEstimate",
    "__version__",
    "attach",
    "clip_grad_norm_",
    "clip_grad_norm_distributed_",
    "clip_grads_with_norm_",
    "decide",
    "fieller_interval",
    "get_total_norm",
    "group_parameters_for_norm",
    "measure",
    "noise_scale",
    "read_run",
    "steps_and_examples",
    "write_report",
]
