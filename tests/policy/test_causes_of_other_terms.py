"""A KL penalty and an entropy bonus as causes of their own, beside the change that each makes alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.log.sinks import JsonlSink
from sonde.policy.log import PolicyLog
from sonde.policy.scoring.rollouts import Rollouts
from sonde.records import RunLog
from sonde.runs.reader import read_run
from sonde.runs.report.write import write_report
from tests.policy.entropy_scene import Scene, older
from tests.runs.report.visible_text import visible_text
from tests.small_policy import STATISTICS, loss

BETA, BONUS = 2.0, 0.3


class Terms:
    """A scene whose loss has a KL penalty (k3, as TRL's) to older weights, and a bonus on the mean entropy."""

    def __init__(self, kind: str = "sgd") -> None:
        self.scene = Scene(kind)
        scene = self.scene
        with torch.no_grad():
            self.reference, _ = STATISTICS(older(scene.model), scene.U)
        s, _ = self.scored()
        slope = BETA * (1.0 - (self.reference - s.detach()).exp())
        # The policy's term is a mean over responses, and the bonus one over tokens.
        bonus = BONUS * scene.U.mask.double() * len(scene.U) / scene.U.mask.sum()
        self.named = dataclasses.replace(scene.U, terms={"KL": -slope}, entropy_bonus=bonus)

    def scored(self) -> tuple[Tensor, Tensor]:
        s, h = STATISTICS(self.scene.model, self.scene.U)
        mask = self.scene.U.mask.bool()
        return torch.where(mask, s, 0.0), torch.where(mask, h, 0.0)

    def kl(self) -> Tensor:
        s, _ = self.scored()
        log_ratio = torch.where(self.scene.U.mask.bool(), self.reference - s, 0.0)
        return BETA * (log_ratio.exp() - log_ratio - 1.0).sum() / len(self.scene.U)

    def bonus(self) -> Tensor:
        _, h = self.scored()
        return -BONUS * h.sum() / self.scene.U.mask.sum()

    def change(self, *terms: Tensor, update: Rollouts | None = None) -> Any:
        """The forecast with these terms as the loss."""
        self.scene.optimizer.zero_grad()
        sum(terms, start=torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        return self.scene.probe().forecast(self.scene.E, update, causes=True)


def test_each_terms_part_is_the_change_that_it_makes_alone() -> None:
    """SGD's step is a sum of the terms' steps."""
    of = Terms()
    policy = of.change(loss(of.scene.model, of.scene.U)).first_order.delta
    kl, bonus = of.change(of.kl()).first_order.delta, of.change(of.bonus()).first_order.delta
    forecast = of.change(loss(of.scene.model, of.scene.U), of.kl(), of.bonus(), update=of.named)
    causes = forecast.causes
    assert causes.batch == pytest.approx(policy + kl + bonus, rel=1e-3)
    assert causes.terms["KL"] == pytest.approx(kl, rel=1e-2)
    assert causes.terms["entropy bonus"] == pytest.approx(bonus, rel=1e-2)
    assert sum(c.change for c in causes.prompts) == pytest.approx(policy, rel=1e-2)
    assert min(abs(kl), abs(bonus)) > 0.2 * abs(policy)  # the terms matter
    assert causes.explained == pytest.approx(1.0, rel=1e-2)
    assert causes.cosine == pytest.approx(1.0, abs=1e-3)
    assert forecast.doubt == ""
    assert f"in this batch's, {kl:+.2e}"[:24] in forecast.table()


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_all_of_the_batch_is_explained(kind: str) -> None:
    of = Terms(kind)
    terms = loss(of.scene.model, of.scene.U), of.kl(), of.bonus()
    causes = of.change(*terms, update=of.named).causes
    assert causes.explained == pytest.approx(1.0, rel=2e-2)
    terms = loss(of.scene.model, of.scene.U), of.kl(), of.bonus()
    unnamed = of.change(*terms, update=of.scene.U).causes
    assert abs(unnamed.explained - 1.0) > 0.1
    assert not unnamed.terms


def test_without_advantages_the_terms_have_their_parts() -> None:
    of = Terms()
    update = dataclasses.replace(of.named, advantage=0.0 * of.scene.U.advantage)
    causes = of.change(of.kl(), of.bonus(), update=update).causes
    assert causes.terms["KL"] + causes.terms["entropy bonus"] == pytest.approx(causes.batch, rel=1e-2)
    assert all(cause.change == 0.0 for cause in causes.prompts)


def test_the_log_and_the_report_name_the_terms(tmp_path: Path) -> None:
    of = Terms()
    forecast = of.change(loss(of.scene.model, of.scene.U), of.kl(), of.bonus(), update=of.named)
    log = PolicyLog(RunLog(JsonlSink(tmp_path)))
    log.measured(1, forecast.metrics(), forecast)
    log.end("training ended")
    [reading] = read_run(tmp_path).policy
    assert reading.causes is not None
    assert reading.causes.terms == pytest.approx(forecast.causes.terms)
    assert reading.causes.doubt == ""
    text = visible_text(write_report(tmp_path))
    assert "Of this batch's part, " in text
    assert "from the term KL, " in text
    assert "from the term entropy bonus." in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terms": [1.0]}, "terms must map names to tensors"),
        ({"terms": {"KL": 0.1}}, "terms must map names to tensors"),
        ({"terms": {"": torch.zeros(2, 2)}}, "terms need names of their own, got ''"),
        ({"terms": {"entropy bonus": torch.zeros(2, 2)}}, "terms need names of their own, got 'entropy bonus'"),
        ({"terms": {"KL": torch.zeros(3, 2)}}, r"terms\['KL'\] must have the mask's shape"),
        ({"terms": {"KL": torch.full((2, 2), torch.nan)}}, r"terms\['KL'\] must be finite wherever"),
        ({"entropy_bonus": 0.1}, "entropy_bonus must be a tensor"),
        ({"entropy_bonus": torch.zeros(3)}, "entropy_bonus must be"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rollouts({}, torch.ones(2, 2), torch.tensor([0, 0]), **changes)


def test_rows_keep_their_terms() -> None:
    made = Rollouts({}, torch.ones(2, 2), torch.tensor([0, 1]), terms={"KL": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert made.rows(torch.tensor([1])).terms["KL"].tolist() == [[3.0, 4.0]]


def test_a_bonus_of_each_response_is_that_of_all_its_tokens() -> None:
    """With as many responses as tokens, another reading would fit too."""
    made = Rollouts(
        {"input_ids": torch.ones(3, 4, dtype=torch.long)},
        mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]),
        prompt=torch.tensor([0, 0, 1]),
        entropy_bonus=torch.tensor([1.0, 2.0, 3.0]),
    )
    _, on_entropy = made.other_terms()["entropy bonus"]
    assert on_entropy.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 0.0], [3.0, 0.0, 0.0]]


def test_packed_rows_take_other_terms() -> None:
    ids, sampled = torch.tensor([5, 6, 7, 2, 5, 6, 2]), torch.tensor([0, 0, 1, 1, 0, 0, 1])
    made = Rollouts.from_packed(
        {"input_ids": ids},
        sampled,
        torch.tensor([3, 3]),
        cu_seqlens=torch.tensor([0, 4, 7]),
        entropy_bonus=torch.tensor([0.5, 0.25]),
        terms={"KL": torch.arange(7.0)},
    )
    found = {name: (s.tolist(), h.tolist()) for name, (s, h) in made.other_terms().items()}
    zero = [[0.0, 0.0], [0.0, 0.0]]
    assert found == {
        "KL": ([[2.0, 3.0], [6.0, 0.0]], zero),
        "entropy bonus": (zero, [[0.5, 0.5], [0.25, 0.0]]),
    }


def test_mean_gradients_follow_advantages_alone() -> None:
    terms = Terms()
    with pytest.raises(ValueError, match="update='gradient' follows the advantages alone, and the update responses"):
        terms.scene.probe(update="gradient").forecast(terms.scene.E, terms.named)
