"""A LightningCLI app; the strategy comes from its YAML."""

import os

import lightning as L  # noqa: N812
from lightning.pytorch.cli import LightningCLI
from scenarios import Mlp
from script import Writes, loader


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()


if __name__ == "__main__":
    LightningCLI(
        Mlp, Data, trainer_defaults={"callbacks": [Writes(os.environ["RESULT_FOLDER"])]}, save_config_callback=None
    )
