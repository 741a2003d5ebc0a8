"""The metrics of an `EntropyChangeProbe`: unit and meaning of each."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.probe import Metric

METRICS: Mapping[str, Metric] = {
    "entropy/evaluation_per_token": Metric("nats a token", "entropy of the policy, on the evaluation responses"),
    "entropy/evaluation_per_token_se": Metric("nats a token", "standard error of this entropy, over prompts"),
    "entropy/evaluation_surprise_sd": Metric(
        "nats", "scatter of −log π around the entropy; almost 0 for a uniform policy"
    ),
    "entropy/evaluation_own_policy_z": Metric(
        "standard errors", "−log π above the entropy; −2 to 2 for the policy's own"
    ),
    "entropy/evaluation_own_policy_departure": Metric("fraction", "−log π above the entropy, over the entropy"),
    "entropy/sampler_kl": Metric("nats a token", "KL of the sampler's log-probabilities and the policy's; 0 if equal"),
    "entropy/sampler_z": Metric("standard errors", "π/q above 1; −2 to 2 if q, log_prob=, is the sampler's"),
    "entropy/sampler_departure": Metric("fraction", "mean of π/q over the responses' tokens, minus 1"),
    "entropy/delta_forecast": Metric("nats", "change of entropy by the step"),
    "entropy/delta_se": Metric("nats", "standard error of this change"),
    "entropy/delta_low": Metric("nats", "lower end of the change's 95 % interval"),
    "entropy/delta_high": Metric("nats", "upper end of the change's 95 % interval"),
    "entropy/delta_sharpening": Metric("nats", "part of the change at the same prefixes"),
    "entropy/delta_drift": Metric("nats", "part of the change from more and less likely prefixes"),
    "entropy/frac_var": Metric("ratio", "variance of the change over its square"),
    "entropy/v_x": Metric("nats²", "variance of the change from the evaluation prompts"),
    "entropy/v_y": Metric("nats²", "variance of the change from the update prompts"),
    "entropy/bars_dot": Metric("nats", "mean entropy gradient times mean update gradient, or times the step"),
    "entropy/n_evaluation_prompts": Metric("prompts", "evaluation prompts, B_E"),
    "entropy/n_update_prompts": Metric("prompts", "update prompts, B_U, where they were passed"),
    "entropy/support": Metric("fraction", "effective sample size after the step over responses, by position"),
    "entropy/unsupported": Metric("fraction", "entropy after the step that positions of little support carry"),
    "entropy/delta_first_order": Metric("nats", "change to first order, if a derivative was taken"),
    "entropy/delta_first_order_se": Metric("nats", "standard error of the change to first order"),
    "entropy/delta_finite_step": Metric("nats", "change by the real step, beside a forecast along gradients"),
    "entropy/delta_finite_step_se": Metric("nats", "standard error of the change by the real step"),
    "entropy/delta_fixed_prefixes": Metric("nats a token", "true change on the same prefixes"),
    "entropy/linear_over_true": Metric("ratio", "first order over truth on the same prefixes; about 1 if small"),
    "entropy/delta_importance": Metric("nats", "change by weights of whole responses, if enough of them count"),
    "entropy/ess_fraction": Metric("fraction", "effective sample size of whole responses, over their number"),
    "entropy/delta_rollouts": Metric("nats", "true change by fresh rollouts"),
    "entropy/delta_rollouts_se": Metric("nats", "standard error of the change by fresh rollouts"),
    "entropy/rollouts_that_differ": Metric("responses", "fresh responses that the step has changed"),
    "entropy/rounded_away": Metric("fraction", "part of the step that parameters of 16 bits do not hold"),
    "entropy/coefficient_to_hold": Metric("1", "entropy coefficient with which the entropy would not change"),
    "entropy/coefficient_to_hold_low": Metric("1", "lower end of its 95 % interval"),
    "entropy/coefficient_to_hold_high": Metric("1", "upper end of its 95 % interval"),
    "entropy/coefficient_now": Metric("1", "entropy coefficient of the loss"),
    "entropy/change_per_coefficient": Metric("nats", "change of entropy by a step, for a coefficient of 1"),
    "entropy/is_valid": Metric("0 or 1", "whether the forecast gives no reason not to trust it"),
    "entropy/is_of_own_prompts": Metric("0 or 1", "whether evaluation prompts are those that the step learns from"),
    "cost/entropy_seconds": Metric("seconds", "time of the forecast of the entropy change"),
    "cost/entropy_seconds_sampling": Metric("seconds", "of these, drawing evaluation responses"),
    "cost/entropy_seconds_scores": Metric("seconds", "of these, scoring responses before the step"),
    "cost/entropy_seconds_scores_after": Metric("seconds", "of these, scoring responses after the step"),
    "cost/entropy_seconds_derivatives": Metric("seconds", "of these, derivatives"),
    "cost/entropy_seconds_gradients": Metric("seconds", "of these, backwards of update='gradient'"),
    "cost/entropy_seconds_causes": Metric("seconds", "of these, causes"),
    "cost/entropy_seconds_coefficient": Metric("seconds", "of these, the coefficient that would hold the entropy"),
    "cost/entropy_seconds_rollouts": Metric("seconds", "of these, fresh rollouts"),
    "cost/entropy_peak_bytes": Metric("bytes", "growth of the peak memory by the forecast"),
}
