"""Records like those of a GRPO run: the entropy falls, forecasts are near the truth, two are not to be trusted."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from sonde.policy.log import METRICS
from tests.runs.report.plausible_run import STARTED, Record, end_record, header_record, written

N_PROMPTS = 20


def policy_header(**changes: Any) -> Record:
    setup = {
        "wrapper": "GRPOTrainer of TRL",
        "ranks": 2,
        "device": "cpu",
        "parameters": 78_000,
        "loss": "dr_grpo",
        "evaluation": "fresh responses to other prompts",
        "log_every": 5,
        "level": 0.95,
    }
    metrics = {name: {"unit": metric.unit, "meaning": metric.meaning} for name, metric in METRICS.items()}
    return header_record(writes="policy", metrics=metrics, run="adding by GRPO", unit="prompts", setup=setup) | changes


def policy_record(i: int, *, has_truth: bool = True, has_noise: bool = True, **changes: Any) -> Record:
    """Record `i`, of step 5 i + 1. The steps of records 0 and 9 are too large."""
    rng = random.Random(i)
    delta, is_valid = -0.02 * math.exp(-0.05 * i) * rng.uniform(0.5, 1.5), i not in (0, 9)
    truth = delta * (1.05 if is_valid else 2.0)
    se = 0.05 * abs(delta)
    metrics: dict[str, float | None] = {
        "reward": 0.1 + 0.02 * i,
        "entropy/evaluation_per_token": 2.7 * math.exp(-0.08 * i),
        "entropy/evaluation_per_token_se": 0.02 * 2.7 * math.exp(-0.08 * i),
        "entropy/update_token_weighted": 2.6 * math.exp(-0.08 * i),
        "entropy/delta_forecast": delta,
        "entropy/delta_se": se,
        "entropy/delta_low": delta - 2 * se,
        "entropy/delta_high": delta + 2 * se,
        "entropy/delta_fixed_prefixes": truth,
        "entropy/linear_over_true": delta / truth if i != 3 else 7.0,
        "entropy/support": 0.95 if is_valid else 0.1,
        "entropy/unsupported": 0.0 if is_valid else 0.7,
        "entropy/evaluation_own_policy_z": math.sin(7.0 * i),
        "entropy/evaluation_own_policy_departure": 0.002 * math.sin(7.0 * i),
        "entropy/delta_importance": truth,
        "entropy/ess_fraction": 0.97 if is_valid else 0.4,
        "entropy/delta_rollouts": truth if has_truth else None,
        "entropy/delta_rollouts_se": 0.02 * abs(delta) if has_truth else None,
        "entropy/coefficient_now": 0.01,
        "entropy/coefficient_to_hold": 0.01 + 0.001 * i if is_valid else None,
        "entropy/coefficient_to_hold_low": 0.008 + 0.001 * i,
        "entropy/coefficient_to_hold_high": 0.012 + 0.001 * i if is_valid else None,
        "entropy/is_valid": float(is_valid),
        "entropy/frac_var": 0.0025,
        "entropy/v_x": se**2,
        "entropy/v_y": 0.0,
        "entropy/bars_dot": 0.98 * delta,
        "entropy/n_evaluation_prompts": 16.0,
        "entropy/n_update_prompts": 8.0,
        "entropy/update_response_sd": 0.3,
        **{f"entropy/update_response_q{q:02}": (1 + q / 100) * math.exp(-0.08 * i) for q in (5, 25, 50, 75, 95)},
        "cost/entropy_seconds": 0.4,
        "cost/entropy_seconds_sampling": 0.15,
        "cost/entropy_seconds_scores": 0.1,
        "cost/entropy_seconds_scores_after": 0.12,
        "cost/entropy_seconds_rollouts": 0.03,
    }
    if has_noise:
        is_resolved = i > 4
        metrics |= {
            "gns_prompts/b_simple": 12.0 + i if is_resolved else None,
            "gns_prompts/b_simple_low": 6.0 if i > 1 else None,
            "gns_prompts/b_simple_high": 40.0 if is_resolved else None,
            "gns_prompts/completions_share": 0.7,
            "gns_prompts/completions_share_low": 0.6 if i > 1 else None,
            "gns_prompts/completions_share_high": 0.8 if i > 1 else None,
            "gns_prompts/prompts_per_window": 8.0,
        }
    parts = [delta * rng.gauss(1, 2) / N_PROMPTS for _ in range(N_PROMPTS)]
    record = {
        "kind": "policy",
        "time": STARTED + 2.0 * i,
        "window": 5 * i + 1,
        "metrics": metrics,
        "reason": "" if is_valid else "not to be trusted: the step is too large for these responses",
        "per": "token",
        "shares": [
            {"prompt": f"{k}+{i}=", "change": part, "sharpening": 0.8 * part, "drift": 0.2 * part}
            for k, part in enumerate(sorted(parts))
        ],
        "causes": {
            "momentum": 0.6 * delta,
            "batch": 0.4 * delta,
            "decay": 0.0,
            "explained": 0.99,
            "cosine": None,
            "terms": {},
            "prompts": [
                {"prompt": f"{k}+3=", "change": part, "from_rewarded": 2 * part, "from_penalised": -part}
                for k, part in enumerate(sorted(parts)[:8])
            ],
        },
        "positions": [],
        "alerts": {},
    }
    return record | changes


def write_policy_run(folder: Path, n: int = 24, **options: Any) -> Path:
    """Write a whole run into `folder` and return the folder. Options are those of `policy_record`."""
    records = [policy_record(i, **options) for i in range(n)]
    return written(folder, [policy_header(), *records, end_record(5 * n, "training ended")])
