"""The probe under DDP, on real gloo ranks: values against whole gradients of all ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from sonde.batch_size.taps.ddp_buckets import comm_hook_name
from tests.batch_size.loops import Recording, attached, batch, flat_grad, mean_loss, small_model
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of

SIZES = ((4, 4, 4), (2, 6, 4), (5, 3, 1))
"""Units of the micro-batches of ranks 0, 1 and 2."""


def in_bf16(state: object, bucket):  # type: ignore[no-untyped-def]  # torch's own refuses gloo by its name
    return default_hooks.bf16_compress_hook(state, bucket)


def batches(rank: int, n_micro: int, window: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * rank + 17 * window)
    return [batch(n, generator) for n in SIZES[rank][:n_micro]]


def wrap(options: dict[str, Any]) -> tuple[nn.Module, DistributedDataParallel]:
    plain = small_model()
    return plain, DistributedDataParallel(plain, **options)


def on_rank(
    ddp_options: dict[str, Any],
    *,
    n_micro: int = 3,
    no_sync: bool = True,
    windows: int = 3,
    hook: str | None = None,
    tap: str = "leaf",
    summed: bool = False,
    clip: bool = True,
    same_data: bool = False,
) -> dict[str, Any]:
    """Train a few windows under DDP on this rank, at a fixed model, and compare with whole gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = wrap(ddp_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"tap": tap}
    if hook is not None:
        function, state = {
            "bf16": (in_bf16, None),
            "allreduce": (default_hooks.allreduce_hook, None),
            "powersgd": (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)),
        }[hook]
        if tap == "comm_hook":
            options |= {"comm_hook": function, "comm_state": state}
        else:
            model.register_comm_hook(state, function)
    if ddp_options.get("static_graph"):  # PyTorch asserts if no_sync is in the first iteration of a static graph
        mean_loss(model, *batches(rank, 1)[0]).backward()
        optimizer.zero_grad()
    norms = []
    sink = Recording()
    with attached(model, optimizer, log_every=2, sinks=[sink], **options) as probe:
        for window in range(windows):
            data = batches(0 if same_data else rank, n_micro, window)
            for i, (x, y) in enumerate(data):
                last = i == len(data) - 1
                with probe.piece(units=len(x)), contextlib.nullcontext() if last or not no_sync else model.no_sync():
                    mean_loss(model, x, y).backward()
            if summed:
                for p in plain.parameters():
                    p.grad.mul_(world)  # type: ignore[union-attr]
            if clip:
                norms.append(float(probe.clip_grad_norm_(0.05)))
            else:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        alerts = probe.alerts
        tap_name = probe._reader.tap_name
    return {
        "reading": reading,
        "norms": norms,
        "alerts": alerts,
        "tap": tap_name,
        "taps_logged": [r["pieces"]["tap"] for r in sink.of_kind("reading")],
        "expected": by_hand(plain, world, n_micro, windows, per_rank=tap == "comm_hook"),
        "hooks": sum(len(p._backward_hooks or ()) for p in plain.parameters()),
    }


def by_hand(model: nn.Module, world: int, n_micro: int, windows: int, *, per_rank: bool) -> dict[str, Any]:
    """The same from every rank's whole gradients: averages over windows of tr Σ, |G|² and the norm."""
    estimates, norms = [], []
    for window in range(windows):
        gradients, units = [], []
        for rank in range(world):
            data = batches(rank, n_micro, window)
            of_rank = [flat_grad(model, mean_loss(model, x, y)) for x, y in data]
            if per_rank:  # the rank's micro-batches as one piece: weight m, m²/Σ(1/n) units
                gradients.append(torch.stack(of_rank).sum(0))
                units.append(n_micro**2 / sum(1 / len(x) for x, _ in data))
            else:
                gradients += of_rank
                units += [len(x) for x, _ in data]
        final = torch.stack(gradients).sum(0) / world
        weights = [float(n_micro) if per_rank else 1.0] * len(gradients)
        estimates.append(window_by_hand(gradients, weights, units, final))
        norms.append(float(final.norm()))
    traces, grads = zip(*estimates, strict=True)
    return {"trace_cov": sum(traces) / windows, "grad_sq": sum(grads) / windows, "norms": norms}


