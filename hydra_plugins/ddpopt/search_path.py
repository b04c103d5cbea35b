"""Makes the package's config groups (`strategy`, `hydra/launcher`) usable in any Hydra app."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class DDPOptSearchPath(SearchPathPlugin):
    """Appends the shipped configs after the app's own, so that the app's win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning_ddpopt", path="pkg://lightning_ddpopt.conf")
