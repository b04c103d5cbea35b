"""Every config composes and instantiates, and the strategies are what their names say."""

from pathlib import Path
from typing import Any

import hydra
import lightning as L  # noqa: N812
import pytest
import torch
import train
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf, open_dict

import lightning_ddpopt
from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan

CONF = Path(__file__).parents[2] / "conf"
SHIPPED = Path(lightning_ddpopt.__file__).with_name("conf")
GROUPS = {"model": CONF, "data": CONF, "strategy": SHIPPED, "trainer": CONF}  # those that make an object
VALUES = {"experiment", "measure", "transport", "workload"}
FILES = [(group, path.stem) for group, folder in GROUPS.items() for path in sorted((folder / group).glob("*.yaml"))]


def compose(*overrides: str, with_hydra: bool = False) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("train", overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    if not with_hydra:
        with open_dict(config):
            del config["hydra"]
    return config


def test_no_config_is_left_out() -> None:
    assert {path.parent.name for path in CONF.rglob("*.yaml")} | {"strategy"} == {*GROUPS, *VALUES, "conf"}
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
    assert (len(data.train_set), len(data.val_set)) == (1280, 517)
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


POWERSGD = HookSpec("powersgd", {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2})
RUNGS = {
    "single": None,
    "ddp_1gpu": Plan(bucket_cap_mb=2000, gradient_as_bucket_view=False),
    "ddp": Plan(bucket_cap_mb=2000, gradient_as_bucket_view=False),
    "ddp_default": Plan(gradient_as_bucket_view=False),
    "static_graph": Plan(static_graph=True, bucket_cap_mb=2000, gradient_as_bucket_view=False),
    "bucket_view": Plan(static_graph=True, bucket_cap_mb=2000),
    "bf16": Plan(static_graph=True, bucket_cap_mb=2000, hook=HookSpec("bf16")),
    "powersgd": Plan(static_graph=True, bucket_cap_mb=2000, hook=POWERSGD),
    "bucket_sweep": Plan(static_graph=True),
    "accumulate": Plan(static_graph=True),
    "ddpopt": Plan(),
}


def test_every_rung_is_listed() -> None:
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} == set(RUNGS)


@pytest.mark.parametrize("rung", RUNGS)
def test_rungs_are_the_articles(rung: str) -> None:
    config = compose(f"experiment={rung}", "trainer=cpu")
    assert config.rung == rung
    assert config.label.startswith("none cap" if rung == "bucket_sweep" else rung)
    assert config.trainer.devices == (1 if rung in ("single", "ddp_1gpu") else 2)
    assert train.plan_asked(config, hydra.utils.instantiate(config.strategy)) == RUNGS[rung]


def test_the_grid_is_the_articles() -> None:
    params = compose("experiment=bucket_sweep", with_hydra=True).hydra.sweeper.params
    assert params == {
        "strategy.comm_hook": "none,bf16,powersgd",
        "strategy.bucket_cap_mb": "25,50,100,200,400,2000",
    }
    point = compose("experiment=bucket_sweep", "strategy.comm_hook=bf16", "strategy.bucket_cap_mb=50")
    assert point.label == "bf16 cap 50"


@pytest.mark.parametrize(("micro_batches", "images"), [(1, 256), (2, 128), (4, 64), (8, 32)])
def test_accumulation_keeps_the_effective_batch(micro_batches: int, images: int) -> None:
    config = compose("experiment=accumulate", f"trainer.accumulate_grad_batches={micro_batches}")
    assert config.data.batch_size == images
    assert config.label == f"accumulate {micro_batches}"


def test_an_effective_batch_that_cannot_be_split() -> None:
    config = compose("experiment=accumulate", "trainer.accumulate_grad_batches=3")
    with pytest.raises(Exception, match="256 cannot be split into 3 equal micro-batches"):
        _ = config.data.batch_size


def test_the_two_measurements() -> None:
    article, claim = compose("measure=article"), compose("measure=claim")
    assert (article.measure.warmup_steps, article.measure.steps, article.trainer.max_steps) == (10, 3, 14)
    assert claim.measure.steps >= 30
    assert claim.measure.warmup_steps > 10, "torch samples its own timers in the first 10 steps"


@pytest.mark.parametrize(
    ("transport", "disabled"),
    [("auto", []), ("p2p", []), ("shm", ["P2P"]), ("net", ["P2P", "SHM"])],
)
def test_transports_are_set_in_the_jobs_environment(transport: str, disabled: list[str]) -> None:
    config = compose(f"transport={transport}", with_hydra=True)
    variables = config.hydra.job.env_set
    assert [name for name in ("P2P", "SHM") if variables.get(f"NCCL_{name}_DISABLE") == "1"] == disabled
    assert config.transport == transport
    assert variables.NCCL_DEBUG == "INFO"


def test_a_gpu_bound_workload() -> None:
    config = compose("model=vit_l_32", "data=synthetic", "workload=bf16_adamw")
    assert (config.trainer.precision, config.data.batch_size) == ("bf16-mixed", 256)
    assert config.model.optimizer["_target_"] == "torch.optim.AdamW"