def check(results: list[dict[str, Any]], *, windows: int = 3, rel: float = 2e-5) -> None:
    first = results[0]["reading"]
    for result in results:
        reading, expected = result["reading"], result["expected"]
        assert reading.windows == windows, reading.dropped
        assert (reading.trace_cov, reading.grad_sq) == (first.trace_cov, first.grad_sq)  # the same on every rank
        # fp32 gradients and their reduction: a few 1e-7 of S and B, amplified by their difference.
        assert reading.trace_cov == pytest.approx(expected["trace_cov"], rel=rel)
        assert reading.grad_sq == pytest.approx(expected["grad_sq"], rel=rel, abs=rel * expected["trace_cov"])
        if result["norms"]:
            assert result["norms"] == pytest.approx(expected["norms"], rel=max(rel, 1e-6))
        assert result["hooks"] == 0


@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.01},
        {"find_unused_parameters": True},
    ],
    ids=lambda o: next(iter(o), "default"),
)
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_accumulation(ranks2: Ranks, ddp_options: dict[str, Any], no_sync: bool) -> None:
    check(ranks2(_accumulate, ddp_options, no_sync))


def _accumulate(ddp_options: dict[str, Any], no_sync: bool) -> dict[str, Any]:
    return on_rank(ddp_options, no_sync=no_sync)


def test_three_ranks(ranks3: Ranks) -> None:
    check(ranks3(_accumulate, {}, True))


