"""Who sampled the evaluation responses: the policy itself, or the sampler whose log-probabilities came with them?

A token that a policy samples has E[−s_k − H_k] = 0, whatever came before it. A token that a sampler draws with
probability q has E[π/q − 1] = 0, whatever the policy π. So the sum over all tokens is 0 within its standard error, the
root of the sum of squares: terms of mean 0, given the tokens before, do not correlate. A departure shows another
temperature, top-p, another policy, or log-probabilities that are not the sampler's. All numbers are there already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sonde.wording import percent

if TYPE_CHECKING:  # a report needs this file where torch is not installed
    from torch import Tensor

    from sonde.policy.stats.entropy_gradient import Responses

_CERTAIN_FROM = 5.0
"""Standard errors from which responses are not the policy's own. The test is repeated at every forecast."""
_NOT_OF_SAMPLER_FROM = 4.0
"""Standard errors from which log-probabilities are not the sampler's: a shift by a token makes 5 in a small batch."""
_MATTERS_FROM = 0.01
"""Fraction of the entropy, or of 1. A smaller departure, as rounding in 16 bits causes, is no alert however certain."""
_OVERFLOW = 300.0
"""Nats. A larger log π/q counts as this: its square would overflow."""


@dataclass(frozen=True)
class OwnPolicyTest:
    """A test of E[−s − H] = 0.

    Attributes:
        z: the departure over its standard error; about −2 to 2 for the policy's own responses.
        departure: Σ(−s − H)/Σ H over all tokens: 0.1 means that tokens are less likely than the entropy says, by a
            tenth of it.
    """

    z: float
    departure: float

    @classmethod
    def of(cls, log_prob: Tensor, entropy: Tensor, responses: Responses) -> OwnPolicyTest | None:
        """The test of one batch; None for a policy that is certain of every token.

        Args:
            log_prob: s_k in nats, [responses, tokens].
            entropy: H_k in nats, [responses, tokens].
            responses: which tokens count.

        Example:
            >>> import torch
            >>> from sonde.policy.stats.entropy_gradient import Responses
            >>> likely = OwnPolicyTest.of(torch.full((8, 64), -0.7), torch.ones(8, 64), Responses(
            ...     torch.ones(8, 64), torch.arange(8)))
            >>> round(likely.z, 1), round(likely.departure, 2)
            (-22.6, -0.3)
        """
        s, h = responses.tokens("log_prob", log_prob), responses.tokens("entropy", entropy)
        above, total = -(s + h), float(h.sum())
        scatter = float(above.square().sum())
        if not scatter or not total:
            return None
        return cls(float(above.sum()) / math.sqrt(scatter), float(above.sum()) / total)

    @property
    def why_not(self) -> str:
        """Why the responses are not the policy's own, with the likely cause; empty if nothing says so."""
        z, departure = self.z, self.departure
        if abs(z) < _CERTAIN_FROM or abs(departure) < _MATTERS_FROM:
            return ""
        amount = percent(abs(departure))
        if departure < 0:
            seen = f"more likely than the policy's entropy says, by {amount} of it"
            cause = "at a lower temperature than they are scored at, or cut off by top-p, top-k or min-p"
        else:
            seen = f"less likely than the policy's entropy says, by {amount} of it"
            cause = "at a higher temperature than they are scored at, or by another policy, such as older weights"
        return (
            f"the evaluation responses are not the policy's own: their tokens are {seen} ({abs(z):.0f} standard "
            f"errors). Probably they were sampled {cause}"
        )


@dataclass(frozen=True)
class SamplerTest:
    """How far the sampler is from the policy, and a test of E[π/q − 1] = 0: of the log-probabilities log q.

    Attributes:
        z: the departure over its standard error; about −2 to 2 if q is the sampler's.
        departure: the mean of π/q − 1 over tokens.
        kl: KL(q‖π) in nats a token: the mean of π/q − 1 − log(π/q). 0 if sampler and policy agree.
    """

    z: float
    departure: float
    kl: float

    @classmethod
    def of(cls, log_prob: Tensor, sampled_log_prob: Tensor, responses: Responses) -> SamplerTest:
        """The test of one batch.

        Args:
            log_prob: log π of the sampled tokens in nats, [responses, tokens].
            sampled_log_prob: log q, as the sampler reported it, [responses, tokens].
            responses: which tokens count.

        Example:
            >>> import torch
            >>> from sonde.policy.stats.entropy_gradient import Responses
            >>> responses = Responses(torch.ones(8, 64), torch.arange(8))
            >>> found = SamplerTest.of(torch.full((8, 64), -0.7), torch.full((8, 64), -0.9), responses)
            >>> round(found.z, 1), round(found.departure, 2), round(found.kl, 3)
            (22.6, 0.22, 0.021)
        """
        log_ratio = responses.tokens("log_prob", log_prob) - responses.tokens("log_prob=", sampled_log_prob)
        above = log_ratio.clamp(max=_OVERFLOW).expm1()
        n, scatter = float(responses.length.sum()), math.sqrt(float(above.square().sum()))
        total = float(above.sum())
        return cls(total / scatter if scatter else 0.0, total / n, float((above - log_ratio).sum()) / n)

    @property
    def why_not(self) -> str:
        """Why log-probabilities are not the sampler's; empty if nothing says so."""
        z, departure = self.z, self.departure
        if abs(z) < _NOT_OF_SAMPLER_FROM or abs(departure) < _MATTERS_FROM:
            return ""
        than = "more" if departure > 0 else "less"
        text = (
            f"log_prob= is not that of the sampler: by it, these tokens are {percent(abs(departure))} {than} likely "
            "under the policy than under the sampler, where the mean over any sampler's tokens is 0 "
            f"({abs(z):.0f} standard errors). Pass the log-probability of each sampled token, in the columns of mask, "
            "at the sampler's temperature"
        )
        if departure > 0:
            return text
        return f"{text}, and sample untruncated: top-p and the like, or much older weights, show here too"


def why_not_over(tests: Sequence[OwnPolicyTest] | Sequence[SamplerTest]) -> str:
    """What the departure of all batches so far means: the sum of n values of z has a standard error of √n."""
    if not tests:
        return ""
    z, departure = (sum(getattr(test, name) for test in tests) for name in ("z", "departure"))
    return replace(tests[-1], z=z / math.sqrt(len(tests)), departure=departure / len(tests)).why_not
