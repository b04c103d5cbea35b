"""A Hydra app that is started as ``python -m pkg.app``, with its configs beside it."""

import hydra
from hydra_app import tell
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    tell(config)


if __name__ == "__main__":
    main()