def _without_accumulation(tap: str, ddp_options: dict[str, Any], clip: bool) -> dict[str, Any]:
    return on_rank(ddp_options, n_micro=1, windows=6, tap=tap, clip=clip)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("ddp_options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], ids=str)
@pytest.mark.parametrize("tap", ["leaf", "comm_hook", "auto"])
def test_one_piece_a_rank(ranks2: Ranks, tap: str, ddp_options: dict[str, Any], clip: bool) -> None:
    results = ranks2(_without_accumulation, tap, ddp_options, clip)
    check(results, windows=6)
    expected = "leaf hooks" if tap == "leaf" else "DDP's communication hook"
    assert [r["tap"] for r in results] == [expected] * 2
    first, *_, last = results[0]["taps_logged"]  # rank 0 writes
    assert (first, last) == ("leaf hooks" if tap == "auto" else expected, expected)


def _buckets_with_accumulation(hook: str | None) -> dict[str, Any]:
    return on_rank({}, tap="comm_hook", hook=hook)


@pytest.mark.parametrize("hook", [None, "allreduce"])
def test_buckets_take_a_rank_as_one_piece(ranks2: Ranks, hook: str | None) -> None:
    check(ranks2(_buckets_with_accumulation, hook))


def _buckets_reduced_each_time() -> dict[str, Any]:
    return on_rank({}, tap="comm_hook", no_sync=False)


def test_buckets_reduced_more_than_once_are_refused(ranks2: Ranks) -> None:
    for result in ranks2(_buckets_reduced_each_time):
        assert result["reading"].windows == 0
        assert "accumulate under model.no_sync()" in result["reading"].reason


def _auto_when_accumulation_starts_later() -> tuple[list[str], int, int]:
    """One piece a rank for a while, then three without no_sync: DDP's buckets hold no rank's gradient then."""
    _, model = wrap({})
    names = []
    with attached(model, log_every=1) as probe:
        for window in range(16):
            for x, y in batches(dist.get_rank(), 1 if window < 6 else 3, window):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
            names.append(probe._reader.tap_name)
        reading = probe.reading()
    return names, reading.windows, sum(reading.dropped.values())


def test_auto_goes_back_to_leaf_hooks_when_buckets_do_not_do(ranks2: Ranks) -> None:
    for names, windows, dropped in ranks2(_auto_when_accumulation_starts_later):
        assert "DDP's communication hook" in names
        assert names[-1] == "leaf hooks"
        assert (windows + dropped, dropped <= 3) == (16, True)


def _auto_with_two_backwards() -> str:
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        for window in range(8):
            with probe.piece(units=4):
                for x, y in batches(dist.get_rank(), 2, window):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        return probe._reader.tap_name


def test_auto_does_not_change_where_a_piece_has_several_backwards(ranks2: Ranks) -> None:
    assert ranks2(_auto_with_two_backwards) == ["leaf hooks"] * 2


def _auto_with_accumulation() -> dict[str, Any]:
    return on_rank({}, tap="auto", windows=6)


def test_auto_keeps_leaf_hooks_under_accumulation(ranks2: Ranks) -> None:
    results = ranks2(_auto_with_accumulation)
    check(results, windows=6)
    assert [r["tap"] for r in results] == ["leaf hooks"] * 2


def _two_backwards(first_reduces: bool) -> dict[str, Any]:
    """Two losses with a backward each in the one piece of a rank, as with an auxiliary loss."""
    plain, model = wrap({})
    rank = dist.get_rank()
    with attached(model, staging_mib=0.0) as probe:
        for window in range(3):
            with probe.piece(units=4):
                for i, (x, y) in enumerate(batches(rank, 2, window)):
                    with contextlib.nullcontext() if i or first_reduces else model.no_sync():
                        mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    estimates = []
    for window in range(3):
        gradients = [sum(flat_grad(plain, mean_loss(plain, x, y)) for x, y in batches(r, 2, window)) for r in range(2)]
        estimates.append(window_by_hand(gradients, [1, 1], [4, 4], sum(gradients) / 2))  # type: ignore[arg-type]
    traces, grads = zip(*estimates, strict=True)
    return {
        "reading": reading,
        "norms": [],
        "expected": {"trace_cov": sum(traces) / 3, "grad_sq": sum(grads) / 3},
        "hooks": sum(len(p._backward_hooks or ()) for p in plain.parameters()),
    }


def test_two_backwards_in_a_ranks_only_piece(ranks2: Ranks) -> None:
    check(ranks2(_two_backwards, False))


def test_two_backwards_that_both_reduce_are_not_taken_for_one(ranks2: Ranks) -> None:
    for result in ranks2(_two_backwards, True):
        assert result["reading"].windows == 0
        assert "several backwards, and their gradients are too large for the staging area" in result["reading"].reason


def _summed() -> dict[str, Any]:
    return on_rank({}, summed=True, clip=False)


def test_ranks_summed_instead_of_averaged(ranks2: Ranks) -> None:
    check(ranks2(_summed))


def _with_hook(hook: str, tap: str) -> dict[str, Any]:
    return on_rank({}, hook=hook, tap=tap, windows=6, clip=False)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_sixteen_bit_communication_is_rounding(ranks2: Ranks, tap: str) -> None:
    # bf16 rounds each element by up to 2⁻⁸; B moves by the square of that, κ by its mean over the witness.
    results = ranks2(_with_hook, "bf16", tap)
    check(results, windows=6, rel=3e-3)
    assert 1e-4 < results[0]["reading"].scale_residual < 1e-2


def test_lossy_communication_is_named(ranks2: Ranks) -> None:
    for result in ranks2(_with_hook, "powersgd", "leaf"):
        reading = result["reading"]
        assert any("communication hook 'powerSGD_hook' is lossy" in reason for reason in reading.dropped)


def _second_hook() -> str:
    _, model = wrap({})
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    try:
        attached(model, tap="comm_hook")
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_registered_hook_cannot_be_wrapped_and_the_way_out_is_named(ranks2: Ranks) -> None:
    for said in ranks2(_second_hook):
        assert "'allreduce_hook' is registered already" in said
        assert "attach(comm_hook=" in said


def _attach_again(how: str) -> dict[str, Any]:
    """Once "auto" has changed to the communication hook and closed, the model can be copied and measured again."""
    plain, model = wrap({})
    with attached(model, log_every=1) as probe:
        for window in range(6):
            with probe.piece(units=4):
                mean_loss(model, *batches(dist.get_rank(), 1, window)[0]).backward()
            probe.step()
            model.zero_grad()
        assert probe._reader.tap_name == "DDP's communication hook"
    if how != "same":
        model = pickle.loads(pickle.dumps(model)) if how == "pickled" else copy.deepcopy(model)
        plain = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = [comm_hook_name(model)]
    with attached(model, optimizer, tap="comm_hook") as probe:
        for window in range(3):
            x, y = batches(dist.get_rank(), 1, window)[0]
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
            probe.step()
            optimizer.zero_grad()
        try:
            attached(model, tap="comm_hook")
        except ValueError as error:
            names.append(str(error))
        reading = probe.reading()
    return {
        "reading": reading,
        "norms": [],
        "names": names,
        "expected": by_hand(plain, 2, 1, 3, per_rank=True),
        "hooks": sum(len(p._backward_hooks or ()) for p in plain.parameters()),
    }


@pytest.mark.parametrize("how", ["same", "pickled", "deepcopied"])
def test_a_model_is_as_good_as_new_after_close(ranks2: Ranks, how: str) -> None:
    results = ranks2(_attach_again, how)
    check(results)
    for result in results:
        assert result["names"][0] is None  # no hook of the user's, whatever sonde has left
        assert "another probe reads the buckets" in result["names"][1]


def _plain_reduced_by_hand(average: bool) -> tuple[sonde.NoiseScaleReading, dict[str, Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = small_model()
    with attached(model, process_group=dist.group.WORLD) as probe:
        for x, y in batches(rank, 3):
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            if average:
                p.grad.div_(world)  # type: ignore[union-attr]
        probe.step()
        reading = probe.reading()
    return reading, by_hand(model, world, 3, 1, per_rank=False)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_reduced_by_the_user(ranks2: Ranks, average: bool) -> None:
    for reading, expected in ranks2(_plain_reduced_by_hand, average):
        assert reading.trace_cov == pytest.approx(expected["trace_cov"], rel=2e-5)
        assert reading.grad_sq == pytest.approx(expected["grad_sq"], rel=2e-5, abs=2e-5 * expected["trace_cov"])


def _reduced_without_telling() -> str:
    model = small_model()
    with attached(model) as probe:
        for x, y in batches(dist.get_rank(), 3):
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        probe.step()
        return probe.reading().reason


def test_ranks_that_the_probe_was_not_told_of(ranks2: Ranks) -> None:
    for reason in ranks2(_reduced_without_telling):
        assert "pass process_group= if you reduce them yourself" in reason


def _peer_fails() -> str:
    """Rank 1 leaves the loop before it ends its second window; rank 0 must not wait for it for ever."""
    model = small_model()
    pair = dist.new_group([0, 1])
    sink = Recording()
    try:
        with attached(model, process_group=pair, sinks=[sink]) as probe:
            for window in range(2):
                for x, y in batches(dist.get_rank(), 2):
                    with probe.piece(units=len(x)):
                        mean_loss(model, x, y).backward()
                if (dist.get_rank(), window) == (1, 1):
                    raise KeyError
                probe.step()
                model.zero_grad()
            raise KeyError
    except KeyError:
        return sink.of_kind("end")[0]["reason"] if dist.get_rank() == 0 else ""


def test_a_rank_that_fails_does_not_hang_the_others(ranks2: Ranks) -> None:
    assert ranks2(_peer_fails)[0] == "stopped by KeyError"
    ranks2.stop(kill=True)  # a collective without its peer is left behind in that group


def _one_nan() -> tuple[sonde.NoiseScaleReading, int]:
    """Rank 1's first micro-batch of window 1 is NaN."""
    rank = dist.get_rank()
    _, model = wrap({})
    with attached(model) as probe:
        for window in range(3):
            for i, (x, y) in enumerate(batches(rank, 2, window)):
                sync = contextlib.nullcontext() if i else model.no_sync()
                with probe.piece(units=len(x)), sync:
                    (mean_loss(model, x, y) * (math.nan if (rank, window, i) == (1, 1, 0) else 1.0)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading(), rank


def test_a_nan_on_one_rank_is_seen_by_all(ranks2: Ranks) -> None:
    for reading, _ in ranks2(_one_nan):
        assert reading.windows == 2
        assert list(reading.dropped.values()) == [1]
        assert "not finite" in next(iter(reading.dropped))


def _same_data(n_micro: int) -> tuple[dict[str, str], float | None]:
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        for window in range(8):
            for x, y in batches(0, n_micro, window):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().status == "unresolved"
        assert probe.reading().b_simple is None
        return dict(probe.alerts), probe.reading().consistency


def test_same_data_on_all_ranks(ranks2: Ranks) -> None:
    for alerts, consistency in ranks2(_same_data, 3):
        assert "do all ranks" in alerts["same_data"]
        assert consistency == math.inf
    for alerts, consistency in ranks2(_same_data, 1):  # nothing within ranks to compare with, but no noise at all
        assert "do all ranks" in alerts["same_data"]
        assert consistency is None


def _repeated_micro_batch() -> dict[str, str]:
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        for window in range(8):
            x, y = batches(dist.get_rank(), 1, window)[0]
            for _ in range(3):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        return dict(probe.alerts)


def test_the_same_micro_batch_again_and_again(ranks2: Ranks) -> None:
    for alerts in ranks2(_repeated_micro_batch):
        assert "several micro-batches of a rank" in alerts["same_data"]


def _healthy() -> tuple[float | None, dict[str, str]]:
    _, model = wrap({})
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, log_every=10) as probe:
        for _ in range(300):
            for _ in range(3):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().consistency, dict(probe.alerts)


def test_consistency_is_about_one_on_sound_data(ranks2: Ranks) -> None:
    for consistency, alerts in ranks2(_healthy):
        # 300 windows of 2 ranks and some ten effective dimensions: about 5 % of scatter.
        assert consistency == pytest.approx(1.0, abs=0.2)
        assert "same_data" not in alerts


class Reads(TorchDispatchMode):
    """Counts values read on the host, on this thread; callbacks of DDP run the same code on theirs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def _issued(tap: str | None, n_micro: int) -> tuple[int, int]:
    """Collectives, and values read on the host, of 4 windows under DDP; None for no probe."""
    _, model = wrap({"bucket_cap_mb": 0.01})
    generator = torch.Generator().manual_seed(dist.get_rank())
    units: dict[str, Any] = {"units_per_piece": 4, "log_every": 1000}
    reads = Reads()
    with attached(model, tap=tap, **units) if tap else contextlib.nullcontext() as probe:
        for window in range(8):  # DDP rebuilds its buckets after the first
            if window == 4:
                before = _sequence_number()
            with reads if window >= 4 else contextlib.nullcontext():
                for i in range(n_micro):
                    sync = contextlib.nullcontext() if i == n_micro - 1 else model.no_sync()
                    with probe.piece(units=4) if probe else contextlib.nullcontext(), sync:
                        mean_loss(model, *batch(4, generator)).backward()
                if probe:
                    probe.clip_grad_norm_(1.0)
                model.zero_grad()
        return _sequence_number() - before, reads.count


def _sequence_number() -> int:
    """How many collectives this process group has issued."""
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]


@pytest.mark.parametrize(("tap", "n_micro"), [("leaf", 1), ("leaf", 3), ("comm_hook", 1), ("comm_hook", 3)])
def test_one_collective_a_window_and_nothing_read_on_the_host(ranks2: Ranks, tap: str, n_micro: int) -> None:
    without = ranks2(_issued, None, n_micro)
    for (n_with, read), (n_without, _) in zip(ranks2(_issued, tap, n_micro), without, strict=True):
        assert (n_with - n_without, read) == (4, 0)


def _frozen_after_wrapping() -> tuple[str, int]:
    plain, model = wrap({"find_unused_parameters": True})
    plain[0].requires_grad_(False)  # type: ignore[index]
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, log_every=1) as probe:
        for _ in range(8):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe._reader.tap_name, probe.reading().windows


def test_parameters_frozen_after_wrapping(ranks2: Ranks) -> None:
    assert ranks2(_frozen_after_wrapping) == [("DDP's communication hook", 8)] * 2


def _two_ddp_modules() -> tuple[str, list[float | None], str]:
    torch.manual_seed(0)
    model = nn.Sequential(DistributedDataParallel(nn.Linear(12, 8)), DistributedDataParallel(nn.Linear(8, 3)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    traces = []
    with attached(model, log_every=1) as probe:
        for _ in range(8):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
            traces.append(probe.reading().groups["1"].trace_cov)
        name = probe._reader.tap_name
    try:
        attached(model, tap="comm_hook")
    except ValueError as error:
        return name, traces, str(error)
    return name, traces, "no error"


def test_two_ddp_modules_stay_with_leaf_hooks(ranks2: Ranks) -> None:
    for name, traces, said in ranks2(_two_ddp_modules):
        assert name == "leaf hooks"
        assert min(traces) > 0.3 * max(traces)
        assert "parameters outside" in said


def _an_empty_rank_after_a_skipped_step() -> tuple[int, dict[str, int]]:
    """The optimizer is not stepped after window 0, and rank 0 has no piece in window 1: it still takes part."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rank = dist.get_rank()
    with attached(model, optimizer, process_group=dist.group.WORLD) as probe:
        for window in range(3):
            for x, y in batches(rank, 2, window) if (rank, window) != (0, 1) else []:
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
            probe.step()
            if window:
                optimizer.step()
            model.zero_grad()
        reading = probe.reading()
    return reading.windows, dict(reading.dropped)


def test_an_empty_rank_takes_part(ranks2: Ranks) -> None:
    assert ranks2(_an_empty_rank_after_a_skipped_step) == [(3, {})] * 2


def _sharded() -> str:
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    fully_shard(model, mesh=mesh_of((2,)))
    try:
        attached(model)
    except ValueError as error:
        return str(error)
    return "no error"


def test_sharded_models_are_refused_by_name(ranks2: Ranks) -> None:
    for said in ranks2(_sharded):
        assert "got sharded parameters (FSDPSequential)" in said
