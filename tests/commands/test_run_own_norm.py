"""Scripts on ranks of FSDP2 that log or clip by the norm of their own shard, and those that do it right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands.scripts import FSDP2
from tests.commands.unmodified import check_untouched, with_run

RANKS = 4
MODEL = """model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.AdaptiveAvgPool1d(1), nn.Tanh())
"""
"""Each rank holds a fourth of each layer."""
OF_SHARDS = "norm = nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])\n"
ONE_WEIGHT = "model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.AdaptiveAvgPool1d(1), nn.Tanh())\n"
PARTIAL = """norm = torch.linalg.vector_norm(model[0].weight.grad)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
"""
"""The norm of one DTensor is still to be summed, which the clip does, with any torch."""
SCRIPTS = {
    "logs the norm of its shard": (OF_SHARDS, True),
    "clips by the norm of its shard": (
        OF_SHARDS + "    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)\n", True
    ),
    "sums the squares": (
        OF_SHARDS + "    norm = norm.square()\n    dist.all_reduce(norm)\n"
        "    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm.sqrt())\n", False
    ),
    "clips": ("norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()\n", False),
    "takes the norm of a part": ("nn.utils.get_total_norm([model[0].weight.grad.to_local()])\n", False),
    "reads its part of the norm": (PARTIAL + "    norm.item()\n", True),
    "reads its part after the step": (
        PARTIAL + "    optimizer.step()\n    float(norm)\n    optimizer.zero_grad()\n    continue\n", True
    ),
    "sums its part of the norm": (PARTIAL + "    norm.full_tensor().item()\n", False),
}  # fmt: skip
"""What a script does before its step, and whether sonde says that its norm is too small."""
UNTOUCHED = ("clips by the norm of its shard", "reads its part after the step")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_norm_of_a_shard_is_said_to_be_too_small(name: str, tmp_path: Path) -> None:
    does, is_wrong = SCRIPTS[name]
    script = FSDP2.replace("# (a window ends here)\n", does)
    script = script.replace("model = network()\n", ONE_WEIGHT if does.startswith(PARTIAL) else MODEL)
    run = check_untouched if name in UNTOUCHED else with_run  # to run it bare takes as long again
    measured = run(script, tmp_path, ranks=RANKS, forks=True)
    assert measured.status == 0, measured.err
    said = re.findall(r"sonde: your grad norm was (0\.\d\d) of the true one in (\d+) of (\d+) windows", measured.err)
    assert len(said) == 2 * is_wrong, measured.err  # when it is noticed, and at the end
    alerts = [alert.name for alert in measured.run.alerts]
    assert alerts.count("own_norm") == is_wrong
    if is_wrong:
        factor, n_wrong, n = map(float, said[-1])
        assert 0.3 < factor < 0.7  # of 4 shards, each has about half of the norm
        assert (n_wrong, n) == (12 - ("part" in name), n_wrong)  # the first window comes before the script reads it
        assert "each rank sees its own shard of 4" in measured.err
