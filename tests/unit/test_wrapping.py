"""The parts of wrapping that need no process group."""

import pytest
import torch
from torch import nn

from lightning_ddpopt import Layout, Plan
from lightning_ddpopt.plan import HookSpec
from lightning_ddpopt.wrapping import TrainableSet, _checksum, check_module

CPU = torch.device("cpu")


def test_a_layout_reads_as_a_sentence() -> None:
    assert str(Layout((2**20,), True)) == "1 bucket of 1 MiB"
    assert str(Layout((2**19, 26 * 2**20), True)) == "2 buckets of 0.5, 26 MiB"
    many = str(Layout(tuple(range(2**20, 11 * 2**20, 2**20)), True))
    assert many == "10 buckets of 1, 2, 3, 4, ..., 8, 9, 10 MiB"
    assert Layout((1, 2), True).total_bytes == 3


def test_nothing_to_train_is_refused() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"Linear has no parameter that requires a gradient.*unfreeze"):
        check_module(module, Plan(), {})
    module.requires_grad_(True)
    check_module(module, Plan(), {})


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_sparse_gradients_and_compression_are_refused(hook: str) -> None:
    module = nn.ModuleDict({"table": nn.Embedding(4, 4, sparse=True), "out": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=f"comm_hook='{hook}' cannot carry the sparse gradients of 'table'"):
        check_module(module, Plan(hook=HookSpec(hook)), {})
    check_module(module, Plan(), {})
    module["table"].requires_grad_(False)
    check_module(module, Plan(hook=HookSpec(hook)), {})


def test_complex_gradients_and_compression_are_refused() -> None:
    module = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="imaginary part of the gradient of 'weight'"):
        check_module(module, Plan(hook=HookSpec("bf16")), {})


def test_two_hooks_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="comm_hook='bf16' and DDP's mixed_precision"):
        check_module(nn.Linear(2, 2), Plan(hook=HookSpec("bf16")), {"mixed_precision": object()})


def test_the_trainable_set_sees_every_change_but_no_ignored_parameter() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    trainable = TrainableSet(module)
    module[1].bias.requires_grad_(False)
    assert trainable.changed() == []
    module[0].weight.requires_grad_(False)
    assert trainable.changed() == ["0.weight"]
    assert TrainableSet(module).changed() == []
    assert TrainableSet(module).digest() != trainable.digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_the_checksum_sees_one_bit(dtype: torch.dtype) -> None:
    gradient = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = _checksum(gradient, CPU)
    assert before == _checksum(gradient.clone(), CPU)
    gradient[3, 1] = torch.nextafter(gradient.real[3, 1], torch.tensor(9, dtype=gradient.real.dtype))
    assert before != _checksum(gradient, CPU)


def test_the_checksum_of_missing_nan_and_sparse_gradients() -> None:
    assert _checksum(None, CPU) != _checksum(torch.zeros(3), CPU)
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert _checksum(quiet, CPU) == _checksum(other, CPU) != _checksum(torch.zeros(()), CPU)
    dense = torch.tensor([0.0, 2.0, 0.0])
    assert _checksum(dense.to_sparse(), CPU) == _checksum(dense.to_sparse(), CPU)
    assert _checksum(dense.to_sparse(), CPU) != _checksum(dense.flip(0).roll(1).to_sparse(), CPU)
