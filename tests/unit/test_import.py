"""What importing the package costs."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "lightning", "pytorch_lightning", "hydra", "numpy")


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = modules_after("import lightning_ddpopt; lightning_ddpopt.Plan().to_json()")
    assert not loaded & set(HEAVY)


def test_that_this_test_can_fail() -> None:
    assert "torch" in modules_after("import lightning_ddpopt; lightning_ddpopt.DDPOptStrategy")


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_ddpopt; import lightning",
        "import lightning; import lightning_ddpopt",
        "import lightning_ddpopt; from lightning.pytorch import Trainer",
        "from lightning_ddpopt import DDPOptStrategy; import lightning",
    ],
)
def test_names_are_registered_in_any_order_of_imports(imports: str) -> None:
    check = (
        "from lightning.pytorch.strategies import StrategyRegistry as R; assert 'ddpopt' in R and 'ddpopt_bf16' in R"
    )
    modules_after(f"{imports}\n{check}")
