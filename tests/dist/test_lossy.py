"""Each lossy hook against the exact mean of the gradients, within a bound that has a reason."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from scenarios import train
from torch import Tensor, nn

from lightning_ddpopt import HookSpec, Plan, wrapping
from lightning_ddpopt.hooks.hook import HookContext, run_hook
from lightning_ddpopt.hooks.registry import build_hook

SHAPES = {"matrix": (64, 96), "conv": (32, 4, 3, 3), "same shape": (64, 96), "bias": (96,), "scalar": ()}


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


class Given(nn.Module):
    """Parameters whose gradients are given: the loss is the sum of parameter times gradient."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.parameters_by_name = nn.ParameterDict({name: nn.Parameter(torch.zeros(s)) for name, s in shapes.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((self.parameters_by_name[n] * g).sum() for n, g in gradients.items())


def gaussian(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def constant(step: int, rank: int) -> dict[str, Tensor]:
    return gaussian(0, rank)


def rank_one(step: int, rank: int) -> dict[str, Tensor]:
    """A matrix of rank 1 on each rank, so a mean of rank 2."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    given = gaussian(step, rank)
    for name in ("matrix", "same shape"):
        given[name] = torch.outer(torch.randn(64, generator=generator), torch.randn(96, generator=generator))
    return given


def overflow_on_rank_one(step: int, rank: int) -> dict[str, Tensor]:
    given = gaussian(step, rank)
    if step == 4 and rank == 1:
        given["matrix"][3, 5] = float("inf")
    return given


def zero_once(step: int, rank: int) -> dict[str, Tensor]:
    return {name: g * (step != 3) for name, g in gaussian(step, rank).items()}


def reduce_steps(
    spec: HookSpec,
    make: Callable[[int, int], dict[str, Tensor]],
    steps: int,
    *,
    scales: list[float] | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """Reduce given gradients; return reduced and exact ones by step, the bytes, and the hook's state."""
    torch.manual_seed(0)
    module = Given(SHAPES).to(device())
    names = {p: n.removeprefix("parameters_by_name.") for n, p in module.named_parameters()}
    hook = build_hook(spec, HookContext(dist.group.WORLD, names))
    ids = [device().index] if device().type == "cuda" else None
    ddp = wrapping.wrap(module, Plan(hook=spec, **plan), device_ids=ids, ddp_arguments={})
    wrapping.register_hook(ddp, hook, run_hook)
    reduced, exact, payload = [], [], []
    for step in range(steps):
        scale = scales[step] if scales else 1.0
        hook.loss_scale = torch.tensor(scale, device=device()) if scales else None
        given = {n: g.to(device()) for n, g in make(step, dist.get_rank()).items()}
        (ddp(given) * scale).backward()
        reduced.append({n: (module.parameters_by_name[n].grad.double() / scale).cpu().numpy() for n in SHAPES})
        mean = {n: g.double() for n, g in given.items()}
        for tensor in mean.values():
            dist.all_reduce(tensor)
        exact.append({n: (g / dist.get_world_size()).cpu().numpy() for n, g in mean.items()})
        payload.append(hook.take_payload_bytes())
        module.zero_grad()
    largest = {}
    for name in SHAPES:
        sizes = torch.stack([make(0, r)[name].abs().double() for r in range(dist.get_world_size())])
        largest[name] = sizes.mean(0).numpy()
    own_residuals = {n: r.clone() for n, r in hook.state_dict().get("residuals", {}).items()}
    hook.average_residuals()
    state = hook.state_dict()
    mean_residuals = {n: r.double().numpy() for n, r in state.get("residuals", {}).items()}
    return {
        "reduced": reduced,
        "exact": exact,
        "payload": payload,
        "mean sizes": largest,
        "own residuals": {n: r.numpy() for n, r in own_residuals.items()},
        "residuals": mean_residuals,
        "steps": state.get("steps"),
    }


def bytes_of(*names: str, itemsize: int = 4) -> int:
    return sum(int(np.prod(SHAPES[name], dtype=int)) * itemsize for name in names or SHAPES)


def assert_ranks_equal(results: list[dict[str, Any]]) -> None:
    for other in results[1:]:
        for one_step, other_step in zip(results[0]["reduced"], other["reduced"], strict=True):
            for name in one_step:
                np.testing.assert_array_equal(one_step[name], other_step[name], err_msg=name)


@pytest.mark.parametrize(("name", "roundoff"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
@pytest.mark.parametrize("cap", [None, 0.001])
def test_cast_hooks(two_ranks: Ranks, name: str, roundoff: float, cap: float | None) -> None:
    """Each summand |x| / n and their sum are rounded once, by at most the unit roundoff times their size.

    Both sizes are at most the mean of |x| over the ranks. Below fp16's normal range the error is absolute: 2**-25 each.
    """
    results = two_ranks(reduce_steps, HookSpec(name), gaussian, 4, bucket_cap_mb=cap)
    assert_ranks_equal(results)
    for reduced, exact in zip(results[0]["reduced"][:1], results[0]["exact"][:1], strict=True):
        for tensor in SHAPES:
            bound = 2.01 * roundoff * results[0]["mean sizes"][tensor] + 3 * 2.0**-25
            assert (abs(reduced[tensor] - exact[tensor]) <= bound).all(), tensor
    assert not all((r["matrix"] == e["matrix"]).all() for r, e in zip(*both(results[0]), strict=True)), (
        "it did not cast"
    )
    assert results[0]["payload"] == [bytes_of(itemsize=2)] * 4


def both(result: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return result["reduced"], result["exact"]


@pytest.mark.parametrize("make", [gaussian, zero_once])
@pytest.mark.parametrize("cap", [None, 0.001, [0.0001, 0.03]], ids=str)
@pytest.mark.parametrize("static", [True, False])
def test_powersgd_owes_exactly_what_it_left_out(
    two_ranks: Ranks, static: bool, cap: Any, make: Callable[[int, int], dict[str, Tensor]]
) -> None:
    """Error feedback: what was applied plus the mean of what is owed is the sum of the exact means.

    Holds to fp32 rounding (2**-24 relative) of a few sums of 12 steps of values around 1: 1e-5 is ample. Several
    buckets: torch's own hook hangs on gloo here. A step in which no rank has a gradient must take nothing from what is
    owed, since DDP drops the result for parameters that no rank used.
    """
    spec = HookSpec("powersgd", {"matrix_approximation_rank": 2})
    results = two_ranks(reduce_steps, spec, make, 12, static_graph=static, bucket_cap_mb=cap)
    assert_ranks_equal(results)
    first = results[0]
    assert set(first["steps"].values()) == {12}
    for name, shape in SHAPES.items():
        applied = sum(step[name] for step in first["reduced"])
        exact = sum(step[name] for step in first["exact"])
        owed = first["residuals"].get(name, np.zeros(1)).reshape(shape if name in first["residuals"] else 1)
        np.testing.assert_allclose(applied + owed, exact, atol=1e-5, err_msg=name)
    assert set(first["residuals"]) == {"matrix", "same shape", "conv"}
    differ = first["own residuals"]["matrix"] != results[1]["own residuals"]["matrix"]
    assert differ.any(), "each rank owes something of its own"


def test_powersgd_starts_when_told_and_saves_bytes(two_ranks: Ranks) -> None:
    for start in (0, 2, 5):
        options = {"start_powerSGD_iter": start, "matrix_approximation_rank": 2}
        result = two_ranks(reduce_steps, HookSpec("powersgd", options), gaussian, 7)[0]
        thin = 4 * 2 * (2 * (64 + 96) + (32 + 36)) + bytes_of("bias", "scalar") + 4 * 3  # 3 flags: used or not
        assert result["payload"] == [bytes_of()] * start + [thin] * (7 - start)
        for step in range(start):
            for name in SHAPES:
                np.testing.assert_allclose(result["reduced"][step][name], result["exact"][step][name], atol=1e-6)
        assert abs(result["reduced"][start]["matrix"] - result["exact"][start]["matrix"]).max() > 0.1
    default = two_ranks(reduce_steps, HookSpec("powersgd"), gaussian, 4)[0]["payload"]
    assert default[:2] == [bytes_of()] * 2
    assert max(default[2:]) < bytes_of() / 10


def test_powersgd_is_exact_where_the_mean_has_its_rank(two_ranks: Ranks) -> None:
    """The left factor spans the columns of a mean of rank 2, so nothing is left out but rounding.

    Without error feedback: these gradients have nothing in common from step to step, and then what rounding leaves
    over comes back larger in each step.
    """
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0, "use_error_feedback": False}
    result = two_ranks(reduce_steps, HookSpec("powersgd", options), rank_one, 5)[0]
    for reduced, exact in zip(result["reduced"], result["exact"], strict=True):
        for name in ("matrix", "same shape"):
            assert abs(reduced[name] - exact[name]).max() < 1e-5 * abs(exact[name]).max()


def test_powersgd_finds_the_best_approximation_of_a_constant_gradient(two_ranks: Ranks) -> None:
    """Without error feedback, warm-started power iteration converges to the truncated SVD (Eckart-Young)."""
    options = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 0, "use_error_feedback": False}
    result = two_ranks(reduce_steps, HookSpec("powersgd", options), constant, 60)[0]
    exact, last = result["exact"][-1]["matrix"], result["reduced"][-1]["matrix"]
    best = np.sqrt((np.linalg.svd(exact, compute_uv=False)[3:] ** 2).sum())
    assert best <= np.linalg.norm(exact - last) * (1 + 1e-6)
    assert np.linalg.norm(exact - last) < 1.02 * best
    cold = two_ranks(reduce_steps, HookSpec("powersgd", options | {"warm_start": False}), constant, 10)[0]
    assert np.linalg.norm(exact - cold["reduced"][-1]["matrix"]) > 1.02 * best


def test_powersgd_recovers_from_an_overflow(two_ranks: Ranks) -> None:
    """One inf makes that step non-finite on every rank, and leaves no trace in the state."""
    results = two_ranks(reduce_steps, HookSpec("powersgd"), overflow_on_rank_one, 9)
    assert_ranks_equal(results)
    clean = two_ranks(reduce_steps, HookSpec("powersgd"), gaussian, 9)[0]
    for result in results:
        for step, reduced in enumerate(result["reduced"]):
            assert np.isfinite(reduced["matrix"]).all() == (step != 4)
            assert np.isfinite(reduced["conv"]).all()
            if step < 4:
                np.testing.assert_array_equal(reduced["matrix"], clean["reduced"][step]["matrix"])
    # The overflowed step applied nothing: what was applied and is owed make up the other steps' sum.
    first = results[0]
    steps = [step for step in range(9) if step != 4]
    applied = sum(first["reduced"][step]["matrix"] for step in steps)
    exact = sum(first["exact"][step]["matrix"] for step in steps)
    np.testing.assert_allclose(applied + first["residuals"]["matrix"], exact, atol=1e-5)


def reduce_transposed() -> float:
    """Relative error for a parameter whose memory is the transpose of its shape; its mean gradient is of rank 2."""
    given = rank_one(0, dist.get_rank())["matrix"].to(device())
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(96, 64, device=device()).t())
    module.forward = lambda gradient: (module.weight * gradient).sum()  # type: ignore[assignment]
    spec = HookSpec("powersgd", {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0})
    hook = build_hook(spec, HookContext(dist.group.WORLD, {module.weight: "weight"}))
    ids = [device().index] if device().type == "cuda" else None
    ddp = wrapping.wrap(module, Plan(hook=spec), device_ids=ids, ddp_arguments={})
    wrapping.register_hook(ddp, hook, run_hook)
    ddp(given).backward()
    mean = given.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return float((module.weight.grad - mean).abs().max() / mean.abs().max())


def test_powersgd_sees_a_transposed_parameter_as_it_is(two_ranks: Ranks) -> None:
    assert max(two_ranks(reduce_transposed)) < 1e-5


def test_powersgd_gets_over_a_zero_gradient(two_ranks: Ranks) -> None:
    options = {"start_powerSGD_iter": 0, "use_error_feedback": False}
    result = two_ranks(reduce_steps, HookSpec("powersgd", options), zero_once, 6)[0]
    assert [bool(step["matrix"].any()) for step in result["reduced"]] == [True, True, True, False, True, True]


def test_residuals_are_in_units_of_the_unscaled_gradient(two_ranks: Ranks) -> None:
    """A loss scale that changes on the way (GradScaler) leaves the sum of what is applied and owed exact."""
    scales = [1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 2048.0, 2048.0]
    result = two_ranks(reduce_steps, HookSpec("powersgd"), gaussian, 8, scales=scales)[0]
    applied = sum(step["matrix"] for step in result["reduced"])
    exact = sum(step["matrix"] for step in result["exact"])
    np.testing.assert_allclose(applied + result["residuals"]["matrix"], exact, atol=1e-5)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("manual", [None, "no_sync"])
def test_lossy_training_keeps_the_ranks_equal(two_ranks: Ranks, hook: str, accumulate: int, manual: str | None) -> None:
    """Through the Trainer, near the exact run, with re-wraps; and not identical to it: the hook did run."""
    arguments = {"comm_hook": hook, "static_graph": True, "bucket_cap_mb": 0.004}
    mode = {"accumulate": accumulate, "manual": manual}
    spec = HookSpec(hook)
    plans = {7: Plan(hook=spec, bucket_cap_mb=0.001), 11: Plan(hook=spec)}
    first, second = two_ranks(train, arguments, plans=plans, **mode)
    exact = two_ranks(train, None, **mode)[0]
    weights = [name for name in first["state"] if name.endswith(("weight", "bias"))]
    for name in weights:
        np.testing.assert_array_equal(first["state"][name], second["state"][name], err_msg=name)
    distance = np.sqrt(sum(((first["state"][n] - exact["state"][n]) ** 2).sum() for n in weights))
    size = np.sqrt(sum((exact["state"][n] ** 2).sum() for n in weights))
    assert 0 < distance < (0.3 if hook == "powersgd" else 0.01) * size
    assert first["bytes"] < 0.51 * exact_bytes(two_ranks)


def exact_bytes(two_ranks: Ranks) -> int:
    return two_ranks(train, {}, steps=6)[0]["bytes"]
