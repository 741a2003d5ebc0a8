"""Are the evaluation responses the policy's own? If they are, each token's surprise is the entropy on average.

A token that a policy samples has E[−s_k − H_k] = 0, whatever came before it. So the sum over all tokens is 0 within its
standard error, √Σ(−s_k − H_k)²: terms of mean 0, given the tokens before, do not correlate. A departure shows another
temperature, top-p, or another policy. Both numbers are there already, so the test costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonde.wording import percent

if TYPE_CHECKING:  # a report needs this file where torch is not installed
    from torch import Tensor

    from sonde.policy.stats.entropy_gradient import Responses

_CERTAIN_FROM = 5.0
"""Standard errors from which responses are not the policy's own. The test is repeated at every forecast."""
_MATTERS_FROM = 0.01
"""Fraction of the entropy. A smaller departure, as rounding in 16 bits causes, is no alert however certain it is."""


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


class OwnPolicyTrack:
    """The test over all batches so far: the sum of n values of z has a standard error of √n."""

    def __init__(self) -> None:
        self._n = 0
        self._z = self._departure = 0.0

    def add(self, test: OwnPolicyTest) -> None:
        """Add the test of the next batch."""
        self._n += 1
        self._z += test.z
        self._departure += test.departure

    def why_not(self) -> str:
        """Why the responses are not the policy's own, with the likely cause; empty if nothing says so."""
        if not self._n:
            return ""
        return why_not_own(OwnPolicyTest(self._z / math.sqrt(self._n), self._departure / self._n))


def why_not_own(test: OwnPolicyTest) -> str:
    """Why the responses are not the policy's own, with the likely cause; empty if nothing says so."""
    if abs(test.z) < _CERTAIN_FROM or abs(test.departure) < _MATTERS_FROM:
        return ""
    amount = percent(abs(test.departure))
    if test.departure < 0:
        seen = f"more likely than the policy's entropy says, by {amount} of it"
        cause = "at a lower temperature than they are scored at, or cut off by top-p, top-k or min-p"
    else:
        seen = f"less likely than the policy's entropy says, by {amount} of it"
        cause = "at a higher temperature than they are scored at, or by another policy, such as older weights"
    return (
        f"the evaluation responses are not the policy's own: their tokens are {seen} ({abs(test.z):.0f} standard "
        f"errors). Probably they were sampled {cause}"
    )
