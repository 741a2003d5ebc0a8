"""The columns of a policy's records: of forecasts, of entropies and of the noise in prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sonde.policy.stats.forecast_point import LEAST_SUPPORT, LINEAR_BETWEEN, MOST_UNSUPPORTED
from sonde.stats.columns import BLUE, GREEN, GREY, ORANGE, Columns, Curve, Metric, Panel, interval
from sonde.wording import duration, number, percent

NATS = "nats a token"
FRESH, LEARNED = "entropy/evaluation_per_token", "entropy/update_token_weighted"
DELTA, HOLD = "entropy/delta_forecast", "entropy/coefficient_to_hold"
PROMPT_NOISE, PROMPTS = "gns_prompts/b_simple", "gns_prompts/prompts_per_window"

BY_RESPONSE, TRUST = "Entropy by response", "Can the forecasts be trusted?"
COEFFICIENT, IN_PROMPTS = "Which entropy coefficient would hold the entropy?", "Noise scale in prompts"
"""Sections of the report."""
_LIMIT = {MOST_UNSUPPORTED: f"limit of this part: {percent(MOST_UNSUPPORTED)}"}
_SMALL = dict.fromkeys(
    LINEAR_BETWEEN, "the step is small enough to be linear from {:g} to {:g}".format(*LINEAR_BETWEEN)
)
_SUPPORT = Panel("Share of the whole", TRUST, ends=(0.0, 1.0), limits=_LIMIT, height=220)
_LINEAR = Panel("Linear / true", TRUST, ends=(0.0, 2.0), limits=_SMALL, height=220)
_HOLD = Panel("Entropy coefficient", COEFFICIENT, "linear", shows=(0.0,))
_BY_RESPONSE = Panel("Entropy (nats a token)", BY_RESPONSE, "linear", shows=(0.0,))
_IN_PROMPTS = Panel("Noise scale (prompts)", IN_PROMPTS, "log", height=320)
_NO_SUPPORT = f"entropy without support: part of it at positions with a support below {percent(LEAST_SUPPORT)}"
_PHASES = {
    "sampling": "drawing evaluation responses", "scores": "scoring responses before the step",
    "scores_after": "scoring responses after the step", "derivatives": "derivatives", "causes": "causes",
    "gradients": "gradients of the prompts", "coefficient": "the coefficient that would hold the entropy",
    "rollouts": "fresh rollouts",
}  # fmt: skip


def _listed(unit: str, meaning: str, of: Any = "", as_text: Callable[[float], str] = number) -> Metric:
    return Metric(unit, meaning, of, as_text=as_text, is_listed=True)


def _real_step(name: str) -> Callable[[Any], float | None]:
    """Along gradients, what a forecast says of the real step. Along a step, the forecast itself is of the step."""
    return lambda of: getattr(of.finite_step, name) if of.update == "gradient" and of.finite_step else None


def _importance(of: Any) -> float | None:
    return of.importance.delta if of.importance and of.importance.is_known else None


def _quantile(percentage: int) -> Callable[[Any], float | None]:
    return lambda of: of.response_quantiles[percentage]


OF_FORECAST: Columns = {
    FRESH: Metric(NATS, "entropy of the policy, on the evaluation responses", "entropy"),
    f"{FRESH}_se": Metric(NATS, "standard error of this entropy, over prompts", "entropy_se"),
    "entropy/evaluation_surprise_sd": Metric("nats", "scatter of −log π around it; almost 0 if uniform", "surprise_sd"),
    "entropy/evaluation_own_policy_departure": Metric("fraction", "departure over the entropy", "own_policy.departure"),
    "entropy/sampler_departure": Metric("fraction", "mean of π/q over the tokens, minus 1", "sampler.departure"),
    "entropy/n_evaluation_prompts": _listed("prompts", "evaluation prompts, B_E", "n_evaluation"),
    "entropy/n_update_prompts": _listed("prompts", "update prompts, B_U", lambda of: of.n_update or None),
    DELTA: _listed("nats", "change of entropy by the step", "delta"),
    "entropy/delta_se": _listed("nats", "standard error of this change", "se"),
    "entropy/delta_low": Metric("nats", "lower end of the change's 95 % interval", "low"),
    "entropy/delta_high": Metric("nats", "upper end of the change's 95 % interval", "high"),
    "entropy/delta_sharpening": Metric("nats", "part of the change at the same prefixes", "sharpening"),
    "entropy/delta_drift": Metric("nats", "part of the change from more and less likely prefixes", "drift"),
    "entropy/v_x": _listed("nats²", "variance of the change from the evaluation prompts, V_X"),
    "entropy/v_y": _listed("nats²", "variance of the change from the update prompts, V_Y"),
    "entropy/frac_var": _listed("ratio", "variance of the change over its square", as_text=percent),
    "entropy/bars_dot": _listed("nats", "change to first order, or X̄·Ȳ: entropy gradient times the update"),
    "entropy/evaluation_own_policy_z": _listed(
        "standard errors", "test that the responses are the policy's own: E[−log π − H] = 0", "own_policy.z"),
    "entropy/sampler_kl": _listed(NATS, "KL of sampler and policy: 0 if their probabilities are equal", "sampler.kl"),
    "entropy/sampler_z": _listed("standard errors", "test of log_prob=, E[π/q] = 1: −2 to 2 if sound", "sampler.z"),
    "entropy/support": Metric(
        "fraction", "support: effective sample size of the responses after the step, a mean over positions",
        "support.ess_fraction", _SUPPORT, Curve("line", GREEN), percent),
    "entropy/unsupported": Metric(
        "fraction", _NO_SUPPORT, "support.unsupported", _SUPPORT, Curve("line", GREY), percent),
    "entropy/delta_first_order": Metric("nats", "change to first order, if it was taken", "first_order.delta"),
    "entropy/delta_first_order_se": Metric("nats", "standard error of the change to first order", "first_order.se"),
    "entropy/delta_finite_step": Metric("nats", "change by the real step, beside gradients", _real_step("delta")),
    "entropy/delta_finite_step_se": Metric("nats", "standard error of the change by the real step", _real_step("se")),
    "entropy/delta_fixed_prefixes": Metric(NATS, "true change on the same prefixes", "fixed_prefixes.true"),
    "entropy/linear_over_true": Metric(
        "ratio", "linear / true: change to first order divided by the true change, on the same prefixes",
        "fixed_prefixes.linear_over_true", _LINEAR, Curve("line", BLUE, outside="ratio outside this axis")),
    "entropy/delta_importance": Metric("nats", "change by weights of whole responses, if enough count", _importance),
    "entropy/ess_fraction": Metric("fraction", "effective part of whole responses", "importance.ess_fraction"),
    "entropy/delta_rollouts": Metric("nats", "true change by fresh rollouts", "rollouts.delta"),
    "entropy/delta_rollouts_se": Metric("nats", "standard error of the change by fresh rollouts", "rollouts.se"),
    "entropy/rounded_away": Metric("fraction", "part of the step that parameters of 16 bits do not hold"),
    **interval(HOLD, "1", "coefficient with which the entropy would not change", value="value",
               of="coefficient_to_hold", panel=_HOLD, curve=Curve("interval", BLUE, stretches=False)),
    "entropy/coefficient_now": Metric(
        "1", "coefficient of the loss", "coefficient_to_hold.present", _HOLD, Curve("dashed", ORANGE)),
    "entropy/change_per_coefficient": Metric(
        "nats", "change of entropy by a step, for a coefficient of 1", "coefficient_to_hold.change_per_unit"),
    "entropy/is_valid": Metric("0 or 1", "whether the forecast gives no reason not to trust it"),
    "cost/entropy_seconds": _listed("seconds", "time of the forecast", lambda of: sum(of.seconds.values()), duration),
    **{f"cost/entropy_seconds_{phase}": _listed("seconds", f"of these, {what}", f"seconds.{phase}", duration)
       for phase, what in _PHASES.items()},
}  # fmt: skip
"""Numbers of an `EntropyForecast`."""
OF_ENTROPY: Columns = {
    LEARNED: Metric(NATS, "entropy of responses, each token weighing the same", "token_weighted"),
    f"{LEARNED}_se": Metric(NATS, "standard error of this entropy, over prompts", "token_weighted_se"),
    f"{LEARNED}_surprise_sd": Metric("nats", "scatter of −log π around it; almost 0 if uniform", "surprise_sd"),
    "entropy/update_sequence_weighted": Metric(NATS, "the same, each response weighing the same", "sequence_weighted"),
    "entropy/update_response_q50": Metric(
        NATS, "median over the responses that the step learns from", _quantile(50), _BY_RESPONSE, Curve("line", BLUE)),
    "entropy/update_response_q25": Metric(
        NATS, "half of the responses (darker): mean entropy of a response; 25 % have less", _quantile(25), _BY_RESPONSE,
        Curve("band", BLUE, top="entropy/update_response_q75", alpha=0.2)),
    "entropy/update_response_q05": Metric(
        NATS, "90 % of the responses: mean entropy of a response; 5 % have less", _quantile(5), _BY_RESPONSE,
        Curve("band", BLUE, top="entropy/update_response_q95", alpha=0.12)),
    "entropy/update_response_q75": Metric(NATS, "mean entropy of a response; 75 % have less", _quantile(75)),
    "entropy/update_response_q95": Metric(NATS, "mean entropy of a response; 95 % have less", _quantile(95)),
    "entropy/update_response_sd": Metric(
        NATS, "standard deviation: of a response's mean entropy, over responses", "response_sd", _BY_RESPONSE,
        Curve("none")),
    "entropy/update_sequence_sum": Metric("nats a response", "entropy of a whole response", "sequence_sum"),
    **interval("entropy/update_advantage_correlation", "ratio", "correlation of a response's entropy and advantage",
               of="advantage_correlation", value="r"),
    "entropy/update_cov_log_prob_advantage": Metric("nats · A", "Cov(log π, A) of tokens", "log_prob_advantage"),
    "length/update_mean": Metric("tokens", "mean length of a response", "mean_length"),
    "length/update_sd": Metric("tokens", "standard deviation of the length over responses", "sd_length"),
    "length/update_longest": Metric("tokens", "length of the longest response", "longest"),
    "length/update_at_limit": Metric("fraction", "share of responses that are as long as the mask is wide", "at_limit"),
}  # fmt: skip
"""Numbers of a `PolicyEntropy`."""
OF_PROMPTS: Columns = {
    **interval(PROMPT_NOISE, "prompts", "noise scale now", panel=_IN_PROMPTS, curve=Curve("interval", BLUE)),
    "gns_prompts/grad_sq": Metric("gradient²", "squared norm of the true gradient |G|², unclamped"),
    "gns_prompts/trace_cov": Metric("gradient² · prompts", "variance of one prompt's gradient, tr Σ"),
    "gns_prompts/completions_share": Metric(
        "fraction", "part from completions: of tr Σ, which more completions a prompt would reduce", "", _IN_PROMPTS,
        Curve("none"), percent),
    "gns_prompts/completions_share_low": Metric("fraction", "lower end of the 95 % interval of this part"),
    "gns_prompts/completions_share_high": Metric("fraction", "upper end of the 95 % interval of this part"),
    "gns_prompts/cut_by_twice_completions": Metric("fraction", "part of the noise that twice the completions cut"),
    PROMPTS: Metric("prompts", "batch size: prompts of a step", "", _IN_PROMPTS, Curve("dashed", ORANGE)),
}  # fmt: skip
"""Numbers of a `PromptNoiseReading`."""
OF_TRAINER: Columns = {
    "entropy/is_of_own_prompts": Metric("0 or 1", "whether evaluation prompts are those that the step learns from"),
}
"""What comes under its name."""
METRICS: Columns = {**OF_FORECAST, **OF_ENTROPY, **OF_PROMPTS, **OF_TRAINER}
