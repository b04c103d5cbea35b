"""Every config composes and instantiates, and the strategies are what their names say."""

from pathlib import Path
from typing import Any

import hydra
import lightning as L  # noqa: N812
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf

import lightning_ddpopt
from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan

CONF = Path(__file__).parents[2] / "conf"
SHIPPED = Path(lightning_ddpopt.__file__).with_name("conf")
GROUPS = {"model": CONF, "data": CONF, "strategy": SHIPPED, "trainer": CONF}
FILES = [(group, path.stem) for group, folder in GROUPS.items() for path in sorted((folder / group).glob("*.yaml"))]


def compose(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("train", overrides=list(overrides))


def test_no_config_is_left_out() -> None:
    assert {path.parent.name for path in CONF.rglob("*.yaml")} | {"strategy"} == {*GROUPS, "conf"}
    assert {path.parent.name for path in SHIPPED.rglob("*.yaml")} == {"strategy", "launcher"}
    assert len(FILES) >= 12


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize(("group", "name"), FILES)
def test_every_config_composes_and_instantiates(group: str, name: str) -> None:
    config = compose(f"{group}={name}")
    OmegaConf.to_container(config, resolve=False, throw_on_missing=True)
    extra: dict[str, Any] = {"strategy": "auto"} if group == "trainer" else {}
    with torch.device("meta" if group == "model" else "cpu"):
        made = hydra.utils.instantiate(config[group], **extra)
    expected = {
        "model": L.LightningModule,
        "data": L.LightningDataModule,
        "strategy": (DDPStrategy, str),
        "trainer": L.Trainer,
    }
    assert isinstance(made, expected[group])


def test_the_articles_model() -> None:
    with torch.device("meta"):
        model = hydra.utils.instantiate(compose("model=vit_l_32").model)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 306_535_400
    optimizer = model.configure_optimizers()
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes")
def test_the_articles_data() -> None:
    data = hydra.utils.instantiate(compose("data=synthetic").data)
    loader = data.train_dataloader()
    assert (loader.batch_size, loader.num_workers) == (32, 8)
    image, label = loader.dataset[5]
    assert image.shape == (3, 224, 224)
    assert 0 <= label <= 999
    assert torch.equal(image, loader.dataset[5][0])


def test_the_digits_are_split() -> None:
    data = hydra.utils.instantiate(compose("data=digits").data)
    assert (len(data.train_set), len(data.val_set)) == (1437, 360)
    assert not set(data.train_set.indices) & set(data.val_set.indices)
    image, label = data.train_set[0]
    assert image.shape == (3, 8, 8)
    assert 0 <= image.min() <= image.max() <= 1
    assert 0 <= label <= 9


@pytest.mark.parametrize(
    ("overrides", "plan"),
    [
        (["strategy=ddpopt"], Plan()),
        (["strategy=ddpopt_static"], Plan(static_graph=True)),
        (["strategy=ddpopt_fp16"], Plan(hook=HookSpec("fp16"))),
        (["strategy=ddpopt_bf16", "strategy.bucket_cap_mb=10"], Plan(bucket_cap_mb=10, hook=HookSpec("bf16"))),
        (["strategy=ddpopt", "strategy.bucket_cap_mb=[1,25]"], Plan(bucket_cap_mb=(1, 25))),
        (["strategy=ddpopt", "strategy.bucket_cap_mb=null"], Plan()),
        (
            ["strategy=ddpopt_powersgd", "strategy.comm_hook_options.matrix_approximation_rank=4"],
            Plan(hook=HookSpec("powersgd", {"matrix_approximation_rank": 4})),
        ),
        (["strategy=ddpopt", "+strategy.find_unused_parameters=true"], Plan()),
    ],
)
def test_strategies_from_hydra_are_their_plans(overrides: list[str], plan: Plan) -> None:
    strategy = hydra.utils.instantiate(compose(*overrides).strategy)
    assert isinstance(strategy, DDPOptStrategy)
    assert strategy.plan == plan


def test_without_convert_all_a_list_still_arrives() -> None:
    config = OmegaConf.create({"_target_": "lightning_ddpopt.DDPOptStrategy", "bucket_cap_mb": [1, 25]})
    assert hydra.utils.instantiate(config).plan == Plan(bucket_cap_mb=(1, 25))
    config.comm_hook, config.comm_hook_options = "powersgd", {"matrix_approximation_rank": 4}
    assert hydra.utils.instantiate(config).plan.hook.options["matrix_approximation_rank"] == 4
