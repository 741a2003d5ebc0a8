"""sonde measures a PyTorch training run while it runs, changes nothing in it, and costs almost nothing."""

from sonde.clip import clip_grad_norm_, clip_grad_norm_distributed_, group_parameters_for_norm
from sonde.measure.norm_plan import NormPlan
from sonde.probes.noise_scale import NoiseScaleProbe
from sonde.records import Sink
from sonde.runs.reader import Run, read_run
from sonde.runs.report import write_report
from sonde.runs.sinks import JsonlSink
from sonde.runs.tensorboard import TensorBoardSink
from sonde.stats.critical_batch import Tradeoff, Verdict, judge_batch, steps_and_examples
from sonde.stats.intervals import RatioInterval, fieller_interval
from sonde.stats.noise_scale import RunningNoiseScale, WindowEstimate, noise_scale
from sonde.stats.reading import GroupReading, NoiseScaleReading
from sonde.version import __version__

attach = NoiseScaleProbe
"""The way in: `sonde.attach(model, optimizer, unit="sequences")`."""

__all__ = [
    "GroupReading",
    "JsonlSink",
    "NoiseScaleProbe",
    "NoiseScaleReading",
    "NormPlan",
    "RatioInterval",
    "Run",
    "RunningNoiseScale",
    "Sink",
    "TensorBoardSink",
    "Tradeoff",
    "Verdict",
    "WindowEstimate",
    "__version__",
    "attach",
    "clip_grad_norm_",
    "clip_grad_norm_distributed_",
    "fieller_interval",
    "group_parameters_for_norm",
    "judge_batch",
    "noise_scale",
    "read_run",
    "steps_and_examples",
    "write_report",
]
